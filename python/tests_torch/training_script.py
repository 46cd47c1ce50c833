"""Run by torchrun: DDP and FSDP2 train a small model, on this backend and on gloo.

With ``cuda`` as argument this backend's is on a GPU, which processes may share; gloo's stays on the host.
"""

from __future__ import annotations

import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import crossweft.torch  # noqa: F401

ON_GPU = sys.argv[1:] == ["cuda"]
if ON_GPU:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("crossweft", timeout=timedelta(seconds=240))
RANK, SIZE = dist.get_rank(), dist.get_world_size()
GLOO = dist.new_group(backend="gloo")


def device_of(group: dist.ProcessGroup) -> str:
    return "cuda" if ON_GPU and group is dist.group.WORLD else "cpu"


def model(device: str) -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(16, 48), torch.nn.GELU(), torch.nn.Linear(48, 16), torch.nn.LayerNorm(16)]
    return torch.nn.Sequential(*layers).double().to(device)


def train(trained: torch.nn.Module, device: str) -> list[torch.Tensor]:
    """Losses and parameters after some steps, each rank on data of its own."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(RANK)
    seen = []
    for _ in range(5):
        x = torch.randn(8, 16, generator=generator, dtype=torch.float64).to(device)
        loss = (trained(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return seen + [parameter.detach() for parameter in trained.parameters()]


def ddp(group: dist.ProcessGroup, **options: object) -> list[torch.Tensor]:
    # Small buckets, so that there are several.
    device = device_of(group)
    return train(DistributedDataParallel(model(device), process_group=group, bucket_cap_mb=0.004, **options), device)


def fsdp(group: dist.ProcessGroup) -> list[torch.Tensor]:
    device = device_of(group)
    mesh = DeviceMesh.from_group(group, device, mesh_dim_names=("data",))
    sharded = model(device)
    for layer in sharded:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in train(sharded, device)]


for name, run in [
    ("DDP", ddp),
    ("DDP with static graph", lambda group: ddp(group, static_graph=True)),
    ("FSDP2", fsdp),
]:
    expected, found = run(GLOO), [each.cpu() for each in run(dist.group.WORLD)]
    # Sums in another order differ in the last bits, and devices in how they divide.
    tolerances = {"rtol": 1e-6, "atol": 1e-9} if ON_GPU else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(found, expected, **tolerances)
    if RANK == 0:
        print(f"{name} ok", flush=True)
dist.destroy_process_group()
# Gloo's threads end with the last who has its group: one that lets go of a tensor while the interpreter ends takes the
# process with it.
del GLOO, expected, found
gc.collect()
