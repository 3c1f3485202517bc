# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled library, once, and refuses a torch it was not built for."""

import warnings
from importlib import metadata
from pathlib import Path

import torch

import ringattn
from ringattn import _torch_releases


def _installed_folder() -> Path | None:
    """The folder where the package is installed, from its metadata. ``__file__`` does not do: in an
    editable install the sources and the compiled files are in different folders."""
    try:
        return Path(str(metadata.distribution("ringattn").locate_file("ringattn")))
    except metadata.PackageNotFoundError:
        return None


_torch_releases.check_not_older(torch.__version__)
_folder = _torch_releases.library_folder(_installed_folder(), torch.__version__)
# The package has the modules of the build that is used: ringattn._C, ringattn._build_info.
ringattn.__path__.append(str(_folder))
from ringattn import _build_info  # noqa: E402

_torch_releases.check_build(
    _build_info.TORCH_VERSION, _build_info.CUDA_VERSION, torch.__version__, torch.version.cuda
)
if (_untested := _torch_releases.untested_warning(torch.__version__)) is not None:
    warnings.warn(_untested, stacklevel=2)
torch.ops.load_library(str(_folder / "libringattn.so"))

VERSION = _build_info.VERSION
#: Types of devices this build has kernels for.
DEVICES: tuple[str, ...] = ("cpu", "cuda") if _build_info.WITH_CUDA else ("cpu",)
