"""PyTorch's process groups of backend "nccl" on this library: two processes, each with a GPU of its own if there are
two, or else sharing one.

    python torch_cuda.py LIBRARY [NAME...]

LIBRARY is libcrossweft_nccl.so, which the processes get by LD_PRELOAD; NAMEs are tests to run instead of all. Prints a
line for each test of each process, and exits with 1 if one has failed. EAGER=0 makes communicators when they are first
used, DESTROY=0 leaves them to the end of the process.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

RANKS = 2
# What only this library says.
VERSION = 23005
TESTS: list[Callable[[Ranks], None]] = []


class Ranks:
    """This process's place, and torch once it is imported."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank = int(os.environ["RANK"])
        self.device = torch.device("cuda", self.rank % torch.cuda.device_count())

    def full(self, value: float, *shape: int, dtype: object = None):
        return self.torch.full(shape, value, device=self.device, dtype=dtype or self.torch.float32)

    def equal(self, got, expected) -> None:
        torch = self.torch
        if not torch.is_tensor(expected):
            expected = torch.full_like(got, expected)
        assert torch.equal(got.cpu(), expected.cpu()), f"{got.flatten()[:8]} is not {expected.flatten()[:8]}"


def test(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
    TESTS.append(function)
    return function


@test
def this_library_is_bound(ranks: Ranks) -> None:
    version = ctypes.c_int()
    assert ctypes.CDLL(None).ncclGetVersion(ctypes.byref(version)) == 0
    assert version.value == VERSION, version.value


@test
def all_reduce(ranks: Ranks) -> None:
    torch, dist = ranks.torch, ranks.dist
    for count in (1, 1000, 1 << 20):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            tensor = ranks.full(ranks.rank + 1, count, dtype=dtype)
            dist.all_reduce(tensor)
            ranks.equal(tensor, 3)
    for op, expected in (
        (dist.ReduceOp.MAX, 3.0),
        (dist.ReduceOp.MIN, 2.0),
        (dist.ReduceOp.PRODUCT, 6.0),
        (dist.ReduceOp.AVG, 2.5),
    ):
        tensor = ranks.full(ranks.rank + 2, 77)
        dist.all_reduce(tensor, op)
        ranks.equal(tensor, expected)


@test
def pre_multiplied_sum(ranks: Ranks) -> None:
    dist = ranks.dist
    for factor in (0.5, ranks.full(0.5, 1)):
        tensor = ranks.full(2.0 * (ranks.rank + 1), 100)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
        ranks.equal(tensor, 3.0)


@test
def asynchronous(ranks: Ranks) -> None:
    torch, dist = ranks.torch, ranks.dist
    tensors = [ranks.full(1.0, 1 << 16) for _ in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.all_reduce(tensors[0].clone())
    for work in works:
        work.wait()
    for tensor in tensors:
        ranks.equal(tensor, 2.0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = ranks.full(1.0, 1 << 16)
        for _ in range(3):
            dist.all_reduce(tensor)
    dist.all_reduce(tensors[0])
    side.synchronize()
    ranks.equal(tensor, 8.0)
    ranks.equal(tensors[0], 4.0)


@test
def all_gather(ranks: Ranks) -> None:
    torch, dist = ranks.torch, ranks.dist
    own = torch.arange(999, device=ranks.device) + 1000 * ranks.rank
    expected = torch.cat([torch.arange(999), torch.arange(999) + 1000])
    both = torch.zeros(2 * 999, dtype=own.dtype, device=ranks.device)
    dist.all_gather_into_tensor(both, own)
    ranks.equal(both, expected)
    parts = [torch.zeros_like(own) for _ in range(RANKS)]
    dist.all_gather(parts, own)
    ranks.equal(torch.cat(parts), expected)
    objects = [None] * RANKS
    dist.all_gather_object(objects, {"rank": ranks.rank})
    assert objects == [{"rank": 0}, {"rank": 1}], objects


@test
def reduce_scatter(ranks: Ranks) -> None:
    torch, dist = ranks.torch, ranks.dist
    given = torch.arange(2 * 500, device=ranks.device, dtype=torch.float32)
    own = ranks.full(0.0, 500)
    dist.reduce_scatter_tensor(own, given)
    ranks.equal(own, 2 * given[500 * ranks.rank :][:500])


@test
def all_to_all(ranks: Ranks) -> None:
    torch, dist = ranks.torch, ranks.dist
    given = torch.arange(2 * 300, device=ranks.device) + 1000 * ranks.rank
    got = torch.zeros_like(given)
    dist.all_to_all_single(got, given)
    half = torch.arange(300) + 300 * ranks.rank
    ranks.equal(got, torch.cat([half, half + 1000]))


@test
def broadcast_and_reduce(ranks: Ranks) -> None:
    dist = ranks.dist
    for root in range(RANKS):
        tensor = ranks.full(ranks.rank + 5, 1234)
        dist.broadcast(tensor, root)
        ranks.equal(tensor, root + 5)
        tensor = ranks.full(ranks.rank + 5, 1234)
        dist.reduce(tensor, root)
        if ranks.rank == root:
            ranks.equal(tensor, 11.0)
    objects = [{"from": ranks.rank}]
    dist.broadcast_object_list(objects, 1)
    assert objects == [{"from": 1}], objects


@test
def barrier(ranks: Ranks) -> None:
    ranks.dist.barrier()


@test
def coalesced(ranks: Ranks) -> None:
    torch, dist = ranks.torch, ranks.dist
    from torch.distributed.distributed_c10d import _coalescing_manager

    tensors = [ranks.full(i + 1.0, 100 * (i + 1)) for i in range(4)]
    with _coalescing_manager(device=ranks.device):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for i, tensor in enumerate(tensors):
        ranks.equal(tensor, 2 * (i + 1.0))
    gathered = [ranks.full(0.0, 2 * 100 * (i + 1)) for i in range(4)]
    with _coalescing_manager(device=ranks.device, async_ops=True) as manager:
        for tensor, both in zip(tensors, gathered, strict=True):
            dist.all_gather_into_tensor(both, tensor)
    manager.wait()
    for i, both in enumerate(gathered):
        ranks.equal(both, 2 * (i + 1.0))
    torch.cuda.synchronize()


@test
def graphs(ranks: Ranks) -> None:
    torch, dist = ranks.torch, ranks.dist
    tensor, both = ranks.full(1.0, 5000), ranks.full(0.0, 10000)
    dist.all_reduce(tensor.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
        tensor.add_(1.0)
        # Not called before.
        dist.all_gather_into_tensor(both, tensor)
    expected = 1.0
    for _ in range(5):
        graph.replay()
        expected = 2 * expected + 1
    torch.cuda.synchronize()
    ranks.equal(tensor, expected)
    ranks.equal(both, expected)
    dist.all_reduce(tensor)
    ranks.equal(tensor, 2 * expected)


@test
def groups(ranks: Ranks) -> None:
    dist = ranks.dist
    both = dist.new_group([0, 1])
    tensor = ranks.full(1.0, 100)
    dist.all_reduce(tensor, group=both)
    ranks.equal(tensor, 2.0)
    split = dist.split_group(split_ranks=[[0, 1]])
    dist.all_reduce(tensor, group=split)
    ranks.equal(tensor, 4.0)
    alone = dist.split_group(split_ranks=[[0], [1]])
    dist.all_reduce(tensor, group=alone)
    ranks.equal(tensor, 4.0)
    for group in (both, split, alone):
        dist.destroy_process_group(group)


@test
def data_parallel_training(ranks: Ranks) -> None:
    torch = ranks.torch
    from torch.nn.parallel import DistributedDataParallel

    def model():
        torch.manual_seed(5)
        layers = (torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        return torch.nn.Sequential(*layers).to(ranks.device)

    torch.manual_seed(7)
    batch, target = torch.randn(16, 32, device=ranks.device), torch.randn(16, 8, device=ranks.device)
    alone, parallel = model(), DistributedDataParallel(model(), device_ids=[ranks.device.index])
    loss = torch.nn.MSELoss()
    optimisers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (alone, parallel)]
    for _ in range(3):
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss(alone(batch), target).backward()
        own = slice(8 * ranks.rank, 8 * ranks.rank + 8)
        loss(parallel(batch[own]), target[own]).backward()
        for one, other in zip(alone.parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
        for optimiser in optimisers:
            optimiser.step()


@test
def messages(ranks: Ranks) -> None:
    torch, dist = ranks.torch, ranks.dist
    other = 1 - ranks.rank
    tensor, got = ranks.full(ranks.rank + 1, 1000), ranks.full(0.0, 1000)
    if ranks.rank == 0:
        dist.send(tensor, other)
        dist.recv(got, other)
    else:
        dist.recv(got, other)
        dist.send(tensor, other)
    ranks.equal(got, other + 1.0)
    got.zero_()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, got, other)]):
        work.wait()
    ranks.equal(got, other + 1.0)
    places = ranks.full(ranks.rank + 1, 100_000)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, places, other), dist.P2POp(dist.irecv, places, other)]):
        work.wait()
    ranks.equal(places, other + 1.0)
    counts = [[10, 20], [30, 40]]
    given = torch.arange(sum(counts[ranks.rank]), device=ranks.device) + 100 * ranks.rank
    sizes = [row[ranks.rank] for row in counts]
    uneven = torch.zeros(sum(sizes), dtype=given.dtype, device=ranks.device)
    dist.all_to_all_single(uneven, given, sizes, counts[ranks.rank])
    starts = [0, 10] if ranks.rank else [0, 0]
    lengths = sizes
    parts = [
        torch.arange(lengths[0]) + (starts[1] if ranks.rank else 0),
        torch.arange(lengths[1]) + 100 + (30 if ranks.rank else 0),
    ]
    ranks.equal(uneven, torch.cat(parts))
    parts = [ranks.full(0.0, 5) for _ in range(RANKS)] if ranks.rank == 0 else None
    dist.gather(ranks.full(ranks.rank, 5), parts, 0)
    if parts:
        ranks.equal(torch.stack(parts)[:, 0], torch.tensor([0.0, 1.0]))


def one_process() -> int:
    ranks = Ranks()
    torch, dist = ranks.torch, ranks.dist
    torch.cuda.set_device(ranks.device)
    print(f"rank {ranks.rank}: {ranks.device}", flush=True)
    eager = ranks.device if os.environ.get("EAGER", "1") == "1" else None
    dist.init_process_group(
        "nccl",
        init_method=os.environ["RENDEZVOUS"],
        rank=ranks.rank,
        world_size=RANKS,
        timeout=timedelta(seconds=40),
        device_id=eager,
    )
    named = sys.argv[2:]
    failed = 0
    for function in TESTS:
        name = function.__name__
        if named and name not in named:
            continue
        start = time.monotonic()
        try:
            function(ranks)
            torch.cuda.synchronize()
            outcome = "ok"
        except Exception:
            failed += 1
            outcome = "FAILED\n" + traceback.format_exc()
        print(f"rank {ranks.rank}: {name}: {outcome} ({time.monotonic() - start:.2f} s)", flush=True)
    if os.environ.get("DESTROY", "1") == "1":
        start = time.monotonic()
        dist.destroy_process_group()
        print(f"rank {ranks.rank}: destroyed ({time.monotonic() - start:.2f} s)", flush=True)
    return 1 if failed else 0


def main() -> int:
    library = os.path.abspath(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "LD_PRELOAD": library,
        "CROSSWEFT_NCCL_VERSION": str(VERSION),
        "RENDEZVOUS": f"tcp://127.0.0.1:{port}",
    }
    processes = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **variables, "RANK": str(rank)})
        for rank in range(RANKS)
    ]
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(one_process() if "RANK" in os.environ else main())
