# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, collective exchanges between them, and how errors reach all of them."""
