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
from typing import Any

import torch

from ringattn._distributed.errors import refuse
from ringattn._distributed.groups import GroupInfo, resolve_group
from ringattn._masks import Mask
from ringattn.functional import attend, block_attention
from ringattn.partition import Partition

try:
    import diffusers
except ImportError as error:
    raise ImportError(
        "diffusers must be installed for ringattn.integrations.diffusers, got none: type "
        "`pip install 'diffusers==0.42.*'`"
    ) from error

#: The release whose backends, split plans and parallel configs this module knows.
RELEASE = "0.42"
BACKEND = "ringattn"

# Others are refused over several ranks: their masks, caches or splits are not those of this module.
_MODELS = ("FluxTransformer2DModel", "WanTransformer3DModel")
_PROCESSORS = ("FluxAttnProcessor", "WanAttnProcessor")


def register() -> None:
    """Adds "ringattn" to the attention backends of diffusers. A second call changes nothing.

    ``model.set_attention_backend("ringattn")`` then selects it, before or after
    ``model.enable_parallelism(config=ContextParallelConfig(ring_degree=W))``, with
    ``ring_anything=True`` for token counts that W does not divide. The models are Flux
    (``FluxTransformer2DModel``) and Wan (``WanTransformer3DModel``), under ``torch.no_grad()``.
    Without ``enable_parallelism`` any model computes attention on this device alone. Wan's
    attention to its text, whose keys every rank has, is local too.

    Raises:
        ValueError: another release of diffusers than 0.42.

    What the backend cannot compute it refuses with a ValueError. Other models (LTX among them),
    other attention processors (IP adapters), a ``cp_plan`` and ``ulysses_degree`` above 1 are
    refused by ``enable_parallelism`` or ``set_attention_backend``, which then change nothing.
    Masks, dropout, and over several ranks causal attention and gradients are refused by the
    attention call, on every rank.
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


class _Watch:
    """What a model's parallel config tells the attention calls: why they are refused, and the
    tokens of each rank in the current forward, with ``ring_anything``.

    It is a forward pre-hook of the model, which forgets the lengths; the first attention call of
    the forward exchanges them. No rank may decide by what it has seen before when ranks exchange:
    ranks would wait for each other in different calls.
    """

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._partition: Partition | None = None

    def __call__(self, model: torch.nn.Module, args: Any) -> None:
        self._partition = None
        if torch.compiler.is_compiling():
            return
        processors = _processors(model)
        # A processor that replaced another one has no config: it knows this rank's keys alone.
        late = {
            type(processor).__name__
            for processor in processors
            if getattr(processor, "_parallel_config", None) is not model._parallel_config
        }
        if late and _uses_backend(processors):
            got = f"{', '.join(sorted(late))} after it"
            _check([f"attention processors must be set before enable_parallelism, got {got}"])

    def partition(self, ring: GroupInfo, tokens: torch.Tensor) -> Partition:
        """Collective in the first call of a forward. tokens: [B, S_r, ...] of this rank."""
        if self._partition is None:
            own = torch.tensor([tokens.size(1)], device=tokens.device)
            one_each = Partition.contiguous([1] * ring.world_size)
            lengths = one_each.gather(own, ring.group, dim=0).tolist()
            self._partition = Partition.contiguous(lengths)
        return self._partition


def _check_in(mixin: Any) -> None:
    """Has ``set_attention_backend`` and ``enable_parallelism`` of all models check the model before
    they change it, and the latter watch for its forwards."""
    set_backend, enable = mixin.set_attention_backend, mixin.enable_parallelism

    @functools.wraps(set_backend)
    def set_attention_backend(model: Any, backend: str) -> None:
        config = model._parallel_config
        if _context_parallel(config) is not None and backend.lower() == BACKEND:
            _check(_config_reasons(config))
        set_backend(model, backend)

    @functools.wraps(enable)
    def enable_parallelism(model: Any, *, config: Any, cp_plan: Any = None) -> None:
        context = _context_parallel(config)
        reasons = [] if context is None else _model_reasons(model, context, cp_plan)
        if _uses_backend(_processors(model)):
            _check(reasons)
        enable(model, config=config, cp_plan=cp_plan)
        if context is not None:
            shared = model._parallel_config  # models may have the same one
            watch = shared._ringattn = getattr(shared, "_ringattn", None) or _Watch()
            watch.reasons += reasons
            model.register_forward_pre_hook(watch)

    mixin.set_attention_backend = set_attention_backend
    mixin.enable_parallelism = enable_parallelism


def _context_parallel(config: Any) -> Any:
    """The ContextParallelConfig in what ``enable_parallelism`` takes; None where there is none."""
    if isinstance(config, diffusers.ContextParallelConfig):
        return config
    return getattr(config, "context_parallel_config", None)


def _processors(model: Any) -> list[Any]:
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_processor import Attention, MochiAttention

    kinds = (Attention, MochiAttention, AttentionModuleMixin)  # those that diffusers looks for
    return [module.processor for module in model.modules() if isinstance(module, kinds)]


def _uses_backend(processors: list[Any]) -> bool:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    active, _ = _AttentionBackendRegistry.get_active_backend()
    chosen = {getattr(processor, "_attention_backend", None) for processor in processors}
    return BACKEND in {active if backend is None else backend for backend in chosen}


def _model_reasons(model: Any, context: Any, cp_plan: Any) -> list[str]:
    """Why a model cannot go through the ring with this config."""
    reasons = []
    if {base.__name__ for base in type(model).__mro__}.isdisjoint(_MODELS):
        got = type(model).__name__
        reasons.append(f"model must be {' or '.join(_MODELS)} over several ranks, got {got}")
    names = {type(processor).__name__ for processor in _processors(model)}
    if others := sorted(names.difference(_PROCESSORS)):
        allowed, got = " or ".join(_PROCESSORS), ", ".join(others)
        reasons.append(f"attention processors must be {allowed} over several ranks, got {got}")
    if cp_plan is not None:
        reasons.append("cp_plan must be None, which is the model's own, got another one")
    degree = context.ulysses_degree
    if context.mesh is not None:  # the caller's, which may have another size
        degree = max(degree, context.mesh.size(context.mesh.mesh_dim_names.index("ulysses")))
    if degree > 1:
        ring_degree = context.ring_degree * degree
        reasons.append(f"ulysses_degree must be 1, got {degree}: pass ring_degree={ring_degree}")
    return reasons


def _config_reasons(config: Any) -> list[str]:
    """Why the model that has this config cannot go through the ring."""
    if hasattr(config, "_ringattn"):
        return config._ringattn.reasons
    return ["register() must be called before enable_parallelism, got a model that is parallel"]


def _check(reasons: list[str]) -> None:
    if reasons:
        raise ValueError(_refusal(reasons))


def _refusal(reasons: list[str]) -> str:
    return (
        f"{'; '.join(reasons)} (the attention backend is ringattn; "
        'another one is model.set_attention_backend("native"))'
    )


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
        reasons += _config_reasons(_parallel_config)
        if is_causal:
            reasons.append("is_causal must be False over several ranks, got True")
        if key.size(1) != query.size(1):
            reasons.append(
                "key must have the tokens of query over several ranks, "
                f"got {key.size(1)} and {query.size(1)}"
            )
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            reasons.append(
                "inputs must not require grad over several ranks, where what diffusers gathers has "
                "no gradient: call the model under torch.no_grad()"
            )
        ring = resolve_group(context._ring_mesh.get_group())
        if reasons:
            refuse(ring, _refusal(reasons))
        if context.ring_anything:
            partition = _parallel_config._ringattn.partition(ring, query)
        else:  # diffusers splits evenly
            partition = Partition.contiguous([query.size(1)] * ring.world_size)
        out, lse = attend(ring, query, key, value, partition, Mask(causal=False), scale)
    else:
        _check(reasons)
        diagonal = 0 if is_causal else None
        out, lse = block_attention(query, key, value, scale=scale, diagonal=diagonal)
    return (out, lse.transpose(1, 2)) if return_lse else out
