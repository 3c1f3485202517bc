# SPDX-License-Identifier: Apache-2.0
"""Hugging Face LLaMA directories: ``config.json`` and one or many ``*.safetensors``."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ringattn._checks import check_device, check_floating, read_json
from ringattn._distributed.groups import Group
from ringattn.models.config import LLaMAConfig
from ringattn.models.llama import LLaMA, LLaMABlock

_INDEX = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/name


def load_model(
    path: str | Path,
    *,
    group: Group = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    transport: str = "auto",
    depth: int | None = None,
    on_weights: Callable[[int, int], None] | None = None,
) -> LLaMA:
    """A LLaMA with the weights of a Hugging Face directory, in eval mode, without gradients.

    Files are memory-mapped; each tensor goes straight to its place on ``device``, in ``dtype``.

    Args:
        path: folder with ``config.json`` (of transformers 4 or 5) and ``model.safetensors``, or the
            shards that ``model.safetensors.index.json`` names, or other ``*.safetensors``. End and
            padding tokens are those of ``config.json``, whatever ``generation_config.json`` has.
        group: over whose ranks sequences will be spread, see :class:`LLaMA`. Every rank loads all
            weights.
        device: where the weights shall lie.
        dtype: floating type of the weights, whatever the files have.
        transport: how blocks travel, see :class:`LLaMA`.
        depth: how many blocks may be under way, likewise.
        on_weights: called after each tensor with the bytes that are in place and those of all
            weights: to show how far loading is.

    Raises:
        FileNotFoundError: no folder, no ``config.json``, no safetensors.
        ValueError: another kind of model, weights that are missing, unknown, broken or of another
            shape, a device without a kernel, a dtype that is not floating.
    """
    folder = model_folder(path)
    place, dtype = check_device(device), check_floating(dtype)
    model = LLaMA(
        read_config(folder),
        group=group,
        device="meta",
        dtype=dtype,
        transport=transport,
        depth=depth,
    )
    model.to_empty(device=place)
    model.requires_grad_(False)
    _fill(model, _weight_files(folder), on_weights)
    return model.eval()


def model_folder(path: str | Path) -> Path:
    """The folder at ``path``.

    Raises:
        FileNotFoundError: there is none; for a name of the Hugging Face hub, the error says how to
            get one.
        ValueError: ``path`` is no path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"path must be that of a folder, got {path!r}")
    folder = Path(path)
    if folder.is_dir():
        return folder
    sentence = f"path must be a folder with config.json and *.safetensors, got {str(path)!r}"
    if not folder.exists() and _HUB_NAME.fullmatch(str(path)):
        sentence += f": pass huggingface_hub.snapshot_download({str(path)!r})"
    raise FileNotFoundError(sentence)


def read_config(folder: Path) -> LLaMAConfig:
    """That of the model in ``folder``; errors as in :func:`load_model`."""
    return config_from_hf(read_json_object(folder / "config.json"))


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError where there is none."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def config_from_hf(hf: Mapping[str, Any]) -> LLaMAConfig:
    """Our names for the fields of Hugging Face's ``LlamaConfig``.

    Raises:
        ValueError: a missing field, or a value that this LLaMA does not have.
    """
    _must_be(hf, "model_type", "llama")
    _must_be(hf, "hidden_act", "silu")
    _must_be(hf, "quantization_config", None)

    max_positions = _whole(hf, "max_position_embeddings")
    # transformers 5 keeps in rope_parameters what 4 has in rope_theta and rope_scaling. In a file
    # with both, rope_scaling stands for all of rope_parameters, its rope_theta included.
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = _of_type(hf, name, (dict,), "an object", {}).copy()
    for number in _ROPE_NUMBERS:
        _number(rope, number)
    theta = rope.pop("rope_theta", None) or _number(hf, "rope_theta", 10000.0)
    _must_be({**hf, **rope}, "partial_rotary_factor", 1.0)
    rope.pop("partial_rotary_factor", None)
    if rope.get("rope_type", rope.get("type")) == "llama3":
        rope.setdefault("original_max_position_embeddings", max_positions)
    eos = hf.get("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return LLaMAConfig(
        src_vocab_size=_whole(hf, "vocab_size"),
        emb_dim=_whole(hf, "hidden_size"),
        nlayers=_whole(hf, "num_hidden_layers"),
        nheads=_whole(hf, "num_attention_heads"),
        kvheads=_whole(hf, "num_key_value_heads", 0),
        head_dim=_whole(hf, "head_dim", 0),
        hidden_dim=_whole(hf, "intermediate_size"),
        norm_eps=_number(hf, "rms_norm_eps", 1e-6),
        max_expected_seq_len=max_positions,
        rope_theta=float(theta),
        rope_scaling=rope,
        attn_bias=_flag(hf, "attention_bias"),
        mlp_bias=_flag(hf, "mlp_bias"),
        tie_heads=_flag(hf, "tie_word_embeddings"),
        window_size=_window(hf),
        eos_ids=tuple(_whole({"eos_token_id": token}, "eos_token_id") for token in eos),
        pad_id=_whole(hf, "pad_token_id", None),
    )


def _window(hf: Mapping[str, Any]) -> int | None:
    """The window of all layers. A sliding_window counts where layer_types or use_sliding_window say
    that layers have it: Hugging Face's LLaMA has none by itself."""
    kinds = set(_of_type(hf, "layer_types", (list,), "a list", []))
    if kinds - {"full_attention", "sliding_attention"} or len(kinds) > 1:
        raise ValueError(
            "layer_types must be sliding_attention in all layers or full_attention in all in "
            f"config.json, got {', '.join(sorted(map(str, kinds)))}"
        )
    used = kinds == {"sliding_attention"} if kinds else _flag(hf, "use_sliding_window")
    if not used:
        return None
    return cast(int, _whole(hf, "sliding_window"))


_ROPE_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    "original_max_position_embeddings",
)
_REQUIRED = object()


def _whole(hf: Mapping[str, Any], name: str, default: Any = _REQUIRED) -> Any:
    """An integer; ``default`` where there is none, or null."""
    if default is _REQUIRED and hf.get(name) is None:
        raise ValueError(f"config.json must have {name!r}, got only {', '.join(sorted(hf))}")
    return _of_type(hf, name, (int,), "an integer", default)


def _number(hf: Mapping[str, Any], name: str, default: float | None = None) -> Any:
    return _of_type(hf, name, (int, float), "a number", default)


def _flag(hf: Mapping[str, Any], name: str) -> Any:
    return _of_type(hf, name, (bool,), "true or false", False)


def _of_type(
    hf: Mapping[str, Any], name: str, types: tuple[type, ...], called: str, default: Any
) -> Any:
    value = hf.get(name)
    if value is None:
        return default
    if type(value) not in types:  # True, an instance of int, is no number
        raise ValueError(f"{name} must be {called} in config.json, got {value!r}")
    return value


def _must_be(hf: Mapping[str, Any], name: str, expected: Any) -> None:
    if hf.get(name, expected) != expected:
        raise ValueError(f"{name} must be {expected!r} in config.json, got {hf[name]!r}")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).exists():
        places = read_json_object(folder / _INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(n, str) for n in places.values()):
            raise ValueError(
                f"weight_map must name the file of each weight in {folder / _INDEX}, "
                f"got {repr(places)[:80]}"
            )
        files = [folder / name for name in sorted(set(places.values()))]
    elif (folder / _SINGLE_FILE).exists():
        files = [folder / _SINGLE_FILE]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        wanted = ", ".join(missing) or "*.safetensors"
        raise FileNotFoundError(f"{folder} must hold {wanted}, got a folder without")
    return files


@torch.no_grad()
def _fill(model: LLaMA, files: list[Path], on_weights: Callable[[int, int], None] | None) -> None:
    """Copies every tensor of the files to its place in the model."""
    places = dict(weight_places(model))
    done, total = 0, sum(place.nbytes for place in places.values())
    filled: set[str] = set()
    unknown: list[str] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118  the handle is not iterable
                    if name in places:
                        _copy(name, weights.get_tensor(name), places[name])
                        filled.add(name)
                        done += places[name].nbytes
                        if on_weights is not None:
                            on_weights(done, total)
                    elif not _is_redundant(name, model.config):
                        unknown.append(name)
        except SafetensorError as error:
            raise ValueError(f"{file.name} must be a whole safetensors file, got {error}") from None
    if missing := sorted(places.keys() - filled):
        raise ValueError(f"weights must have {_some(missing)}, got files without")
    if unknown:
        raise ValueError(f"weights must be those of config.json's model, got also {_some(unknown)}")


def _copy(name: str, weight: torch.Tensor, place: torch.Tensor) -> None:
    if weight.shape != place.shape:
        raise ValueError(f"{name} must have shape {list(place.shape)}, got {list(weight.shape)}")
    # To the device first: it converts faster than the host does.
    place.copy_(weight.to(place.device))


def _is_redundant(name: str, config: LLaMAConfig) -> bool:
    """Files may repeat a tied head, and old ones hold RoPE's frequencies."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_heads)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def weight_places(model: LLaMA) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face's name of every tensor, and where it lies in the model."""
    yield "model.embed_tokens.weight", model.base_model.embedding.weight
    yield "model.norm.weight", model.base_model.dec_norm.weight
    if model.head is not None:
        yield "lm_head.weight", model.head.weight
    for index, block in enumerate(model.base_model.layers):
        assert isinstance(block, LLaMABlock)
        for module, rows in _parts(block, model.config):
            for kind, parameter in module.named_parameters():  # weight; bias where there is one
                for name, place in zip(rows, parameter.split(list(rows.values())), strict=True):
                    yield f"model.layers.{index}.{name}.{kind}", place


def _parts(block: LLaMABlock, config: LLaMAConfig) -> list[tuple[nn.Module, dict[str, int]]]:
    """Each layer of a block with Hugging Face's names for its rows: a fused one has several."""
    q_rows, kv_rows = config.nheads * config.head_dim, config.kvheads * config.head_dim
    qkv = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
    gate_up = {"mlp.gate_proj": config.hidden_dim, "mlp.up_proj": config.hidden_dim}
    return [
        (block.ln, {"input_layernorm": config.emb_dim}),
        (block.attn.qkv, qkv),
        (block.attn.dense, {"self_attn.o_proj": config.emb_dim}),
        (block.ff_ln, {"post_attention_layernorm": config.emb_dim}),
        (block.ff_sub_layer.wg1, gate_up),
        (block.ff_sub_layer.w2, {"mlp.down_proj": config.emb_dim}),
    ]
