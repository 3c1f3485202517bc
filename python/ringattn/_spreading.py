# SPDX-License-Identifier: Apache-2.0
"""Whether new tokens after a cache are spread over the ranks, or computed by every rank.

Either way is exact. Spread, each rank runs its share through the layers and fetches keys of the
other ranks' shares of the cache. Otherwise every rank runs all of them, attends to the keys that
it holds, and the ranks exchange partial results. Meta's context parallelism names the ways pass-KV
and pass-Q (https://arxiv.org/abs/2411.01783).
"""

from __future__ import annotations

# Fewer rows of a product take no less time. On CUDA its weights must be read from memory either
# way: an H100 multiplies about 300 rows (989 TFLOPS) while it reads a weight (3.35 TB/s).
MIN_ROWS = {"cuda": 256, "cpu": 4}

# Spread, a layer saves a share of its products and fetches the same share of the cached keys. For
# Llama 3 8B it is 436 MFLOP a token, 0.9 us at 500 TFLOPS, against 4 KiB a key, 14 ns at 300 GB/s:
# the products of a token take as long as the fetch of 64 keys, which overlaps with attention, too.
MAX_CACHED_PER_TOKEN = 64


def is_faster_spread(num_tokens: int, num_cached: int, world_size: int, device_type: str) -> bool:
    """Whether ``num_tokens`` after ``num_cached`` are to be spread over ``world_size`` ranks. The
    same on all ranks."""
    enough_rows = num_tokens >= world_size * MIN_ROWS.get(device_type, MIN_ROWS["cuda"])
    fetched = num_cached if world_size > 1 else 0
    return enough_rows and fetched <= num_tokens * MAX_CACHED_PER_TOKEN
