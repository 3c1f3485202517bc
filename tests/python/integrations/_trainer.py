# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny LLaMA with the Trainer of transformers, and prints the losses as JSON.

Under torchrun the sequence is spread over all ranks: by accelerate's context parallelism, which
finds ringattn's context in the place of torch's, or by ringattn.parallelize, with packed documents.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ringattn
import torch
import torch.distributed.tensor.experimental
from accelerate.utils import ParallelismConfig
from ringattn.integrations.torch import context_parallel
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

sys.path.append(str(Path(__file__).parents[1] / "training"))
from _training import sum_over_the_ring

SEQ_LEN = 22  # not a multiple of 4, of which torch's own rows would be
STEPS = 6
called = 0


def counted(mesh: Any, **given: Any) -> Any:
    global called
    called += 1
    return context_parallel(mesh, **given)


class OverTheRing(Trainer):
    """The same batches on every rank."""

    def get_train_dataloader(self) -> Any:
        return self.batches(self.train_dataset, self.args.per_device_train_batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.batches(rows, self.args.per_device_eval_batch_size)

    def batches(self, rows: Any, size: int) -> Any:
        return DataLoader(rows, batch_size=size, collate_fn=self.data_collator)


class SumOverTheRing(TrainerCallback):
    """Tells DDP to sum gradients over the ring."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.model_wrapped.register_comm_hook(1, sum_over_the_ring)


def main(folder: str, way: str) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99,
            hidden_size=64,
            intermediate_size=112,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="sdpa",
        )
    )
    ids = torch.randint(0, 99, (2 * STEPS, SEQ_LEN))
    ids[:, 1::2] = ids[:, ::2]  # something to learn
    rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
    options: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    if way == "parallelize":
        rows = [{"input_ids": row[: 3 + 5 * i % 19].tolist()} for i, row in enumerate(ids)]
        kinds["data_collator"] = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    elif world_size > 1:
        # accelerate has context parallelism on GPUs alone, because torch's own has.
        ParallelismConfig._validate_accelerator = lambda self, accelerator: None
        options["parallelism_config"] = ParallelismConfig(cp_size=world_size)
        torch.distributed.tensor.experimental.context_parallel = counted
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=STEPS // 2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    if way == "parallelize" and world_size > 1:
        ringattn.parallelize(model)
    trainer_type = OverTheRing if way == "parallelize" else Trainer
    trainer = trainer_type(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4], **kinds
    )
    if way == "parallelize" and world_size > 1:
        trainer.add_callback(SumOverTheRing(trainer))
    trainer.train()
    history = trainer.state.log_history
    shown = {
        name: [entry[key] for entry in history if key in entry]
        for name, key in (("losses", "loss"), ("norms", "grad_norm"), ("evaluated", "eval_loss"))
    }
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({**shown, "called": called}))


if __name__ == "__main__":
    main(*sys.argv[1:])
