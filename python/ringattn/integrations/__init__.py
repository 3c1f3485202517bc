# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries through the ring. Only these modules know names of those libraries."""
