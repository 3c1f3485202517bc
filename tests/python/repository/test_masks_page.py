# SPDX-License-Identifier: Apache-2.0
"""Every block of docs/masks.md runs on two ranks, and gives what its mask says."""

from collections.abc import Callable

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from _documents import ROOT, Names, run, shown
from ringattn.reference import masked_attention, visible_keys

PAGE = "docs/masks.md"
IN_RING = {
    "A window": {"window_size": (63, 0)},
    "Packed documents": {"cu_seqlens": [0, 24, 40, 96, 108, 172, 192]},
    "Queries after other keys": {},
    "Sinks and softcap": {"window_size": (63, 0)},
}


def names_of(section: str) -> Names:
    torch.manual_seed(this().rank)
    names: Names = {"ringattn": ringattn, "torch": torch}
    names |= {"rank": this().rank, "world_size": this().world_size}
    run(shown(PAGE, section), names)
    return names


def in_ring(section: str) -> None:
    names, masks = names_of(section), IN_RING[section]
    p = names["p"]
    keys = names.get("keys", p)
    q, out = (p.gather(names[name]) for name in ("q", "out"))
    k, v = (keys.gather(names[name]) for name in ("k", "v"))
    at = torch.arange(keys.seq_len)
    scores = {"softcap": 50.0, "sinks": names["sinks"]} if "sinks" in names else {}
    expected, _ = masked_attention(q, k, v, visible_keys(at[-p.seq_len :], at, **masks), **scores)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


def on_one_device() -> None:
    names = names_of("A table of one device")
    at = torch.arange(40)
    visible = (at <= at[:, None]) | (at < 10)
    expected, _ = masked_attention(names["q"], names["k"], names["v"], visible)
    torch.testing.assert_close(names["out"], expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("section", IN_RING)
def test_the_masks_of_a_ring_are_those_of_the_page(
    section: str, rank_pool: Callable[[int], RankPool]
) -> None:
    rank_pool(2).run(in_ring, section)


def test_a_table_shows_a_prefix_to_all(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(1).run(on_one_device)


def test_the_picture_shows_the_partition_of_the_page() -> None:
    ends = [0, 24, 40, 96, 108, 172, 192]
    drawn = (ROOT / "docs/packed-partition.svg").read_text()
    p = ringattn.Partition.packed(ends, 4)
    for rank in range(4):
        assert f">{p.num_pairs(rank, cu_seqlens=ends)}<" in drawn
        for start, stop in p.segments(rank):
            assert f'width="{(stop - start) * 800 / 192:.1f}"' in drawn
