# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 2 examples/chat.py [MODEL_FOLDER TEXT_FILE]
"""A long document, three questions after it, and one cache: how long each turn takes."""

import sys
import time
from pathlib import Path

import ringattn
import torch
import torch.distributed as dist
from ringattn.models import demo_model_path
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

on_cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if on_cuda else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
if on_cuda:
    torch.cuda.set_device(device)

if len(sys.argv) > 2:
    folder, document = sys.argv[1], Path(sys.argv[2]).read_text()
    encode = AutoTokenizer.from_pretrained(folder).encode
else:  # the model of the package, whose tokens are bytes
    folder, document = demo_model_path(), Path(ringattn.functional.__file__).read_text()[:3000]
    encode = str.encode
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval().to(device)
ringattn.parallelize(model)

ids = torch.empty(1, 0, dtype=torch.int64, device=device)
cache = DynamicCache()  # its keys stay spread over the ranks
for turn in (document, "\n\ndef main() -> None:\n    ", "\n\nimport ", "\n\nclass "):
    ids = torch.cat((ids, torch.tensor([list(encode(turn))], device=device)), 1)
    before, given, start = cache.get_seq_length(), ids.size(1), time.perf_counter()
    ids = model.generate(ids, past_key_values=cache, max_new_tokens=16, do_sample=False)
    ids[0, -1].item()  # waits for the device
    if rank == 0:
        made = f"{given - before} tokens after {before}, {ids.size(1) - given} generated"
        print(f"{made}: {time.perf_counter() - start:.2f} s")
dist.destroy_process_group()
