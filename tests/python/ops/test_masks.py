# SPDX-License-Identifier: Apache-2.0
"""Windows, packed documents, sinks and softcap, together, in rings of any partition."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from _gradients import check_ring_gradients
from _numerics import check_attention
from _rings import HALVES, Case, apart_case, check_ring, random_case, ring_call
from ringattn import Partition, reference
from torch.utils.flop_counter import FlopCounterMode

#: Drawn for each number of ranks and dtype.
CASES = 65


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
def test_every_mask_on_every_partition_equals_three_loops(ring: RankPool, dtype: torch.dtype):
    on_cpu = ring.device_type == "cpu"
    if dtype == torch.float64 and not on_cpu:
        pytest.skip("float64 is computed on CPUs")
    draw = random.Random(1000 * ring.world_size + torch.finfo(dtype).bits)
    for _ in range(CASES if dtype not in HALVES or not on_cpu else 8):
        check_ring(ring, random_case(draw, ring.world_size, dtype, 1 if on_cpu else 13))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
def test_a_block_under_any_table_equals_three_loops(device: str, dtype: torch.dtype):
    if dtype == torch.float64 and device != "cpu":
        pytest.skip("float64 is computed on CPUs")
    draw = random.Random(torch.finfo(dtype).bits)
    for trial in range(20):
        rows, keys = draw.randint(1, 300), draw.randint(1, 300)
        bounds = [sorted(draw.randint(-9, keys + 9) for _ in range(rows)) for _ in range(2)]
        table = torch.tensor(bounds, dtype=torch.int32).T.contiguous()
        shapes = ((rows, 4), (keys, 2), (keys, 2))
        q, k, v = (torch.randn(2, n, h, 64).to(device, dtype) for n, h in shapes)
        softcap = draw.choice([0.0, 2.0])
        sinks = torch.randn(4).to(device, dtype) if trial % 2 else None
        options = {"softcap": softcap, "sinks": sinks}
        out, lse = ringattn.block_attention(q, k, v, key_ranges=table.to(device), **options)
        columns = torch.arange(keys)
        visible = (columns >= table[:, :1]) & (columns < table[:, 1:])
        check_attention(
            out, lse, q, k, v, visible=visible.to(device), what=f"table {trial}", **options
        )


def hidden_nan_call(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of this rank where keys of the document in the middle are NaN."""
    q, k, v = case.local_inputs()
    first, last = case.cu_seqlens[1], case.cu_seqlens[2]
    positions = case.partition.position_ids(this().rank, q.device)
    k[:, (positions >= first) & (positions < last)] = torch.nan
    mask = {"window_size": case.window_size, "cu_seqlens": case.cu_seqlens}
    return ringattn.ring_attention(q, k, v, case.partition, return_lse=True, **mask)


def test_a_nan_reaches_the_rows_of_its_document_alone(ring: RankPool):
    seq_len = 80 if ring.device_type == "cpu" else 800
    ends = (0, seq_len // 3, seq_len // 2, seq_len)
    case = Case(Partition.even(seq_len, ring.world_size), cu_seqlens=ends, window_size=(40, 0))
    for outs in zip(ring.run(ring_call, case), ring.run(hidden_nan_call, case), strict=True):
        (clean, _), (out, lse) = outs
        hit = out.isnan().any(-1).any(-1).any(0)
        assert torch.equal(out[:, ~hit], clean[:, ~hit])
        assert torch.equal(lse.isnan().any(0).any(0), hit)
    places = [case.partition.position_ids(rank) for rank in range(ring.world_size)]
    hits = [out.isnan().any(-1).any(-1).any(0) for out, _ in ring.run(hidden_nan_call, case)]
    hit = torch.cat([at[rows.cpu()] for at, rows in zip(places, hits, strict=True)])
    assert sorted(hit.tolist()) == list(range(ends[1], ends[2]))


@pytest.mark.parametrize("causal", [True, False])
def test_rows_that_no_other_rank_sees_stay_where_they_are(ring: RankPool, causal: bool):
    dtype = torch.float64 if ring.device_type == "cpu" else torch.bfloat16
    case = apart_case(ring.world_size, dtype, causal=causal)
    check_ring(ring, case)
    if causal:
        check_ring_gradients(ring, case)


def far_nan_call(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows are NaN where the values of the first document are: of the last document, and of
    the first."""
    q, k, v = case.local_inputs()
    assert case.cu_seqlens is not None
    first, last = case.cu_seqlens[1], case.cu_seqlens[-2]
    positions = case.partition.position_ids(this().rank, q.device)
    v[:, positions < first] = torch.nan
    out = ringattn.ring_attention(
        q, k, v, case.partition, causal=case.causal, cu_seqlens=case.cu_seqlens
    )
    nan = out.isnan().flatten(2).any(2)[0]
    return nan[positions >= last], nan[positions < first]


def test_a_nan_reaches_no_row_from_across_what_did_not_travel(ring: RankPool):
    dtype = torch.float32 if ring.device_type == "cpu" else torch.bfloat16
    for last, first in ring.run(far_nan_call, apart_case(ring.world_size, dtype, causal=False)):
        assert not last.any()
        assert first.all()


def rows_beside(world_size: int) -> list[Case]:
    """Rows that see no key of another rank, within 64 rows that have some of which others do."""
    size = 40 * world_size
    stripes = Partition.pieces(
        [[(i, i + 1) for i in range(rank, size, world_size)] for rank in range(world_size)]
    )
    # A rank has a part of the first document, one of its own and a part of the last.
    own = [(20 * (world_size + rank), 20 * (world_size + rank + 1)) for rank in range(world_size)]
    beside = Partition.pieces(
        [
            [(20 * rank, 20 * rank + 20), own[rank], (begin, begin + 60)]
            for rank, begin in enumerate(range(40 * world_size, 100 * world_size, 60))
        ]
    )
    ends = (0, *(begin for begin, _ in own), 40 * world_size, 100 * world_size)
    documents = Case(beside, cu_seqlens=ends)
    return [Case(stripes), documents, replace(documents, causal=False)]


def nan_of_one_rank_call(case: Case, rank: int) -> torch.Tensor:
    """Which rows are NaN where all values of a rank are."""
    q, k, v = case.local_inputs()
    if this().rank == rank:
        v = torch.full_like(v, torch.nan)
    out = ringattn.ring_attention(
        q, k, v, case.partition, causal=case.causal, cu_seqlens=case.cu_seqlens
    )
    return out.isnan().flatten(2).any(2).any(0)


@pytest.mark.parametrize("case", range(3))
def test_a_nan_reaches_no_row_that_sees_nothing_of_its_owner(ring: RankPool, case: int) -> None:
    dtype = torch.float32 if ring.device_type == "cpu" else torch.bfloat16
    of_case = replace(rows_beside(ring.world_size)[case], dtype=dtype)
    partition, visible = of_case.partition, of_case.visible()
    for rank in range(ring.world_size):
        sees = visible[:, partition.position_ids(rank)].any(1)
        for other, nan in enumerate(ring.run(nan_of_one_rank_call, of_case, rank)):
            assert torch.equal(nan.cpu(), sees[partition.position_ids(other)])


@pytest.mark.parametrize(
    "window_size", [(2**63 - 1, 2**63 - 1), (-1, 2**63 - 1), (2**62, -1), (2**200, 2**63)]
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 15, 40]])
def test_a_window_that_reaches_all_keys_is_none(window_size, causal, cu_seqlens):
    q = torch.randn(1, 40, 2, 16)
    mask = {"causal": causal, "cu_seqlens": cu_seqlens}
    wide = ringattn.ring_attention(q, q, q, window_size=window_size, **mask)
    assert torch.equal(wide, ringattn.ring_attention(q, q, q, **mask))
    partition = Partition.even(40, 3)
    for rank in range(3):
        pairs = partition.num_pairs(rank, **mask)
        assert partition.num_pairs(rank, window_size=window_size, **mask) == pairs
    ends = cu_seqlens or [0, 40]
    packed = Partition.packed(ends, 3, causal=causal)
    assert Partition.packed(ends, 3, causal=causal, window_size=window_size) == packed


def test_the_operator_takes_windows_of_any_length():
    q = torch.randn(1, 40, 2, 16)
    ring = (q, q, q, [40], [0], "zigzag", False, 0.25, "", "auto", None)
    wide = torch.ops.ringattn.ring_forward(*ring, 2**63 - 1, 2**63 - 1)
    assert torch.equal(wide[0], torch.ops.ringattn.ring_forward(*ring)[0])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"window_size": (-2, 0)}, "window_size must be (left, right), "),
    ({"window_size": 5}, "window_size must be (left, right), "),
    ({"window_size": (1.5, 0)}, "window_size must be (left, right), "),
    ({"softcap": -1.0}, "softcap must be finite and not negative, got -1.0"),
    ({"softcap": float("inf")}, "softcap must be finite and not negative, got inf"),
    ({"sinks": torch.zeros(3)}, "sinks must have shape [H], H = 4, got [3]"),
    (
        {"sinks": torch.zeros(4, dtype=torch.int64)},
        "sinks must be of a float dtype, got torch.int64",
    ),
    ({"cu_seqlens": [0, 4]}, "cu_seqlens must end with the 6 tokens of the whole sequence, got 4"),
    ({"cu_seqlens": [1, 6]}, "cu_seqlens must be [0, ..., S], the boundaries of the documents, "),
    ({"cu_seqlens": [0, 4, 3, 6]}, "cu_seqlens must not decrease, got 4 before 3"),
    ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "cu_seqlens must be int32 or int64 of one"),
    ({"cu_seqlens": 6}, "cu_seqlens must be a list or a tensor of boundaries [0, ..., S], got int"),
    ({"cu_seqlens": [0, 2**63]}, "cu_seqlens must fit into 64 bits, got 9223372036854775808"),
    (
        {"cu_seqlens": torch.tensor([0, 6], device="meta")},
        "cu_seqlens must be on a device with a kernel",
    ),
    ({"cu_seqlens": torch.tensor([0, 6]).to_sparse()}, "cu_seqlens must be strided, got "),
]


@pytest.mark.parametrize(("mask", "sentence"), BAD)
def test_a_mask_that_breaks_a_rule_is_refused(mask: dict[str, Any], sentence: str):
    q = torch.randn(1, 6, 4, 16)
    with pytest.raises(ValueError) as error:
        ringattn.ring_attention(q, q, q, **mask)
    assert str(error.value).startswith(sentence)


def differing_call(case: Case, name: str, values: list[Any]) -> torch.Tensor:
    q, k, v = case.local_inputs()
    value = values[this().rank]
    sinks = None
    mask = {name: value}
    if name == "sinks":
        mask, sinks = {}, case.sinks(q.device) if value else None
    return ringattn.ring_attention(q, k, v, case.partition, sinks=sinks, **mask)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("window_size", [(3, 0), (4, 0)], "window_size"),
        ("softcap", [0.0, 2.0], "softcap"),
        ("sinks", [True, False], "sinks"),
        ("cu_seqlens", [(0, 9, 20), (0, 10, 20)], "cu_seqlens"),
        ("cu_seqlens", [(0, 9, 20), None], "on cu_seqlens, got [0, 9, 20] on rank 0 and none on"),
    ],
)
def test_ranks_whose_masks_differ_are_told_so(rank_pool, name, values, said):
    ring = rank_pool(2, "cpu")
    case = Case(Partition.even(20, 2), with_sinks=True)
    for outcome in ring.outcomes(differing_call, case, name, values):
        assert not outcome.ok and said in outcome.message
    check_ring(ring, case)  # the group works on


def test_ranks_whose_pieces_differ_are_told_so(rank_pool):
    ring = rank_pool(2, "cpu")
    for outcome in ring.outcomes(swapped_pieces_call):
        assert not outcome.ok and "pieces" in outcome.message


def swapped_pieces_call() -> torch.Tensor:
    pieces = [[(0, 4), (8, 12)], [(4, 8), (12, 16)]]
    x = torch.randn(1, 8, 2, 16)
    return ringattn.ring_attention(x, x, x, Partition.pieces(pieces[:: 1 - 2 * this().rank]))


def test_documents_come_as_a_list_a_tuple_or_a_tensor_and_are_read_again_when_they_change():
    q = torch.randn(1, 12, 2, 16)
    ends = [0, 5, 12]
    expected = ringattn.ring_attention(q, q, q, cu_seqlens=ends)
    for same in (tuple(ends), torch.tensor(ends), torch.tensor(ends, dtype=torch.int32)):
        assert torch.equal(ringattn.ring_attention(q, q, q, cu_seqlens=same), expected)
    changing = torch.tensor(ends)
    ringattn.ring_attention(q, q, q, cu_seqlens=changing)
    changing[1] = 7
    other = ringattn.ring_attention(q, q, q, cu_seqlens=changing)
    assert torch.equal(other, ringattn.ring_attention(q, q, q, cu_seqlens=[0, 7, 12]))
    assert not torch.equal(other, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_documents_of_the_host_are_read_in_every_call(dtype):
    """NumPy or another process may write to their memory: no version of the tensor shows it."""
    q, ends = torch.randn(1, 12, 2, 16), torch.tensor([0, 5, 12], dtype=dtype)
    memory = ends.numpy()
    for middle in (5, 7, 3):
        memory[1] = middle
        expected = ringattn.ring_attention(q, q, q, cu_seqlens=[0, middle, 12])
        assert torch.equal(ringattn.ring_attention(q, q, q, cu_seqlens=ends), expected)


def test_documents_of_a_backward_are_those_of_its_forward():
    q, ends = torch.randn(1, 12, 2, 16, requires_grad=True), torch.tensor([0, 5, 12])
    out = ringattn.ring_attention(q, q, 2 * q, cu_seqlens=ends)
    ends.numpy()[1] = 9
    (got,) = torch.autograd.grad(out.square().sum(), q)
    out = ringattn.ring_attention(q, q, 2 * q, cu_seqlens=[0, 5, 12])
    assert torch.equal(got, torch.autograd.grad(out.square().sum(), q)[0])


def test_the_module_holds_window_and_cap_and_takes_documents_and_sinks_at_the_call():
    q, sinks = torch.randn(1, 12, 2, 16), torch.randn(2)
    attn = ringattn.RingAttention(window_size=[3, 0], softcap=2.0)
    expected = ringattn.ring_attention(
        q, q, q, window_size=(3, 0), softcap=2.0, cu_seqlens=[0, 5, 12], sinks=sinks
    )
    assert torch.equal(attn(q, q, q, cu_seqlens=[0, 5, 12], sinks=sinks), expected)
    for late in ({"window_size": (3, 0)}, {"softcap": 2.0}):
        with pytest.raises(ValueError, match="must be left out"):
            attn(q, q, q, **late)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_other_documents_neither_recompile_nor_break_the_graph(softcap):
    torch._dynamo.reset()
    compiles = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        compiles.append(graph)
        return graph.forward

    def attend(q: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        mask = {"window_size": (4, 0), "softcap": softcap, "cu_seqlens": ends}
        return ringattn.ring_attention(q, q, q, **mask)

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    q = torch.randn(1, 12, 2, 16)
    for ends in ([0, 5, 12], [0, 6, 12], [0, 1, 12]):
        given = torch.tensor(ends)
        assert torch.equal(compiled(q, given), attend(q, given))
    assert len(compiles) == 1
    for ends in ([0, 1, 2, 12], [0, 1, 2, 3, 12], [0, 12]):
        given = torch.tensor(ends)
        assert torch.equal(compiled(q, given), attend(q, given))
    assert len(compiles) == 2


def compile_over_pieces() -> tuple[int, list[bool]]:
    """How often a call over other pieces is compiled, and whether results are those without."""
    torch._dynamo.reset()
    compiles = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        compiles.append(graph)
        return graph.forward

    def attend(q: torch.Tensor, partition: Partition) -> torch.Tensor:
        return ringattn.ring_attention(q, q, q, partition, window_size=(5, 0))

    compiled, right = torch.compile(attend, fullgraph=True, backend=backend), []
    for cuts in ((4, 8, 12), (3, 6, 11), (2, 6, 12), (1, 9, 14), (5, 6, 7)):
        ends = (0, *cuts, 16)
        pieces = list(itertools.pairwise(ends))
        partition = Partition.pieces([pieces[::2], pieces[1::2]])
        generator = torch.Generator().manual_seed(1)
        q = partition.shard(torch.randn(1, 16, 2, 16, generator=generator), this().rank)
        right.append(torch.equal(compiled(q, partition), attend(q, partition)))
    return len(compiles), right


def test_other_pieces_are_compiled_twice_at_most(rank_pool):
    for compiles, right in rank_pool(2, "cpu").run(compile_over_pieces):
        assert all(right) and compiles <= 2


@pytest.mark.cuda
def test_a_cuda_graph_keeps_the_documents_of_its_capture():
    q = torch.randn(1, 700, 4, 64, dtype=torch.bfloat16, device="cuda")

    def attend(ends: list[int]) -> torch.Tensor:
        return ringattn.ring_attention(q, q, q, cu_seqlens=ends, window_size=(200, 0))

    expected, graph = attend([0, 300, 700]), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend([0, 300, 700])
    for first in range(40):  # more documents than calls are remembered
        attend([0, first + 1, 700])
    q.copy_(torch.randn_like(q))
    expected = attend([0, 300, 700])
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    other = torch.cuda.CUDAGraph()
    with (
        pytest.raises(ValueError, match="must have been made once before"),
        torch.cuda.graph(other),
    ):
        attend([0, 699, 700, 700])


def test_flops_are_those_of_visible_pairs():
    q = torch.randn(2, 40, 4, 16)
    ends, window = [0, 13, 13, 40], (5, 2)
    positions = torch.arange(40)
    visible = reference.visible_keys(positions, positions, False, window, ends)
    with FlopCounterMode(display=False) as counter:
        ringattn.ring_attention(q, q, q, causal=False, window_size=window, cu_seqlens=ends)
    assert counter.get_total_flops() == 4 * 16 * 4 * 2 * int(visible.sum())


def test_operators_pass_opcheck():
    q, sinks = torch.randn(1, 6, 2, 16), torch.randn(2)
    table = torch.tensor([[0, 2]] * 6, dtype=torch.int32)
    arguments = (q, q, q, 0.25, None, table, 2.0, sinks)
    torch.library.opcheck(torch.ops.ringattn.block_attention.default, arguments)
    pieces = torch.tensor([[0, 0, 6]])
    mask = (3, -1, 2.0, sinks, torch.tensor([0, 2, 6]), pieces)
    arguments = (q, q, q, [6], [0], "pieces", True, 0.25, "", "auto", None, *mask)
    torch.library.opcheck(torch.ops.ringattn.ring_forward.default, arguments)


def documents_on_each_rank(partition: Partition, documents: list[list[int]]) -> str:
    """What a call says whose documents are those at this rank's place, after calls with others."""
    x = torch.zeros(1, partition.lengths[this().rank], 2, 64, device=this().device)

    def attend(cu_seqlens: list[int]) -> None:
        ringattn.ring_attention(x, x, x, partition, cu_seqlens=cu_seqlens)

    for end in range(9):
        attend([0, end, partition.seq_len])
    message = ""
    try:
        attend(documents[this().rank])
        ringattn.synchronize()
    except (ValueError, RuntimeError) as error:
        message = str(error)
    attend([0, 3, partition.seq_len])  # the group works on
    return message


@pytest.mark.parametrize(
    ("partition", "documents"),
    [
        (Partition.even(40, 2), [[0, 20, 40], [0, 21, 40]]),
        # Nothing travels between ranks 0 and 1, by the documents of one of them or of both.
        (Partition.contiguous([20, 20]), [[0, 20, 40], [0, 21, 40]]),
        (Partition.contiguous([20, 20]), [[0, 20, 40], [0, 20, 30, 40]]),
        (Partition.zigzag([20, 0, 20]), [[0, 20, 40], [0, 21, 40], [0, 20, 40]]),
    ],
)
def test_a_difference_between_new_documents_is_told_on_all_ranks(
    own_pool: Any, partition: Partition, documents: list[list[int]]
) -> None:
    for message in own_pool(len(documents)).run(documents_on_each_rank, partition, documents):
        assert message.startswith("ranks must agree on cu_seqlens")
