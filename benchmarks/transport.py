# SPDX-License-Identifier: Apache-2.0
"""One hop of the ring: every rank sends its key/value block to the next one, all at once.

    torchrun --nproc-per-node 2 benchmarks/transport.py --transports process_group,nccl
    torchrun --nproc-per-node 2 benchmarks/transport.py --device cpu

Beside ringattn.rotate_kv: torch.distributed's send and receive, and a plain copy of as many
bytes, on CUDA from the memory of the previous rank's device, on CPU within the process. GB/s
count the bytes that a rank receives. `wrong` counts received bytes that differ from what was
sent.
"""

from __future__ import annotations

from collections.abc import Callable

import ringattn
import torch
import torch.distributed as dist
from lib.cli import (
    check_transports,
    integers,
    parse_under_torchrun,
    timing_arguments,
    transport_names,
)
from lib.ranks import from_all_ranks, process_group, rank, world_size
from lib.report import Report, environment
from lib.timing import Contestant, measure

HEADS, HEAD_DIM = 8, 128
TOKEN_BYTES = 2 * HEADS * HEAD_DIM * 2  # K and V in bfloat16
COLUMNS = ["KB", "what", "ms", "p10", "p90", "GB/s", "wrong"]


def block(sender: int, tokens: int, device: torch.device) -> torch.Tensor:
    """The block that a rank sends, [2, 1, S_r, H_kv, D]; every rank can compute it."""
    generator = torch.Generator().manual_seed(sender)
    shape = (2, 1, tokens, HEADS, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)


def send_and_receive(kv: torch.Tensor) -> torch.Tensor:
    received = torch.empty_like(kv)
    exchange = [
        dist.P2POp(dist.isend, kv, (rank() + 1) % world_size()),
        dist.P2POp(dist.irecv, received, (rank() - 1) % world_size()),
    ]
    for request in dist.batch_isend_irecv(exchange):
        request.wait()
    return received


def ways(tokens: int, device: torch.device, transports: list[str]) -> list[Contestant]:
    """Every way to get the previous rank's block."""
    kv = block(rank(), tokens, device)
    partition = ringattn.Partition.even(tokens * world_size(), world_size())
    nothing = torch.empty(0)

    def rotate(transport: str) -> Callable[[], torch.Tensor]:
        return lambda: ringattn.rotate_kv(kv, partition, transport=transport).wait()

    # The previous rank's block, in its device's memory (this process's own copy of it).
    previous_rank = (rank() - 1) % world_size()
    place = device
    if device.type == "cuda":
        place = torch.device("cuda", previous_rank % torch.cuda.device_count())
    source = block(previous_rank, tokens, place)
    target = torch.empty_like(kv)
    return [
        *(Contestant(f"rotate_kv {name}", rotate(name), nothing) for name in transports),
        Contestant("batch_isend_irecv", lambda: send_and_receive(kv), nothing),
        Contestant("plain copy", lambda: target.copy_(source), nothing),
    ]


def wrong_bytes(contestant: Contestant, expected: torch.Tensor) -> int:
    received = contestant.call().view(torch.uint8)
    wrong = (received != expected.view(torch.uint8)).sum().item()
    return int(from_all_ranks([wrong]).sum().item())


def main() -> None:
    parser = timing_arguments(__doc__)
    default = [64, 256, 1024, 4096, 16384, 65536, 131072]
    parser.add_argument("--kilobytes", type=integers, default=default, help="with commas")
    parser.add_argument("--transports", type=transport_names, default="auto", help="with commas")
    arguments = parse_under_torchrun(parser)
    check_transports(parser, arguments)

    with process_group(arguments.device) as device:
        header = environment(device) | {
            "block": f"K and V, H_kv {HEADS}, D {HEAD_DIM}, bfloat16",
            "rounds": f"{arguments.rounds} after {arguments.warmup} of warm-up, medians",
        }
        report = Report(f"One hop between {world_size()} ranks", header, COLUMNS)
        report.start()
        for kilobytes in arguments.kilobytes:
            tokens = max(1, kilobytes * 1024 // TOKEN_BYTES)
            field = ways(tokens, device, arguments.transports)
            expected = block((rank() - 1) % world_size(), tokens, device)
            wrong = {item.name: wrong_bytes(item, expected) for item in field}
            timings = measure(field, device, rounds=arguments.rounds, warmup=arguments.warmup)
            for name, timing in timings.items():
                report.add(
                    {
                        "KB": kilobytes,
                        "what": name,
                        **timing.columns(),
                        "GB/s": tokens * TOKEN_BYTES / timing.median / 1e6,
                        "wrong": wrong[name],
                    }
                )
        report.write(arguments.out)


if __name__ == "__main__":
    main()
