# SPDX-License-Identifier: Apache-2.0
# torchrun --nproc-per-node 2 examples/fms_generate.py
import torch
import torch.distributed as dist
from ringattn.integrations.fms import generate, get_model
from ringattn.models import demo_model_path

dist.init_process_group("gloo")
prompt = b'def main() -> None:\n    """Runs the program."""\n    parser = argparse.'
prompt_ids = torch.tensor([list(prompt)])  # [B, S]: this model's tokens are bytes
settings = {"model_path": demo_model_path(), "data_type": torch.float32}
# On the ring: the ranks own three quarters and a quarter of any sequence.
model = get_model("hf_pretrained", **settings, distributed_strategy="ring", block_lens=[3, 1])
ids = generate(model, prompt_ids, max_new_tokens=40, do_sample=False, use_cache=True)  # [B, S + N]
if dist.get_rank() == 0:
    print(bytes(ids[0].tolist()).decode())
dist.destroy_process_group()
