# SPDX-License-Identifier: Apache-2.0
"""The arguments of a ring call, checked: once for all layers of a model, which repeat one call."""

import operator

import torch

from ringattn._checks import (
    are_plain,
    check_collective,
    check_dims,
    check_int64_or_none,
    check_tensors,
    check_transport,
    finite_scale,
)
from ringattn._distributed.groups import GroupInfo
from ringattn._masks import Mask, documents
from ringattn.partition import (
    Partition,
    PartitionArguments,
    check_partition,
    check_partition_type,
    partition_arguments,
)

# Of the operator ring_forward, after q, k and v, but sinks: lengths, order, layout, causal, scale,
# group_name, transport, depth; window_left, window_right, softcap; cu_seqlens, pieces; of the keys,
# where they have a partition of their own: lengths, order, layout, pieces.
Options = tuple[
    tuple[list[int], list[int], str, bool, float, str, str, int | None],
    tuple[int, int, float],
    tuple[torch.Tensor | None, torch.Tensor | None],
    PartitionArguments | tuple[None, None, None, None],
]

# The latest calls with other arguments, the latest first: layers of a model may alternate between
# masks. What each was given, by value and by identity, and its options.
_latest: list[tuple[tuple[object, ...], tuple[object, ...], Options]] = []
_MAX_LATEST = 4


def ring_options(
    ring: GroupInfo,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    partition: Partition | None,
    mask: Mask,
    scale: float | None,
    transport: str,
    depth: int | None,
    key_partition: Partition | None,
) -> Options:
    """The operator's arguments beside the tensors; ValueError where one breaks a rule of
    :func:`ringattn.ring_attention`.

    A call with the arguments of a recent call reuses its options without a check: they depend on
    nothing else but the values of cu_seqlens, which the operator checks. The operator finds the
    group of the name, and looks at the tensors.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or not are_plain(q, k, v):
        check_tensors(q=q, k=k, v=v)
        # The operator refuses plain tensors for the same reasons, and reports that to the peers.
        check_collective(q=q, k=k, v=v)
        return _check(ring, q, partition, mask, scale, transport, depth, key_partition)
    boundaries = mask.cu_seqlens
    in_tensor = isinstance(boundaries, torch.Tensor)
    values = (scale, ring.name, ring.world_size, q.shape)
    objects = (partition, transport, depth, key_partition, *mask)
    # Objects that may change are not known by their identity. Zeros of both signs are equal.
    keeps = (
        type(partition) in (Partition, type(None))
        and type(key_partition) in (Partition, type(None))
        and type(scale) in (float, type(None))
        and scale != 0.0
        and type(mask.causal) is bool
        and type(mask.window_size) in (tuple, type(None))
        and type(mask.softcap) in (float, int)
        and (type(boundaries) in (tuple, type(None)) or in_tensor)
        and type(transport) is str
        and type(depth) in (int, type(None))
    )
    if keeps:
        for known_values, known_objects, options in _latest:
            if known_values == values and all(map(operator.is_, objects, known_objects)):
                if not in_tensor:
                    return options
                call, scores, (_, pieces), of_keys = options
                return call, scores, (documents(boundaries), pieces), of_keys
    options = _check(ring, q, partition, mask, scale, transport, depth, key_partition)
    # Tuples that hold objects that may change are not kept either.
    held = () if in_tensor else (*(mask.window_size or ()), *(boundaries or ()))
    if keeps and all(type(x) in (int, type(None)) for x in held):
        _latest.insert(0, (values, objects, options))
        del _latest[_MAX_LATEST:]
    return options


def _check(
    ring: GroupInfo,
    q: torch.Tensor,
    partition: Partition | None,
    mask: Mask,
    scale: float | None,
    transport: str,
    depth: int | None,
    key_partition: Partition | None,
) -> Options:
    check_dims("q", q, "[B, S_r, H, D]")
    pieces = None
    if partition is None and ring.world_size == 1:
        # While torch.jit traces, a size is a tensor.
        rows = int(q.size(1)) if torch.jit.is_tracing() else q.size(1)
        lengths, order, layout = [rows], [0], "zigzag"
    else:
        lengths, order, layout, pieces = partition_arguments(check_partition(partition, ring))
    of_keys: PartitionArguments | tuple[None, None, None, None] = (None, None, None, None)
    if key_partition is not None:
        of_keys = partition_arguments(check_partition_type(key_partition, "key_partition"))
    scale = finite_scale(scale, q)
    depth = check_int64_or_none("depth", depth, least=1)
    causal, left, right, softcap, boundaries = mask.arguments()
    check_transport(transport)
    return (
        (lengths, order, layout, causal, scale, ring.name, transport, depth),
        (left, right, softcap),
        (boundaries, pieces),
        of_keys,
    )
