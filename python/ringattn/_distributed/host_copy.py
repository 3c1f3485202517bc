# SPDX-License-Identifier: Apache-2.0
"""Values of a CUDA tensor that the host reads one call later, without a wait in between."""

from __future__ import annotations

import torch


class HostCopy:
    """A copy of a CUDA tensor in pinned memory, which the tensor's current stream fills."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._values.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """The values, on the CPU, once they are there."""
        self._arrived.synchronize()
        return self._values
