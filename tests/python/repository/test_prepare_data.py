# SPDX-License-Identifier: Apache-2.0
"""scripts/prepare_data.py: text becomes ids that can be memory-mapped, all of it, once."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from prompts import Prompts

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import prepare_data

    return prepare_data


@pytest.fixture
def prepare(script: ModuleType, monkeypatch: pytest.MonkeyPatch):
    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, arguments)])
        script.main()

    return run


def read(folder: Path) -> tuple[dict, list[int], list[int]]:
    facts = json.loads((folder / "meta.json").read_text())
    parts = [
        np.memmap(folder / f"{part}.bin", facts["dtype"], "r").tolist() for part in ("train", "val")
    ]
    assert [len(part) for part in parts] == [facts["train_tokens"], facts["val_tokens"]]
    return facts, *parts


def test_a_file_is_split_where_the_share_says(prepare, script, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "PIECE", 7)  # characters of two bytes are cut
    text = "häß\n" * 50
    (tmp_path / "book.txt").write_text(text)
    prepare(tmp_path / "book.txt", "--out", tmp_path / "data", "--val-share", "0.25")
    facts, train, val = read(tmp_path / "data")
    assert bytes(train[1:] + val[1:]).decode() == text
    assert (train[0], val[0], facts["dtype"], facts["vocabulary"]) == (0, 0, "uint16", 256)
    assert abs(len(val) - 0.25 * len(text.encode())) <= 3


def test_a_folder_is_every_text_file_in_the_order_of_names(prepare, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    for name, letter in (("more/c.md", "c"), ("b.txt", "b"), ("a.txt", "a"), ("d.py", "d")):
        (folder / name).write_text(10 * letter)
    prepare(folder, "--out", tmp_path / "data", "--separator", "1")
    _, train, val = read(tmp_path / "data")
    assert bytes(train) == b"\1aaaaaaaaa\1bbbbbbbbb\1ccccccccc"
    assert bytes(val) == b"\1a\1b\1c"
    prepare(folder, "--out", tmp_path / "data", "--max-tokens", "10", "--val-share", "0.5")
    _, train, val = read(tmp_path / "data")
    assert (len(train), len(val)) == (5, 5)


def test_a_data_set_is_streamed_by_documents(prepare, monkeypatch, tmp_path: Path) -> None:
    rows = [{"words": str(number)} for number in range(10)]
    asked = []
    loaded = SimpleNamespace(load_dataset=lambda *a, **k: asked.append((a, k)) or iter(rows))
    monkeypatch.setitem(sys.modules, "datasets", loaded)
    options = ("--split", "all", "--column", "words", "--val-share", "0.3")
    prepare("some/set", "--out", tmp_path, *options)
    assert asked == [(("some/set",), {"split": "all", "streaming": True})]
    _, train, val = read(tmp_path)
    assert bytes(val) == b"\x003\x006\x009"
    assert bytes(train) == b"\x000\x001\x002\x004\x005\x007\x008"


def test_a_tokenizer_file_gives_its_ids_and_the_models_separator(prepare, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "ring": 1, "rank": 2, **{f"w{n}": n for n in range(3, 70_000)}}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"bos_token_id": 5}')
    (tmp_path / "text.txt").write_text("ring rank w69999 " * 10)
    prepare(tmp_path / "text.txt", "--tokenizer", folder, "--out", tmp_path / "data")
    facts, train, _ = read(tmp_path / "data")
    assert train[:4] == [5, 1, 2, 69_999]
    assert (facts["dtype"], facts["vocabulary"]) == ("uint32", 70_000)
    with pytest.raises(ValueError, match=r"--data must have ids below the model's 512, got 70000"):
        Prompts.of(tmp_path / "data", 512)


def test_prompts_are_the_text_and_repeat_where_it_is_short(prepare, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("0123456789")
    prepare(tmp_path / "text.txt", "--out", tmp_path / "data", "--val-share", "0.5")
    ids = Prompts.of(tmp_path / "data", 256).draw(2, 4)
    assert bytes(ids.flatten().tolist()) == b"\x0056789\x005" and ids.dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{0} --val-share 1", "--val-share: must be a number between 0 and 1, got '1'"),
        ("{0} --max-tokens 1", "--max-tokens must be 2 or more, got 1"),
        ("{0} --separator 70000", "--separator must fit into uint16, got 70000"),
        ("{0} --tokenizer nowhere", '--tokenizer must be "bytes" or have tokenizer.json, got nowh'),
        ("{0} --tokenizer {0}/a.txt", "--tokenizer must be a tokenizer's file, got "),
        ("{0} --suffixes .tex", "SOURCE must hold files with .tex, got "),
        ("{0}/empty.txt", "SOURCE must have text for train and val, got none for train"),
        ("some/set", "got no such path some/set, and for data sets no package datasets (pip ins"),
        (
            "no/such/set",
            "SOURCE must be a file, a folder or a data set's name, got no such path no/",
        ),
        ("{0}/b.txt", "got no such path {0}/b.txt"),
        ("{0}s/", "got no such path {0}s/"),
        ("bok.txt", "got no such path bok.txt"),
        ("./book", "got no such path ./book"),
    ],
)
def test_wrong_usage_is_one_sentence_and_leaves_no_files(
    prepare, monkeypatch, capsys, tmp_path: Path, arguments: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("text of a file")
    (source / "empty.txt").write_text("")
    with pytest.raises(SystemExit) as ended:
        prepare(*arguments.format(source).split(), "--out", tmp_path / "data")
    assert ended.value.code == 2
    assert message.format(source) in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "data").glob("*"))


def test_a_data_set_that_is_not_there_may_be_a_path_that_was_mistyped(
    prepare, monkeypatch, capsys, tmp_path: Path
) -> None:
    def load_dataset(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("Dataset 'opnwebtext' doesn't exist on the Hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(SystemExit) as ended:
        prepare("opnwebtext", "--out", tmp_path / "data")
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "got no such path opnwebtext, and no such data set: Dataset 'opnwebtext' does" in error


def test_a_file_in_the_place_of_the_folder_is_one_sentence(prepare, capsys, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("text of a file")
    with pytest.raises(SystemExit) as ended:
        prepare(tmp_path / "book.txt", "--out", tmp_path / "book.txt")
    assert ended.value.code == 2
    assert "File exists: " in capsys.readouterr().err.splitlines()[-1]


def test_a_package_that_is_missing_is_one_sentence() -> None:
    prepare_without_tqdm = "import sys; sys.modules['tqdm'] = None; import prepare_data"
    done = subprocess.run(
        [sys.executable, "-c", prepare_without_tqdm],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "prepare_data: tqdm must be installed (pip install tqdm), got no such package\n",
    )
