# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, small and on CPU, and what they write can be read and is right."""

import csv
import ctypes
import importlib
import json
import math
import re
import shutil
import sys
from pathlib import Path

import kernel_variants
import pytest
import torch
from _commands import run_command
from isolated_rank import MAX_RANKS, RankCall
from lib.problem import Problem, relative_error
from lib.report import PERCENTAGE_VARIABLES, RUN_VARIABLES, SEQ_LEN_VARIABLES, command

ROOT = Path(__file__).resolve().parents[3]


def run(*command: str, ranks: int = 1) -> None:
    done = run_command(command, ranks=ranks)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


def read(stem: Path) -> list[dict[str, str]]:
    """Rows of the CSV, once Markdown and JSON were found to have as many."""
    with Path(f"{stem}.csv").open() as file:
        rows = list(csv.DictReader(file))
    content = json.loads(Path(f"{stem}.json").read_text())
    assert len(content["rows"]) == len(rows) > 0
    assert {"command", "commit", "torch", "device"} <= content["header"].keys()
    table = [line for line in Path(f"{stem}.md").read_text().splitlines() if line.startswith("|")]
    assert len(table) == len(rows) + 2
    return rows


SMALL = ["--device", "cpu", "--rounds", "2", "--warmup", "1"]
HEADS = ["--heads", "4", "--kv-heads", "2", "--dtype", "float32"]


def test_attention_benchmark_times_ours_beside_torch_and_all_are_exact(tmp_path: Path) -> None:
    stem = tmp_path / "attention"
    sizes = ["--seq-lens", "96", "--head-dims", "16,32"]
    run("benchmarks/attention.py", *SMALL, *HEADS, *sizes, "--out", str(stem))
    rows = read(stem)
    assert {row["what"] for row in rows} == {"ringattn", "ringattn fold", "torch CPU"}
    assert len(rows) == 2 * 2 * 3  # head dims, masks, contestants
    assert all(float(row["ms"]) > 0 and float(row["max error"]) < 2e-6 for row in rows)


def test_ring_benchmark_compares_rings_with_one_device(tmp_path: Path) -> None:
    stem = tmp_path / "ring"
    sizes = ["--seq-lens", "128", "--head-dim", "16"]
    run("benchmarks/ring.py", *SMALL, *HEADS, *sizes, "--out", str(stem), ranks=2)
    rows = {row["what"]: row for row in read(stem)}
    rings = {"ringattn zigzag auto", "ringattn contiguous auto", "zigzag on torch CPU"}
    assert rings < rows.keys()
    assert {"one device: ringattn", "one device: torch CPU"} < rows.keys()
    assert all(float(row["max error"]) < 2e-6 for row in rows.values())
    assert all(float(rows[name]["share of ideal"]) > 0 for name in rings)
    assert 0 <= float(rows["ringattn zigzag auto"]["wait share"]) <= 1


MASKS = ["--seq-lens", "96", "--head-dim", "16", "--median", "24", "--seeds", "3"]


def test_masks_benchmark_times_every_mask_and_all_are_exact(tmp_path: Path) -> None:
    stem = tmp_path / "masks"
    run("benchmarks/masks.py", *SMALL, *HEADS, *MASKS, "--windows", "8", "--out", str(stem))
    rows = read(stem)
    masks = {(row["window"], row["sinks"], row["softcap"]) for row in rows}
    assert len(masks) == 2 * 4  # packed and window; plain, sinks, softcap, both
    ours = {"ringattn", "ringattn kernel", "ringattn causal", "torch FlexAttention"}
    assert {row["what"] for row in rows} == ours | {"torch CPU"}
    assert all(float(row["of causal"]) > 0 and float(row["max error"]) < 2e-6 for row in rows)


def test_masks_benchmark_compares_partitions_of_packs_and_windows(tmp_path: Path) -> None:
    stem = tmp_path / "masks"
    arguments = [*SMALL, *HEADS, *MASKS, "--windows", "8", "--out", str(stem)]
    run("benchmarks/masks.py", *arguments, ranks=2)
    rows = read(stem)
    packed = {row["what"]: row for row in rows if not row["window"]}
    windows = {row["what"]: row for row in rows if row["window"]}
    assert packed.keys() == {"one device", "packed", "contiguous", "zigzag"}
    assert windows.keys() == packed.keys() - {"packed"}
    assert all(float(row["max error"]) < 2e-6 for row in rows)
    assert float(packed["packed"]["busiest"]) <= float(packed["contiguous"]["busiest"])
    assert float(packed["packed"]["share of ideal"]) > 0
    assert windows["contiguous"]["rows fetched"] == "7"


def test_masks_benchmark_plans_packs_for_unequal_ranks_that_it_starts(tmp_path: Path) -> None:
    stem = tmp_path / "masks"
    sizes = ["--seq-lens", "512", "--head-dim", "16", "--median", "64", "--seeds", "3"]
    speeds = ["--percentages", "100,10"]
    run("benchmarks/masks.py", *SMALL, *HEADS, *sizes, *speeds, "--out", str(stem))
    rows = {row["what"]: row for row in read(stem)}
    fast, slow, even, planned = (
        rows.pop(name) for name in ("rank 0 alone", "rank 1 alone", "even", "planned")
    )
    assert not rows
    assert all(float(row["max error"]) < 2e-6 for row in (fast, slow, even, planned))
    assert float(slow["ms"]) > 2 * float(fast["ms"])
    ideal = 1 / (1 / float(fast["ms"]) + 1 / float(slow["ms"]))
    for row in (even, planned):
        assert float(row["share of ideal"]) == pytest.approx(ideal / float(row["ms"]), rel=1e-3)
    assert float(even["busiest"]) < 1.1 and float(planned["busiest"]) > 1.3


def test_transport_benchmark_receives_what_was_sent(tmp_path: Path) -> None:
    stem = tmp_path / "transport"
    sizes = ["--kilobytes", "64,256"]
    run("benchmarks/transport.py", *SMALL, *sizes, "--out", str(stem), ranks=2)
    rows = read(stem)
    assert len(rows) == 2 * 3
    assert all(row["wrong"] == "0" and float(row["GB/s"]) > 0 for row in rows)


def test_planning_benchmark_plans_with_links_and_tiles_in_both_layouts(tmp_path: Path) -> None:
    stem = tmp_path / "planning"
    run("benchmarks/planning.py", "--seq-len", "4096", "--rounds", "2", "--out", str(stem))
    rows = read(stem)
    assert len({(row["layout"], row["links"], row["tiles"]) for row in rows}) == 8
    assert all(0 < float(row["ms"]) <= float(row["slowest"]) for row in rows)


def test_packed_documents_are_balanced_beside_other_ways(tmp_path: Path) -> None:
    stem = tmp_path / "packing"
    run("benchmarks/packing.py", "--seq-len", "32768", "--seeds", "2", "--out", str(stem))
    rows = read(stem)
    assert len(rows) == 4 * 3 * 4 + 2 * 3
    packed = [row for row in rows if row["what"] == "packed"]
    assert all(float(row["busiest"]) <= 1.02 and float(row["ms"]) > 0 for row in packed)
    others = [row for row in rows if row["what"] != "packed"]
    assert max(float(row["busiest"]) for row in others) > 2
    assert all(0 <= float(row["rows fetched / S"]) < 1 for row in rows)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("--rounds 2 --out /a/folder/ring --warmup 1", "--rounds 2 --out ring --warmup 1"),
        ("--out=/a/folder/ring --rounds 2", "--out=ring --rounds 2"),
        ("--out ring --lut a/table.csv", "--out ring --lut a/table.csv"),
    ],
)
def test_a_command_names_what_it_writes_without_the_folder(
    monkeypatch: pytest.MonkeyPatch, given: str, written: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks/ring.py", *given.split()])
    assert command().endswith(f" ring.py {written}")
    assert command(given.split()) == command()


def test_a_command_names_what_changes_a_run_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that looks at another variable must have it in its commands too."""
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".cpp", ".cu", ".h"}]
    looked_at = {
        name for path in sources for name in re.findall(r'"(RINGATTN_[A-Z_]+)"', path.read_text())
    }
    lines_only = {"RINGATTN_LOG", "RINGATTN_WAIT_REPORT_S"}  # on stderr, beside the run
    assert looked_at | {"NCCL_HOSTID"} == set(RUN_VARIABLES) | lines_only
    for name in (*RUN_VARIABLES, *lines_only, "RINGATTN_CUDA", "RINGATTN_COMMIT"):
        monkeypatch.setenv(name, "0")
    for name in (*SEQ_LEN_VARIABLES, *PERCENTAGE_VARIABLES, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["benchmarks/ring.py"])
    assert command() == " ".join(f"{name}=0" for name in RUN_VARIABLES) + " python ring.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("attention.py --masks foo", "--masks: must be of causal, dense, got 'foo'"),
        ("attention.py --rounds 0", "--rounds: must be an integer from 1 on, got '0'"),
        ("attention.py --warmup -1", "--warmup: must be an integer from 0 on, got '-1'"),
        ("attention.py --seq-lens 0", "--seq-lens: must be an integer from 1 on, got '0'"),
        ("attention.py --seq-lens 64,x", "--seq-lens: must be an integer from 1 on, got 'x'"),
        ("attention.py --batches 0", "--batches: must be an integer from 1 on, got '0'"),
        ("attention.py --kv-heads 0", "--kv-heads: must be an integer from 1 on, got '0'"),
        ("attention.py --heads 5 --kv-heads 2", "--heads must be a multiple of --kv-heads, 2, got"),
        ("attention.py --head-dims 64,20", "--head-dims must be multiples of 8 from 8 to 256, got"),
        ("attention.py --head-dims 264", "--head-dims must be multiples of 8 from 8 to 256, got"),
        ("attention_shapes.py --device cpu", "shapes must be measured on a CUDA device, got cpu"),
        ("decode.py --shapes foo", "--shapes: must be of 8b, 1b, tiny, demo, got 'foo'"),
        ("decode.py --contexts 0", "--contexts: must be an integer from 1 on, got '0'"),
        ("decode.py --batch 0", "--batch: must be an integer from 1 on, got '0'"),
        ("decode.py --bandwidth 0", "--bandwidth: must be a positive number, got '0'"),
        ("decode.py --bandwidth fast", "--bandwidth: must be a positive number, got 'fast'"),
        ("findings.py nowhere", "STEM.json must be a file that can be read, got nowhere: No such"),
        ("findings.py README.md", "STEM.json must be a sweep of benchmarks/heterogeneous.py, got"),
        (
            "findings.py python/ringattn/models/pydoc_llama/config.json",
            "STEM.json must be a sweep of benchmarks/heterogeneous.py, got python/ringattn/",
        ),
        ("masks.py --windows 0", "--windows: must be an integer from 1 on, got '0'"),
        ("masks.py --percentages 101", "--percentages must be at most 100, got 101"),
        ("ring.py --layouts foo", "--layouts: must be of zigzag, contiguous, got 'foo'"),
        ("ring.py", "ranks must be started by torchrun, got a process without it"),
        ("transport.py", "ranks must be started by torchrun, got a process without it"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: str, message: str) -> None:
    script, *options = arguments.split()
    done = run_command([f"benchmarks/{script}", *options], timeout=600)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("script", ["attention", "decode"])
def test_a_device_that_is_not_there_is_wrong_usage(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--device", "cuda"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main()
    assert ended.value.code == 2
    message = "--device must be cpu without a CUDA device, got cuda"
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("script", ["attention", "decode"])
def test_float64_is_wrong_usage_on_cuda(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", [script, "--device", "cuda", "--dtype", "float64"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main()
    assert ended.value.code == 2
    assert "--dtype must not be float64 on CUDA" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("script", ["transport", "ring"])
def test_transports_that_a_device_does_not_have_are_refused(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--transports", "process_group,nccl"]
    monkeypatch.setattr(sys, "argv", [script, *options])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main()
    assert ended.value.code == 2
    message = "--transports must be of auto, process_group on CPU, got 'nccl'"
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_problem_sees_a_wrong_row_and_a_nan() -> None:
    device = torch.device("cpu")
    problem = Problem.random(32, 4, 2, 8, dtype=torch.float64, device=device, causal=True)
    right = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in problem.tensors),
        is_causal=True,
        enable_gqa=True,
    ).transpose(1, 2)
    positions = torch.arange(32)
    assert problem.max_error(right, positions) < 1e-12
    wrong = right.clone()
    wrong[0, 5, 2, 3] += 0.5
    assert problem.max_error(wrong, positions) == pytest.approx(0.5)
    wrong[0, 7, 0, 0] = float("nan")
    assert problem.max_error(wrong, positions) != problem.max_error(wrong, positions)
    assert problem.max_error(right[:, 8:], positions[8:]) < 1e-12


def test_a_relative_error_is_over_the_largest_expected_value() -> None:
    expected = torch.tensor([1.0, -4.0], dtype=torch.bfloat16)
    found = torch.tensor([1.25, -4.0])
    assert relative_error(expected, expected) == 0.0
    assert relative_error(found, expected) == 0.25 / 4
    assert math.isnan(relative_error(found * torch.nan, expected))


@pytest.mark.parametrize(
    "text",
    [
        *("", "4096", "0:causal", "x:causal", "4096:casual", "4096:dense:folded"),
        *("4096:causal:ring", "4096:causal:ring1", "4096:causal:ring17", "3:causal:ring4"),
        *("4096:causal:fold:ring4", "4096:causal:ring4:there", "4096:causal:backward:ring4"),
    ],
)
def test_wrong_cases_of_kernel_variants_are_named(text: str) -> None:
    with pytest.raises(kernel_variants.argparse.ArgumentTypeError, match="got " + text):
        kernel_variants.cases(text)


def test_cases_of_kernel_variants() -> None:
    Case = kernel_variants.Case
    assert kernel_variants.cases(
        "1:causal,512:dense:fold,4:causal:ring4,8192:dense:ring16-there,9:dense:backward"
        ",2:causal:backward-deterministic"
    ) == [
        Case("1:causal", 1, causal=True),
        Case("512:dense:fold", 512, causal=False, fold=True),
        Case("4:causal:ring4", 4, causal=True, ranks=4),
        Case("8192:dense:ring16-there", 8192, causal=False, ranks=16, there=True),
        Case("9:dense:backward", 9, causal=False, backward=True),
        Case("2:causal:backward-deterministic", 2, True, backward=True, deterministic=True),
    ]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_kernel_variant_is_compiled_by_itself(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(kernel_variants, "FOLDER", tmp_path)
    path = kernel_variants.build("one", ROOT, 40, [])
    assert path == tmp_path / "one_64.so"
    kernel = ctypes.CDLL(str(path))
    attend = kernel.attend
    attend.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int] * 7 + [ctypes.c_float, ctypes.c_void_p]
    backward = kernel.attend_backward
    of_backward = [ctypes.c_void_p] * 10 + [ctypes.c_int] * 6
    backward.argtypes = [*of_backward, ctypes.c_float, ctypes.c_void_p]
    invalid_value = 1
    for head_dim in (0, 20, 72):  # none, not of whole pieces, larger than what it was built for
        shape = (1, 64, 2, 2, head_dim)
        assert attend(*[None] * 6, *shape, 0, 0, 1.0, None) == invalid_value
        assert backward(*[None] * 10, *shape, 0, 1.0, None) == invalid_value
    assert kernel.rank_call_bytes() == ctypes.sizeof(RankCall)
    for ranks in (1, MAX_RANKS + 1):
        call = RankCall(world_size=ranks, head_dim=64)
        assert kernel.attend_as_rank(ctypes.byref(call), None) == invalid_value


@pytest.mark.cuda
@pytest.mark.hopper
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_kernel_variants_are_timed_side_by_side(tmp_path: Path) -> None:
    tool = "benchmarks/kernel_variants.py"
    for name in ("test-one", "test-other"):
        run(tool, "build", name, "--head-dim", "64")
    stem = tmp_path / "variants"
    options = ("--head-dim", "64", "--rounds", "3", "--out", str(stem))
    run(tool, "time", "test-one,test-other,cudnn", "--cases", "300:causal,300:dense:fold", *options)
    rows = read(stem)
    assert [row["what"] for row in rows] == ["test-one", "test-other", "cudnn"] * 2
    assert all(float(row["max error"]) < 0.02 for row in rows)
    backwards = "300:causal:backward,1000:dense:backward-deterministic"
    run(tool, "time", "test-one,test-other", "--cases", backwards, *options)
    rows = read(stem)
    assert [row["what"] for row in rows] == ["test-one", "test-other"] * 2
    assert all(float(row["max error"]) < 1e-4 for row in rows)
    rings = "4097:causal:ring3,1024:dense:ring4,1000:causal:ring2-there"
    run(tool, "time", "test-one,test-other", "--cases", rings, *options)
    rows = read(stem)
    assert [row["what"] for row in rows] == ["test-one", "test-other"] * (3 + 4 + 2)
    assert [row["case"] for row in rows[-2:]] == ["1000:causal:ring2-there rank 1"] * 2
    assert all(float(row["max error"]) < 0.02 for row in rows)


@pytest.mark.parametrize("ranks", [1, 2])
def test_families_give_the_logits_of_the_unmodified_models(ranks: int, tmp_path: Path) -> None:
    stem = tmp_path / "families"
    sizes = ["--families", "gemma2,gpt_oss", "--seq-len", "40", "--documents", "3", "--tokens", "9"]
    run("benchmarks/families.py", "--device", "cpu", *sizes, "--out", str(stem), ranks=ranks)
    rows = read(stem)
    assert [row["family"] for row in rows] == ["gemma2", "gpt_oss"]
    for row in rows:
        bound = 2e-5 * float(row["largest logit"])
        assert all(float(row[name]) < bound for name in ("forward", "packed", "generate"))
        assert row["tokens equal"] == "18 of 18"


def test_models_of_other_libraries_are_timed_beside_themselves(tmp_path: Path) -> None:
    stem = tmp_path / "drop_in"
    sizes = ["--shape", "tiny", "--dtype", "float32", "--seq-lens", "33,64", "--tokens", "2"]
    rounds = ["--libraries", "own,transformers,fms", "--rounds", "2", "--warmup", "1"]
    command = ["benchmarks/drop_in.py", "--device", "cpu", *sizes, *rounds, "--out", stem]
    done = run_command(command, ranks=2)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path(f"{stem}.json").read_text())["rows"]
    ways = [(row["library"], row["way"]) for row in rows if row["S"] == 33]
    assert ways == [
        ("own", "1 rank"),
        ("own", "2 ranks"),
        *(("transformers", way) for way in ("plain", "1 rank", "2 ranks")),
        *(("fms", way) for way in ("plain", "1 rank", "2 ranks")),
    ]
    assert len(rows) == 2 * len(ways)
    plain = next(row for row in rows if row["S"] == 64 and row["way"] == "plain")
    for row in rows:
        assert row["error"] < 1e-5 and row["token ms"] > 0
        if row["S"] == 64 and row["library"] != "fms":
            assert row["x plain"] == plain["ms"] / row["ms"]
