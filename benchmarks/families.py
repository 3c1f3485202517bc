# SPDX-License-Identifier: Apache-2.0
"""Families of Hugging Face transformers over the ring, beside the same models unmodified.

    torchrun --nproc-per-node 2 benchmarks/families.py
    python benchmarks/families.py

The first runs parallelized models, the second attn_implementation="ringattn" on one process. Small
models of random weights, float32; the unmodified ones in eager attention. Every family with windows
has a layer with one, and where it mixes kinds of layers, one without. Columns:

largest logit  of the unmodified model, of which the next columns are differences
forward        largest difference of a sequence's logits
packed         the same of documents in one sequence, which come as collators of transformers give
               them for flash attention, from those of one call for each
generate       the same of greedy tokens after a prompt
tokens equal   of these tokens, how many are those of the unmodified model
"""

from __future__ import annotations

import copy
import importlib.metadata
import itertools
from typing import Any

import ringattn
import ringattn.integrations.transformers  # registers the attention "ringattn"
import torch
from lib.cli import at_least, common_arguments, names_of, parse
from lib.ranks import process_group, world_size
from lib.report import Report, environment
from transformers import AutoConfig, AutoModelForCausalLM

COLUMNS = (
    *("family", "layers", "largest logit", "forward", "packed"),
    *("generate", "tokens equal"),
)
VOCABULARY = 61
WINDOW = 8
MIXED = ["sliding_attention", "full_attention"]
SOME = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
MIXES = {"sliding_window": WINDOW, "layer_types": MIXED}

#: What layers of a family do, and what its config says of it.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("full", {}),
    "mistral": ("window", {"sliding_window": WINDOW}),
    "qwen2": ("full, window", SOME),
    "qwen3": ("full, window", SOME),
    "gemma2": (
        "window, full; softcap",
        {**MIXES, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    ),
    "gemma3_text": ("window, full", {**MIXES, "query_pre_attn_scalar": 16}),
    "gpt_oss": (
        "window, full; sinks",
        {**MIXES, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "phi3": ("window", {"sliding_window": WINDOW}),
    "olmo2": ("full", {}),
    "olmo3": ("window, full", MIXES),
    "cohere2": ("window, full", MIXES),
    "granite": ("full", {}),
    "granite_swa": ("window, full; sinks", MIXES),
}


def model_of(family: str, device: torch.device) -> Any:
    """Two layers whose weights are large enough for attention to matter, the same on every rank."""
    config = AutoConfig.for_model(
        family,
        **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "attention_dropout": 0.0},
        **FAMILIES[family][1],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.normal_()
        elif parameter.dim() > 1:
            parameter.data.mul_(4)
    return model.eval().requires_grad_(False).to(device)


def packed(model: Any, ids: torch.Tensor, ends: list[int]) -> torch.Tensor:
    pairs = itertools.pairwise(ends)
    places = torch.cat([torch.arange(stop - start) for start, stop in pairs])[None].to(ids.device)
    cu_seq_lens = torch.tensor(ends, dtype=torch.int32, device=ids.device)
    documents = {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens}
    return model(ids, position_ids=places, use_cache=False, **documents).logits


def one_by_one(model: Any, ids: torch.Tensor, ends: list[int]) -> torch.Tensor:
    pairs = itertools.pairwise(ends)
    return torch.cat([model(ids[:, start:stop]).logits for start, stop in pairs], 1)


def largest(difference: torch.Tensor) -> float:
    return difference.abs().max().item()


def row_of(family: str, device: torch.device, options: Any) -> dict[str, Any]:
    plain = model_of(family, device)
    model = copy.deepcopy(plain)
    if world_size() > 1:
        ringattn.parallelize(model)
    else:
        model.set_attn_implementation("ringattn")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (2, options.seq_len), generator=generator).to(device)
    cuts = torch.randperm(options.seq_len - 1, generator=generator)[: options.documents - 1] + 1
    ends = [0, *sorted(cuts.tolist()), options.seq_len]
    logits = plain(ids).logits
    row = {
        "family": family,
        "layers": FAMILIES[family][0],
        "largest logit": largest(logits),
        "forward": largest(model(ids).logits - logits),
        "packed": largest(packed(model, ids, ends) - one_by_one(plain, ids, ends)),
    }
    settings = {"max_new_tokens": options.tokens, "do_sample": False, "output_logits": True}
    ours, theirs = (
        x.generate(ids, **settings, return_dict_in_generate=True) for x in (model, plain)
    )
    row["generate"] = largest(torch.stack(ours.logits) - torch.stack(theirs.logits))
    equal = ours.sequences == theirs.sequences
    row["tokens equal"] = f"{int(equal[:, options.seq_len :].sum())} of {2 * options.tokens}"
    return row


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--families", type=names_of(*FAMILIES), default=list(FAMILIES))
    parser.add_argument("--seq-len", type=at_least(8), default=201)
    parser.add_argument("--documents", type=at_least(2), default=7)
    parser.add_argument("--tokens", type=at_least(1), default=32)
    options = parse(parser)
    with process_group(options.device) as device, torch.no_grad():
        versions = {"transformers": importlib.metadata.version("transformers")}
        shape = f"batch 2, {options.seq_len} tokens, {options.documents} documents, {WINDOW} keys"
        header = {**environment(device), **versions, "shape": shape, "dtype": "float32"}
        report = Report("Logits of families over the ring", header, COLUMNS)
        report.start()
        for family in options.families:
            report.add(row_of(family, device, options))
        report.write(options.out)


if __name__ == "__main__":
    main()
