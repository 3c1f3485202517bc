# SPDX-License-Identifier: Apache-2.0
VERSION: str
TORCH_VERSION: str
WITH_CUDA: bool
CUDA_VERSION: str | None
NO_CUDA_BECAUSE: str | None
