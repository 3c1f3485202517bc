# SPDX-License-Identifier: Apache-2.0
"""Language models whose sequences are spread over ranks."""

from pathlib import Path

from ringattn.models.config import LLaMAConfig
from ringattn.models.llama import LLaMA, LLaMABlock, LLaMAHeadless
from ringattn.models.loading import load_model
from ringattn.models.saving import save_model

__all__ = [
    "LLaMA",
    "LLaMABlock",
    "LLaMAConfig",
    "LLaMAHeadless",
    "demo_model_path",
    "load_model",
    "save_model",
]


def demo_model_path() -> Path:
    """Folder of the model that comes with the package: a small byte-level LLaMA in Hugging Face's
    format, whose token ids are bytes."""
    return Path(__file__).parent / "pydoc_llama"
