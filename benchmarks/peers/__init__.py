# SPDX-License-Identifier: Apache-2.0
"""Small adapters to other implementations, one file per peer.

Each has `available(problem) -> str | None`, the reason why it cannot run here or None, and
`prepare(problem) -> list[Contestant]`. Whether a peer groups queries or gets expanded K
and V is in the note of its contestants.
"""
