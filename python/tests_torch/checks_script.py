"""Run by torchrun with TORCH_DISTRIBUTED_DEBUG=DETAIL: calls that torch compares between ranks."""

import gc
from datetime import timedelta

import torch
import torch.distributed as dist

import crossweft.torch  # noqa: F401

dist.init_process_group("crossweft", timeout=timedelta(seconds=240))
# torch's wrapper does not hold what it wraps.
gc.collect()
rank, world_size = dist.get_rank(), dist.get_world_size()
for group in (None, dist.new_group(backend="crossweft")):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [world_size] * 3
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    assert tensor.tolist() == [world_size**2] * 3
    dist.barrier(group=group)
try:
    dist.all_reduce(torch.ones(3 + rank))
except RuntimeError as error:
    assert "mismatch" in str(error), error
else:
    raise AssertionError("ranks gave tensors of different shapes")
print(f"rank {rank} ok\n", end="", flush=True)
