# SPDX-License-Identifier: Apache-2.0
"""The command line, as a user runs it."""

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _commands import command_line
from _llama import random_ids, save, tiny_llama
from ringattn import RankProfile, _build_info, _library, save_profiles
from ringattn.__main__ import main, parser
from ringattn.cli import auto
from ringattn.generation import generate
from ringattn.models import load_model

PROMPT_LEN = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without tokenizer, and `prompt.txt` with token ids."""
    folder = save(tiny_llama(), tmp_path_factory.mktemp("llama"))
    (folder / "prompt.txt").write_text(" ".join(map(str, random_ids(PROMPT_LEN).tolist())) + "\n")
    return folder


def torchrun(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a Python command line on two ranks, as a user does, interpreters included."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return subprocess.run(
        [*launcher, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


def greedy(folder: Path, new_tokens: int) -> list[int]:
    ids = generate(load_model(folder), random_ids(1, PROMPT_LEN), max_new_tokens=new_tokens)
    return ids[0, PROMPT_LEN:].tolist()


def test_two_ranks_write_what_one_generates(folder: Path, tmp_path: Path) -> None:
    done = torchrun(
        *("-m", "ringattn", "generate", "--model", folder, "--prompt-file", folder / "prompt.txt"),
        *("--max-new-tokens", "9", "--partition", "27,13", "--compare"),
        *("--json", tmp_path / "run.json"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["prompt_ids"] == random_ids(PROMPT_LEN).tolist()
    assert result["generated_ids"] == greedy(folder, 9)
    assert result["compare"]["same"] is True
    assert result["compare"]["generated_ids"] == result["generated_ids"]
    assert result["partition"] == {"layout": "zigzag", "lengths": [27, 13], "order": [0, 1]}
    assert result["time_to_first_token_ms"] > 0
    assert len(result["token_ms"]) == 8 and min(result["token_ms"]) > 0
    median = statistics.median(result["token_ms"])
    assert result["time_per_token_ms"] == median
    assert f"time per token: {median:.2f} ms (median of 8)" in done.stdout
    assert result["versions"]["torch"] == torch.__version__
    assert [of_rank["tokens"] for of_rank in result["ranks"]] == [27, 13]
    assert result["ranks"][1]["segments"] == [[13, 19], [19, 26]]
    for rank, of_rank in enumerate(result["ranks"]):
        check_steps(rank, of_rank)
    # One rank speaks.
    assert done.stdout.count("time to first token: ") == 1
    assert "one rank alone: the same 9 tokens" in done.stdout


def check_steps(rank: int, of_rank: dict[str, Any]) -> None:
    own, remote = of_rank["steps"]
    assert (own["source"], own["kind"], own["transfer_ms"]) == (rank, "own", 0)
    assert (remote["source"], remote["kind"]) == (1 - rank, "remote")
    assert own["attention_ms"] > 0 and remote["attention_ms"] > 0
    assert of_rank["ring"]["calls"] == 2  # one per layer
    for name in ("attention_ms", "transfer_ms", "wait_ms"):
        assert of_rank["ring"][name] == pytest.approx(own[name] + remote[name])


def generate_auto(folder: Path, tmp_path: Path, *arguments: str | Path) -> dict[str, Any]:
    done = command_line(
        *("generate", "--model", folder, "--prompt-file", folder / "prompt.txt"),
        *("--max-new-tokens", "9", "--partition", "auto", *arguments, "--compare"),
        *("--json", tmp_path / "run.json"),
        ranks=2,
    )
    assert done.returncode == 0, done.stderr
    assert "planned for " in done.stdout
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["generated_ids"] == greedy(folder, 9) and result["compare"]["same"]
    assert [of_rank["tokens"] for of_rank in result["ranks"]] == result["partition"]["lengths"]
    assert sum(result["partition"]["lengths"]) == PROMPT_LEN
    assert sum(result["plan"]["cache_lengths"]) == PROMPT_LEN + 8
    return result


def test_auto_plans_for_the_profiles_in_a_file(folder: Path, tmp_path: Path) -> None:
    profiles = [
        RankProfile(3e-3, 3e-3, memory_gbps=10.0, max_tokens=100),
        RankProfile(1e-3, 1e-3, memory_gbps=50.0),
    ]
    save_profiles(tmp_path / "profiles.json", profiles)
    result = generate_auto(folder, tmp_path, "--profiles", tmp_path / "profiles.json")
    # Equal shares of time: three of four tokens to attend to, one of six to read again.
    assert result["partition"]["lengths"] == [30, 10]
    assert result["plan"]["cache_lengths"] == [8, 40]
    assert len(result["plan"]["profiles"]) == 2 and len(result["plan"]["speeds"]) == 2
    assert result["plan"]["efficiency"] == pytest.approx(1)


def test_auto_measures_and_follows_from_run_to_run(folder: Path, tmp_path: Path) -> None:
    result = generate_auto(folder, tmp_path, "--warmup", "3", "--layout", "contiguous")
    assert result["partition"]["layout"] == "contiguous"
    assert all(profile["attention_tflops"] > 0 for profile in result["plan"]["profiles"])
    assert result["plan"]["speeds"] != [1, 1]  # something was learnt


@pytest.mark.parametrize(("num_tokens", "measured"), [(40, 256), (2000, 2000)])
def test_auto_measures_with_shards_as_long_as_the_prompts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_tokens: int, measured: int
) -> None:
    asked = []

    def measure(group: Any, **shape: Any) -> list[RankProfile]:
        asked.append(shape["num_tokens"])
        return [RankProfile(1, 1)]

    monkeypatch.setattr(auto, "measure_profiles", measure)
    auto.AutoPartition.measured(load_model(folder), num_tokens, 1, "zigzag", None)
    assert asked == [measured]  # short ones: enough to be measured at all


def test_auto_leaves_the_cache_of_a_windowed_model_in_order(tmp_path: Path) -> None:
    layers = {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2}
    folder = save(tiny_llama(), tmp_path / "windowed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | layers))
    (folder / "prompt.txt").write_text(" ".join(map(str, random_ids(PROMPT_LEN).tolist())))
    save_profiles(tmp_path / "p.json", [RankProfile(3e-3, 3e-3), RankProfile(1e-3, 1e-3)])
    done = command_line(
        *("generate", "--model", folder, "--prompt-file", folder / "prompt.txt"),
        *("--max-new-tokens", "9", "--partition", "auto", "--profiles", tmp_path / "p.json"),
        *("--json", tmp_path / "run.json"),
        ranks=2,
    )
    assert done.returncode == 0, done.stderr
    assert "of ideal\n" in done.stdout
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["generated_ids"] == greedy(folder, 9)
    assert result["plan"]["cache_lengths"] is None


def test_profiles_for_another_number_of_ranks_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profiles(tmp_path / "p.json", [RankProfile(1, 1)] * 2)
    usual = ["generate", "--model", str(folder), "--prompt-file", str(folder / "prompt.txt")]
    assert main([*usual, "--partition", "auto", "--profiles", str(tmp_path / "p.json")]) == 2
    assert "--profiles must hold one for each of the 1 ranks, got 2" in capsys.readouterr().err


def test_one_rank_needs_no_launcher(folder: Path, tmp_path: Path) -> None:
    prompt = (folder / "prompt.txt").read_text()
    done = command_line(
        *("generate", "--model", folder, "--prompt", prompt, "--max-new-tokens", "4"),
        *("--layout", "contiguous", "--warmup", "1", "--json", tmp_path / "run.json"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["generated_ids"] == greedy(folder, 4)
    assert result["compare"] is None
    assert " ".join(map(str, result["generated_ids"])) in done.stdout.splitlines()


def test_draws_follow_the_seed_on_any_number_of_ranks(folder: Path) -> None:
    done = command_line(
        *("generate", "--model", folder, "--prompt-file", folder / "prompt.txt"),
        *("--max-new-tokens", "12", "--temperature", "1.5", "--seed", "5"),
        ranks=2,
    )
    prompt = random_ids(1, PROMPT_LEN)
    drawn = generate(load_model(folder), prompt, max_new_tokens=12, temperature=1.5, seed=5)
    assert " ".join(map(str, drawn[0, PROMPT_LEN:].tolist())) in done.stdout.splitlines()
    assert drawn[0, PROMPT_LEN:].tolist() != greedy(folder, 12)


def test_the_group_ends_with_the_command(folder: Path) -> None:
    """A group that outlives its destruction has threads that may crash as Python ends."""
    program = """if True:
        import sys, time
        import torch.distributed as dist
        from pathlib import Path
        from ringattn.__main__ import main
        def threads():
            names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
            return sum("gloo" in name for name in names)
        alive = []
        destroy = dist.destroy_process_group
        dist.destroy_process_group = lambda: (alive.append(threads()), destroy())
        assert main(sys.argv[1:]) == 0
        deadline = time.monotonic() + 60  # a thread that was joined may be listed a little longer
        while threads() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert alive[0] > 0 and threads() == 0, (alive, threads())
    """
    arguments = ["generate", "--model", folder, "--prompt", "1 2 3", "--max-new-tokens", "2"]
    done = torchrun("--no-python", sys.executable, "-c", program, *arguments)
    assert done.returncode == 0, done.stderr


def test_a_tokenizer_file_is_used(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    save(tiny_llama(), tmp_path)
    vocabulary = {"zero": 0, "one": 1, "two": 2, "[UNK]": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt, file = "two one zero three", tmp_path / "run.json"
    arguments = ["generate", "--model", str(tmp_path), "--prompt", prompt, "--json", str(file)]
    assert main([*arguments, "--max-new-tokens", "2"]) == 0
    assert json.loads(file.read_text())["prompt_ids"] == [2, 1, 0, 3]


def test_without_a_model_that_of_the_package_writes_bytes(tmp_path: Path) -> None:
    prompt, file = "def f(x):\n    retur", tmp_path / "run.json"
    arguments = ["generate", "--prompt", prompt, "--max-new-tokens", "5", "--json", str(file)]
    assert main(arguments) == 0
    result = json.loads(file.read_text())
    assert result["prompt_ids"] == list(prompt.encode())
    assert result["text"].startswith("n ")


def test_a_prompt_file_of_any_bytes_is_read_as_it_is(tmp_path: Path) -> None:
    prompt, file = b"def f():\r\n    return '\xe2\x82", tmp_path / "run.json"  # half a euro sign
    (tmp_path / "prompt").write_bytes(prompt)
    arguments = ["generate", "--prompt-file", str(tmp_path / "prompt"), "--json", str(file)]
    assert main([*arguments, "--max-new-tokens", "1"]) == 0
    assert json.loads(file.read_text())["prompt_ids"] == list(prompt)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--partition", "1,x"],
            "--partition must be even, auto or lengths such as 3000,1096, got '1,x'",
        ),
        (["--profiles", "p.json"], "--profiles must go with --partition auto, got even"),
        (["--partition", "auto", "--profiles", "nowhere"], "No such file or directory: 'nowhere'"),
        (["--partition", "20,20"], "--partition must have 1 lengths, got 2"),
        (["--partition", "41"], "--partition must add up to the prompt's 40 tokens, got 41"),
        (["--max-new-tokens", "89"], "at most the 128 tokens the model was trained for, got 129"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--top-p", "3"], "top_p must lie in (0, 1], got 3.0"),
        (["--dtype", "float16", "--seed", "-1", "--temperature", "-1"], "temperature must be 0"),
        (["--warmup", "-1"], "--warmup must not be negative, got -1"),
        (["--json", "nowhere/run.json"], "--json must name a file in a folder that can be written"),
        (["--json", "."], "--json must name a file in a folder that can be written to, got ."),
        (
            ["--model", "nowhere"],
            "path must be a folder with config.json and *.safetensors, got 'nowhere'",
        ),
        (
            ["--model", "meta-llama/none"],
            ": pass huggingface_hub.snapshot_download('meta-llama/none')",
        ),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["generate", "--model", str(folder), "--prompt-file", str(folder / "prompt.txt")]
    assert main([*usual, *arguments]) == 2
    out, error = capsys.readouterr()
    assert error.startswith("ringattn: ") and error.count("\n") == 1 and message in error
    assert out == ""


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json must be a tokenizer's file, got: "),
        ("config.json", '{"hidden_size": "big"}', "hidden_size must be an integer in config.json"),
        ("model.safetensors.index.json", '{"weight_map": []}', "weight_map must name the file of"),
    ],
)
def test_a_broken_folder_is_one_sentence(
    file: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tiny_llama(), tmp_path)
    if file == "config.json":
        content = json.dumps(json.loads((tmp_path / file).read_text()) | json.loads(content))
    (tmp_path / file).write_text(content)
    capsys.readouterr()
    assert main(["generate", "--model", str(tmp_path), "--prompt", "1 2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ringattn: ") and error.count("\n") == 1 and message in error


def test_words_for_a_model_without_tokenizer_are_refused(folder: Path) -> None:
    done = command_line("generate", "--model", folder, "--prompt", "1 2 three")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "ringattn: prompt must be token ids because the model has no tokenizer.json, got 'three'\n"
    )


def test_ids_that_no_tensor_holds_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(f"1 {2**63} 2")
    assert main(["generate", "--model", str(folder), "--prompt-file", str(file)]) == 2
    assert capsys.readouterr().err == (
        "ringattn: token id of the prompt must fit into 64 bits, got 9223372036854775808\n"
    )


def test_a_comparison_that_fails_is_exit_code_1(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = load_model(folder)
    other.base_model.embedding.weight.neg_()
    monkeypatch.setattr("ringattn.models.LLaMA.alone", lambda self: other)
    usual = ["generate", "--model", str(folder), "--prompt-file", str(folder / "prompt.txt")]
    assert main([*usual, "--max-new-tokens", "9", "--compare"]) == 1
    assert "one rank alone: other tokens, from token " in capsys.readouterr().out


def test_a_lost_peer_is_one_sentence_and_exit_code_3(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: Any, **__: Any) -> None:
        raise dist.DistBackendError("rank 1 closed its connection\nand a stack")

    monkeypatch.setattr("ringattn.cli.generate.load_model", lose)
    usual = ["generate", "--model", str(folder), "--prompt-file", str(folder / "prompt.txt")]
    assert main(usual) == 3
    assert capsys.readouterr().err.splitlines()[-1] == "ringattn: rank 1 closed its connection"


def test_a_closed_pipe_ends_a_command_without_a_traceback() -> None:
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-m", "ringattn", "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What `--help` says of each option, in one line."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    options = capsys.readouterr().out.partition("\noptions:\n")[2]
    said = {}
    for text in re.split(r"\n  (?=--)", options):
        name = re.match(r"--([\w-]+)", text)
        if name:
            said[name[1].replace("-", "_")] = " ".join(text.split())
    return said


@pytest.mark.parametrize(
    ("arguments", "without"),
    [
        # One prompt must be given; flags are off; a sweep needs a folder.
        (["generate", "--prompt", "x"], {"prompt", "prompt_file", "ignore_eos", "compare"}),
        (["profile"], {"out"}),
        (["info"], set()),
    ],
)
def test_help_says_every_default(
    arguments: list[str], without: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = help_of(arguments[0], capsys)
    defaults = vars(parser().parse_args(arguments))
    assert said.keys() == defaults.keys() - {"command"}
    for name, text in said.items():
        shown = re.search(r"\(default: ([^)]+)\)$", text)
        assert (shown is None) == (name in without), text
        if shown and defaults[name] is not None:
            assert shown[1] == str(defaults[name])


def test_cuda_without_kernels_is_wrong_usage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever devices there are: they are not what is missing."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(_library, "DEVICES", ("cpu",))
    monkeypatch.setattr(_build_info, "WITH_CUDA", False)
    monkeypatch.setattr(_build_info, "NO_CUDA_BECAUSE", "no nvcc was found")
    usual = ["generate", "--model", str(folder), "--prompt", "1 2 3", "--device", "cuda"]
    assert main(usual) == 2
    assert capsys.readouterr().err == (
        "ringattn: --device cuda must have a ringattn built with CUDA kernels, got one without "
        "(no nvcc was found)\n"
    )


def test_info_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    assert torch.__version__ in capsys.readouterr().out
