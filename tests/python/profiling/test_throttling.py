# SPDX-License-Identifier: Apache-2.0
"""Throttles slow ranks by the factor that was asked for, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import ringattn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _distributed import RankPool, this
from _waiting import eventually, has_ended
from ringattn import Partition, testing
from ringattn.__main__ import main
from ringattn.testing import MPS
from torch.utils.flop_counter import FlopCounterMode

# Stands for the daemon: it keeps a file while it runs, and its environment.
DAEMON = """#!/bin/sh
if [ "$1" = -d ]; then
  [ -e "$0.broken" ] && echo "no device" && exit 3
  env | grep -e CUDA_MPS -e CUDA_VISIBLE > "$0.running"
  sleep 100 &
  echo $! > "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
else
  grep -q '^quit' && rm "$0.running"
fi
"""


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in for nvidia-cuda-mps-control, found first."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(DAEMON)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    return program


def running(daemon: Path) -> Path:
    return daemon.with_name(f"{daemon.name}.running")


def test_the_daemon_is_private_and_stops_with_its_context(daemon: Path) -> None:
    with MPS() as mps:
        environment = mps.environment(12.5)
        assert environment.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") == "12.5"
        pipe, log = (Path(environment[f"CUDA_MPS_{name}_DIRECTORY"]) for name in ("PIPE", "LOG"))
        assert pipe.is_dir() and log.is_dir() and len(str(pipe)) < 60
        # The daemon sees every device, its clients choose.
        seen = dict(line.split("=", 1) for line in running(daemon).read_text().splitlines())
        assert seen == environment
        pid = int((pipe / "nvidia-cuda-mps-control.pid").read_text())
        assert not has_ended(pid)
    assert not running(daemon).exists() and not pipe.parent.exists()
    assert eventually(lambda: has_ended(pid))


def test_the_daemon_stops_after_an_error(daemon: Path) -> None:
    with pytest.raises(KeyError), MPS():
        assert running(daemon).exists()
        raise KeyError
    assert not running(daemon).exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_daemon_stops_when_its_owner_is_killed(daemon: Path, how: signal.Signals) -> None:
    script = (
        "import time; from ringattn.testing import MPS\n"
        "with MPS() as mps:\n"
        "    print(mps.environment(1)['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n"
        "    time.sleep(6000)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pipe = Path(owner.stdout.readline().strip())
    assert running(daemon).exists() and pipe.is_dir()
    owner.send_signal(how)
    owner.communicate()
    assert eventually(lambda: not running(daemon).exists() and not pipe.parent.exists())


def test_a_daemon_that_does_not_start_says_why(daemon: Path) -> None:
    daemon.with_name(f"{daemon.name}.broken").touch()
    with pytest.raises(OSError, match="nvidia-cuda-mps-control must start, got no device"):
        MPS().__enter__()


def test_a_machine_without_the_daemon_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="must find nvidia-cuda-mps-control on the PATH, got none"):
        MPS().__enter__()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_sweep_whose_process_fails_says_why_and_stops_the_daemon(
    daemon: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["profile", "--percentages", "50", "--out", str(tmp_path / "speeds")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "ringattn: the process at 50 % must measure, got ringattn: --device cuda must "
    )
    assert error.count("\n") == 1
    assert not running(daemon).exists()


@pytest.mark.parametrize("percentage", [0, -1, 101, float("nan")])
def test_percentages_out_of_range_are_refused(daemon: Path, percentage: float) -> None:
    with MPS() as mps, pytest.raises(ValueError, match=r"percentage must lie in \(0, 100\], got"):
        mps.environment(percentage)


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU time of a call in this thread, whatever else keeps the cores busy."""
    times = []
    for _ in range(15):
        start = time.thread_time()
        work()
        times.append(1e3 * (time.thread_time() - start))
    return min(times)


def linear_flops() -> int:
    with FlopCounterMode(display=False) as counter:
        F.linear(torch.ones(64, 32), torch.ones(16, 32))
    return counter.get_total_flops()


def attention_ms() -> float:
    q, size = torch.ones(1, 512, 4, 64), dist.get_world_size() if dist.is_initialized() else 1
    partition = Partition.even(512 * size, size)
    return cpu_ms(lambda: ringattn.ring_attention(q, q, q, partition))


def test_a_slow_rank_repeats_its_linear_layers() -> None:
    alone = linear_flops()
    with testing.slowdown(6.5):
        assert linear_flops() == 6.5 * alone > 0
        with testing.slowdown(1.0):
            assert linear_flops() == alone
    assert linear_flops() == alone


def test_repetition_changes_no_linear_layer() -> None:
    layer = torch.nn.Linear(24, 8)
    x = torch.randn(2, 3, 24, requires_grad=True)
    expected = layer(x)
    expected.sum().backward()
    gradients = [x.grad, layer.weight.grad, layer.bias.grad]
    x.grad = layer.weight.grad = layer.bias.grad = None
    with testing.slowdown(2.5):
        out = layer(x)
        empty = layer(x.detach()[:0])
    assert torch.equal(out, expected) and empty.shape == (0, 3, 8)
    out.sum().backward()
    for grad, before in zip((x.grad, layer.weight.grad, layer.bias.grad), gradients, strict=True):
        assert torch.equal(grad, before)


@pytest.mark.parametrize(
    ("factor", "rows"), [(1.0, 6), (1.25, 6 + 2), (1.5, 6 + 3), (2.0, 12), (2.5, 15), (4.0, 24)]
)
def test_linear_layers_repeat_the_rows_that_the_factor_asks_for(factor: float, rows: int) -> None:
    layer, x = torch.nn.Linear(24, 8), torch.randn(2, 3, 24)
    outer = testing.slowdown(3.0)  # of which nothing holds inside the other
    with FlopCounterMode(display=False) as counter, outer, testing.slowdown(factor):
        layer(x)
    assert counter.get_total_flops() == 2 * rows * 24 * 8


@pytest.mark.parametrize(("factor", "products"), [(1.0, 3), (2.0, 6), (2.5, 7.5)])
def test_the_backward_of_linear_layers_is_repeated_too(factor: float, products: float) -> None:
    layer, x = torch.nn.Linear(24, 8), torch.randn(2, 3, 24, requires_grad=True)
    with FlopCounterMode(display=False) as counter, testing.slowdown(factor):
        layer(x).sum().backward()
    assert counter.get_total_flops() == products * 2 * 6 * 24 * 8
    expected = (x.grad, layer.weight.grad)
    x.grad = layer.weight.grad = None
    layer(x).sum().backward()
    assert all(map(torch.equal, expected, (x.grad, layer.weight.grad)))
    with testing.slowdown(2.0), torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    with testing.slowdown(2.0):  # a vector for a weight
        torch.nn.functional.linear(x, layer.weight[0]).sum().backward()
        torch.nn.functional.linear(x[0, 0], layer.weight[0]).backward()
        layer(x[:0]).sum().backward()


def test_repetition_passes_through_torch_compile() -> None:
    layer = torch.nn.Linear(16, 16)
    q = torch.randn(1, 8, 2, 8)

    def block(x: torch.Tensor) -> torch.Tensor:
        return layer(ringattn.ring_attention(x, x, x).flatten(2))

    compiled = torch.compile(block, fullgraph=True, backend="eager")
    with torch.no_grad(), testing.slowdown(2.0):
        assert torch.equal(compiled(q), block(q))


def test_a_schedule_changes_the_speed_from_request_to_request() -> None:
    attention_ms()
    alone = attention_ms()
    for wrong in ([2.0], {"a": 2.0}, {1: 0.5}):
        with pytest.raises(ValueError, match="must be"), testing.slowdown_schedule(wrong):
            pass
    with testing.slowdown_schedule({2: 5.0, 4: 2.0}) as at_request:
        assert [at_request(request) for request in range(6)] == [1, 1, 5, 5, 2, 2]
        at_request(0)
        first = attention_ms()
        at_request(3)
        slow, slow_linear = attention_ms(), linear_flops()
        at_request(4)
        recovered = attention_ms()
    after, linear_after = attention_ms(), linear_flops()
    assert first / alone < 1.8 and after / alone < 1.8
    assert 3 < slow / alone < 8 and slow_linear == 5 * linear_after > 0
    assert 1.4 < recovered / alone < 3.5


@pytest.mark.parametrize("factor", [0.5, 0.0, float("nan"), float("inf")])
def test_a_schedule_refuses_factors_below_one(factor: float) -> None:
    with (
        pytest.raises(ValueError, match="factor must be a finite number of at least 1, got"),
        testing.slowdown_schedule({0: 2.0, 3: factor}),
    ):
        raise AssertionError("the context must not be entered")


def ring_under_drift(slow_rank: int) -> list[float]:
    """What attention costs this rank at full speed, slow, and at full speed again."""
    factors = {1: 6.0, 2: 1.0} if this().rank == slow_rank else {}
    times = []
    with testing.slowdown_schedule(factors) as at_request:
        for request in range(3):
            at_request(request)
            times.append(attention_ms())
    return times


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_rank_of_a_ring_drifts(rank_pool: Callable[..., RankPool], world_size: int) -> None:
    slow_rank = world_size - 1
    times = rank_pool(world_size).run(ring_under_drift, slow_rank)
    for rank, (before, slow, after) in enumerate(times):
        if rank == slow_rank:
            assert slow > 3 * before and slow > 3 * after
        else:
            assert slow < 2 * before and slow < 2 * after


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(
    ("context", "message"),
    [
        (testing.green_context, "green_context must run on a CUDA device, got none"),
        (testing.sm_cap, r"sm_cap must run on a CUDA device .* capability 9\.0, got none"),
    ],
)
def test_fewer_multiprocessors_need_a_device(
    context: Callable[[int], AbstractContextManager[None]], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message), context(8):
        raise AssertionError("the context must not be entered")


def block_ms() -> float:
    """The least of many: other processes may use the GPU meanwhile."""
    q = torch.randn(1, 4096, 16, 128, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(200):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        ringattn.block_attention(q, q, q)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


@pytest.mark.cuda
def test_a_green_context_slows_attention_and_ends() -> None:
    block_ms()
    alone = block_ms()
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    with testing.green_context(num_sms // 4):
        assert block_ms() > 2 * alone
    assert block_ms() < 1.5 * alone
    with (
        pytest.raises(ValueError, match=f"num_sms must lie in \\[1, {num_sms}\\], got 0"),
        testing.green_context(0),
    ):
        raise AssertionError("the context must not be entered")


@pytest.mark.cuda
@pytest.mark.hopper
def test_a_cap_slows_attention_to_the_same_bits_and_ends(
    set_variable: Callable[[str, str], None],
) -> None:
    set_variable("RINGATTN_KERNEL_FAMILY", "sm90")
    q = torch.randn(1, 1000, 8, 128, device="cuda", dtype=torch.bfloat16)
    expected = ringattn.block_attention(q, q, q, diagonal=0)
    block_ms()
    alone = block_ms()
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    with testing.sm_cap(num_sms // 4):
        assert 3 * alone < block_ms() < 6 * alone
        with testing.sm_cap(num_sms // 2):
            assert 1.5 * alone < block_ms() < 3 * alone
        for got, wanted in zip(
            ringattn.block_attention(q, q, q, diagonal=0), expected, strict=True
        ):
            assert got.equal(wanted)
    assert block_ms() < 1.5 * alone
    with (
        pytest.raises(ValueError, match=f"num_sms must lie in \\[1, {num_sms}\\], got 0"),
        testing.sm_cap(0),
    ):
        raise AssertionError("the context must not be entered")


def enter_green_context() -> None:
    with testing.green_context(8):
        raise AssertionError("the context must not be entered")


@pytest.mark.multi_gpu(size=2)
def test_green_contexts_refuse_a_process_with_a_communicator(
    rank_pool: Callable[..., RankPool],
) -> None:
    for outcome in rank_pool(2, "cuda").outcomes(enter_green_context):
        assert outcome.error == "ValueError"
        assert "without communicators, got one of 2 ranks" in outcome.message


@pytest.mark.cuda
def test_mps_gives_a_process_its_share_of_a_device() -> None:
    script = (
        "import torch; print(torch.cuda.get_device_properties(0).multi_processor_count);"
        "print(torch.ones(1000, device='cuda').sum().item())"
    )

    def sms(percentage: float) -> int:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **mps.environment(percentage)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        count, total = done.stdout.split()
        assert float(total) == 1000
        return int(count)

    with MPS() as mps:
        full, half = sms(100), sms(50)
        assert 0.4 * full <= half <= 0.6 * full
    assert not Path(mps.environment(1)["CUDA_MPS_PIPE_DIRECTORY"]).exists()
