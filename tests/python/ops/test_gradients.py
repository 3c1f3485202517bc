# SPDX-License-Identifier: Apache-2.0
"""Gradients through rings and single blocks."""

import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import RankPool, this
from _gradients import Rule, check_ring_gradients, compare, ring_gradients
from _rings import HALVES, SPLITS, Case, apart_case, random_case
from ringattn import _C, Partition
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

CASES = 25


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
def test_gradients_under_every_mask_on_every_partition(ring: RankPool, dtype: torch.dtype) -> None:
    on_cpu = ring.device_type == "cpu"
    if dtype == torch.float64 and not on_cpu:
        pytest.skip("float64 is computed on CPUs")
    draw = random.Random(77 * ring.world_size + torch.finfo(dtype).bits)
    for _ in range(CASES if dtype not in HALVES or not on_cpu else 5):
        check_ring_gradients(ring, random_case(draw, ring.world_size, dtype, 1 if on_cpu else 7))


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_plain_masks(ring: RankPool, causal: bool) -> None:
    dtype = torch.float64 if ring.device_type == "cpu" else torch.bfloat16
    for lengths, order in SPLITS[ring.world_size]:
        for layout in ("zigzag", "contiguous"):
            partition = getattr(Partition, layout)(lengths, order=order)
            check_ring_gradients(ring, Case(partition, dtype, causal=causal))


def block_case(draw: random.Random, dtype: torch.dtype) -> tuple[dict[str, Any], torch.Tensor]:
    """Keywords of a block's call, and which row sees which key."""
    rows, keys = draw.randint(1, 200), draw.randint(1, 200)
    options: dict[str, Any] = {"softcap": draw.choice([0.0, 2.0])}
    columns = torch.arange(keys)
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if (kind := draw.choice(["diagonal", "table", "none"])) == "diagonal":
        options["diagonal"] = draw.randint(-rows - 2, keys + 2)
        visible = visible.tril(options["diagonal"])
    elif kind == "table":
        bounds = [sorted(draw.randint(-9, keys + 9) for _ in range(rows)) for _ in range(2)]
        table = torch.tensor(bounds, dtype=torch.int32).T.contiguous()
        options["key_ranges"] = table
        visible = (columns >= table[:, :1]) & (columns < table[:, 1:])
    return options, visible


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
def test_gradients_of_a_block(device: str, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and device != "cpu":
        pytest.skip("float64 is computed on CPUs")
    draw = random.Random(torch.finfo(dtype).bits)
    for trial in range(30):
        options, visible = block_case(draw, dtype)
        rows, keys = visible.shape
        case = BlockCase(rows, keys, dtype, draw.choice([8, 64, 72, 128, 256]), options, trial)
        rule = Rule.of(case, visible, device)  # type: ignore[arg-type]
        compare(case, case.gradients(device), rule)  # type: ignore[arg-type]


class BlockCase:
    """One block, with what :func:`_gradients.compare` asks a ring's case about."""

    num_heads, num_kv_heads, batch, scale = 6, 2, 2, None

    def __init__(
        self,
        rows: int,
        keys: int,
        dtype: torch.dtype,
        head_dim: int,
        options: dict[str, Any],
        seed: int,
    ) -> None:
        self.partition = Partition.even(rows, 1)  # of the queries
        self.keys, self.dtype, self.head_dim, self.seed = keys, dtype, head_dim, seed
        self.options, self.softcap, self.with_sinks = options, options["softcap"], seed % 2 == 1

    def inputs(self, device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shapes = [(self.partition.seq_len, 6), (self.keys, 2), (self.keys, 2)]
        return [
            torch.randn(2, *shape, self.head_dim, generator=generator).to(device, self.dtype)
            for shape in shapes
        ]

    def sinks(self, device: str) -> torch.Tensor | None:
        return Case.sinks(self, device)  # type: ignore[arg-type]

    def gradients(self, device: str) -> list[torch.Tensor]:
        from _gradients import result_gradients

        inputs = [x.requires_grad_() for x in self.inputs(device)]
        options = dict(self.options)
        if "key_ranges" in options:
            options["key_ranges"] = options["key_ranges"].to(device)
        if (sinks := self.sinks(device)) is not None:
            inputs.append(sinks.requires_grad_())
        out, lse = ringattn.block_attention(*inputs[:3], sinks=sinks, **options)
        given = [x.to(device) for x in result_gradients(self)]  # type: ignore[arg-type]
        return [x.cpu() for x in torch.autograd.grad([out, lse], inputs, given)]


def test_gradcheck_of_a_block() -> None:
    q, k, v = (torch.randn(1, 5, h, 8, dtype=torch.float64).requires_grad_() for h in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64).requires_grad_()

    def attend(*inputs: torch.Tensor) -> Any:
        return ringattn.block_attention(*inputs[:3], diagonal=0, softcap=1.5, sinks=inputs[3])

    assert torch.autograd.gradcheck(attend, (q, k, v, sinks))


def test_either_gradient_may_be_absent(device: str) -> None:
    q, k, v = (torch.randn(1, 9, 2, 16, device=device).requires_grad_() for _ in range(3))
    out, lse = ringattn.block_attention(q, k, v, diagonal=0)
    both = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v), retain_graph=True)
    of_out = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    of_lse = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    for total, part, other in zip(both, of_out, of_lse, strict=True):
        torch.testing.assert_close(total, part + other, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_is_refused_where_it_is_asked_for(device: str) -> None:
    q, k, v = (torch.randn(1, 4, 2, 8, device=device).requires_grad_() for _ in range(3))
    out, _ = ringattn.block_attention(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        dq.sum().backward()


def test_a_softcap_beyond_float32_changes_no_gradient(device: str) -> None:
    q, k, v = (torch.randn(1, 5, 2, 8, device=device).requires_grad_() for _ in range(3))
    plain, capped = (
        torch.autograd.grad(ringattn.block_attention(q, k, v, softcap=cap)[0].sum(), (q, k, v))
        for cap in (0.0, 1e300)
    )
    for a, b in zip(plain, capped, strict=True):
        torch.testing.assert_close(a, b)
    zeros = torch.zeros_like(q)
    out, _ = ringattn.block_attention(zeros, k, v, softcap=1e-300)
    for gradient in torch.autograd.grad(out.sum(), (k, v)):
        assert gradient.isfinite().all()


def test_a_backward_runs_once(device: str) -> None:
    q, k, v = (torch.randn(1, 4, 2, 8, device=device).requires_grad_() for _ in range(3))
    out, _ = ringattn.block_attention(q, k, v)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        out.sum().backward()


@pytest.mark.parametrize("scale", [1e6, 1e8, 1e12])
def test_gradients_of_very_large_scores_stay_finite(scale: float) -> None:
    """Scores of a backward may differ from those of the forward by a last bit, which is large."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 16, generator=generator).requires_grad_() for _ in range(3))
    out, _ = ringattn.block_attention(q, k, v, scale=scale, diagonal=0)
    grad_out = torch.ones_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad_out)
    assert dq.isfinite().all() and dk.isfinite().all()
    assert (dv <= grad_out.sum(1, keepdim=True)).all()  # no weight exceeds 1


def left_out_backward() -> str:
    """The first rank makes a backward, the other one the next forward; then both make both."""
    partition = Partition.even(6, 2)
    q, k, v = (torch.ones(1, 3, 2, 8).requires_grad_() for _ in range(3))
    out = ringattn.ring_attention(q, k, v, partition)
    with pytest.raises(ValueError) as error:
        if this().rank == 0:
            out.sum().backward(retain_graph=True)
        else:
            ringattn.ring_attention(q, k, v, partition)
    ringattn.ring_attention(q, k, v, partition).sum().backward()
    return str(error.value)


def test_a_backward_that_a_rank_leaves_out_is_a_value_error(rank_pool: Any) -> None:
    for sentence in rank_pool(2).run(left_out_backward):
        assert sentence.startswith("ranks must agree on operator, got ring_backward on rank 0")


def test_what_is_not_asked_for_is_not_returned(device: str) -> None:
    q, k, v = (torch.randn(1, 4, 2, 8, device=device) for _ in range(3))
    k.requires_grad_()
    out, _ = ringattn.block_attention(q, k, v)
    out.sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None


def test_a_change_of_an_input_after_the_forward_is_noticed() -> None:
    q, k, v = (torch.randn(1, 4, 2, 8).requires_grad_() for _ in range(3))
    out, _ = ringattn.block_attention(q * 1, k, hidden := v * 1)
    hidden.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_nan_behind_a_mask_reaches_no_gradient() -> None:
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    q[:, 4:], k[:, 4:] = torch.nan, torch.nan
    for x in (q, k, v):
        x.requires_grad_()
    table = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 4], [4, 6], [4, 6]], dtype=torch.int32)
    out, _ = ringattn.block_attention(q, k, v, key_ranges=table)
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient[:, :4].isfinite().all() and gradient[:, 4:].isnan().all()


def test_operators_of_the_backward_pass_opcheck(device: str) -> None:
    q, k, v = (torch.randn(1, 6, h, 8, device=device) for h in (4, 2, 2))
    sinks = torch.randn(4, device=device)
    table = torch.tensor([[0, 3]] * 6, dtype=torch.int32, device=device)
    for rest in ((0.3, 1), (0.3, None, table, 1.5, sinks)):
        out, lse = torch.ops.ringattn.block_attention(q, k, v, *rest)
        arguments = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *rest)
        opcheck(torch.ops.ringattn.block_attention_backward.default, arguments)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        opcheck(torch.ops.ringattn.block_attention.default, (*inputs, *rest))
    ring = ([6], [0], "zigzag", True, 0.3, "", "auto", None)
    out, lse = torch.ops.ringattn.ring_forward(q, k, v, *ring)
    arguments = (torch.randn_like(out), None, q, k, v, out, lse, *ring)
    opcheck(torch.ops.ringattn.ring_backward.default, arguments)
    opcheck(torch.ops.ringattn.ring_forward.default, (*inputs, *ring))


def compiled_gradients(case: Case) -> list[torch.Tensor]:
    """As ring_gradients, under torch.compile."""
    inputs = [x.requires_grad_() for x in case.local_inputs()]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        out = ringattn.ring_attention(*inputs, case.partition, window_size=case.window_size)
        return out.square().sum()

    return list(torch.autograd.grad(loss(*inputs), inputs))


def eager_gradients(case: Case) -> list[torch.Tensor]:
    inputs = [x.requires_grad_() for x in case.local_inputs()]
    out = ringattn.ring_attention(*inputs, case.partition, window_size=case.window_size)
    return list(torch.autograd.grad(out.square().sum(), inputs))


def test_compiled_gradients_are_the_eager_ones(ring: RankPool) -> None:
    case = Case(Partition.even(20, ring.world_size), window_size=(7, 0))
    eager, compiled = ring.run(eager_gradients, case), ring.run(compiled_gradients, case)
    for mine, theirs in zip(compiled, eager, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)


def both_passes_with_inductor(partition: Partition) -> None:
    x = partition.shard(torch.randn(1, 8, 2, 16), this().rank).requires_grad_()

    def program(x: torch.Tensor) -> torch.Tensor:
        return ringattn.ring_attention(x, x, 3 * x, partition) * 2

    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(program, fullgraph=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), program(x))
        mine, expected = (torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, program))
    torch.testing.assert_close(mine, expected)


def test_inductor_keeps_the_calls_of_a_rank_without_tokens(rank_pool: Any) -> None:
    rank_pool(2).run(both_passes_with_inductor, Partition.zigzag([0, 8]))


def disagreeing(case: Case) -> str:
    """A forward whose keys require grad on one rank alone."""
    q, k, v = case.local_inputs()
    if this().rank == 0:
        k.requires_grad_()
    try:
        ringattn.ring_attention(q, k, v, case.partition)
    except ValueError as error:
        message = str(error)
    k.requires_grad_(False)
    ringattn.ring_attention(q, k, v, case.partition)  # the group works on
    return message


def test_ranks_agree_on_what_requires_grad(ring: RankPool) -> None:
    if ring.world_size == 1:
        pytest.skip("one rank agrees with itself")
    # A call that no rank has made before.
    for message in ring.run(disagreeing, Case(Partition.even(20, ring.world_size), scale=0.77)):
        assert "agree on inputs that require grad, got k on rank 0" in message


def counted(case: Case) -> list[int]:
    q, k, v = (x.requires_grad_() for x in case.local_inputs())
    flops = []
    for backward in (False, True):
        with FlopCounterMode(display=False) as counter:
            out = ringattn.ring_attention(q, k, v, case.partition)
            if backward:
                out.sum().backward()
        flops.append(counter.get_total_flops())
    return flops


def test_flops_of_a_backward_are_two_and_a_half_forwards(ring: RankPool) -> None:
    case = Case(Partition.even(24, ring.world_size))
    for forward, both in ring.run(counted, case):
        assert both == forward * 7 // 2


def test_gradients_are_the_same_bits_in_deterministic_mode(ring: RankPool) -> None:
    dtype = torch.float32 if ring.device_type == "cpu" else torch.bfloat16
    case = Case(Partition.even(700, ring.world_size), dtype, head_dim=128)
    first, second = (ring.run(ring_gradients, case, True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def names_of_transports() -> list[str]:
    """Those that can carry tensors of this rank's device."""
    if this().device.type == "cpu":
        return ["process_group"]
    with_nccl = "nccl" in str(dist.get_backend_config())
    return [name for name in _C.transports() if with_nccl or name == "symmetric"]


def test_gradients_return_over_every_transport(ring: RankPool) -> None:
    (names, *_) = ring.run(names_of_transports)
    for lengths, order in SPLITS[ring.world_size]:
        partition = Partition.zigzag(lengths, order=order)
        for name in names:
            dtype = torch.float32 if ring.device_type == "cpu" else torch.bfloat16
            window = Case(partition, dtype, transport=name, window_size=(9, 0))
            check_ring_gradients(ring, window)
            check_ring_gradients(ring, Case(partition, dtype, transport=name, depth=1))


def replayed_gradients(case: Case) -> list[list[torch.Tensor]]:
    """dq, dk and dv of other inputs: of a captured call, and of a call."""
    inputs = [x.requires_grad_() for x in case.local_inputs()]
    of_out = case.partition.shard(torch.randn_like(case.inputs(this().device)[0]), this().rank)

    def step() -> list[torch.Tensor]:
        mask = {"window_size": case.window_size, "cu_seqlens": case.cu_seqlens}
        out = ringattn.ring_attention(*inputs, case.partition, **mask)
        return list(torch.autograd.grad(out, inputs, of_out))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in inputs:
            x.mul_(0.5)
    graph.replay()
    ringattn.synchronize()
    return [[x.cpu() for x in captured], [x.cpu() for x in step()]]


@pytest.mark.cuda
def test_a_process_ends_well_after_a_backward_with_tables() -> None:
    """The thread of autograd that keeps the tables ends beside the CUDA driver. A process that has
    torch already would end without its exit handlers."""
    script = (
        "import ringattn, torch\n"
        "x = torch.randn(1, 64, 4, 64, device='cuda', dtype=torch.bfloat16, requires_grad=True)\n"
        "for size in range(1, 9):\n"
        "    ringattn.ring_attention(x, x, x, window_size=(size, 0)).sum().backward()\n"
    )
    command = [sys.executable, "-c", script]
    ends = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        errors = [end.communicate(timeout=300)[1] for end in ends]
    finally:
        for end in ends:
            end.kill()
    assert [end.returncode for end in ends] == [0] * 4, errors


def test_a_cuda_graph_holds_both_passes(ring: RankPool) -> None:
    if ring.device_type != "cuda":
        pytest.skip("a graph is of CUDA")
    window = Case(Partition.even(600, ring.world_size), torch.bfloat16, window_size=(100, 0))
    # Its backward needs more memory for messages than its forward has.
    documents = replace(
        apart_case(ring.world_size, torch.bfloat16, causal=True), num_heads=8, num_kv_heads=8
    )
    for case in (window, documents):
        for captured, eager in ring.run(replayed_gradients, case):
            for a, b in zip(captured, eager, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
