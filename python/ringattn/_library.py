# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled library, once, and refuses a torch it was not built for."""

import importlib.util
from pathlib import Path

import torch


def _compiled_folder() -> Path:
    """Where the compiled files lie. Asked of the import system and not of ``__file__``: in an
    editable install the sources and the compiled files are in different folders."""
    spec = importlib.util.find_spec("ringattn._C")
    if spec is None or spec.origin is None:
        raise ImportError("ringattn must be built before it is imported, got no ringattn._C")
    return Path(spec.origin).parent


def _check_torch(built_for: str, built_for_cuda: str | None) -> None:
    """A library built for another torch crashes or misbehaves: say so before it is opened.

    A build without CUDA goes with the same torch for any CUDA.
    """
    built_for, found = (text.split("+")[0] for text in (built_for, torch.__version__))
    if built_for_cuda is not None:
        built_for, found = (
            f"{built_for} (CUDA {built_for_cuda})",
            f"{found} (CUDA {torch.version.cuda})",
        )
    if built_for != found:
        raise ImportError(
            f"ringattn must be rebuilt for this torch {found}, got a build for {built_for}"
        )


_folder = _compiled_folder()
from ringattn import _build_info  # noqa: E402  there is none before there is a build

_check_torch(_build_info.TORCH_VERSION, _build_info.CUDA_VERSION)
torch.ops.load_library(str(_folder / "libringattn.so"))

VERSION = _build_info.VERSION
#: Types of devices this build has kernels for.
DEVICES: tuple[str, ...] = ("cpu", "cuda") if _build_info.WITH_CUDA else ("cpu",)
