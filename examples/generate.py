# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 2 examples/generate.py
import torch
import torch.distributed as dist
from ringattn import Partition
from ringattn.generation import generate
from ringattn.models import demo_model_path, load_model

dist.init_process_group("gloo")
prompt = b'def main() -> None:\n    """Runs the program."""\n    parser = argparse.'
prompt_ids = torch.tensor([list(prompt)])  # [B, T]: this model's tokens are bytes
model = load_model(demo_model_path())  # a Hugging Face directory, on all ranks

p = Partition.zigzag([len(prompt) - 20, 20])  # how many tokens each rank owns of the prompt
ids = generate(model, prompt_ids, max_new_tokens=40, partition=p)  # [B, T + N], on every rank
if dist.get_rank() == 0:
    print(bytes(ids[0].tolist()).decode())
dist.destroy_process_group()
