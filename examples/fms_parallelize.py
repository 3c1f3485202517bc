# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 2 examples/fms_parallelize.py
import ringattn
import torch
import torch.distributed as dist
from fms.models.llama import LLaMA, LLaMAConfig
from fms.utils.generation import generate, pad_input_ids

dist.init_process_group("gloo")
torch.manual_seed(0)  # random weights, the same on every rank
model = LLaMA(LLaMAConfig(src_vocab_size=256, emb_dim=128, nheads=4, nlayers=2)).eval()
model.reset_parameters()
prompts = [torch.randint(256, (length,)) for length in (300, 41)]
ids, padding = pad_input_ids(prompts)  # [B, S]; a mask and position ids

options = {"do_sample": False, "use_cache": True, "max_new_tokens": 16, "extra_kwargs": padding}
one_process = generate(model, ids, **options)
ringattn.parallelize(model)  # from here on each rank computes its part of the tokens
over_the_ring = generate(model, ids, **options)
print(f"rank {dist.get_rank()}: same tokens: {torch.equal(one_process, over_the_ring)}")
dist.destroy_process_group()
