"""Run by torchrun: the backend on CUDA tensors of processes that share a GPU, with gloo on copies of them beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel

import crossweft as cw
import crossweft.torch

torch.cuda.set_device(0)
dist.init_process_group(sys.argv[1], timeout=timedelta(seconds=60))
RANK, SIZE = dist.get_rank(), dist.get_world_size()
OURS = dist.group.WORLD
GLOO = dist.new_group(backend="gloo")
OPS = dist.ReduceOp
CASES: list[Callable[[], None]] = []


def case(test: Callable[[], None]) -> Callable[[], None]:
    CASES.append(test)
    return test


def numbers(*shape: int, dtype: torch.dtype = torch.float32, rank: int = RANK) -> torch.Tensor:
    """Small whole numbers on the host, so that sums are exact in every type."""
    return torch.randint(1, 4, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def total(*shape: int) -> torch.Tensor:
    return sum(numbers(*shape, rank=rank) for rank in range(SIZE))


def both(call: Callable[[dist.ProcessGroup, torch.device], torch.Tensor | list[torch.Tensor]]) -> None:
    """Both backends give the same, each on its own device."""
    expected, found = call(GLOO, torch.device("cpu")), call(OURS, torch.device("cuda", 0))
    found = [each.cpu() for each in found] if isinstance(found, list) else found.cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@case
def all_reduce() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for op in (OPS.SUM, OPS.MAX):
            for shape in ((), (3, 5), (100, 333)):

                def call(group, device, op=op, shape=shape, dtype=dtype):
                    tensor = numbers(*shape, dtype=dtype).to(device)
                    dist.all_reduce(tensor, op, group=group)
                    return tensor

                both(call)
    tensor = numbers(6, 8).cuda().t()
    dist.all_reduce(tensor, OPS.AVG)
    torch.testing.assert_close(tensor.cpu(), total(6, 8).t() / SIZE)


@case
def moves() -> None:
    def broadcast(group, device):
        tensor = numbers(4, 9).bool().to(device)
        dist.broadcast(tensor, SIZE - 1, group=group)
        return tensor

    def reduce(group, device):
        tensor = numbers(9).to(device)
        dist.reduce(tensor, SIZE - 1, group=group)
        return tensor if RANK == SIZE - 1 else torch.zeros(9)

    def lists(group, device):
        outputs = [torch.zeros(3, 5, device=device) for _ in range(SIZE)]
        dist.all_gather(outputs, numbers(3, 5).to(device), group=group)
        return outputs

    def single(group, device):
        output = torch.zeros(SIZE * 3, 5, dtype=torch.bfloat16, device=device)
        dist.all_gather_into_tensor(output, numbers(3, 5, dtype=torch.bfloat16).to(device), group=group)
        return output

    def scattered(group, device):
        output = torch.zeros(3, 2, device=device)
        dist.reduce_scatter_tensor(output, numbers(SIZE * 3, 2).to(device), group=group)
        other = torch.zeros(3, 2, device=device)
        dist.reduce_scatter(other, list(numbers(SIZE * 3, 2).to(device).chunk(SIZE)), group=group)
        return [output, other]

    def exchanged(group, device):
        output = torch.zeros(SIZE * 2, 3, device=device)
        dist.all_to_all_single(output, numbers(SIZE * 2, 3).to(device), group=group)
        return output

    for call in (broadcast, reduce, lists, single, scattered, exchanged):
        both(call)


@case
def works() -> None:
    torch.cuda.synchronize()
    sources = [numbers(50_000).cuda() * turn for turn in range(4)]
    results = [dist.all_reduce(source, async_op=True) for source in sources]
    for turn, (work, source) in enumerate(zip(results, sources, strict=True)):
        work.wait()
        # In the order of the current stream, which nobody has waited for.
        assert torch.equal((source + 1).cpu(), total(50_000) * turn + 1)
    tensor = numbers(5).cuda()
    half = dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0] / 2)
    assert torch.equal(half.wait().cpu(), total(5) / 2)
    # Calls that are waited for and others, on any stream, follow one another.
    tensor, side = numbers(1000).cuda(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    work = dist.all_reduce(tensor, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
        dist.all_reduce(tensor)
    torch.cuda.current_stream().wait_stream(side)
    dist.all_reduce(tensor)
    assert torch.equal(tensor.cpu(), total(1000) * SIZE**2)
    dist.barrier()
    tensors = [numbers(3).cuda(), numbers(4, 4).cuda()]
    with dist._coalescing_manager(group=OURS, device=torch.device("cuda", 0), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert [tensor.cpu().tolist() for tensor in tensors] == [total(3).tolist(), total(4, 4).tolist()]


@case
def host_tensors() -> None:
    """Of the same group."""
    tensor = numbers(5)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total(5))
    objects = [None] * SIZE
    dist.all_gather_object(objects, RANK)
    assert objects == list(range(SIZE))


@case
def graphs() -> None:
    tensor = numbers(3000).cuda()
    dist.all_reduce(tensor)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            reduced = tensor.clone()
            work = dist.all_reduce(reduced, async_op=True)
            work.wait()
            reduced += 1
        for turn in range(10):
            tensor.fill_(turn + RANK)
            graph.replay()
            assert reduced.unique().tolist() == [sum(turn + rank for rank in range(SIZE)) + 1]


@case
def functional_collectives() -> None:
    old = not hasattr(funcol, "all_gather_single")

    def call(group, device):
        tensor = numbers(SIZE * 2, 3).to(device)
        results = [
            funcol.all_reduce(tensor, "sum", group),
            (funcol.all_gather_tensor if old else funcol.all_gather_single)(tensor, 0, group),
            (funcol.reduce_scatter_tensor if old else funcol.reduce_scatter_single)(tensor, "sum", 0, group),
            funcol.all_to_all_single(tensor, None, None, group),
        ]
        return [funcol.wait_tensor(result) for result in results]

    both(call)


@case
def ddp() -> None:
    def train(group, device):
        torch.manual_seed(3)
        layers = [torch.nn.Linear(16, 48), torch.nn.GELU(), torch.nn.Linear(48, 16)]
        model = torch.nn.Sequential(*layers).double().to(device)
        trained = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.004)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(RANK)
        for _ in range(4):
            x = torch.randn(8, 16, generator=generator, dtype=torch.float64).to(device)
            optimizer.zero_grad()
            (trained(x) - x.roll(1, dims=1)).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in trained.parameters()]

    expected, found = train(GLOO, torch.device("cpu")), train(OURS, torch.device("cuda", 0))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@case
def blocks_of_any_size() -> None:
    def uneven_lists(group, device):
        outputs = [torch.zeros(rank + 1, device=device) for rank in range(SIZE)]
        if group is OURS:
            dist.all_gather(outputs, torch.full((RANK + 1,), float(RANK), device=device), group=group)
            return outputs
        return [torch.full((rank + 1,), float(rank)) for rank in range(SIZE)]

    def uneven_sums(group, device):
        output = torch.zeros(RANK + 1, device=device)
        if group is OURS:
            inputs = [torch.full((rank + 1,), float(RANK), device=device) for rank in range(SIZE)]
            dist.reduce_scatter(output, inputs, group=group)
            return output
        return torch.full((RANK + 1,), float(sum(range(SIZE))))

    def splits(group, device):
        # Rank r sends r + q rows to rank q.
        rows = [RANK + rank for rank in range(SIZE)]
        output = torch.zeros(sum(rows), 2, device=device)
        dist.all_to_all_single(output, numbers(sum(rows), 2).to(device), rows, rows, group=group)
        return output

    def gather(group, device):
        outputs = [torch.zeros(5, device=device) for _ in range(SIZE)] if RANK == 1 else None
        dist.gather(numbers(5).to(device), outputs, dst=1, group=group)
        return outputs or []

    def scatter(group, device):
        output = torch.zeros(5, device=device)
        dist.scatter(output, list(numbers(SIZE, 5).to(device)) if RANK == 1 else None, src=1, group=group)
        return output

    for call in (uneven_lists, uneven_sums, splits, gather, scatter):
        both(call)
    outputs = [torch.zeros(RANK + rank, device="cuda") for rank in range(SIZE)]
    dist.all_to_all(outputs, [torch.full((RANK + rank,), float(RANK), device="cuda") for rank in range(SIZE)])
    assert [output.tolist() for output in outputs] == [[float(rank)] * (RANK + rank) for rank in range(SIZE)]


@case
def messages() -> None:
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    large = torch.full((1 << 18,), float(RANK), device="cuda")
    received = torch.zeros(1 << 18, device="cuda")
    # Everybody sends first.
    work = dist.isend(large, right)
    dist.recv(received, left)
    work.wait()
    large += 10
    assert torch.equal(received, torch.full_like(received, float(left)))
    ops = [dist.P2POp(dist.irecv, received[:10], left), dist.P2POp(dist.isend, large[:10], right)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert received[:10].tolist() == [left + 10.0] * 10
    # A collective between, and tags in another order.
    works = [dist.isend(torch.tensor([float(tag), float(RANK)], device="cuda"), right, tag=tag) for tag in (1, 2)]
    dist.all_reduce(torch.ones(4, device="cuda"))
    for tag in (2, 1):
        pair = torch.zeros(2, 2, device="cuda")
        dist.recv(pair[:, 0], left, tag=tag)
        assert pair[:, 0].tolist() == [tag, left]
    for work in works:
        work.wait()


failed = []
for test in CASES:
    try:
        test()
    except Exception as error:
        # The others may be right.
        failed.append(f"{test.__name__}: {type(error).__name__}: {error}")
    dist.barrier(group=GLOO)
    if RANK == 0 and not (failed and failed[-1].startswith(test.__name__)):
        print(f"{test.__name__} ok", flush=True)
if RANK == 0 and os.environ.get("CROSSWEFT_TELL"):
    print(*cw.report(), sep="\n")
assert not failed, failed
dist.destroy_process_group()
