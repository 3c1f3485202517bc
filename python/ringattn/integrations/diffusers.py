# SPDX-License-Identifier: Apache-2.0
"""Attention of diffusers' transformers through the ring: ``register()`` adds the backend
"ringattn".

    from ringattn.integrations import diffusers as ring_backend

    ring_backend.register()
    model.set_attention_backend("ringattn")
    model.enable_parallelism(config=ContextParallelConfig(ring_degree=world_size))

diffusers splits the tokens and gathers the output, by the plan of its model; this module computes
the attention in between. Nothing else of diffusers changes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ringattn._calls import tell_peers
from ringattn._group import Ring, resolve_group
from ringattn.functional import attend, block_attention
from ringattn.partition import Partition

try:
    import diffusers
except ImportError as error:
    raise ImportError(
        "diffusers must be installed for ringattn.integrations.diffusers, got none: type "
        "`pip install 'ringattn[diffusers]'`"
    ) from error

#: The release whose backends, split plans and parallel configs this module knows.
RELEASE = "0.42"
BACKEND = "ringattn"

_MODELS = {
    name: "its text cross attention has a mask, and keys that are split unlike the queries"
    for name in ("LTXVideoTransformer3DModel", "LTX2VideoTransformer3DModel")
}
_PROCESSORS = {
    name: "it attends to cached keys on this rank alone"
    for name in ("Flux2KVAttnProcessor", "Flux2KVParallelSelfAttnProcessor")
}


def register() -> None:
    """Adds "ringattn" to the attention backends of diffusers. A second call changes nothing.

    ``model.set_attention_backend("ringattn")`` then selects it, before or after
    ``model.enable_parallelism(config=ContextParallelConfig(ring_degree=W))``, with
    ``ring_anything=True`` for token counts that W does not divide. Without ``enable_parallelism``
    attention is computed on this device alone. Attention without a parallel config, such as Wan's
    on its text, whose keys every rank has, is local too.

    Raises:
        ValueError: another release of diffusers than 0.42.

    What the backend cannot compute it refuses, with a ValueError: ``ulysses_degree`` above 1 and
    models that it does not serve (LTX, Flux 2 with cached keys) in ``enable_parallelism`` or
    ``set_attention_backend``, which then change nothing; masks, dropout, causal attention over
    several ranks and gradients at the attention call, on every rank.
    """
    if ".".join(diffusers.__version__.split(".")[:2]) != RELEASE:
        raise ValueError(
            f"diffusers must be {RELEASE} for the ringattn backend, got {diffusers.__version__}: "
            f"type `pip install 'diffusers=={RELEASE}.*'`"
        )
    # Not at the top: another release may have them elsewhere.
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    from diffusers.models.modeling_utils import ModelMixin

    if BACKEND in (backend.value for backend in AttentionBackendName):
        return
    backend = _add_member(AttentionBackendName, BACKEND)
    _AttentionBackendRegistry.register(backend, supports_context_parallel=True)(_attention)
    _check_in(ModelMixin)


def _add_member(names: Any, value: str) -> Any:
    """A new member of an enum of strings, which has no public way to get one."""
    name = value.upper()
    member = str.__new__(names, value)
    member._name_, member._value_, member.__objclass__ = name, value, names
    member._sort_order_ = len(names)
    setattr(names, name, member)  # refused once the name is in the map
    names._member_names_.append(name)
    names._member_map_[name] = member
    names._value2member_map_[value] = member
    if hasattr(names, "_hashable_values_"):  # Python 3.13
        names._hashable_values_.append(value)
    return member


# ---- what models are refused, and when a forward begins ------------------------------------------


def _check_in(mixin: Any) -> None:
    """Has ``set_attention_backend`` and ``enable_parallelism`` of all models check the model before
    they change it, and watch for its forwards after."""
    set_backend, enable = mixin.set_attention_backend, mixin.enable_parallelism

    @functools.wraps(set_backend)
    def set_attention_backend(model: Any, backend: str) -> None:
        context = _context_parallel(model._parallel_config)
        if context is not None and backend.lower() == BACKEND:
            _check_model(model, context)
            _watch(model, context)
        set_backend(model, backend)

    @functools.wraps(enable)
    def enable_parallelism(model: Any, *, config: Any, cp_plan: Any = None) -> None:
        context = _context_parallel(config)
        if context is not None and _uses_backend(model):
            _check_model(model, context)
        enable(model, config=config, cp_plan=cp_plan)
        if context is not None:
            _watch(model, context)

    mixin.set_attention_backend = set_attention_backend
    mixin.enable_parallelism = enable_parallelism


def _context_parallel(config: Any) -> Any:
    """The ContextParallelConfig in what ``enable_parallelism`` takes; None where there is none."""
    if isinstance(config, diffusers.ContextParallelConfig):
        return config
    return getattr(config, "context_parallel_config", None)


def _processors(model: Any) -> Iterator[Any]:
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    for module in model.modules():
        if isinstance(module, (Attention, MochiAttention, AttentionModuleMixin)):
            yield module.processor


def _uses_backend(model: Any) -> bool:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    active, _ = _AttentionBackendRegistry.get_active_backend()
    chosen = {getattr(processor, "_attention_backend", None) for processor in _processors(model)}
    return BACKEND in {active if backend is None else backend for backend in chosen}


def _check_model(model: Any, context: Any) -> None:
    """ValueError with all reasons why a model cannot go through the ring with this config."""
    reasons = [
        f"model must be one whose tokens all see each other, got {base.__name__}: "
        f"{_MODELS[base.__name__]}"
        for base in type(model).__mro__
        if base.__name__ in _MODELS
    ]
    reasons += _ulysses(context)
    processors = {type(processor).__name__: processor for processor in _processors(model)}
    for name, processor in processors.items():
        # One without the attribute never hears that there are other ranks.
        alone = (
            None if hasattr(processor, "_parallel_config") else "it knows this rank's keys alone"
        )
        if reason := _PROCESSORS.get(name, alone):
            reasons.append(
                f"attention processors must take part in context parallelism, got {name}: {reason}"
            )
    if reasons:
        raise ValueError(_refusal(reasons))


def _ulysses(context: Any) -> list[str]:
    degree = context.ulysses_degree
    if context.mesh is not None:  # the caller's, which may have another size
        degree = max(degree, context.mesh.size(context.mesh.mesh_dim_names.index("ulysses")))
    if degree == 1:
        return []
    ring_degree = context.ring_degree * degree
    return [f"ulysses_degree must be 1, got {degree}: pass ring_degree={ring_degree}"]


def _refusal(reasons: list[str]) -> str:
    return (
        f"{'; '.join(reasons)} (the attention backend is ringattn; "
        'another one is model.set_attention_backend("native"))'
    )


class _ForwardLengths:
    """The tokens of each rank in the current forward, with ``ring_anything``.

    A forward pre-hook of the model forgets them; the first attention call of the forward exchanges
    them. What is exchanged when must not depend on what one rank has seen before, or ranks would
    wait for each other in different calls.
    """

    def __init__(self) -> None:
        self._partition: Partition | None = None

    def __call__(self, model: torch.nn.Module, args: Any) -> None:
        self._partition = None

    def partition(self, ring: Ring, tokens: torch.Tensor) -> Partition:
        """Collective in the first call of a forward. tokens: [B, S_r, ...] of this rank."""
        if self._partition is None:
            own = torch.tensor([tokens.size(1)], device=tokens.device)
            one_each = Partition.contiguous([1] * ring.world_size)
            lengths = one_each.gather(own, ring.group, dim=0).tolist()
            self._partition = Partition.contiguous(lengths)
        return self._partition


def _watch(model: Any, context: Any) -> None:
    """Has every forward of the model begin with unknown lengths. Models may share a config."""
    if not hasattr(context, "_ringattn_lengths"):
        context._ringattn_lengths = _ForwardLengths()
    if context._ringattn_lengths not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(context._ringattn_lengths)


# ---- the backend ---------------------------------------------------------------------------------


def _attention(
    query: torch.Tensor,  # [B, S_q, H, D]
    key: torch.Tensor,  # [B, S_k, H_kv, D]
    value: torch.Tensor,  # [B, S_k, H_kv, D]
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Note: diffusers drops every argument that has no name here, without a word."""
    reasons = []
    if attn_mask is not None:
        got = f"a {attn_mask.dtype} tensor {list(attn_mask.shape)}"
        reasons.append(f"attn_mask must be None, got {got}")
    if dropout_p != 0:
        reasons.append(f"dropout_p must be 0, got {dropout_p}")
    if key.size(2) != query.size(2) and not enable_gqa:
        reasons.append(
            f"key must have the {query.size(2)} heads of query without enable_gqa, "
            f"got {key.size(2)}"
        )
    context = _context_parallel(_parallel_config)
    if context is not None:
        reasons += _ring_reasons(context, query, key, is_causal)
        ring = resolve_group(context._ring_mesh.get_group())
        if reasons:
            error = ValueError(_refusal(reasons))
            tell_peers(ring, error)
            raise error
        if context.ring_anything:
            partition = context._ringattn_lengths.partition(ring, query)
        else:  # diffusers splits evenly
            partition = Partition.contiguous([query.size(1)] * ring.world_size)
        out, lse = attend(ring, query, key, value, partition, False, scale)
    elif reasons:
        raise ValueError(_refusal(reasons))
    else:
        diagonal = 0 if is_causal else None
        out, lse = block_attention(query, key, value, scale=scale, diagonal=diagonal)
    return (out, lse.transpose(1, 2)) if return_lse else out


def _ring_reasons(
    context: Any, query: torch.Tensor, key: torch.Tensor, is_causal: bool
) -> list[str]:
    """Why a call cannot go over several ranks."""
    reasons = _ulysses(context)
    if is_causal:
        reasons.append("is_causal must be False over several ranks, got True")
    if key.size(1) != query.size(1):
        reasons.append(
            "key must have the tokens of query over several ranks, "
            f"got {key.size(1)} and {query.size(1)}"
        )
    if not hasattr(context, "_ringattn_lengths"):
        reasons.append(
            'the backend must be set by model.set_attention_backend("ringattn") where '
            "enable_parallelism() came before register(), got another way"
        )
    return reasons
