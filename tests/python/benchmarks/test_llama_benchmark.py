# SPDX-License-Identifier: Apache-2.0
"""benchmarks/llama.py: the ring beside regular attention, small and on CPU; what it writes is right
and is what its users know."""

import csv
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import decode
import llama
import llama_requests
import llama_timing
import pytest
import roofline
import torch
from _commands import run_command
from _distributed import RankPool, this
from _llama import random_ids, save, tiny_llama
from llama_models import REGULAR, RING, RegularCall, Strategy, config_of, own_step, strategies
from ringattn import Partition
from ringattn.model_call import ModelCall
from ringattn.models import LLaMA
from torch.utils.flop_counter import FlopCounterMode

BENCHMARK = "benchmarks/llama.py"
SMALL = ["--device", "cpu", "--tokens", "2", "--num-iters", "2"]
#: Columns of the summaries that users of earlier benchmarks read.
KNOWN = {
    *("strategy", "prompt_tokens", "ttft_ms", "avg_decode_ms", "total_time_ms", "comm_time_ms"),
    "compute_comm_ratio",
}


def run(*arguments: str | Path, ranks: int = 2) -> list[dict[str, Any]]:
    """Rows of the JSON of --out, once the CSV was found to have as many."""
    done = run_command([BENCHMARK, *SMALL, *arguments], ranks=ranks)
    assert done.returncode == 0, done.stderr
    return rows_of(arguments[arguments.index("--out") + 1])


def rows_of(stem: str | Path) -> list[dict[str, Any]]:
    rows = json.loads(Path(f"{stem}.json").read_text())["rows"]
    with Path(f"{stem}.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    return rows


def test_the_ring_is_measured_beside_regular_attention_and_a_run_goes_on(tmp_path: Path) -> None:
    stem = tmp_path / "llama"
    peak = ["--peak-tflops", "0.5", "--peak-gbps", "10", "--batch-size", "2"]
    rows = run("--num_tokens", "33,64", *peak, "--out", stem)
    assert [(row["strategy"], row["prompt_tokens"], row["ranks"]) for row in rows] == [
        *((REGULAR, 33, 1), (RING, 33, 2), (REGULAR, 64, 1), (RING, 64, 2))
    ]
    assert rows[0].keys() >= KNOWN
    flops = roofline.prefill_flops(decode.SHAPES["tiny"], Partition.even(64, 2), 2)
    for regular, ring in zip(rows[::2], rows[1::2], strict=True):
        assert ring["error"] < 1e-5 and regular["error"] == 0
        assert ring["x_regular"] == pytest.approx(regular["ttft_ms"] / ring["ttft_ms"])
        for row in (regular, ring):
            assert row["status"] == "ok" and row["peak_gib"] is None
            assert 0 < row["ttft_ms"] < row["total_time_ms"] and row["avg_decode_ms"] > 0
            assert row["tokens_per_s"] == pytest.approx(2e3 * row["prompt_tokens"] / row["ttft_ms"])
        assert regular["comm_time_ms"] is None and ring["comm_time_ms"] > 0
    assert rows[3]["mfu"] == pytest.approx(flops / rows[3]["ttft_ms"] * 1e3 / (2 * 0.5e12))
    layers = [row for row in rows_of(f"{stem}_layers") if row["prompt_tokens"] == 64]
    assert [row["layer"] for row in layers] == [0, 1]
    assert rows[3]["comm_time_ms"] == pytest.approx(sum(row["transfer_ms"] for row in layers))
    assert rows[3]["wait_ms"] == pytest.approx(sum(row["wait_ms"] for row in layers))
    computed = sum(row["own_ms"] + row["remote_ms"] for row in layers)
    assert rows[3]["compute_comm_ratio"] == pytest.approx(computed / rows[3]["comm_time_ms"])

    more = run("--num_tokens", "33,48,64", *peak, "--out", stem, "--resume")
    assert [row for row in more if row["prompt_tokens"] != 48] == rows
    assert len(more) == 6 and len(rows_of(f"{stem}_layers")) == 6


def test_another_run_does_not_go_on_with_other_settings(tmp_path: Path) -> None:
    stem = tmp_path / "llama"
    sizes = ["--seq-len", "16", "--mode", "vanilla", "--out", stem]
    sizes += ["--world-size", "1"]
    run(*sizes, ranks=1)
    again = ["--resume", "--dtype", "bfloat16"]
    done = run_command([BENCHMARK, *SMALL, *sizes, *again])
    assert done.returncode == 1
    assert "--resume must go on with the same dtype, bfloat16, got float32" in done.stderr


def logits_of(library: str, folder: Path, partition: str) -> list[torch.Tensor | None]:
    """Of a prompt and of the tokens after it, by regular attention and over the ring."""
    options = Namespace(model=folder, library=library, strategies=[REGULAR, RING], flash=False)
    vars(options).update(dtype="float32", partition=partition, seq_lens=[33], tokens=2)
    config = config_of(options, decode.SHAPES)
    ids = random_ids(2, 33)
    found: list[torch.Tensor | None] = []
    with torch.inference_mode():
        for strategy in strategies(config, this().device, options):
            fits, shown = llama_timing.attempt(
                strategy, lambda s=strategy: llama_timing.generation(s, ids, options)
            )
            assert fits
            found.append(shown and shown.logits)
    return found


@pytest.mark.parametrize("library", ["own", "transformers", "fms"])
def test_models_from_files_go_through_the_ring(
    rank_pool: Callable[[int], RankPool], library: str, tmp_path: Path
) -> None:
    pytest.importorskip({"own": "torch"}.get(library, library))
    model = tiny_llama()
    folder = save(model, tmp_path / "model")
    with torch.no_grad():
        right = model(random_ids(2, 33)).logits[:, -1]
    for partition in ("even", "auto"):
        (regular, ring), (nothing, same) = rank_pool(2).run(logits_of, library, folder, partition)
        assert nothing is None and torch.equal(ring, same)
        torch.testing.assert_close(regular, right, atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(ring, right, atol=1e-3, rtol=1e-4)


def test_it_starts_its_ranks_itself_and_reads_prepared_text(tmp_path: Path) -> None:
    (tmp_path / "val.bin").write_bytes(bytes(range(100)))
    facts = {"dtype": "uint8", "vocabulary": 256, "tokenizer": "bytes"}
    (tmp_path / "meta.json").write_text(json.dumps(facts))
    options = ["--data", tmp_path, "--seq-len", "32", "--mode", "ring", "--world-size", "2"]
    shape = ["--dim", "32", "--n-layers", "1", "--n-heads", "2", "--n-kv-heads", "1", "--bf16"]
    (row,) = run(*options, *shape, "--out", tmp_path / "out", ranks=1)
    assert (row["strategy"], row["ranks"], row["error"]) == (RING, 2, None)
    header = json.loads((tmp_path / "out.json").read_text())["header"]
    assert header["dtype"] == "bfloat16"
    assert header["model"] == "tiny: 1 layers of 32 and 112, 2/1 heads of 16"
    assert header["command"].startswith("torchrun --nproc-per-node 2 llama.py ")


def test_requests_are_served_by_three_partitions(tmp_path: Path) -> None:
    stem = tmp_path / "requests"
    shape = ["--dim", "256", "--n-heads", "8", "--n-kv-heads", "2"]
    speeds = ["--percentages", "100,10", "--partition", "auto"]
    rows = run("--requests", "512,96,512,97", *shape, *speeds, "--out", stem)
    assert [row["partition"] for row in rows] == ["even", "planned", "rebalanced"]
    for row in rows:
        assert row["requests"] == 4 and row["error"] < 1e-4
        assert 0 < row["p50_ttft_ms"] <= row["p95_ttft_ms"]
    assert rows[0]["x_even"] == 1 and rows[0]["replans"] == rows[1]["replans"] == 0
    shares = [[int(share) for share in row["shares"].split(",")] for row in rows]
    assert shares[0] == [50, 50] and shares[1][0] > 60 and shares[2][0] > 50


def test_percentiles_are_of_the_requests_and_lengths_are_drawn_alike() -> None:
    even = llama_requests.Policy("even", lambda _: Partition.even(8, 1), times=[2.0] * 20)
    policy = llama_requests.Policy("planned", even.split, times=[1.0] * 18 + [5.0, 9.0])
    policy.tokens = [48, 16]
    row = policy.row(even)
    assert row["shares"] == "75,25"
    assert (row["p50_ttft_ms"], row["p95_ttft_ms"], row["requests"]) == (1.0, 5.0, 20)
    assert row["x_even"] == 40 / 32 and row["tokens_per_s"] == 2000
    lengths = llama_requests.drawn(50, 4096)
    assert lengths == llama_requests.drawn(50, 4096) and 256 <= min(lengths) < 512
    assert 2048 < max(lengths) <= 4096 and set(llama_requests.drawn(9, 100)) == {100}


# ---- memory -------------------------------------------------------------------------------------


def parse_options(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Namespace:
    monkeypatch.setattr(sys, "argv", ["llama.py", "--device", "cpu", *arguments])
    return llama.parse_options(llama.parser())


def test_running_out_of_memory_is_a_row_and_longer_prompts_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def layers_of(_: Strategy, ids: torch.Tensor) -> list[float]:
        if ids.size(1) == 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [1.0, 2.0, 3.0, 4.0]

    monkeypatch.setattr(llama_timing, "layers_of", layers_of)
    asked = []

    def step(name: str, most: int) -> Any:
        def of_strategy(ids: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
            asked.append((name, ids.size(1)))
            if ids.size(1) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return torch.arange(8.0).view(1, 8), "state"

        return of_strategy

    split = lambda seq_len: Partition.even(seq_len, 1)  # noqa: E731
    made = [Strategy(REGULAR, step(REGULAR, 16), split), Strategy(RING, step(RING, 64), split)]
    options = parse_options(monkeypatch, "--seq-len", "16,32,64", "--out", str(tmp_path / "out"))
    config = decode.SHAPES["tiny"]
    compared = llama.Comparison(made, config, torch.device("cpu"), options)
    for seq_len in options.seq_lens:
        compared.measure(seq_len)
    rows = {(row["strategy"], row["prompt_tokens"]): row for row in rows_of(tmp_path / "out")}
    assert [rows[REGULAR, s]["status"] for s in (16, 32, 64)] == [
        "ok",
        "out of memory",
        "more than 32",
    ]
    assert all(rows[RING, s]["status"] == "ok" for s in (16, 32, 64))
    assert rows[REGULAR, 32]["ttft_ms"] is None and rows[RING, 64]["ttft_ms"] > 0
    assert [rows[RING, s]["comm_time_ms"] for s in (16, 32, 64)] == [3.0, 3.0, None]
    assert (REGULAR, 64) not in asked and asked.count((REGULAR, 32)) == 1

    options.resume = True
    again = llama.Comparison(made, config, torch.device("cpu"), options)
    again.resume()
    assert again.ran_out == {REGULAR: 32} and all(again.has(s) for s in options.seq_lens)


def memory_of_one_rank() -> list[tuple[bool, Any]]:
    """The last rank runs out of memory in the first layer. The others wait for it in the second."""
    model = LLaMA(decode.SHAPES["tiny"]).requires_grad_(False)
    whole = lambda seq_len: Partition.even(seq_len, this().world_size)  # noqa: E731
    strategy = Strategy(RING, own_step(model, 1, whole), whole)
    ids = random_ids(1, 32)

    def out(*_: Any) -> None:
        if this().rank == this().world_size - 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = model.base_model.layers[0].ff_sub_layer.register_forward_pre_hook(out)
    work = lambda: strategy.step(ids, None)[0].shape  # noqa: E731
    found = [llama_timing.attempt(strategy, work)]
    hook.remove()
    return [*found, llama_timing.attempt(strategy, work)]


def test_ranks_give_up_together_where_one_has_no_memory_and_go_on(
    own_pool: Callable[[int], RankPool],
) -> None:
    for first, second in own_pool(2).run(memory_of_one_rank):
        assert first == (False, None) and second == (True, (1, 512))


def test_other_failures_are_no_lack_of_memory() -> None:
    strategy = Strategy(REGULAR, None, lambda seq_len: Partition.even(seq_len, 1))

    def fail(message: str) -> None:
        raise RuntimeError(message)

    for message in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"):
        assert llama_timing.attempt(strategy, lambda m=message: fail(m)) == (False, None)
    with pytest.raises(RuntimeError, match="CUDA error: an illegal memory access"):
        llama_timing.attempt(strategy, lambda: fail("CUDA error: an illegal memory access"))


# ---- what rows are made of ----------------------------------------------------------------------


def test_regular_attention_is_the_rings_on_one_rank() -> None:
    torch.manual_seed(0)
    model = LLaMA(decode.SHAPES["tiny"], group="single").requires_grad_(False)
    whole = lambda seq_len: Partition.even(seq_len, 1)  # noqa: E731
    ids, tokens = random_ids(2, 17), random_ids(2, 1)
    logits = []
    for call in (ModelCall, RegularCall):
        step = own_step(model, 2, whole, call)
        first, state = step(ids, None)
        second, state = step(tokens, state)
        logits.append(torch.stack((first, second, step(tokens, state)[0])))
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[0][0], model(ids)[:, -1])


def test_operations_are_those_that_are_counted() -> None:
    config = decode.SHAPES["tiny"]
    model = LLaMA(config, group="single").requires_grad_(False)
    step = own_step(model, 1, lambda seq_len: Partition.even(seq_len, 1))
    with FlopCounterMode(display=False) as counter:
        step(random_ids(3, 41), None)
    assert roofline.prefill_flops(config, Partition.even(41, 1), 3) == counter.get_total_flops()


def test_kernels_on_tensor_cores_are_known_by_their_names() -> None:
    on_them = (
        *("nvjet_hsh_256x128_64x4_1x2_h_bz_coopa_nnt", "sm90_xmma_gemm_bf16bf16_bf16f32"),
        *("void pytorch_flash::flash_fwd_kernel<...>", "cudnn_generated_fort_native_sdpa_sm90"),
        "void ringattn::sm90::block_attention_kernel<...>",
    )
    others = ("void at::native::elementwise_kernel<...>", "memcpy dtod", "rms_norm_kernel")
    times = [*((name, 2.0) for name in on_them), *((name, 5.0) for name in others)]
    assert llama_timing.share_on_tensor_cores(times) == 10 / 25
    assert llama_timing.share_on_tensor_cores([]) is None


@pytest.mark.parametrize("causal", [True, False])
def test_pairs_of_all_ranks_are_those_of_the_mask(causal: bool) -> None:
    pairs = roofline.num_pairs(Partition.zigzag([5, 0, 8]), causal)
    assert sum(pairs) == (13 * 14 / 2 if causal else 13**2) and pairs[1] == 0


def test_peak_rates_are_the_tables_or_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, half = torch.device("cuda"), torch.bfloat16
    options = Namespace(peak_tflops=None, peak_gbps=None)
    for name, tflops in (("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA L40S", 362.1)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert roofline.peak_rates(cuda, half, options).tflops == tflops
    assert roofline.peak_rates(cuda, torch.float32, options) is None
    assert roofline.peak_rates(torch.device("cpu"), half, options) is None
    given = Namespace(peak_tflops=756.0, peak_gbps=None)
    assert roofline.peak_rates(cuda, half, given) == roofline.PeakRates(756.0, 864.0)


def test_a_shape_of_the_command_line_is_llama_3s_where_nothing_is_said() -> None:
    nothing = dict.fromkeys(("model", "dim", "n_layers", "n_heads", "n_kv_heads"))
    given = SimpleNamespace(**nothing | {"shape": "8b", "dim": 512, "n_heads": 8})
    config = config_of(given, decode.SHAPES)
    assert (config.hidden_dim, config.head_dim, config.kvheads) == (1792, 64, 8)
    assert config_of(SimpleNamespace(**nothing, shape="8b"), decode.SHAPES) == decode.SHAPES["8b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seq-len 0", "--num_tokens: must be an integer from 1 on, got '0'"),
        ("--bf16 --dtype float16", "--dtype must be bfloat16 with --bf16, got float16"),
        ("--resume", "--resume must come with --out STEM, got none"),
        ("--model nowhere", "--model_path: must be a folder with config.json, got nowhere"),
        ("--data nowhere", "--data: must be a folder of scripts/prepare_data.py with meta.json"),
        ("--percentages 50", "--percentages must come with --requests, got no requests"),
        ("--requests draw:0", "--requests: must be an integer from 1 on, got '0'"),
        ("--requests 9 --library fms", "--requests must go through --library own, got fms"),
        ("--requests 9 --percentages 101", "--percentages must be from 1 to 100, got 101"),
        ("--requests 9 --partition even", "--requests must have --partition auto, which compares"),
        ("--peak-tflops 0", "--peak-tflops: must be a positive number, got '0'"),
    ],
)
def test_wrong_usage_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(monkeypatch, *arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_flags_of_earlier_benchmarks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "--num_tokens 9,8 --num_decode_tokens 3 --disable_flash --batch_size 2 --nproc 4 --bf16"
    options = parse_options(monkeypatch, *given.split(), "--mode", "vanilla")
    assert (options.seq_lens, options.tokens, options.batch) == ([8, 9], 3, 2)
    assert (options.flash, options.world_size, options.dtype) == (False, 4, "bfloat16")
    assert options.strategies == [REGULAR] and options.partition == "even"


def test_ranks_of_torchrun_are_not_started_again(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = parse_options(monkeypatch, "--world-size", "3")
    with pytest.raises(SystemExit):
        llama.launching.under_launcher(llama.parser(), options)
    message = "--world-size must be that of torchrun, 2, got 3"
    assert message in capsys.readouterr().err.splitlines()[-1]
