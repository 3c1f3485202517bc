#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Text to token ids on disk: train.bin, val.bin and meta.json, to be memory-mapped.

    python scripts/prepare_data.py book.txt --out data
    python scripts/prepare_data.py texts/ --tokenizer MODEL_DIR --out data
    python scripts/prepare_data.py openwebtext --tokenizer MODEL_DIR --max-tokens 100000000 \\
        --out data

SOURCE is a text file, a folder whose text files are taken in the order of their names, or the name
of a data set of the package datasets, which is streamed. The last part of each file goes to
val.bin; of a data set every tenth document, with a --val-share of 0.1.

The files hold nothing but ids, uint16, or uint32 for vocabularies of more than 65,536; meta.json
says which (``dtype``), and has ``vocabulary``, ``tokenizer``, ``separator`` (the id in front of
every document) and the numbers of tokens. ``numpy.memmap("data/train.bin", dtype)`` reads them, as
benchmarks/llama.py --data does. A run that is not finished leaves neither file.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

try:
    from tqdm import tqdm
except ModuleNotFoundError:
    sys.exit("prepare_data: tqdm must be installed (pip install tqdm), got no such package")

PIECE = 2**18  # bytes of a file that are tokenized at once
PARTS = ("train", "val")
SUFFIXES = [".txt", ".md"]  # of a folder's files
_UINT16_IDS = 2**16

#: A piece of text, the part it belongs to, and whether a document begins with it.
Piece = tuple[str, str, bool]


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids, without special tokens."""

    name: str
    vocabulary: int
    encode: Callable[[str], list[int]]
    separator: int | None

    @classmethod
    def of(cls, given: str, separator: int | None) -> Tokenizer:
        """ "bytes", a tokenizer.json, or a folder with one.

        Raises:
            ValueError: neither, a file that is no tokenizer's, a package that is missing.
        """
        if given == "bytes":
            default = 0 if separator is None else separator
            return cls("bytes", 256, lambda text: list(text.encode(errors="replace")), default)
        path = Path(given)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f'--tokenizer must be "bytes" or have tokenizer.json, got {given}')
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise ValueError(
                "tokenizers must be installed to read tokenizer.json (pip install tokenizers), "
                "got no such package"
            ) from None
        try:
            loaded = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(
                f"--tokenizer must be a tokenizer's file, got {path}: {error}"
            ) from None
        config = path.parent / "config.json"
        if separator is None and config.is_file():
            separator = json.loads(config.read_text()).get("bos_token_id")
        return cls(
            path.parent.name,
            loaded.get_vocab_size(),
            lambda text: loaded.encode(text, add_special_tokens=False).ids,
            separator,
        )


# ---- text ---------------------------------------------------------------------------------------


def pieces_of_file(path: Path, val_share: float, bar: tqdm) -> Iterator[Piece]:
    """A file, PIECE bytes at a time; its last part is for "val"."""
    size = path.stat().st_size
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # characters may be cut
    with path.open("rb") as file:
        for part, end in (("train", round((1 - val_share) * size)), ("val", size)):
            begins = True
            while data := file.read(min(PIECE, end - file.tell())):
                yield decoder.decode(data), part, begins
                begins = False
                bar.update(len(data))


def pieces_of_files(paths: list[Path], val_share: float) -> Iterator[Piece]:
    total = sum(path.stat().st_size for path in paths)
    with tqdm(total=total, unit="B", unit_scale=True) as bar:
        for path in paths:
            bar.set_postfix_str(path.name)
            yield from pieces_of_file(path, val_share, bar)


def looks_like_a_path(name: str) -> bool:
    """Whether a data set cannot be called that: its name is NAME or OWNER/NAME, and has no suffix
    of a text."""
    owner, _, rest = name.rpartition("/")
    is_name = rest != "" and "/" not in owner and not name.startswith((".", "~", "/"))
    return not is_name or Path(name).suffix in SUFFIXES


def pieces_of_data_set(name: str, split: str, column: str, val_share: float) -> Iterator[Piece]:
    """Each document whole.

    Raises:
        ValueError: the name is neither a path nor a data set's, or the package is missing.
    """
    sentence = f"SOURCE must be a file, a folder or a data set's name, got no such path {name}"
    if looks_like_a_path(name):
        raise ValueError(sentence)
    try:
        import datasets
    except ModuleNotFoundError:
        raise ValueError(
            f"{sentence}, and for data sets no package datasets (pip install datasets)"
        ) from None
    try:
        documents = datasets.load_dataset(name, split=split, streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{sentence}, and no such data set: {error}") from None
    for number, document in enumerate(tqdm(documents, unit="document")):
        if column not in document:
            known = ", ".join(sorted(document))
            raise ValueError(f"--column must be of {known}, got {column}")
        to_val = math.floor((number + 1) * val_share) > math.floor(number * val_share)
        yield document[column], "val" if to_val else "train", True


def pieces_of(options: argparse.Namespace) -> Iterator[Piece]:
    """ValueError where there is no text."""
    path = Path(options.source)
    if path.is_file():
        return pieces_of_files([path], options.val_share)
    if path.is_dir():
        paths = sorted(
            file for file in path.rglob("*") if file.is_file() and file.suffix in options.suffixes
        )
        if not paths:
            suffixes = ", ".join(options.suffixes)
            raise ValueError(f"SOURCE must hold files with {suffixes}, got {path} without")
        return pieces_of_files(paths, options.val_share)
    return pieces_of_data_set(options.source, options.split, options.column, options.val_share)


# ---- ids ----------------------------------------------------------------------------------------


def prepare(pieces: Iterator[Piece], tokenizer: Tokenizer, options: argparse.Namespace) -> dict:
    """Writes the files; what meta.json has.

    Raises:
        ValueError: text for one of the parts only, a separator outside of the vocabulary.
    """
    dtype = np.dtype("uint16" if tokenizer.vocabulary <= _UINT16_IDS else "uint32")
    separator = [] if tokenizer.separator is None else [tokenizer.separator]
    if any(not 0 <= token <= np.iinfo(dtype).max for token in separator):
        raise ValueError(f"--separator must fit into {dtype}, got {tokenizer.separator}")
    options.out.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(PARTS, 0)
    to_val = math.ceil(options.val_share * options.max_tokens)
    most = {"train": options.max_tokens - to_val, "val": to_val}
    unfinished = {part: options.out / f"{part}.bin.unfinished" for part in PARTS}
    try:
        with contextlib.ExitStack() as stack:
            files = {
                part: stack.enter_context(path.open("wb")) for part, path in unfinished.items()
            }
            for text, part, begins in pieces:
                if counts == most:
                    break
                if counts[part] < most[part]:
                    ids = [*(separator if begins else []), *tokenizer.encode(text)]
                    ids = ids[: most[part] - counts[part]]
                    np.array(ids, dtype).tofile(files[part])
                    counts[part] += len(ids)
        empty = [part for part, count in counts.items() if count == 0]
        if empty:
            raise ValueError(f"SOURCE must have text for train and val, got none for {empty[0]}")
    except BaseException:
        for path in unfinished.values():
            path.unlink(missing_ok=True)
        raise
    for part, path in unfinished.items():
        path.replace(options.out / f"{part}.bin")
    facts = {
        "tokenizer": tokenizer.name,
        "vocabulary": max(tokenizer.vocabulary, *(1 + token for token in separator), 0),
        "dtype": dtype.name,
        "separator": tokenizer.separator,
        **{f"{part}_tokens": count for part, count in counts.items()},
    }
    (options.out / "meta.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def share(text: str) -> float:
    """A type of arguments: a number between 0 and 1."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"must be a number between 0 and 1, got {text!r}")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE", help="a file, a folder, or a data set's name")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--tokenizer", default="bytes", help="tokenizer.json, its folder, or bytes")
    parser.add_argument("--separator", type=int, metavar="ID", help="(default: bytes 0, else BOS)")
    parser.add_argument("--val-share", type=share, default=0.1, help="(default: 0.1)")
    parser.add_argument("--max-tokens", type=int, default=2**48, metavar="N", help="at most")
    parser.add_argument("--suffixes", nargs="+", default=SUFFIXES, help="of a folder's files")
    parser.add_argument("--split", default="train", help="of a data set (default: train)")
    parser.add_argument("--column", default="text", help="of a data set (default: text)")
    options = parser.parse_args()
    if options.max_tokens < 2:
        parser.error(f"--max-tokens must be 2 or more, got {options.max_tokens}")
    try:
        tokenizer = Tokenizer.of(options.tokenizer, options.separator)
        facts = prepare(pieces_of(options), tokenizer, options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for part in PARTS:
        print(f"{options.out / part}.bin: {facts[f'{part}_tokens']:,} tokens, {facts['dtype']}")


if __name__ == "__main__":
    main()
