# SPDX-License-Identifier: Apache-2.0
"""Profiles to the last digit, with a scripted clock and a scripted memory."""

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from ringattn.__main__ import main
from ringattn._distributed.groups import resolve_group
from ringattn._profiling import devices, links, speeds
from ringattn._profiling.timers import Spread
from ringattn._profiling.workloads import ProbeWorkload
from ringattn.cli import profile as command
from ringattn.profiling import tokens_to_measure
from ringattn.strategies import LatencyRow, read_table

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "num_layers": 3,
    "num_tokens": 256,
}
KV_BYTES = 2 * 2 * 64 * 4  # of a token in a layer: keys and values, heads, D, float32


def probe(dtype: torch.dtype = torch.float32) -> ProbeWorkload:
    return ProbeWorkload(**SMALL, dtype=dtype, device=CPU)


# ---- speeds ------------------------------------------------------------------------------------


def scripted(answers: Sequence[Any]) -> Callable[..., Any]:
    """A function that returns these answers in order, whatever its arguments."""
    left = iter(answers)
    return lambda *_: next(left)


def profiles_of_times() -> list[ringattn.RankProfile]:
    """Profiles of a ring whose ranks all took these milliseconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speeds, "_settled", scripted([[9.0, 2.0, 1.0], [5.0], [4.0]]))
        patch.setattr(speeds, "measure_link", lambda *_: (Spread.of([3.0]), Spread.of([7.0])))
        patch.setattr(speeds, "bursts", scripted([[0.5, 0.25, 8.0]]))
        patch.setattr(speeds, "call_tflops", lambda *_: [0.125])
        patch.setattr(speeds, "spare_bytes", lambda *_: 11 * 3 * KV_BYTES - 1)
        return ringattn.measure_profiles(device="cpu", seconds=0.01, **SMALL)


@pytest.mark.parametrize("world_size", [1, 2])
def test_speeds_are_work_over_time(rank_pool: Callable[..., RankPool], world_size: int) -> None:
    for profiles in rank_pool(world_size).run(profiles_of_times):
        for profile in profiles:
            pairs = 256 * 257 / 2
            alone = 1e-9 * 4 * 4 * 64 * pairs / 2.0
            assert profile.attention_tflops == (alone if world_size == 1 else 0.125)
            assert profile.linear_tflops == 1e-9 * 2 * 256 * 256**2 / 5.0
            read = (2**24 // KV_BYTES + 1) * KV_BYTES  # more than caches hold, in whole tokens
            assert profile.memory_gbps == 1e-6 * read / 4.0
            assert profile.overhead_ms == world_size * 0.5  # of a call: one for each block
            assert profile.max_tokens == 10
            assert profile.link_gbps == (None if world_size == 1 else 3.0)


def test_work_is_done_as_it_is_counted() -> None:
    attend, flops = probe().attention(7)
    out, lse = attend()
    assert out.shape == (1, 7, 4, 64) and lse.shape == (1, 4, 7)
    assert flops == 4 * 4 * 64 * 7 * 8 / 2
    assert lse[0, :, 0].isfinite().all()
    project, flops = probe().linear()
    assert project().shape == (256, 256) and flops == 2 * 256 * 256 * 256
    read, num_bytes = probe(torch.bfloat16).decode(5)
    assert read().dtype == torch.bfloat16 and num_bytes == 5 * KV_BYTES / 2


@pytest.mark.parametrize(
    ("seq_len", "world_size", "device", "tokens"),
    [
        *((2000, 2, "cpu", 1000), (2001, 2, "cpu", 1001), (2002, 3, "cpu", 668)),
        *((513, 2, "cpu", 257), (512, 2, "cpu", 256), (8, 4, "cpu", 256)),
        *((16385, 2, "cuda", 8193), (16384, 2, "cuda", 8192), (4096, 1, "cuda", 8192)),
    ],
)
def test_shards_that_are_measured_are_as_long_as_the_longest(
    seq_len: int, world_size: int, device: str, tokens: int
) -> None:
    assert tokens_to_measure(seq_len, world_size, torch.device(device)) == tokens


def test_a_sweep_writes_medians(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = scripted([[], [6.0, 2.0, 90.0], [3.0, 1.5, 80.0], [0.5], [0.25, 0.125, 70.0]])
    monkeypatch.setattr(command, "repeat", lambda *_, **__: times())
    monkeypatch.setattr(command, "bursts", lambda *_: times())
    arguments = ["--device", "cpu", "--slowdowns", "4", "--sizes", "64,32", "--out", str(tmp_path)]
    assert main(["profile", *arguments]) == 0
    (latency,) = read_table(tmp_path / "ring_attention_profile.csv")
    assert latency == LatencyRow(mps_pct=25, latency_ms=6)
    rows = read_table(tmp_path / "matmul_mps_sweep.csv")
    # The second is too short for one call: it is timed in bursts.
    assert [(row.size, row.avg_ms) for row in rows] == [(64, 3.0), (32, 0.25)]


# ---- links -------------------------------------------------------------------------------------


def link_of_times(*milliseconds: list[float]) -> tuple[Spread, Spread, list[int]]:
    """Bandwidth and latency where hops take these milliseconds, and their tokens."""
    times, tokens = iter(milliseconds), []

    def bursts(hop: Callable[[], Any], device: torch.device, meet: Callable[[], None]) -> Any:
        meet()
        tokens.append(hop().size(2))
        return next(times)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "bursts", bursts)
        return (*links.measure_link(resolve_group(None), probe(), "auto"), tokens)


def test_a_link_is_what_more_bytes_take_longer(rank_pool: Callable[..., RankPool]) -> None:
    samples = [0.02, 0.03, 0.01], [9.0, 0.5, 0.25], [1.5, 2.5, 4.5]
    for bandwidth, latency, tokens in rank_pool(2).run(link_of_times, *samples):
        assert tokens == [1, 128, 256]  # so that 128 make the difference
        assert latency == Spread(20.0, 15.0, 25.0)
        gigabytes = 1e-9 * 128 * KV_BYTES
        expected = sorted(1e3 * gigabytes / ms for ms in (1.0, 2.0, 4.0))
        assert bandwidth.median == pytest.approx(expected[1], rel=1e-12)
        assert bandwidth.low == pytest.approx((expected[0] + expected[1]) / 2, rel=1e-12)
        assert bandwidth.high == pytest.approx((expected[1] + expected[2]) / 2, rel=1e-12)


def test_a_long_hop_that_is_no_slower_takes_a_tenth_of_its_time_for_its_bytes(
    rank_pool: Callable[..., RankPool],
) -> None:
    for bandwidth, _, _ in rank_pool(2).run(link_of_times, [0.5], [2.0], [1.0]):
        assert bandwidth.median == pytest.approx(1e-9 * 128 * KV_BYTES / 1e-4, rel=1e-12)


# ---- room --------------------------------------------------------------------------------------


def room(free: int, dtype: torch.dtype, one_host: bool) -> int:
    """Tokens that this rank has room for where so many bytes are free."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_free_host_memory", lambda: free)
        if not one_host:
            patch.setattr(platform, "node", lambda: f"host {this().rank}")
        tokens = probe(dtype)
        spare = devices.spare_bytes(resolve_group(None), CPU)
        return spare // (tokens.num_layers * tokens.token_bytes)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("one_host", [True, False])
@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.float16, 2)])
def test_room_is_nine_tenths_of_what_is_free_shared_by_ranks_of_one_host(
    rank_pool: Callable[..., RankPool],
    world_size: int,
    one_host: bool,
    dtype: torch.dtype,
    itemsize: int,
) -> None:
    token = 3 * 2 * 2 * 64 * itemsize  # layers, keys and values, heads, D
    num_sharing = world_size if one_host else 1
    for tokens in (1, 1000):
        just = tokens * token * num_sharing * 10 // 9 + 1  # of which nine tenths hold them
        pool = rank_pool(world_size)
        assert pool.run(room, just, dtype, one_host) == [tokens] * world_size
        assert pool.run(room, just - 2 * num_sharing, dtype, one_host) == [tokens - 1] * world_size


def test_free_memory_is_what_the_host_gives_without_swapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:    7 kB\nCached: 3 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda self: lines)
    assert devices._free_host_memory() == 7 * 1024
