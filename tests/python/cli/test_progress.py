# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a command runs: a header at once, how far it is, tokens as they come."""

import io
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _llama import save, tiny_llama
from ringattn.__main__ import main
from ringattn.cli import generate, progress, run
from ringattn.cli.progress import GenerationProgress, Progress, TextStream, visible
from ringattn.cli.text import Bytes, Numbers
from ringattn.models import load_model

Stderr = Callable[[io.StringIO], io.StringIO]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Stderr:
    """Puts its argument in the place of stderr; in the test, as pytest does so before each test."""

    def put(out: io.StringIO) -> io.StringIO:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(progress, "_SECONDS_OF_A_TERMINAL", 0.001)
        monkeypatch.setattr(progress, "_SECONDS_OF_A_LOG", 0.001)
        monkeypatch.setattr(sys, "stderr", out)
        return out

    return put


def wait_for(text: str, out: io.StringIO) -> None:
    for _ in range(10_000):
        if text in out.getvalue():
            return
        progress.time.sleep(0.001)
    raise AssertionError(f"{text!r} must be printed, got {out.getvalue()!r}")


def test_a_terminal_has_one_line_that_is_erased(stderr: Stderr) -> None:
    terminal = stderr(Terminal())
    with Progress("loading") as loading:
        wait_for("\r\033[Kloading, 0 s", terminal)
        loading.at("3 of 5 layers")
        wait_for("\r\033[Kloading, 3 of 5 layers, 0 s", terminal)
    shown = terminal.getvalue()
    assert shown.endswith("\r\033[K") and "\n" not in shown


def test_a_log_has_lines_without_control_characters(stderr: Stderr) -> None:
    log = stderr(io.StringIO())
    with Progress("loading") as loading:
        loading.at("3 of 5 layers")
        wait_for("loading, 3 of 5 layers, 0 s\n", log)
    assert visible(log.getvalue()) == log.getvalue()


def test_what_is_short_or_quiet_prints_nothing(
    stderr: Stderr, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = stderr(Terminal())
    Progress("loading", quiet=True).close()
    log = stderr(io.StringIO())
    monkeypatch.setattr(progress, "_SECONDS_OF_A_LOG", 100.0)
    Progress("loading").close()
    assert (terminal.getvalue(), log.getvalue()) == ("", "")


@pytest.mark.parametrize("decode", [Bytes().decode, Numbers().decode])
def test_text_comes_token_by_token_and_whole(
    decode: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = list("häß €\n\tend".encode())
    stream, pieces = TextStream(decode), []
    for token in ids:
        stream.add(token)
        pieces.append(capsys.readouterr().out)
    stream.close()
    assert "".join(pieces) == decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert capsys.readouterr().out == "\n"


def test_bytes_that_are_no_text_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    for _ in range(50):
        ids = [draw.randrange(256) for _ in range(20)]
        stream = TextStream(Bytes().decode)
        for token in ids:
            stream.add(token)
        stream.close()
        printed = capsys.readouterr().out
        assert printed == visible(Bytes().decode(ids)) + "\n"


def test_a_terminal_does_not_obey_the_text_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    stream = TextStream(Bytes().decode)
    for token in b"a\x1b[2Jb\r\x07\n\tc":
        stream.add(token)
    assert capsys.readouterr().out == "a\\x1b[2Jb\\x0d\\x07\n\tc"


def test_layers_are_counted_on_the_prompt_alone(stderr: Stderr, tmp_path: Path) -> None:
    model = load_model(save(tiny_llama(), tmp_path))
    terminal = stderr(Terminal())
    layers = model.base_model.layers
    show = GenerationProgress("prompt", layers, 4)
    model(torch.tensor([[1, 2, 3]]))
    wait_for(f"prompt, {len(layers)} of {len(layers)} layers, ", terminal)
    show.add(7)
    assert not any(layer._forward_hooks for layer in layers)  # a hook would keep graphs away
    wait_for("prompt, 1 of 4 tokens, ", terminal)
    show.close()


def test_the_header_is_there_before_the_weights_and_tokens_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tiny_llama(), tmp_path / "tiny")
    capsys.readouterr()
    printed: list[str] = []
    printed_of: dict[str, Sequence[str]] = {}

    def load(*args: Any, **kwargs: Any) -> Any:
        printed_of["before loading"] = capsys.readouterr().out.splitlines()
        return load_model(*args, **kwargs)

    def generating(*args: Any, on_tokens: Any, **kwargs: Any) -> Any:
        def then(tokens: Any) -> None:
            capsys.readouterr()
            on_tokens(tokens)
            printed.append(capsys.readouterr().out)

        return generate_ids(*args, on_tokens=then, **kwargs)

    generate_ids = run.generate
    monkeypatch.setattr(generate, "load_model", load)
    monkeypatch.setattr(run, "generate", generating)
    arguments = ["--model", str(folder), "--prompt", "1 2 3", "--max-new-tokens", "3"]
    assert main(["generate", *arguments]) == 0
    model, prompt = printed_of["before loading"]
    assert model == "model: tiny, 2 layers, float32 on cpu"
    assert prompt == "prompt: 3 tokens over 1 rank, zigzag"
    assert len(printed) == 3 and all(piece.strip().isdigit() for piece in printed)


def test_the_model_of_the_package_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "def add(a, b):", "--max-new-tokens", "1"]) == 0
    assert "to try the ring: it writes text that looks like" in capsys.readouterr().out
