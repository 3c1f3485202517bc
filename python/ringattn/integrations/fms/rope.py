# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of Hugging Face's configs, of which FMS loses some on the way."""

from __future__ import annotations

from typing import Any

# Families of FMS whose config has a rope_scaling.
_SCALED = ("llama", "mistral", "qwen3")


def rope_arguments(
    architecture: str, variant: str | None, model_path: str | None, given: dict[str, Any]
) -> dict[str, Any]:
    """``given``, keyword arguments of ``get_model``, with the ``rope_scaling`` that a Hugging Face
    config asks for: FMS does not find it where transformers 5 puts it.

    Raises:
        ValueError: a scaling that FMS would leave out or compute otherwise.
    """
    if architecture not in ("hf_pretrained", "hf_configured") or "rope_scaling" in given:
        return given
    from transformers import AutoConfig

    where: Any = variant if model_path is None or architecture == "hf_configured" else model_path
    config = AutoConfig.from_pretrained(
        where, trust_remote_code=given.get("trust_remote_code", False)
    ).get_text_config()
    asked = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = asked.get("rope_type", asked.get("type")) or "default"
    if kind == "default":
        return given
    if kind != "llama3" or config.model_type not in _SCALED:
        raise ValueError(
            f"rotary embedding must be one that FMS computes for {config.model_type}, "
            f"got {kind!r}: FMS would drop it"
        )
    return {**given, "rope_scaling": {**asked, "rope_type": kind}}
