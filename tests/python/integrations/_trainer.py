# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny LLaMA with the Trainer of transformers, and prints the losses as JSON.

Under torchrun the sequence is spread over all ranks: by accelerate's context parallelism, whose
context is replaced by that of ringattn.
"""

import json
import os
import sys
from functools import partial
from typing import Any

import torch
from accelerate.utils import ParallelismConfig
from ringattn.integrations.torch import context_parallel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

SEQ_LEN = 22  # not a multiple of 4, of which torch's own rows would be
STEPS = 6
called = 0


class OnTheRing(TrainerCallback):
    """Sets the context once accelerate has prepared the model."""

    def __init__(self, trainer: Trainer) -> None:
        self.accelerator = trainer.accelerator

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        mesh = self.accelerator.torch_device_mesh["cp"]
        self.accelerator._cp_context = partial(counted, mesh)


def counted(mesh: Any, **given: Any) -> Any:
    global called
    called += 1
    return context_parallel(mesh, **given)


def main(folder: str) -> None:
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
    if world_size > 1:
        # accelerate has context parallelism on GPUs alone, because torch's own has.
        ParallelismConfig._validate_accelerator = lambda self, accelerator: None
        options["parallelism_config"] = ParallelismConfig(cp_size=world_size)
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    if world_size > 1:
        trainer.add_callback(OnTheRing(trainer))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({"losses": losses, "norms": norms, "called": called}))


if __name__ == "__main__":
    main(sys.argv[1])
