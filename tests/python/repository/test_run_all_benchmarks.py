# SPDX-License-Identifier: Apache-2.0
"""scripts/run_all_benchmarks.sh writes one summary and a log, and goes on where it stood."""

import shutil
import subprocess
from pathlib import Path

import pytest
from _scripts import commands_on, copy_of_scripts

BENCHMARK = 'echo "measured"; echo "bar" >&2; {}'


def run(
    folder: Path, command: str = "", benchmark: str = "exit 0", **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The script with stubs in place of all that it starts; what those were called with."""
    shutil.rmtree(folder / "bin", ignore_errors=True)
    (folder / "calls").unlink(missing_ok=True)
    stubs = {"srun": BENCHMARK.format(benchmark), "scontrol": "echo host1; echo host2"}
    path = commands_on(folder / "bin", python3=BENCHMARK.format(benchmark), **stubs)
    for name in ("date", "rm", "sed", "tee"):
        (folder / "bin" / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        ["bash", folder / "scripts/run_all_benchmarks.sh", *command.split()],
        env={"PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_of_scripts(tmp_path / "checkout")


def test_all_lengths_are_one_call_with_a_log_beside_the_summary(folder: Path) -> None:
    done, calls = run(folder, "--nproc 4 ring --bf16")
    assert (done.returncode, done.stderr) == (0, "bar\n")
    (stem,) = [path.with_suffix("") for path in (folder / "build/benchmarks").glob("*.log")]
    assert stem.name.startswith("summary_2")
    lengths = ",".join(str(2**power) for power in range(8, 18))
    given = f"--world-size 4 --mode ring --seq-len {lengths}"
    assert calls == [
        f"python3 benchmarks/llama.py {given} --out {stem.relative_to(folder)} --resume --bf16"
    ]
    assert sorted(Path(f"{stem}.log").read_text().split()) == ["bar", "measured"]
    assert done.stdout.splitlines()[-1] == f"wrote {stem.relative_to(folder)}.csv"


def test_a_run_that_was_ended_goes_on_and_a_finished_one_does_not(folder: Path) -> None:
    done, (first,) = run(folder, benchmark="exit 7")
    assert done.returncode == 7 and "not complete; the same command goes on" in done.stderr
    stem = first.split("--out ")[1].split()[0]
    (folder / "build/benchmarks/unfinished_both_all").write_text("summary_20000101_000000\n")
    _, (again,) = run(folder)
    assert again == first.replace(Path(stem).name, "summary_20000101_000000")
    _, (other,) = run(folder)
    assert "summary_20000101_000000" not in other
    (folder / "build/benchmarks/unfinished_both_all").write_text("summary_20000101_000000\n")
    _, (new,) = run(folder, "--new")
    assert "summary_20000101_000000" not in new


def test_hosts_of_a_job_are_one_ring(folder: Path) -> None:
    job = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "host[1-2]", "SLURM_JOB_ID": "9"}
    done, calls = run(folder, SLURM_GPUS_ON_NODE="8", **job)
    assert done.returncode == 0, done.stderr
    assert calls[0] == "scontrol show hostnames host[1-2]"
    launch = "srun --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d"
    meeting = "--rdzv-endpoint host1:29500 --rdzv-id 9 benchmarks/llama.py --mode both"
    assert calls[1].startswith(f"{launch} {meeting}")
    done, calls = run(folder, **job)
    assert done.returncode == 1 and "a job on several hosts must have GPUs" in done.stderr
    batch = (folder / "scripts/run_all_benchmarks.sbatch").read_text()
    assert 'scripts/run_all_benchmarks.sh" "$@"' in batch
