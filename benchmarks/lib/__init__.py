# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: problems and their check, ranks, timing, the command line, reports."""
