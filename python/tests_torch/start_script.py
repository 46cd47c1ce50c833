"""Run by torchrun: how soon an all-reduce of bf16 for up to 16 MiB is ready, on a GPU, which processes may share.

What crossweft says meanwhile, rank 0 prints, and how long it took: in this process for the first time, and again.
"""

from __future__ import annotations

import logging
import os
import sys
import time

import torch
import torch.distributed as dist

from crossweft.torch import AllReduceCommunicator

LARGEST = 16 << 20

dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.cuda.set_device(DEVICE)
if RANK == 0:
    logging.getLogger("crossweft").addHandler(logging.StreamHandler(sys.stdout))


def ready(name: str) -> None:
    tensor = torch.full((4096,), RANK + 1.0, dtype=torch.bfloat16, device=DEVICE)
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.monotonic()
    ours = AllReduceCommunicator(dist.group.WORLD, device=DEVICE, max_bytes=LARGEST, timeout=60.0)
    joined = time.monotonic()
    ours.prepare((LARGEST // 2,), torch.bfloat16)
    prepared = time.monotonic()
    ours.all_reduce_(tensor)
    torch.cuda.synchronize()
    called = time.monotonic()
    ours.check()
    assert tensor.unique().tolist() == [sum(range(1, SIZE + 1))]
    parts = [1e3 * (end - start) for start, end in ((begin, joined), (joined, prepared), (prepared, called))]
    source = ours.communicator.explain("all-reduce", 65536, dtype="bf16")["source"]
    if RANK == 0:
        print(
            f"{name} start: {1e3 * (prepared - begin):.0f} ms (joining {parts[0]:.0f}, preparing {parts[1]:.0f}), "
            f"first call {parts[2]:.1f} ms; choices come from {source}",
            flush=True,
        )
    dist.barrier()
    ours.close()


ready("first")
ready("second")
print(f"rank {RANK} ok\n", end="", flush=True)
dist.destroy_process_group()
