# SPDX-License-Identifier: Apache-2.0
"""Prompts of any length: random ids, or text that scripts/prepare_data.py has tokenized."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

_SEED = 0


@dataclass(frozen=True)
class Prompts:
    """Token ids below ``vocabulary``, from ``tokens`` where there are any."""

    vocabulary: int
    tokens: np.ndarray | None = None  # of a text, memory-mapped

    @classmethod
    def of(cls, folder: Path | None, vocabulary: int) -> Prompts:
        """From ``val.bin`` in a folder of scripts/prepare_data.py; None: random ids.

        Raises:
            ValueError: ids that the vocabulary does not have.
        """
        if folder is None:
            return cls(vocabulary)
        facts = json.loads((folder / "meta.json").read_text())
        if facts["vocabulary"] > vocabulary:
            raise ValueError(
                f"--data must have ids below the model's {vocabulary}, got {facts['vocabulary']} "
                f"of {facts['tokenizer']}"
            )
        return cls(vocabulary, np.memmap(folder / "val.bin", facts["dtype"], "r"))

    def draw(self, batch: int, seq_len: int) -> torch.Tensor:
        """int64 ``[B, S]`` on the CPU, the same on every rank. A text that is too short repeats."""
        if self.tokens is None:
            generator = torch.Generator().manual_seed(_SEED + seq_len)
            return torch.randint(self.vocabulary, (batch, seq_len), generator=generator)
        places = np.arange(batch * seq_len) % len(self.tokens)
        return torch.from_numpy(self.tokens[places].astype(np.int64)).view(batch, seq_len)


def data_folder(text: str) -> Path:
    """A type of arguments: a folder that scripts/prepare_data.py has written."""
    folder = Path(text)
    missing = [name for name in ("meta.json", "val.bin") if not (folder / name).is_file()]
    if missing:
        raise argparse.ArgumentTypeError(
            f"must be a folder of scripts/prepare_data.py with {missing[0]}, got {text}"
        )
    return folder
