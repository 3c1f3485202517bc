# SPDX-License-Identifier: Apache-2.0
"""Rooms of benchmarks/heterogeneous.py: what a cell is, the ranks that measure it, and tables."""
