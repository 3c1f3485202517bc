# SPDX-License-Identifier: Apache-2.0
"""The build backend (PEP 517): scikit-build-core's, with an error for isolated builds.

Under build isolation pip first asks for further build requirements, in an environment without
torch. The error of that step stands alone; CMake's would stand in the middle of a long log.
"""

import importlib.util
import sys

from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403


def _refuse_isolation() -> None:
    if importlib.util.find_spec("torch") is None:
        sys.exit(
            "ringattn must be built beside the installed torch, got an isolated build: type "
            "`pip install scikit-build-core ninja && pip install --no-build-isolation .`"
        )


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    _refuse_isolation()
    return _backend.get_requires_for_build_wheel(config_settings)


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    _refuse_isolation()
    return _backend.get_requires_for_build_editable(config_settings)
