# SPDX-License-Identifier: Apache-2.0
"""Softcap and sinks of a decoded token, over ranks."""

import math
from dataclasses import replace

import pytest
import ringattn
import torch
from _decode import CACHES, DTYPES, Cache
from _distributed import RankPool
from _numerics import (
    FLOAT32_TOLERANCE,
    Error,
    allowed_error,
    assert_within,
    measure,
    poisoned_memory,
    pytorch_error,
)


def sinks_of(cache: Cache, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """None on the second head."""
    sinks = torch.linspace(-1.0, 6.0, cache.num_heads)
    sinks[1] = -math.inf
    return sinks.to(dtype)


def decode_with_sinks(cache: Cache, with_sinks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = cache.local_inputs()
    sinks = sinks_of(cache).to(q.device) if with_sinks else None
    with poisoned_memory():
        return ringattn.decode_attention(
            *(q, k, v), scale=cache.scale, softcap=cache.softcap, sinks=sinks, return_lse=True
        )


def expected_with_sinks(cache: Cache, with_sinks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (x.double() for x in cache.inputs("cpu"))
    group = cache.num_heads // cache.num_kv_heads
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scale = cache.head_dim**-0.5 if cache.scale is None else cache.scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if cache.softcap:
        scores = cache.softcap * torch.tanh(scores / cache.softcap)
    lse = scores.logsumexp(-1)
    if with_sinks:
        lse = torch.logaddexp(lse, sinks_of(cache).double()[:, None])
    weights = torch.exp(scores - lse.clamp(min=-1e300).unsqueeze(-1))
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def check_with_sinks(ring: RankPool, cache: Cache, with_sinks: bool) -> None:
    results = ring.run(decode_with_sinks, cache, with_sinks)
    out, lse = results[0]
    for other_out, other_lse in results[1:]:
        assert torch.equal(other_out, out) and torch.equal(other_lse, lse)
    expected, expected_lse = expected_with_sinks(cache, with_sinks)
    q, k, v = (x.to(ring.device_type) for x in cache.inputs("cpu"))
    visible = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device)
    scale = cache.head_dim**-0.5 if cache.scale is None else cache.scale
    # Without softcap and sinks: PyTorch has neither.
    plain, _ = expected_with_sinks(replace(cache, softcap=0.0), with_sinks=False)
    pytorch = (
        pytorch_error(q, k, v, visible, scale, plain.to(q.device)) if k.size(1) else Error(0.0, 0.0)
    )
    what = f"{cache}, sinks {with_sinks}"
    assert_within(what, measure(out, expected), allowed_error(cache.dtype, pytorch, expected))
    tolerance = FLOAT32_TOLERANCE * max(1.0, expected_lse[expected_lse.isfinite()].abs().max())
    assert_within(f"lse of {what}", measure(lse, expected_lse), Error(tolerance, tolerance))


@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0, 1e4])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_softcap_and_sinks_over_all_ranks(ring, softcap, with_sinks):
    for dtype in DTYPES:
        if dtype == torch.float64 and ring.device_type == "cuda":
            continue
        for lengths in CACHES[ring.world_size]:
            if sum(lengths) == 0 and not with_sinks:
                continue
            cache = Cache(tuple(lengths), dtype, 3, softcap=softcap)
            check_with_sinks(ring, cache, with_sinks)
            wide = replace(cache, scale=-0.3, head_dim=128, num_heads=6, num_queries=1)
            check_with_sinks(ring, wide, with_sinks)


def test_without_keys_the_lse_is_the_sink(ring):
    cache = Cache((0,) * ring.world_size)
    for out, lse in ring.run(decode_with_sinks, cache, True):
        assert (out == 0).all()
        assert torch.equal(lse.cpu(), sinks_of(cache)[None, :, None].expand(2, -1, 1))


def extremes(cache: Cache) -> list[torch.Tensor]:
    """Pairs that have to be equal: sinks that are none, of other types, a softcap far off."""
    q, k, v = cache.local_inputs()
    plain = ringattn.decode_attention(q, k, v)
    sinks = sinks_of(cache, torch.bfloat16).to(q.device)
    return [
        *(plain, ringattn.decode_attention(q, k, v, sinks=torch.full_like(sinks, -math.inf))),
        *(ringattn.decode_attention(q, k, v, sinks=x) for x in (sinks, sinks.float())),
        *(ringattn.decode_attention(q, k, v, softcap=x) for x in (1e30, 1e300)),
    ]


def test_extremes_of_softcap_and_sinks(ring):
    for results in ring.run(extremes, Cache(tuple(CACHES[ring.world_size][-1]))):
        for a, b in zip(results[::2], results[1::2], strict=True):
            assert torch.equal(a, b)
        assert measure(results[-1], results[0].double().cpu()).max < 2e-6


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"softcap": -1.0}, "softcap must be finite and not negative, got -1.0"),
        ({"softcap": math.inf}, "softcap must be finite and not negative, got inf"),
        ({"softcap": math.nan}, "softcap must be finite and not negative, got nan"),
        ({"softcap": "30"}, "softcap must be a number, got '30'"),
        ({"softcap": True}, "softcap must be a number, got True"),
        ({"softcap": torch.ones(())}, "softcap must be a number, got a tensor"),
        ({"sinks": [0.0] * 4}, "sinks must be a tensor, got list"),
        (
            {"sinks": torch.ones(4, dtype=torch.int32)},
            "sinks must be of a float dtype, got torch.i",
        ),
        ({"sinks": torch.ones(2)}, r"sinks must have shape \[H\], H = 4, got \[2\]"),
        ({"sinks": torch.ones(4, requires_grad=True)}, "sinks must not require grad"),
    ],
)
def test_wrong_softcap_and_sinks_are_refused(keywords, sentence):
    q, k, v = (x.contiguous() for x in Cache((4,)).inputs("cpu"))
    with pytest.raises(ValueError, match=sentence):
        ringattn.decode_attention(q, k, v, **keywords)
