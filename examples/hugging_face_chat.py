# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 2 examples/hugging_face_chat.py
import ringattn
import torch
import torch.distributed as dist
from ringattn.models import demo_model_path
from transformers import AutoModelForCausalLM, DynamicCache

dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(demo_model_path()).eval()  # on all ranks
ringattn.parallelize(model, partition=[3, 1])  # rank 0 takes three quarters of each prompt

ids, cache = torch.empty(1, 0, dtype=torch.int64), DynamicCache()  # keys stay spread over the ranks
for turn in (b"import argparse\nimport ", b"\n\n\ndef main() -> None:\n    parser = "):
    ids = torch.cat((ids, torch.tensor([list(turn)])), 1)  # this model's tokens are bytes
    ids = model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)
if dist.get_rank() == 0:
    print(bytes(ids[0].tolist()).decode())
dist.destroy_process_group()
