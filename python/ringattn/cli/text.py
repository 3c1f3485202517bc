# SPDX-License-Identifier: Apache-2.0
"""Between text and token ids: a model's ``tokenizer.json``, bytes, or plain numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ringattn._checks import check_int64
from ringattn.models.loading import read_json_object

#: Key of ``config.json`` that says how a model without ``tokenizer.json`` reads text.
CONFIG_KEY = "ringattn_tokenizer"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """A token is a byte of UTF-8; text decoded with "surrogateescape" gives back any bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode(errors="surrogateescape"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class Numbers:
    """Text is the ids themselves, separated by white space."""

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(
                "prompt must be token ids because the model has no tokenizer.json, "
                f"got {str(error).rpartition(': ')[2]}"
            ) from None
        return [check_int64("token id of the prompt", token) for token in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class FromFile:
    """``tokenizer.json`` of Hugging Face, with the special tokens its post-processor adds."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise ValueError(
                f"tokenizers must be installed to read {path.name} "
                "(pip install tokenizers), got no such package"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{path} must be a tokenizer's file, got: {error}") from None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids))
        return text


def read_tokenizer(folder: Path) -> Tokenizer:
    """What the model in ``folder`` reads.

    Raises:
        ValueError: a tokenizer that is not known or broken, or whose package is not installed.
    """
    if (folder / "tokenizer.json").exists():
        return FromFile(folder / "tokenizer.json")
    kind = read_json_object(folder / "config.json").get(CONFIG_KEY)
    if kind not in (None, "bytes"):
        raise ValueError(f'{CONFIG_KEY} must be "bytes" in config.json, got {kind!r}')
    return Numbers() if kind is None else Bytes()
