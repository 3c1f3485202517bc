#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a LLaMA over a ring of ranks, on packed documents.

    python scripts/prepare_data.py texts/ --out data
    torchrun --nproc-per-node 2 examples/train.py --data data --out run --tokens 8192 --steps 200
    torchrun --nproc-per-node 2 examples/train.py --data data --out run --steps 400 --resume

Every rank holds the whole model and some tokens of each sequence; documents see themselves alone.
Weights and the optimizer are float32; with ``--dtype bfloat16`` matrix products and attention are
bfloat16, by autocast. ``--out`` gets losses.csv, checkpoints (torch.distributed.checkpoint; another
number of ranks may go on from them) and model/, a Hugging Face directory that ringattn and
transformers load. docs/training.md explains each step.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ringattn
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
import torch.nn.functional as F
from ringattn import Partition, record_timings
from ringattn.models import LLaMA, LLaMAConfig, load_model, save_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

try:
    from tqdm import tqdm
except ModuleNotFoundError:
    sys.exit("train: tqdm must be installed (pip install tqdm), got no such package")

#: Dense bfloat16 TFLOPS, for MFU, by a part of a GPU's name.
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
COLUMNS = ("step", "loss", "learning_rate", "gradient_norm", "tokens_per_s", "mfu")
KEPT_CHECKPOINTS = 2
#: What says the model's shape, by the fields of its config.
SAID_BY = {
    "src_vocab_size": "vocabulary of --data",
    "emb_dim": "--width",
    "nlayers": "--layers",
    "nheads": "--heads",
    "kvheads": "--kv-heads",
    "hidden_dim": "--hidden",
    "rope_theta": "--rope-base",
    "tie_heads": "--tie-heads",
}


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of the ring."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def start(cls) -> Ranks:
        """Of torchrun, or of a process alone; on GPUs where there are any."""
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        if "RANK" not in os.environ:
            return cls(0, 1, device)
        dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


# ---- data ---------------------------------------------------------------------------------------


class Data:
    """Sequences of T + 1 tokens out of a file of scripts/prepare_data.py. Which sequence a step
    gets depends on nothing but the seed and the step's number."""

    def __init__(self, options: argparse.Namespace, part: str, seed: int) -> None:
        folder, tokens, self.across = options.data, options.tokens, options.across_documents
        facts = json.loads((folder / "meta.json").read_text())
        self.ids = np.memmap(folder / f"{part}.bin", facts["dtype"], mode="r")
        self.separator, self.tokens, self.seed = facts["separator"], tokens, seed
        self.count = (len(self.ids) - 1) // tokens
        if self.count < 1:
            sys.exit(f"--tokens must be below the {len(self.ids)} of {part}.bin, got {tokens}")

    def sequence(self, number: int) -> torch.Tensor:
        """int64 ``[T + 1]``."""
        epoch, place = divmod(number, self.count)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        first = int(torch.randperm(self.count, generator=generator)[place]) * self.tokens
        return torch.from_numpy(self.ids[first : first + self.tokens + 1].astype(np.int64))

    def boundaries(self, ids: torch.Tensor) -> torch.Tensor:
        """``cu_seqlens``, int64: a separator stands in front of each document."""
        ends = torch.tensor([0]), torch.tensor([len(ids)])
        if self.separator is None or self.across:
            return torch.cat(ends)
        starts = (ids[1:] == self.separator).nonzero().flatten() + 1
        return torch.cat((ends[0], starts, ends[1]))


# ---- steps --------------------------------------------------------------------------------------


class Trainer:
    """A model, its optimizer, and what is done with them in a step. Every rank makes each call."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self.options, self.ranks, self.step = options, ranks, 0
        self.data = Data(options, "train", options.seed)
        self.model = model_of(options).to(ranks.device).train()
        if options.dropout:
            drop_residuals(self.model, options.dropout)
        matrices = [x for x in self.model.parameters() if x.dim() >= 2]
        vectors = [x for x in self.model.parameters() if x.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
        self.rebalancer = rebalancer_of(self.model, options, ranks)
        if options.recompute:
            recompute_layers(self.model)

    def partition(self, documents: torch.Tensor) -> Partition:
        """Of the sequence that has these boundaries."""
        if self.rebalancer is not None:
            return self.rebalancer.plan(self.options.tokens, documents).partition
        return Partition.packed(documents, self.ranks.size, weights=self.options.weights)

    def part_of_loss(self, sequence: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The sum of this rank's tokens' losses, and the operations of all ranks."""
        ids, targets = (x.to(self.ranks.device) for x in (sequence[:-1], sequence[1:]))
        documents = self.data.boundaries(sequence[:-1])
        p = self.partition(documents)
        half = self.options.dtype == torch.bfloat16
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=half):
            logits = self.model(ids[None], p, cu_seqlens=documents)[0]  # [T_r, V], this rank's rows
        own = p.shard(targets, self.ranks.rank, dim=0)
        pairs = sum(p.num_pairs(rank, cu_seqlens=documents) for rank in range(self.ranks.size))
        loss = F.cross_entropy(logits.float(), own, reduction="sum")
        return loss, flops(self.model, self.options.tokens, pairs)

    def train_step(self) -> dict[str, float]:
        """One step of the optimizer; what losses.csv has of it."""
        options, begun, operations = self.options, time.perf_counter(), 0
        total = torch.zeros((), device=self.ranks.device)
        # Dropout depends on nothing but the seed, the step's number and the rank.
        torch.manual_seed(hash((options.seed, self.step, self.ranks.rank)) % 2**63)
        for number in range(options.accumulate):
            sequence = self.data.sequence(self.step * options.accumulate + number)
            timed = nullcontext() if self.rebalancer is None else record_timings(by_block=False)
            with timed as timings:
                part, of_sequence = self.part_of_loss(sequence)
                part = part / (options.accumulate * options.tokens)  # of all ranks' tokens
                part.backward()
            if self.rebalancer is not None:
                self.rebalancer.observe(timings)
            total += part.detach()
            operations += of_sequence
        ringattn.all_reduce_gradients(self.model)  # parts of all ranks, summed
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        rate = learning_rate(options, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ranks.size > 1:
            dist.all_reduce(total)
        loss = total.item()  # waits for the device
        self.step += 1
        seconds = time.perf_counter() - begun
        tokens = options.accumulate * options.tokens
        peak = self.ranks.size * options.peak_tflops * 1e12
        mfu = operations / seconds / peak if peak else math.nan
        figures = (self.step, loss, rate, float(norm), tokens / seconds, mfu)
        return dict(zip(COLUMNS, figures, strict=True))

    @torch.no_grad()
    def validate(self, count: int = 4) -> float:
        """The loss of a token of val.bin."""
        data = Data(self.options, "val", 0)
        count = min(count, data.count)
        self.model.eval()
        parts = [self.part_of_loss(data.sequence(number))[0] for number in range(count)]
        self.model.train()
        total = torch.stack(parts).sum()
        if self.ranks.size > 1:
            dist.all_reduce(total)
        return total.item() / (count * self.options.tokens)


def model_of(options: argparse.Namespace) -> LLaMA:
    """The same weights on every rank: drawn on the CPU from one seed, or loaded."""
    if options.init is not None:
        return load_model(options.init).requires_grad_(True)
    torch.manual_seed(options.seed)
    facts = json.loads((options.data / "meta.json").read_text())
    separator = facts["separator"]
    config = LLaMAConfig(
        src_vocab_size=facts["vocabulary"],
        emb_dim=options.width,
        nlayers=options.layers,
        nheads=options.heads,
        kvheads=options.kv_heads,
        hidden_dim=options.hidden,
        max_expected_seq_len=options.tokens,
        rope_theta=options.rope_base,
        tie_heads=options.tie_heads,
        eos_ids=() if separator is None else (separator,),
    )
    return LLaMA(config)


def rebalancer_of(
    model: LLaMA, options: argparse.Namespace, ranks: Ranks
) -> ringattn.Rebalancer | None:
    """Plans for the ranks as they are measured now, and in each step."""
    if options.partition != "auto":
        return None
    config = model.config
    profiles = ringattn.measure_profiles(
        num_heads=config.nheads,
        num_kv_heads=config.kvheads,
        head_dim=config.head_dim,
        num_layers=config.nlayers,
        num_tokens=max(1, options.tokens // ranks.size),
        dtype=options.dtype,
        device=ranks.device,
    )
    cost = ringattn.ModelCost.from_config(config, dtype=options.dtype)
    return ringattn.Rebalancer(profiles, cost, training=True)


def drop_residuals(model: LLaMA, rate: float) -> None:
    """Dropout on what enters the residual stream. Each rank draws for its own rows."""

    base = model.base_model
    parts = [part for layer in base.layers for part in (layer.attn.dense, layer.ff_sub_layer)]
    for part in (base.embedding, *parts):
        part.register_forward_hook(lambda part, _, out: F.dropout(out, rate, part.training))


def recompute_layers(model: LLaMA) -> None:
    """Layers keep attention's results for the backward, and compute all others again."""
    contexts = functools.partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, ringattn.checkpoint_policy
    )
    for layer in model.base_model.layers:
        layer.forward = functools.partial(
            checkpoint, layer.forward, use_reentrant=False, context_fn=contexts
        )


def learning_rate(options: argparse.Namespace, step: int) -> float:
    """Linear over the first 3 % of the steps, then a cosine down to a tenth."""
    progress, warm_up = (step + 1) / options.steps, 0.03
    if progress < warm_up:
        return options.learning_rate * progress / warm_up
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))
    return options.learning_rate * (0.1 + 0.9 * cosine)


def flops(model: LLaMA, tokens: int, pairs: int) -> int:
    """Of a forward and a backward, which is two of them, of all ranks."""
    config = model.config
    weights = sum(x.numel() for x in model.parameters())
    if not config.tie_heads:
        weights -= model.base_model.embedding.weight.numel()  # a look-up, no product
    attention = 4 * config.nheads * config.head_dim * config.nlayers * pairs
    return 3 * (2 * weights * tokens + attention)


# ---- files --------------------------------------------------------------------------------------


class Run:
    """The folder of a training: losses.csv, checkpoints/, model/."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        self.losses = folder / "losses.csv"

    def checkpoints(self) -> list[Path]:
        """Those that are whole, the latest last."""
        return sorted((self.folder / "checkpoints").glob("step-????????"))

    def save(self, trainer: Trainer) -> None:
        model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
        state = {"model": model, "optimizer": optimizer, "step": trainer.step}
        place = self.folder / "checkpoints" / f"step-{trainer.step:08}"
        unfinished = place.with_suffix(".unfinished")
        checkpoints.save(state, checkpoint_id=unfinished)
        self.ranks.barrier()
        if self.ranks.rank == 0:
            (unfinished / "config.json").write_text(json.dumps(asdict(trainer.model.config)))
            shutil.rmtree(place, ignore_errors=True)
            unfinished.rename(place)
            for old in self.checkpoints()[:-KEPT_CHECKPOINTS]:
                shutil.rmtree(old)
        self.ranks.barrier()

    def resume(self, trainer: Trainer) -> None:
        """Goes on after the latest checkpoint; from the start where there is none."""
        found = self.checkpoints()
        if found:
            config = found[-1] / "config.json"
            if not config.is_file():
                sys.exit(f"--resume must find {config}, got a checkpoint without it")
            check_config(trainer, json.loads(config.read_text()))
            model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
            state = {"model": model, "optimizer": optimizer, "step": 0}
            checkpoints.load(state, checkpoint_id=found[-1])
            set_state_dict(
                *(trainer.model, trainer.optimizer),
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            trainer.step = state["step"]
        if self.ranks.rank == 0 and self.losses.exists():  # rows of steps that are done again
            lines = self.losses.read_text().splitlines(keepends=True)
            rows = (row for row in lines[1:] if row.strip())
            kept = [row for row in rows if int(row.split(",")[0]) <= trainer.step]
            self.losses.write_text("".join((*lines[:1], *kept)))

    def rows(self) -> Iterator[Any]:
        """A writer of losses.csv, whose rows are in the file at once. A run without a step has no
        file: its folder is still a new one."""
        figures = yield
        self.folder.mkdir(parents=True, exist_ok=True)
        begins = not self.losses.exists() or self.losses.stat().st_size == 0
        with self.losses.open("a", newline="", buffering=1) as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if begins:
                writer.writeheader()
            while True:
                writer.writerow(figures)
                figures = yield

    def export(self, trainer: Trainer) -> None:
        """model/, as Hugging Face has it."""
        if self.ranks.rank == 0:
            facts = json.loads((trainer.options.data / "meta.json").read_text())
            more = {"bos_token_id": facts["separator"]}
            if facts["tokenizer"] == "bytes":
                more["ringattn_tokenizer"] = "bytes"
            save_model(
                trainer.model, self.folder / "model", dtype=trainer.options.dtype, config=more
            )
        self.ranks.barrier()


def check_config(trainer: Trainer, before: dict[str, Any]) -> None:
    """Ends this process where the model is not the one that ``before`` is the config of: a
    checkpoint of more layers, or of other heads in the same shapes, would load without an error."""
    now = json.loads(json.dumps(asdict(trainer.model.config)))
    for name, right in before.items():
        if name not in ("max_expected_seq_len", "eos_ids") and now.get(name) != right:
            subject = f"{name} of --init"
            if trainer.options.init is None:
                subject = SAID_BY.get(name, subject)
            sys.exit(f"{subject} must be {right} with --resume, got {now.get(name)}")


def train(options: argparse.Namespace, ranks: Ranks) -> None:
    run, trainer = Run(options.out, ranks), Trainer(options, ranks)
    if options.resume:
        run.resume(trainer)
    elif run.checkpoints() or run.losses.exists():
        sys.exit(f"--out must be a new folder without --resume, got {options.out}")
    ranks.barrier()
    is_first = ranks.rank == 0
    rows = run.rows() if is_first else None
    if rows is not None:
        next(rows)
    with tqdm(total=options.steps, initial=trainer.step, unit="step", disable=not is_first) as bar:
        while trainer.step < options.steps:
            figures = trainer.train_step()
            if rows is not None:
                rows.send(figures)
            shown = {"loss": f"{figures['loss']:.4f}", "tok/s": f"{figures['tokens_per_s']:,.0f}"}
            if not math.isnan(figures["mfu"]):
                shown["MFU"] = f"{figures['mfu']:.1%}"
            bar.set_postfix(shown)
            bar.update()
            if trainer.step % options.checkpoint_every == 0 or trainer.step == options.steps:
                run.save(trainer)
                validation = trainer.validate()
                if is_first:
                    bar.write(f"step {trainer.step}: validation loss {validation:.4f}")
    run.export(trainer)
    if is_first:
        count = sum(x.numel() for x in trainer.model.parameters())
        print(f"{options.out / 'model'}: {count:,} weights")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FOLDER", help="of scripts/prepare_data.py")
    add("--out", type=Path, required=True, metavar="FOLDER", help="of this training")
    add("--resume", action="store_true", help="go on after the latest checkpoint of --out")
    add("--init", metavar="DIR", help="weights to begin with, of Hugging Face (default: random)")
    add("--tokens", type=int, default=8192, metavar="T", help="of a sequence (default: 8192)")
    add("--accumulate", type=int, default=1, metavar="N", help="sequences of a step (default: 1)")
    add("--steps", type=int, default=200, help="in all (default: 200)")
    add("--weights", type=float, nargs="+", metavar="W", help="shares of the ranks (default: even)")
    add(
        "--partition",
        default="packed",
        choices=("packed", "auto"),
        help="auto: ranks are measured, and own what they are fast enough for (default: packed)",
    )
    add("--learning-rate", type=float, default=1e-3, metavar="LR", help="(default: 1e-3)")
    add("--dropout", type=float, default=0.0, metavar="P", help="of what layers add (default: 0)")
    add("--across-documents", action="store_true", help="a token sees documents before its own")
    add("--clip", type=float, default=1.0, help="of the gradients' norm (default: 1)")
    add(
        "--dtype", default=None, choices=("float32", "bfloat16"), help="(default: bfloat16 on GPUs)"
    )
    add("--seed", type=int, default=0, help="of weights and data (default: 0)")
    add("--checkpoint-every", type=int, default=50, metavar="STEPS", help="(default: 50)")
    add("--recompute", action="store_true", help="layers compute again what their backward needs")
    add("--peak-tflops", type=float, help="of a rank, for MFU (default: by the GPU's name)")
    for name, size in (("layers", 4), ("width", 256), ("heads", 8), ("kv-heads", 2)):
        add(f"--{name}", type=int, default=size, help=f"of a new model (default: {size})")
    add("--hidden", type=int, default=768, help="of its feed-forward layers (default: 768)")
    add("--rope-base", type=float, default=5e5, help="of its positions (default: 500000)")
    add("--tie-heads", action="store_true", help="its head has the embedding's weights")
    options = parser.parse_args()
    sizes = ("layers", "width", "heads", "hidden")
    for name in ("tokens", "accumulate", "steps", "checkpoint-every", *sizes):
        if (number := getattr(options, name.replace("-", "_"))) < 1:
            parser.error(f"--{name} must be at least 1, got {number}")
    if not (options.data / "meta.json").is_file():
        parser.error(f"--data must be a folder of scripts/prepare_data.py, got {options.data}")
    if options.kv_heads < 1 or options.heads % options.kv_heads != 0:
        parser.error(f"--kv-heads must divide --heads {options.heads}, got {options.kv_heads}")
    most, step = 256 * options.heads, 8 * options.heads  # head dimensions that kernels take
    if options.init is None and (options.width % step != 0 or options.width > most):
        parser.error(
            f"--width must be a multiple of {step}, at most {most}, with --heads {options.heads}, "
            f"got {options.width}"
        )
    if not 0 <= options.dropout <= 1:
        parser.error(f"--dropout must be from 0 to 1, got {options.dropout}")
    if options.init is not None and options.tie_heads:
        parser.error("--tie-heads must be left out with --init, whose model says it")
    if options.weights is not None and options.partition == "auto":
        parser.error("--weights must be left out with --partition auto, which measures them")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        Partition.packed([0, options.tokens], world_size, weights=options.weights)
    except ValueError as error:
        parser.error(f"--{error}")
    return options


def main() -> None:
    options, ranks = parse(), Ranks.start()
    on_gpu = ranks.device.type == "cuda"
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    options.dtype = getattr(torch, dtype)
    if options.peak_tflops is None:
        name = torch.cuda.get_device_name(ranks.device) if on_gpu and dtype == "bfloat16" else ""
        options.peak_tflops = next((x for part, x in PEAK_TFLOPS.items() if part in name), 0.0)
    try:
        train(options, ranks)
    finally:
        if ranks.size > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
