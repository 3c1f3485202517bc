# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 2 examples/diffusers_wan.py
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, WanTransformer3DModel
from ringattn.integrations import diffusers as ring_backend
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.accelerator.device_count = lambda: 1  # diffusers divides by it: 0 without a GPU
torch.manual_seed(0)
sizes = {"text_dim": 32, "ffn_dim": 64, "num_layers": 2}
model = WanTransformer3DModel(num_attention_heads=4, attention_head_dim=16, **sizes)
video, text = torch.randn(1, 16, 6, 8, 8), torch.randn(1, 7, 32)  # 6 x 4 x 4 = 96 tokens
inputs = {"hidden_states": video, "encoder_hidden_states": text, "timestep": torch.tensor([500])}

with torch.no_grad():
    (one_device,) = model(**inputs, return_dict=False)
    ring_backend.register()
    model.set_attention_backend("ringattn")
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("ring", "ulysses"))
    model.enable_parallelism(config=ContextParallelConfig(ring_degree=size, mesh=mesh))
    (out,) = model(**inputs, return_dict=False)  # whole, on every rank
print(f"rank {rank}: differs from one device by {(out - one_device).abs().max():.0e}")
dist.destroy_process_group()
