# SPDX-License-Identifier: Apache-2.0
"""The text that the demo model is trained on: what every Python installation carries."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SEPARATOR = 0  # in front of every document: begin and end of text in one; never a byte of the text
# One document in twenty, by a hash of its name, is never trained on. Of the twenty choices this one
# has the corpus's own mix: a fifth topics, the rest modules, no document above a fifth of it.
HELD_OUT_SHARE, HELD_OUT_PART = 20, 16
MIN_DUPLICATE_CHARS = 40  # a repeated paragraph this long is kept only where it comes first

# Parts of the standard library that many installations leave out, or that only test the rest.
SKIPPED_FOLDERS = {
    "test", "tests", "idlelib", "turtledemo", "lib2to3", "ensurepip", "site-packages",
    "dist-packages", "__pycache__",
}  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    python: str  # version of the Python whose text this is
    documents: dict[str, str]  # name -> text

    def split(self) -> tuple[dict[str, str], dict[str, str]]:
        """Documents to train on and documents held out, by a hash of their names."""
        train: dict[str, str] = {}
        held_out: dict[str, str] = {}
        for name, text in self.documents.items():
            is_held_out = name_hash(name) % HELD_OUT_SHARE == HELD_OUT_PART
            (held_out if is_held_out else train)[name] = text
        return train, held_out

    def held_out_stream(self) -> torch.Tensor:
        """All held-out documents in one row of token ids, in the order of their names' hashes."""
        held_out = self.split()[1]
        return pack([held_out[name] for name in sorted(held_out, key=name_hash)])

    def write(self, folder: Path) -> None:
        """train.bin, val.bin and meta.json, as scripts/prepare_data.py writes them: val.bin is the
        held-out text."""
        folder.mkdir(parents=True, exist_ok=True)
        train = self.split()[0]
        streams = {"train": pack([train[name] for name in sorted(train, key=name_hash)])}
        streams["val"] = self.held_out_stream()
        facts = {"tokenizer": "bytes", "vocabulary": 256, "dtype": "uint16", "separator": SEPARATOR}
        for part, ids in streams.items():
            ids.numpy().astype(np.uint16).tofile(folder / f"{part}.bin")
            facts[f"{part}_tokens"] = len(ids)
        (folder / "meta.json").write_text(json.dumps(facts, indent=1) + "\n")


def name_hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def pack(texts: list[str]) -> torch.Tensor:
    """Documents -> uint8 [T], each behind a separator."""
    data = b"".join(bytes([SEPARATOR]) + text.encode() for text in texts)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def build_corpus() -> Corpus:
    """One document a topic and one a module; no long paragraph appears in it twice.

    Topics contain one another ("compound" holds all of "while"), so without that rule a held-out
    document could stand in the training text word for word. Longer topics go first and stay whole.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    documents: dict[str, str] = {}
    for topic in sorted(topics, key=lambda topic: (-len(topics[topic]), topic)):
        if text := first_occurrences(topics[topic], seen):
            documents[f"topic {topic}"] = text

    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        parts = path.relative_to(root).with_suffix("").parts
        if not SKIPPED_FOLDERS.isdisjoint(parts):
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sections: list[str] = []
        for heading, docstring in docstrings(ast.parse(path.read_bytes()), module):
            if text := first_occurrences(docstring, seen):
                sections.append(f"{heading}\n\n{text}")
        if sections:
            documents[f"module {module}"] = "\n\n".join(sections)
    return Corpus(platform.python_version(), documents)


def docstrings(node: ast.AST, name: str, owner: str = "") -> Iterator[tuple[str, str]]:
    """(heading, docstring) of a module and, in source order, of all it defines, as help() would."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        if isinstance(node, ast.Module):
            heading, inside = f"module {name}", ""
        elif isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            heading, inside = f"class {owner}{name}({bases})", f"{owner}{name}."
        else:
            heading, inside = f"{owner}{name}({ast.unparse(node.args)})", f"{owner}{name}."
        if docstring := ast.get_docstring(node):
            yield heading, docstring
        owner = inside
    for child in ast.iter_child_nodes(node):
        yield from docstrings(child, getattr(child, "name", None) or "", owner)


def first_occurrences(text: str, seen: set[str]) -> str:
    """The text without the long paragraphs that were seen before; adds its own to ``seen``."""
    lines = (line.rstrip() for line in text.replace("\0", "").expandtabs().splitlines())
    kept: list[str] = []
    for paragraph in "\n".join(lines).strip("\n").split("\n\n"):
        if len(paragraph) >= MIN_DUPLICATE_CHARS:
            if paragraph in seen:
                continue
            seen.add(paragraph)
        kept.append(paragraph)
    return "\n\n".join(kept).strip("\n")


def load_corpus(path: Path | None) -> Corpus:
    return build_corpus() if path is None else Corpus(**json.loads(path.read_text("utf-8")))
