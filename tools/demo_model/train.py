#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the small LLaMA that ships with ringattn, on text every Python installation carries.

The text is the language reference behind ``help()`` (``pydoc_data.topics``) and the docstrings of
the standard library. The model reads bytes: a token's id is the byte's value, and byte 0 stands in
front of every document. Three steps, each usable alone:

    python tools/demo_model/train.py --build-corpus corpus.json
    python tools/demo_model/train.py --corpus corpus.json --train DIR
    python tools/demo_model/train.py --corpus corpus.json --evaluate DIR

Without ``--corpus`` the text of the running Python is used.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from corpus import SEPARATOR, Corpus, build_corpus, load_corpus, pack
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 256
CUT = 256  # bytes of context, where it is cut short
CUT_RUN = 16  # neighbouring bytes that one window of cut context predicts
LN2 = math.log(2.0)
LOG_COLUMNS = (
    "step", "tokens", "train_bits_per_byte", "held_out_bits_per_byte", "learning_rate", "seconds",
)  # fmt: skip


# ---- the model ------------------------------------------------------------------------------


def model_config(context: int) -> LlamaConfig:
    """2.9 million weights. RoPE's base is left at 10000, the one default all loaders agree on."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=SEPARATOR,
        eos_token_id=SEPARATOR,
        pad_token_id=None,
        ringattn_tokenizer="bytes",
    )


def add_dropout(model: LlamaForCausalLM, rate: float) -> None:
    """Dropout on what enters the residual stream; the library's LLaMA has it in attention only."""

    def drop(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return F.dropout(output, rate, training=module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def token_bits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """ids [N, T + 1] -> bits the model needs for each of ids[:, 1:], float32 [N, T]."""
    ids = ids.to(next(model.parameters()).device, torch.long)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return loss / LN2


# ---- training -------------------------------------------------------------------------------


def batches(texts: list[str], context: int, batch: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless ids [batch, context + 1]; each epoch has its own document order and crops."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(texts), generator=generator).tolist()
        stream = pack([texts[i] for i in order])
        start = int(torch.randint(context, (), generator=generator))
        rows = stream[start:].unfold(0, context + 1, context)  # [rows, context + 1]
        for picked in torch.randperm(len(rows), generator=generator).split(batch):
            if len(picked) == batch or len(rows) < batch:
                yield rows[picked]


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up over the first 3 %, then a cosine down to 1 % of the peak."""
    warm_up = 0.03
    if progress < warm_up:
        return peak * progress / warm_up
    cosine = 0.5 * (1.0 + math.cos(math.pi * (progress - warm_up) / (1.0 - warm_up)))
    return peak * (0.01 + 0.99 * cosine)


def train(args: argparse.Namespace, corpus: Corpus, device: torch.device) -> None:
    """Trains until ``--steps`` or ``--max-seconds``, whichever ends first: the learning rate's
    cosine ends with it. Keeps the weights that were best on the held-out text."""
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(model_config(args.context)).to(device)
    add_dropout(model, args.dropout)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    texts = list(corpus.split()[0].values())
    held_out = corpus.held_out_stream()
    print(f"{len(pack(texts)):,} bytes to train on, {len(held_out):,} held out", flush=True)

    args.train.mkdir(parents=True, exist_ok=True)
    best_bits, best_weights = math.inf, model.state_dict()
    train_bits: list[torch.Tensor] = []
    start = time.perf_counter()
    with (args.train / "training_log.csv").open("w", newline="") as file:
        log = csv.DictWriter(file, LOG_COLUMNS, lineterminator="\n")
        log.writeheader()
        for step, ids in enumerate(batches(texts, args.context, args.batch, args.seed), start=1):
            seconds = time.perf_counter() - start
            progress = min(1.0, max(step / args.steps, seconds / args.max_seconds))
            rate = learning_rate(args.learning_rate, progress)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast(device.type, torch.bfloat16):
                loss = token_bits(model, ids).mean()
            (loss * LN2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            train_bits.append(loss.detach())

            if step % args.log_every == 0 or progress >= 1.0:
                with torch.autocast(device.type, torch.bfloat16):
                    bits = window_bits(model, held_out, args.context)[1].mean().item()
                tokens = step * args.batch * args.context
                mean = torch.stack(train_bits).mean().item()
                figures = f"{mean:.4f}", f"{bits:.4f}", f"{rate:.3g}", f"{seconds:.1f}"
                row = dict(zip(LOG_COLUMNS, (step, tokens, *figures), strict=True))
                log.writerow(row)
                print(*(f"{column} {value}" for column, value in row.items()), flush=True)
                train_bits.clear()
                if bits < best_bits:
                    best_bits = bits
                    best_weights = {k: v.clone() for k, v in model.state_dict().items()}
            if progress >= 1.0:
                break
    model.load_state_dict(best_weights)
    model.to(torch.bfloat16).save_pretrained(args.train)


# ---- evaluation -----------------------------------------------------------------------------


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
    parser = argparse.ArgumentParser(description="Trains and measures the model that ships here.")
    parser.add_argument("--build-corpus", type=Path, metavar="FILE", help="write the text, stop")
    parser.add_argument(
        "--write-data", type=Path, metavar="DIR", help="for examples/train.py, stop"
    )
    parser.add_argument("--corpus", type=Path, metavar="FILE", help="text that was built before")
    parser.add_argument("--train", type=Path, metavar="DIR", help="train; write model and log here")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="measure the model found here")
    parser.add_argument("--context", type=int, default=8192, help="bytes in a training sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="end by then")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--log-every", type=int, default=50, help="steps between held-out losses")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    if args.build_corpus:
        text = json.dumps(vars(build_corpus()), ensure_ascii=False, indent=0)
        args.build_corpus.write_text(text, "utf-8")
        return
    corpus = load_corpus(args.corpus)
    if args.write_data:
        corpus.write(args.write_data)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.train:
        train(args, corpus, device)
        args.evaluate = args.evaluate or args.train
    if args.evaluate:
        evaluate_directory(args, corpus, device)


if __name__ == "__main__":
    main()
