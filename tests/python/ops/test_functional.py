# SPDX-License-Identifier: Apache-2.0
"""The public surface: names, signatures, documentation, and what a single rank refuses."""

import copy
import inspect
import re
import warnings
from typing import Any

import numpy as np
import pytest
import ringattn
import torch
from _distributed import this
from ringattn import Partition
from ringattn.models import LLaMA, LLaMAConfig

TINY = LLaMAConfig(src_vocab_size=16, emb_dim=16, nlayers=1, nheads=2, hidden_dim=8)
COST = ringattn.ModelCost.attention_only(4, 16)
PUBLIC = [getattr(ringattn, name) for name in ringattn.__all__ if name != "testing"]


def operands(**changes):
    given = {
        "q": torch.randn(2, 6, 4, 16),
        "k": torch.randn(2, 6, 2, 16),
        "v": torch.randn(2, 6, 2, 16),
    }
    return list((given | changes).values())


def test_all_names_are_there_and_sorted():
    assert ringattn.__all__ == sorted(ringattn.__all__)
    for name in ringattn.__all__:
        assert hasattr(ringattn, name)


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__name__)
def test_everything_public_is_documented(thing):
    assert inspect.getdoc(thing), f"{thing.__name__} must have a docstring"
    if inspect.isfunction(thing):
        text = inspect.getdoc(thing)
        returns_nothing = thing.__name__ in ("synchronize", "all_reduce_gradients")
        assert "Returns:" in text or "Yields:" in text or returns_nothing
        assert "Raises:" in text or thing is ringattn.checkpoint_policy
        for name, parameter in inspect.signature(thing).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD:
                assert f"{name}: " in text, f"{thing.__name__} must say what {name} is"
    if inspect.isclass(thing):
        for name, member in vars(thing).items():
            if not name.startswith("_") and callable(getattr(thing, name)):
                assert inspect.getdoc(member), f"{thing.__name__}.{name} must have a docstring"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            ringattn.ring_attention,
            "(q, k, v, partition=None, *, group=None, causal=True, window_size=(-1, -1), "
            "softcap=0.0, sinks=None, cu_seqlens=None, key_partition=None, scale=None, "
            "transport='auto', depth=None, return_lse=False)",
        ),
        (
            ringattn.block_attention,
            "(q, k, v, *, scale=None, diagonal=None, key_ranges=None, softcap=0.0, sinks=None)",
        ),
        (ringattn.merge_states, "(out_a, lse_a, out_b, lse_b)"),
        (
            ringattn.decode_attention,
            "(q, k_shard, v_shard, *, group=None, scale=None, key_lengths=None, key_begins=None, "
            "softcap=0.0, sinks=None, return_lse=False)",
        ),
        (ringattn.rotate_kv, "(kv, partition, *, group=None, transport='auto')"),
        (ringattn.synchronize, "(group=None)"),
        (
            ringattn.RingAttention.__init__,
            "(self, group=None, *, partition=None, causal=True, window_size=(-1, -1), softcap=0.0, "
            "scale=None, transport='auto', depth=None)",
        ),
        (
            ringattn.RingAttention.forward,
            "(self, q, k, v, partition=None, *, cu_seqlens=None, sinks=None, key_partition=None)",
        ),
    ],
)
def test_signatures_are_fixed(function, expected):
    parameters = inspect.signature(function).parameters.values()
    bare = [
        parameter.replace(annotation=parameter.empty)
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    assert str(inspect.Signature(bare)) == expected


def test_the_module_holds_its_options():
    partition = Partition.even(6, 1)
    attention = ringattn.RingAttention(partition=partition, causal=False, scale=0.5, depth=2)
    assert f"partition={partition}" in repr(attention)
    assert "causal=False" in repr(attention) and "scale=0.5" in repr(attention)
    assert list(attention.parameters()) == [] and attention.state_dict() == {}
    q, k, v = operands()
    expected, _ = ringattn.block_attention(q, k, v, scale=0.5)
    assert torch.equal(attention(q, k, v), expected)
    assert torch.equal(copy.deepcopy(attention)(q, k, v), expected)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"transport": "pigeon"}, "transport must be .* got .*pigeon"),
        ({"depth": 0}, "depth must .*0"),
    ],
)
def test_the_module_hands_its_options_on(option, message):
    attention = ringattn.RingAttention(**option)  # which holds them, and does not judge
    assert "{}={!r}".format(*option.popitem()) in repr(attention)
    with pytest.raises(ValueError, match=message):
        attention(*operands())


ATTENTION_RULES = [
    ({"q": torch.randn(6, 4, 16)}, "q must be .*, got shape"),
    ({"q": [1.0]}, "q must be a tensor, got list"),
    ({"k": None}, "k must be a tensor, got NoneType"),
    ({"k": torch.randn(2, 6, 16)}, r"k must be \[B, S, H_kv, D\], got shape \[2, 6, 16\]"),
    ({"q": torch.randn(2, 6, 5, 16)}, "query heads must be a multiple .* 2, got 5"),
    ({"q": torch.randn(2, 6, 0, 16)}, "at least one head"),
    ({"k": torch.randn(2, 6, 2, 24)}, "k must have the head dimension of q, 16, got 24"),
    ({"v": torch.randn(2, 5, 2, 16)}, "v must have as many rows as k, 6, got 5"),
    ({"v": torch.randn(2, 6, 4, 16)}, "v must have as many heads as k, 2, got 4"),
    ({"k": torch.randn(1, 6, 2, 16)}, "k must have the batch size of q, 2, got 1"),
    ({"v": torch.randn(2, 6, 2, 16).half()}, "v must have the dtype of q"),
    ({"q": torch.randn(2, 6, 4, 16).cfloat()}, "q must be float16, bfloat16, float32 or float64"),
    ({"q": torch.ones(2, 6, 4, 16).long()}, "q must be float16, bfloat16, float32 or float64"),
    ({"q": torch.randn(2, 6, 4, 16, device="meta")}, "q must be on a device with a kernel"),
    ({"v": torch.randn(2, 6, 2, 16, device="meta")}, "v must be on a device with a kernel"),
    ({"scale": float("nan")}, "scale must be finite, got nan"),
    ({"scale": float("inf")}, "scale must be finite, got inf"),
    ({"attn_mask": torch.ones(6, 6)}, r"attn_mask must be left out .* got Tensor"),
    ({"dropout_p": 0.1}, r"dropout_p must be left out .* got 0.1"),
    ({"is_causal": True}, r"is_causal must be left out .* got True"),
    ({"enable_gqa": True}, r"enable_gqa must be left out .* got True"),
    ({"softmax_scale": 0.1}, r"softmax_scale must be left out \(.* scale=\), got 0.1"),
    ({"process_group": None}, r"process_group must be left out \(.* group= .*\), got None"),
]


def wide_heads(head_dim: int):
    return [torch.randn(1, 4, 2, head_dim) for _ in range(3)]


def call(function, changes, **more):
    tensors = {name: changes[name] for name in changes if name in "qkv"}
    others = {name: changes[name] for name in changes if name not in "qkv"}
    return function(*operands(**tensors), **others, **more)


@pytest.mark.parametrize("diagonal", [1.5, "a", 2**63, True, False])
def test_a_diagonal_that_is_no_whole_number_is_refused(diagonal):
    with pytest.raises(ValueError, match=r"^diagonal must .*, got "):
        ringattn.block_attention(*operands(), diagonal=diagonal)


def test_tensors_without_plain_memory_are_refused():
    q, k, v = operands()
    with pytest.raises(ValueError, match=r"^q must be strided, got torch\.sparse_coo"):
        ringattn.block_attention(q.to_sparse(), k, v)
    with pytest.raises(ValueError, match=r"^k must be a plain tensor, got a nested one"):
        ringattn.block_attention(q, torch.nested.nested_tensor([k[0], k[1]]), v)


def test_forward_mode_is_refused():
    q, k, v = operands()
    for function in (ringattn.ring_attention, ringattn.block_attention, ringattn.decode_attention):
        with pytest.raises(ValueError, match=r"q must have no tangent"):
            torch.func.jvp(lambda x, f=function: f(x, k, v), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        lse = torch.zeros(2, 4, 6)
        with pytest.raises(ValueError, match="must have no tangent"):
            ringattn.merge_states(dual, lse, q, lse)


@pytest.mark.parametrize("scale", [1e-46, -1e-46, 1e-320, 1e-38])
def test_a_scale_that_is_next_to_none_is_one(scale):
    q, k, v = (torch.randn(1, 40, heads, 16) for heads in (4, 2, 2))
    out, lse = ringattn.block_attention(q, k, v, scale=scale, diagonal=0)
    means = v.cumsum(1) / torch.arange(1, 41).view(1, -1, 1, 1)
    torch.testing.assert_close(out, means.repeat_interleave(2, 2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[0, 0], torch.arange(1.0, 41.0).log(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", [ringattn.ring_attention, ringattn.block_attention])
@pytest.mark.parametrize(("changes", "message"), ATTENTION_RULES)
def test_wrong_attention_arguments_are_refused(function, changes, message):
    with pytest.raises(ValueError, match=message):
        call(function, changes)


@pytest.mark.parametrize(
    "function", [ringattn.ring_attention, ringattn.block_attention, ringattn.decode_attention]
)
def test_wrong_head_dimensions_are_refused(function):
    for head_dim in (0, 4, 12, 264):
        with pytest.raises(ValueError, match=f"multiple of 8 from 8 to 256, got {head_dim}"):
            function(*wide_heads(head_dim))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            changes,
            re.sub(r"\b([kv])( must|,)", r"\1_shard\2", message),
        )
        for changes, message in ATTENTION_RULES
    ],
)
def test_wrong_decode_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call(ringattn.decode_attention, changes)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RINGATTN_KERNEL_FAMILY", "sm89", "RINGATTN_KERNEL_FAMILY must be sm80 or sm90, got sm89"),
        ("RINGATTN_KERNEL_WAITS", "no", "RINGATTN_KERNEL_WAITS must be 0 or 1, got no"),
    ],
)
def test_switches_that_mean_nothing_are_refused(set_variable, variable, value, message):
    x = torch.zeros(1, 2, 1, 8)
    set_variable(variable, "")  # as if it were not set
    ringattn.ring_attention(x, x, x)
    set_variable(variable, value)
    with pytest.raises(ValueError, match=f"^environment variable {message}$"):
        ringattn.ring_attention(x, x, x)
    with pytest.raises(ValueError, match=f"^environment variable {message}$"):
        ringattn.rotate_kv(x.unsqueeze(0).expand(2, -1, -1, -1, -1), Partition.even(2, 1))


def test_scales_of_numpy_are_numbers() -> None:
    q = torch.randn(1, 6, 2, 8)
    out = ringattn.ring_attention(q, q, q, scale=np.float32(0.5))
    assert torch.equal(out, ringattn.ring_attention(q, q, q, scale=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = ringattn.ring_attention(q, q, q, softcap=np.float32(2.0))
    assert torch.equal(out, ringattn.ring_attention(q, q, q, softcap=2.0))


def calls_with_values_of_the_host() -> list[Any]:
    """Results of calls that make tensors of what the caller gives as numbers."""
    rank, size = this().rank, this().world_size
    torch.manual_seed(0)
    x, model = torch.ones(1, 4 * size, 2, 8, device="cpu"), LLaMA(TINY, device="cpu")
    x[:, 3] = 2
    packed = Partition.packed([0, 5, 4 * size], size)
    shard = packed.shard(x, rank)
    out = ringattn.ring_attention(shard, shard, shard, packed, cu_seqlens=[0, 5, 4 * size])
    ids = torch.arange(7, device="cpu")[None]
    generated = ringattn.generate(model.requires_grad_(False), ids, max_new_tokens=2)
    profiles = [ringattn.RankProfile(1, 1)] * size
    lengths = ringattn.plan(8, profiles, COST, cu_seqlens=[0, 5, 8]).partition.lengths
    pairs = packed.num_pairs(rank, cu_seqlens=[0, 5, 4 * size])
    return [out, packed.gather(out), generated, lengths, pairs]


def calls_with_a_default_device() -> list[Any]:
    with torch.device("meta"):
        return calls_with_values_of_the_host()


def test_a_default_device_is_not_that_of_what_the_host_reads(rank_pool) -> None:
    expected = rank_pool(2).run(calls_with_values_of_the_host)
    found = rank_pool(2).run(calls_with_a_default_device)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "pigeon"}, 'transport must be .* got "pigeon"'),
        ({"transport": "nccl"}, "nccl"),
        ({"depth": 0}, "depth must be positive, got 0"),
        ({"depth": -1}, "depth must be positive, got -1"),
        ({"transport": None}, "transport must be a name, got None"),
        ({"scale": "big"}, "scale must be a number, got 'big'"),
        ({"scale": torch.nn.Parameter(torch.tensor(0.3))}, "scale must be a number, got a tensor"),
        ({"scale": np.ones(2)}, "scale must be a number, got array"),
        ({"scale": 10**400}, "scale must be finite, got a number past the range of floats"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"causal": None}, "causal must be True or False, got None"),
        ({"causal": np.ones(2)}, "causal must be True or False, got array"),
        ({"causal": torch.tensor(True)}, "causal must be True or False, got Tensor"),
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"depth": 1.5}, "depth must be an integer or None, got 1.5"),
        ({"depth": True}, "depth must be an integer or None, got True"),
        ({"depth": 2**63}, "depth must fit into 64 bits, got 9223372036854775808"),
        ({"scale": True}, "scale must be a number, got True"),
        (
            {"partition": (6,)},
            r"partition must be a Partition, got tuple: pass ringattn\.Partition\.zigzag\(\[6\]\)$",
        ),
        ({"partition": True}, "partition must be a Partition, got True: causality is causal=True$"),
        ({"partition": 0.5}, "must be a Partition, got 0.5: the factor of the scores is scale=0.5"),
        ({"partition": torch.ones(6, 6).bool()}, "got Tensor: the masks are causal=, window_size="),
        (
            {"partition": ringattn.plan(6, [ringattn.RankProfile(1, 1)], COST)},
            "partition must be a Partition, got Plan: pass plan.partition$",
        ),
        ({"partition": Partition.even(5, 1)}, "q must have the 5 rows .* got 6"),
        ({"partition": Partition.even(12, 2)}, "partition must have the 1 ranks .* got 2"),
        ({"group": "world"}, "group must be a ProcessGroup, .* or \"single\", got 'world'"),
        (
            {"group": torch.distributed.GroupMember.NON_GROUP_MEMBER},
            "group must contain this process",
        ),
        ({"group": True}, "group must be a ProcessGroup, .* got bool"),
        ({"group": 0}, "group must be a ProcessGroup, .* got int"),
    ],
)
def test_wrong_ring_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ringattn.ring_attention(*operands(), **options)


def test_numbers_and_flags_may_be_numpys() -> None:
    q, k, v = operands()
    out = ringattn.ring_attention(q, k, v, causal=np.True_, depth=np.int64(2))
    assert torch.equal(out, ringattn.ring_attention(q, k, v))
    expected, _ = ringattn.block_attention(q, k, v, diagonal=1)
    assert torch.equal(ringattn.block_attention(q, k, v, diagonal=np.int32(1))[0], expected)


def test_a_scale_may_be_a_tensor_of_one_element() -> None:
    tensors = operands()
    expected = ringattn.ring_attention(*tensors, scale=0.5)
    scale = torch.tensor([0.5])
    assert torch.equal(ringattn.ring_attention(*tensors, scale=scale), expected)
    with torch.no_grad():
        learned = torch.nn.Parameter(scale.squeeze())
        assert torch.equal(ringattn.ring_attention(*tensors, scale=learned), expected)
    for function in (ringattn.block_attention, ringattn.decode_attention):
        for given, right in zip(
            function(*tensors, scale=scale), function(*tensors, scale=0.5), strict=True
        ):
            assert torch.equal(given, right)
    scale.fill_(2)  # it is read in each call
    expected = ringattn.ring_attention(*tensors, scale=2.0)
    assert torch.equal(ringattn.ring_attention(*tensors, scale=scale), expected)


def test_the_module_takes_a_partition_first_as_the_function_does() -> None:
    tensors, partition = operands(), Partition.even(6, 1)
    expected = ringattn.ring_attention(*tensors)
    for attention in (
        ringattn.RingAttention(partition),
        ringattn.RingAttention(partition, group="single"),
        ringattn.RingAttention("single", partition=partition),
        copy.deepcopy(ringattn.RingAttention(partition)),
    ):
        assert attention.partition == partition
        assert torch.equal(attention(*tensors), expected)
    with pytest.raises(ValueError, match="partition must be given once, got it as first argument"):
        ringattn.RingAttention(partition, partition=partition)
    plan = ringattn.plan(6, [ringattn.RankProfile(1, 1)], COST)
    with pytest.raises(ValueError, match=r"must be a Partition, got Plan: pass plan\.partition"):
        ringattn.RingAttention(plan)


def test_a_learned_scale_is_refused_where_it_would_be_a_constant():
    learned = torch.nn.Parameter(torch.tensor(0.3))
    for function in (ringattn.block_attention, ringattn.decode_attention):
        with pytest.raises(ValueError, match="scale must be a number, got a tensor"):
            function(*operands(), scale=learned)


@pytest.mark.parametrize(("name", "value"), [("dropout_p", 0.1), ("attn_mask", torch.ones(6, 6))])
def test_the_module_refuses_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} must be left out"):
        ringattn.RingAttention(**{name: value})
    with pytest.raises(ValueError, match=f"{name} must be left out"):
        ringattn.RingAttention()(*operands(), **{name: value})
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        ringattn.RingAttention(window=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        ringattn.RingAttention()(*operands(), window=3)


def refuse_in_the_module(where: str, wrong: dict[str, Any]) -> str:
    rows = {"constructor": 31, "call": 32}[where]  # what is known already is not compared again
    q, k, v = (torch.zeros(1, rows, heads, 16) for heads in (4, 2, 2))
    partition = Partition.even(rows * this().world_size, this().world_size)
    wrong = wrong if this().rank == 1 else {}
    with pytest.raises(ValueError) as error:
        attention = ringattn.RingAttention(**(wrong if where == "constructor" else {}))
        attention(q, k, v, partition, **wrong)
    assert ringattn.RingAttention()(q, k, v, partition).shape == q.shape
    return str(error.value)


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        ("constructor", {"dropout_p": 0.1}),
        ("constructor", {"window_size": 3}),
        ("constructor", {"softcap": -1.0}),
        ("call", {"dropout_p": 0.1}),
    ],
)
def test_a_refusal_of_the_module_reaches_the_peers(rank_pool, where, wrong):
    first, second = rank_pool(2).run(refuse_in_the_module, where, wrong)
    assert second.startswith(f"{next(iter(wrong))} must be ") and first == f"rank 1: {second}"


@pytest.mark.parametrize(
    "function", [ringattn.ring_attention, ringattn.block_attention, ringattn.decode_attention]
)
def test_unknown_keywords_are_type_errors(function):
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        function(*operands(), window=3)


@pytest.mark.parametrize(
    "function", [ringattn.ring_attention, ringattn.block_attention, ringattn.decode_attention]
)
def test_vmap_is_refused(function):
    q, k, v = (torch.stack([x, x]) for x in operands())
    with pytest.raises(ValueError, match="vmap"):
        torch.vmap(lambda q: function(q, k[0], v[0]))(q)


@pytest.mark.parametrize(
    "function", [ringattn.ring_attention, ringattn.block_attention, ringattn.decode_attention]
)
def test_torch_func_is_refused(function):
    q, k, v = operands()
    with pytest.raises(ValueError, match=r"q must not be differentiated by torch\.func"):
        torch.func.grad(lambda x: function(x, k, v)[0].sum())(q)


def test_double_precision_of_other_operands_is_not_converted():
    q, k, v = operands()
    with pytest.raises(ValueError, match="k must have the dtype of q"):
        ringattn.ring_attention(q, k.double(), v.double())


def test_results_have_no_gradient_without_grad_mode():
    q, k, v = operands()
    q.requires_grad_()
    with torch.no_grad():
        assert not ringattn.ring_attention(q, k, v).requires_grad
    with torch.inference_mode():
        ringattn.ring_attention(q, k, v)


def test_distributed_tensors_are_refused(rank_pool):
    rank_pool(2).run(refuse_distributed_tensors)


def refuse_distributed_tensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    q, k, v = operands()
    spread = distribute_tensor(q, mesh, [Shard(1)])
    for function in (ringattn.ring_attention, ringattn.block_attention):
        with pytest.raises(ValueError, match=r"q must be a plain tensor .* got a DTensor"):
            function(spread, k, v)


def test_synchronize_without_a_group_returns():
    ringattn.synchronize()
