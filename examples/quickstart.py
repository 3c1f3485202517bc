# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 3 examples/quickstart.py
import ringattn
import torch
import torch.distributed as dist
import torch.nn.functional as F

dist.init_process_group("gloo")
rank = dist.get_rank()
p = ringattn.Partition.zigzag([500, 300, 201])  # how many tokens each rank owns: any numbers
torch.manual_seed(0)
q, k, v = (torch.randn(1, p.seq_len, heads, 64) for heads in (8, 2, 2))  # [B, S, H, D], whole

out = ringattn.ring_attention(*(p.shard(x, rank) for x in (q, k, v)), p)  # [1, S_r, 8, 64]

one_device = F.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
).transpose(1, 2)
error = (out - p.shard(one_device, rank)).abs().max().item()
print(f"rank {rank} owns {p.segments(rank)}: differs from one device by {error:.0e}")
dist.destroy_process_group()
