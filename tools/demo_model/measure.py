#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the text of the small LLaMA that ships with ringattn, and measures the model.

The text is what every Python installation carries: the language reference behind ``help()``
(``pydoc_data.topics``) and the docstrings of the standard library. The model reads bytes: a token's
id is the byte's value, and byte 0 stands in front of every document.

    python tools/demo_model/measure.py --build-corpus corpus.json
    python tools/demo_model/measure.py --corpus corpus.json --write-data DATA
    python tools/demo_model/measure.py --corpus corpus.json --evaluate DIR

Without ``--corpus`` the text of the running Python is used. examples/train.py trains the model on
DATA: tools/demo_model/train.sh is the recipe.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from corpus import SEPARATOR, Corpus, build_corpus, load_corpus
from transformers import LlamaForCausalLM

CUT = 256  # bytes of context, where it is cut short
CUT_RUN = 16  # neighbouring bytes that one window of cut context predicts
LN2 = math.log(2.0)


def token_bits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """ids [N, T + 1] -> bits the model needs for each of ids[:, 1:], float32 [N, T]."""
    ids = ids.to(next(model.parameters()).device, torch.long)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return loss / LN2


@torch.no_grad()
def window_bits(
    model: torch.nn.Module, stream: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts the stream into windows of ``context`` bytes, side by side.

    Returns, for every predicted byte, how many bytes of context it had and the bits it took.
    """
    was_training = model.training
    model.eval()
    bits = [
        token_bits(model, stream[None, i : i + context + 1])[0].cpu()
        for i in range(0, len(stream) - 1, context)
    ]
    model.train(was_training)
    return torch.cat([torch.arange(1, len(window) + 1) for window in bits]), torch.cat(bits)


@torch.no_grad()
def cut_context_bits(
    model: torch.nn.Module, stream: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Bits of the bytes at ``targets`` when each sees at most the CUT bytes before it.

    ``targets`` comes in runs of CUT_RUN neighbours. A window of CUT bytes predicts one run: its
    last byte sees the whole window, its first all but CUT_RUN - 1.
    """
    last = targets.view(-1, CUT_RUN)[:, -1:]  # [runs, 1]
    windows = stream[last - CUT + torch.arange(CUT + 1)]  # [runs, CUT + 1]
    bits = [token_bits(model, part)[:, -CUT_RUN:].cpu() for part in windows.split(64)]
    return torch.cat(bits).view(-1)


def evaluate(model: torch.nn.Module, stream: torch.Tensor, context: int) -> dict[str, Any]:
    """Bits per byte over the whole stream, by position, and with the context cut short."""
    position, bits = window_bits(model, stream, context)
    edges = [1, 257, 1024, 2048, 4096, 8193]
    by_position = {
        f"{low}-{high - 1}": bits[(position >= low) & (position < high)].mean().item()
        for low, high in itertools.pairwise(edges)
        if low <= context
    }
    if context != 4096:  # the shorter the window, the more of the text lies at 2048-4095
        position, bits_4096 = window_bits(model, stream, 4096)
    else:
        bits_4096 = bits
    index = ((position >= 2048) & (position < 4096)).nonzero().view(-1)
    index = index[: len(index) // CUT_RUN * CUT_RUN]  # windows give 2048 each, the last one fewer
    cut_bits = cut_context_bits(model, stream, index + 1)  # bits[i] is for stream[i + 1]
    full = bits_4096[index]
    gain = cut_bits - full
    return {
        "held_out_bytes": len(stream),
        "context": context,
        "bits_per_byte": bits.mean().item(),
        "bits_per_byte_by_position": by_position,
        "positions_2048_to_4095": {
            "bytes": len(index),
            "bits_per_byte": full.mean().item(),
            f"bits_per_byte_context_cut_to_{CUT}": cut_bits.mean().item(),
            "gain": gain.mean().item(),
            "gain_standard_error": gain.std().item() / len(gain) ** 0.5,
        },
    }


@torch.no_grad()
def sample(model: LlamaForCausalLM, stream: torch.Tensor, seed: int) -> dict[str, str]:
    """A sampled continuation of 2048 held-out bytes; the prompt's last 200 bytes are shown."""
    torch.manual_seed(seed)
    prompt = stream[:2048].long()[None].to(model.device)
    how = {"do_sample": True, "temperature": 0.7, "top_k": 0, "pad_token_id": SEPARATOR}
    mask = torch.ones_like(prompt)
    out = model.generate(prompt, attention_mask=mask, max_new_tokens=400, **how)[0].tolist()
    show = [bytes(part).decode("utf-8", "replace") for part in (out[1848:2048], out[2048:])]
    return {"prompt_end": show[0], "continuation": show[1]}


def evaluate_directory(args: argparse.Namespace, corpus: Corpus, device: torch.device) -> None:
    """Prints the table and writes ``evaluation.json`` next to the weights."""
    model = LlamaForCausalLM.from_pretrained(args.evaluate).float().to(device).eval()
    stream = corpus.held_out_stream()
    report: dict[str, Any] = {
        "text_of_python": corpus.python,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "weights": sum(p.numel() for p in model.parameters()),
    }
    report |= evaluate(model, stream, model.config.max_position_embeddings)
    report["sample"] = sample(model, stream, args.seed)
    (args.evaluate / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")

    middle = report["positions_2048_to_4095"]
    rows = {f"all {report['held_out_bytes']:,} held-out bytes": report["bits_per_byte"]}
    rows |= {f"  at positions {name}": v for name, v in report["bits_per_byte_by_position"].items()}
    rows["windows of 4096: positions 2048-4095"] = middle["bits_per_byte"]
    rows[f"the same bytes, context cut to {CUT}"] = middle[f"bits_per_byte_context_cut_to_{CUT}"]
    print(f"{'held-out text of Python ' + corpus.python:40} bits/byte")
    for name, value in rows.items():
        print(f"{name:40} {value:9.4f}")
    print("", report["sample"]["prompt_end"], "-" * 20, report["sample"]["continuation"], sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--build-corpus", type=Path, metavar="FILE", help="write the text, stop")
    add("--corpus", type=Path, metavar="FILE", help="text that was built before")
    add("--write-data", type=Path, metavar="DATA", help="write it as scripts/prepare_data.py does")
    add("--evaluate", type=Path, metavar="DIR", help="measure the model found here")
    add("--seed", type=int, default=0, help="of the sample (default: 0)")
    args = parser.parse_args()

    if args.build_corpus:
        text = json.dumps(vars(build_corpus()), ensure_ascii=False, indent=0)
        args.build_corpus.write_text(text, "utf-8")
        return
    corpus = load_corpus(args.corpus)
    if args.write_data:
        corpus.write(args.write_data)
    if args.evaluate:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        evaluate_directory(args, corpus, device)


if __name__ == "__main__":
    main()
