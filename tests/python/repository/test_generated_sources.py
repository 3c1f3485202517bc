# SPDX-License-Identifier: Apache-2.0
"""Sources that a program wrote are what it writes today."""

import subprocess
import sys
from pathlib import Path

SM90 = Path(__file__).parents[3] / "csrc/attention/cuda/sm90"


def test_the_tensor_core_products_are_what_their_generator_writes():
    command = [sys.executable, SM90 / "generate_wgmma.py"]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (SM90 / "ptx/wgmma.cuh").read_text() == written
