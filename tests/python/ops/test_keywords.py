# SPDX-License-Identifier: Apache-2.0
"""Keywords of PyTorch's attention, of flash-attention and of packages built on them: accepted with
the values that change nothing, refused by name with any other."""

from collections.abc import Callable
from typing import Any

import pytest
import ringattn
import torch


def module(*operands: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """The keywords at construction and in the call."""
    return ringattn.RingAttention(**keywords)(*operands, **keywords)


FUNCTIONS: list[Callable[..., Any]] = [
    ringattn.ring_attention,
    ringattn.block_attention,
    ringattn.decode_attention,
    module,
]

MASKS = "causal=, window_size= and cu_seqlens= (ring_attention), diagonal="

#: A value that changes nothing, one that does, and what the refusal says to write.
KEYWORDS: dict[str, tuple[Any, Any, str]] = {
    "attn_mask": (None, torch.ones(6, 6), MASKS),
    "attention_mask": (None, torch.ones(2, 6), MASKS),
    "attn_bias": (None, torch.ones(6, 6), "scores have no bias"),
    "alibi_slopes": (None, torch.ones(4), "scores have no bias"),
    "block_mask": (None, "mask", MASKS),
    "score_mod": (None, max, "scale= alone"),
    "dropout_p": (0.0, 0.1, "no dropout"),
    "enable_gqa": (False, True, "fewer key/value heads than query heads are always allowed"),
    "softmax_scale": (None, 0.1, "scale="),
    "logits_soft_cap": (0.0, 30.0, "softcap="),
    "sliding_window": (None, 128, "window_size= (ring_attention)"),
    "s_aux": (None, torch.ones(4), "sinks="),
    "learnable_sink": (None, torch.ones(4), "sinks="),
    "cu_seqlens_q": (None, torch.tensor([0, 6]), "cu_seqlens= (ring_attention)"),
    "cu_seqlens_k": (None, torch.tensor([0, 6]), "cu_seqlens= (ring_attention)"),
    "max_seqlen": (None, 6, "cu_seqlens= (ring_attention)"),
    "max_seqlen_q": (None, 6, "cu_seqlens= (ring_attention)"),
    "max_seqlen_k": (None, 6, "cu_seqlens= (ring_attention)"),
    "attention_chunk": (0, 4, "cu_seqlens="),
    "k_cache": (None, torch.ones(4), "k_shard[:, :n]"),
    "cache_leftpad": (None, torch.zeros(2), "key_begins= (decode_attention)"),
    "rotary_cos": (None, torch.ones(4), "rotated before the call"),
    "rotary_interleaved": (True, "pairs", "rotated before the call"),
    "qv": (None, torch.ones(4), "q and k alone"),
    "q_descale": (None, torch.ones(4), "without scales of their own"),
    "num_splits": (1, 4, "chosen by the kernels"),
    "pack_gqa": (True, 2, "chosen by the kernels"),
    "sm_margin": (0, 8, "chosen by the kernels"),
    "cache_seqlens": (None, torch.tensor([6, 6]), "k_shard[:, :n]"),
    "block_table": (None, torch.zeros(2, 1), "k_shard[:, :n]"),
    "deterministic": (False, True, "a backward does under torch.use_deterministic_algorithms"),
    "return_attn_probs": (False, True, "return_lse=True (ring_attention)"),
    "return_softmax_lse": (False, True, "return_lse=True (ring_attention)"),
}


def operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 6, heads, 16, generator=generator) for heads in (4, 2, 2)]


def out_of(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_that_change_nothing_are_accepted(function: Callable[..., Any]) -> None:
    expected = out_of(function(*operands()))
    neutral = {name: value for name, (value, _, _) in KEYWORDS.items()}
    assert torch.equal(out_of(function(*operands(), **neutral)), expected)
    for others in ({"dropout_p": 0}, {"softcap": None}, {"sinks": None}):
        assert torch.equal(out_of(function(*operands(), **others)), expected)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", KEYWORDS)
def test_other_values_are_refused_by_name_with_what_to_write(
    name: str, function: Callable[..., Any]
) -> None:
    _, value, instead = KEYWORDS[name]
    with pytest.raises(ValueError) as error:
        function(*operands(), **{name: value})
    got = "Tensor" if isinstance(value, torch.Tensor) else repr(value)
    assert str(error.value).startswith(f"{name} must be left out (")
    assert instead in str(error.value) and str(error.value).endswith(f"), got {got}")


@pytest.mark.parametrize("name", ["is_causal", "causal", "process_group"])
@pytest.mark.parametrize("value", [None, False, True])
def test_what_has_another_default_elsewhere_is_always_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be left out \(.*=.*\), got {value}$"):
        ringattn.block_attention(*operands(), **{name: value})


def test_neutral_keywords_are_compiled() -> None:
    q, k, v = operands()

    def attend(q: torch.Tensor) -> torch.Tensor:
        return ringattn.ring_attention(q, k, v, dropout_p=0.0, attn_mask=None, window_size=(-1, -1))

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), ringattn.ring_attention(q, k, v))
