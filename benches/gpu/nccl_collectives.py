#!/usr/bin/env python3
"""NCCL's collectives, measured as `crossweft bench --device cuda` measures its own: bf16 in a CUDA graph of many calls, one
call ahead to line the ranks up, the slowest rank of each replay, median and least over the replays; microseconds by bytes of
the larger of input and output.

  torchrun --nproc-per-node 2 -- benches/gpu/nccl_collectives.py [--max BYTES] [--factor N] [NAME ...]

Prints a JSON object, `{"all-gather": {"1024": [p50, min], ...}, ...}`. Set NCCL_NVLS_ENABLE=0, or the figures are of multicast.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch_allreduce import measure


def calls_of(name, count, rank, ranks):
    """A call of the collective whose larger buffer has `count` elements."""

    def tensor(elements):
        return torch.ones(elements, dtype=torch.bfloat16, device="cuda")

    whole, part = tensor(count), tensor(count // ranks)
    blocks = list(whole.chunk(ranks))
    root_blocks = blocks if rank == 0 else None
    other = tensor(count) if name == "all-to-all" else None
    return {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "gather": lambda: dist.gather(part, root_blocks, 0),
        "scatter": lambda: dist.scatter(part, root_blocks, 0),
    }[name]


NAMES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--min", type=int, default=1024)
    parser.add_argument("--max", type=int, default=1 << 26)
    parser.add_argument("--factor", type=int, default=4)
    options = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in options.names:
        size = options.min
        while size <= options.max:
            calls = 100 if size < 1 << 20 else 20
            times = measure(calls_of(name, size // 2, rank, ranks), calls)
            found.setdefault(name, {})[size] = times
            size *= options.factor
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
