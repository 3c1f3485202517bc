# SPDX-License-Identifier: Apache-2.0
"""Masks of FMS: which of them are causal attention over padded rows, and where the padding is."""

from __future__ import annotations

from typing import Literal

import torch

from ringattn.model_inputs import Padding


def visible(mask: object, batch: int, num_queries: int, num_keys: int) -> torch.Tensor:
    """Which keys each query sees, bool ``[B, T, K]``, or ``[B, 1, K]`` where all queries share a
    row, as ``generate`` of FMS has it without a cache.

    Args:
        mask: ``[B, T, K]`` or ``[B, 1, T, K]``, B or T may be 1: bool, or 0 where a key is seen and
            -inf (or the least number of its dtype) where not.
        batch: B.
        num_queries: T.
        num_keys: K.

    Raises:
        ValueError: another shape or dtype.
    """
    expected = f"mask must be [B, S, S], [{batch}, {num_queries}, {num_keys}] in this call"
    if not isinstance(mask, torch.Tensor):
        raise ValueError(f"{expected}, got {type(mask).__name__}")
    given = mask.squeeze(1) if mask.dim() == 4 else mask
    if (
        given.dim() != 3
        or given.size(0) not in (1, batch)
        or given.size(1) not in (1, num_queries)
        or given.size(2) != num_keys
    ):
        raise ValueError(f"{expected}, got {list(mask.shape)}")
    given = given.expand(batch, -1, -1)
    if given.dtype == torch.bool:
        return given
    if not given.is_floating_point():
        raise ValueError(f"mask must be bool or floating, got {given.dtype}")
    return given == 0


def check_values(mask: torch.Tensor) -> None:
    """ValueError where a mask adds anything but 0 and -inf to scores. Waits for the device."""
    if mask.dtype == torch.bool:
        return
    hides = (mask == 0) | (mask <= torch.finfo(mask.dtype).min)
    if not bool(hides.all()):
        raise ValueError(
            "mask must hide keys or not, with -inf or 0, got other values: a bias of the scores is "
            "not supported"
        )


def check_ends(padding: Padding) -> None:
    """ValueError where new tokens are to follow a prompt with padding after it."""
    if any(padding.ends):
        raise ValueError(
            "mask must have its padding before the prompts to generate, got padding after one: "
            'call pad_input_ids() with padding_side="left"'
        )


def padding_of(seen: torch.Tensor, position_ids: torch.Tensor | None) -> Padding | None:
    """The padding of a prompt; None where there is none. Waits for the device.

    ``pad_input_ids`` of FMS lets padding see padding, so its mask is the same for two tokens of
    padding before three real ones as for two real ones before three of padding: position ids, which
    count real tokens and nothing else, tell.

    Args:
        seen: from :func:`visible`, ``[B, S, S]`` or ``[B, 1, S]``.
        position_ids: ``[B, S]`` or ``[1, S]``.

    Raises:
        ValueError: a mask that is not causal attention over one run of real tokens in each row,
            padding without position ids.
    """
    last = seen[:, -1]
    real = last if seen.size(1) == 1 else _real(seen, last, position_ids)
    padding = Padding.of(real)
    if padding is not None and position_ids is None:
        raise ValueError(
            "position_ids must be given with a padded mask, got None: pad_input_ids() of FMS "
            "returns both"
        )
    return padding


def _real(
    seen: torch.Tensor, last: torch.Tensor, position_ids: torch.Tensor | None
) -> torch.Tensor:
    """Which tokens are real, bool ``[B, S]``: those that the last one sees, or the others."""
    batch, num_tokens, _ = seen.shape
    rising = seen.new_zeros(batch, num_tokens - 1)
    if position_ids is not None:
        rising = position_ids.to(seen.device).expand(batch, -1).diff(dim=1) == 1
    facts = []
    for real in (last, ~last):
        expected = real[:, None, :].expand(-1, num_tokens, -1).tril()
        causal = ((seen == expected) | ~real[:, :, None]).all(2).all(1) & real.any(1)
        # Padding that sees itself and is counted is a sequence of its own.
        others = ~real[:, :, None] & ~real[:, None, :]
        together = (seen & others).tril(-1).any(2).any(1)
        packed = together & (rising & ~real[:, 1:] & ~real[:, :-1]).any(1)
        counted = (rising | ~(real[:, 1:] & real[:, :-1])).all(1)
        facts += [causal, packed, counted]
    # Tokens before padding are not those of a window: padding does not see them.
    facts[3] &= ~(seen & last[:, :, None] & ~last[:, None, :]).any(2).any(1)
    after: list[bool | None] = []  # whether each row has its padding after the tokens
    for row, one in enumerate(torch.stack(facts, 1).tolist()):
        fits, packed_before, counted_before, fits_after, packed_after, counted_after = one
        if not fits and not fits_after:
            raise ValueError(
                "mask must be causal over the real tokens of each row, which lie in one run, "
                f"got another one in row {row}"
            )
        fits, fits_after = fits and not packed_before, fits_after and not packed_after
        if not fits and not fits_after:
            raise ValueError(
                f"mask must be causal over one sequence in each row, got more in row {row}: packed "
                "sequences are not supported"
            )
        if fits and fits_after:
            after.append(None if counted_before == counted_after else counted_after)
        else:
            after.append(fits_after)
    # Of two tokens, one of them padding, nothing tells which: as in the other rows.
    side = any(after)
    chosen = torch.tensor([side if one is None else one for one in after], device=last.device)
    return last ^ chosen[:, None]


def seen_by_padding(
    seen: torch.Tensor, padding: Padding, last: int
) -> Literal["text", "padding"] | None:
    """What rows of padding see, as :class:`Padding` names it; None where it is something else, or
    where the caller wants the ``last`` tokens alone, which are none of them. Waits for the device.
    """
    if seen.size(1) == 1 or (0 < last <= min(padding.lengths) and not any(padding.ends)):
        return None
    real = padding.mask(seen.device)
    for sees, keys in (("padding", ~real), ("text", real)):
        expected = keys[:, None, :].expand(seen.shape).tril()
        if bool(((seen == expected) | real[:, :, None]).all()):
            one_side = all(0 in ends for ends in zip(padding.starts, padding.ends, strict=True))
            return "text" if sees == "text" else "padding" if one_side else None
    return None


def differs(seen: torch.Tensor, padding: Padding | None, past: int) -> torch.Tensor:
    """Whether a mask of new tokens, from :func:`visible`, is another one than the prompt's and
    ones: bool, without a dimension."""
    batch, num_rows, num_keys = seen.shape
    if padding is None:
        expected = seen.new_ones(batch, num_keys)
    else:
        expected = padding.mask(seen.device, num_keys - padding.seq_len)
    rows = expected[:, None, :].expand(-1, num_rows, -1)
    if num_rows > 1:
        rows = rows.tril(past)
    return (seen != rows).any()
