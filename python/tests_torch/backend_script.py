"""Run by torchrun: what docs/torch.md says of the backend, with gloo beside it."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import crossweft as cw
import crossweft.torch

dist.init_process_group(sys.argv[1], timeout=timedelta(seconds=240))
RANK, SIZE = dist.get_rank(), dist.get_world_size()
OURS = dist.group.WORLD
GLOO = dist.new_group(backend="gloo")
OPS = dist.ReduceOp
CASES: list[Callable[[], None]] = []


def case(test: Callable[[], None]) -> Callable[[], None]:
    CASES.append(test)
    return test


def numbers(*shape: int, dtype: torch.dtype = torch.float32, rank: int = RANK) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in every type."""
    return torch.randint(1, 4, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def both(call: Callable[[dist.ProcessGroup], torch.Tensor | list[torch.Tensor]]) -> None:
    """Both backends give the same."""
    expected, found = call(GLOO), call(OURS)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def raises(error: type[Exception], message: str, call: Callable[[], object]) -> None:
    try:
        call()
    except error as raised:
        assert message in str(raised), raised
    else:
        raise AssertionError(f"nothing raised {error.__name__}: {message}")


@case
def all_reduce() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8):
        for op in (OPS.SUM, OPS.PRODUCT, OPS.MIN, OPS.MAX):
            for shape in ((), (1,), (3, 5), (100, 333)):

                def call(group: dist.ProcessGroup, op=op, shape=shape, dtype=dtype) -> torch.Tensor:
                    tensor = numbers(*shape, dtype=dtype)
                    dist.all_reduce(tensor, op, group=group)
                    return tensor

                both(call)
    # Small numbers, sums of them are exact.
    tensor = numbers(7, dtype=torch.complex64) * (1 + 2j)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, sum(numbers(7, rank=rank) for rank in range(SIZE)) * (1 + 2j))


@case
def all_reduce_by_ops_that_gloo_has_not() -> None:
    total = sum(numbers(50, rank=rank) for rank in range(SIZE))
    tensor = numbers(50)
    dist.all_reduce(tensor, OPS.AVG)
    torch.testing.assert_close(tensor, total / SIZE)
    tensor = torch.tensor([-SIZE - 1 if RANK == 0 else 0, SIZE + 1 if RANK == 0 else 0])
    dist.all_reduce(tensor, OPS.AVG)
    assert tensor.tolist() == [-1, 1], "truncated"
    tensor = torch.full((3,), 1 + 2j)
    dist.all_reduce(tensor, OPS.AVG)
    assert tensor.tolist() == [1 + 2j] * 3
    tensor = numbers(50)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0))
    assert torch.equal(tensor, total * 2)
    # or, and
    for op, expected in ((OPS.SUM, True), (OPS.MAX, True), (OPS.PRODUCT, False), (OPS.MIN, False)):
        tensor = torch.tensor([RANK == 0, True, False])
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == [expected, True, False], (op, tensor)


@case
def what_is_not_supported_says_so() -> None:
    tensor = torch.ones(3, dtype=torch.int32)
    for op in (OPS.BAND, OPS.BOR, OPS.BXOR):
        raises(
            cw.UsageError,
            f"crossweft does not reduce by {op.name}",
            lambda op=op: dist.all_reduce(tensor, op),
        )
    raises(cw.UsageError, "torch.bool", lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), OPS.AVG))
    raises(cw.UsageError, "any source", lambda: dist.recv(tensor))
    raises(
        cw.TensorError,
        "cannot be split among",
        lambda: dist.all_to_all_single(torch.ones(SIZE + 1), torch.ones(SIZE + 1)),
    )
    raises(cw.TensorError, "does not reduce elements of torch.float8_e4m3fnuz",
           lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fnuz)))  # fmt: skip
    raises(cw.TensorError, "takes strided tensors", lambda: dist.all_reduce(torch.eye(3).to_sparse()))
    raises(cw.UsageError, "rank 7 is the root", lambda: dist.broadcast(torch.ones(3), 7))
    dist.barrier()


@case
def tensors_that_are_not_contiguous() -> None:
    def call(group: dist.ProcessGroup) -> torch.Tensor:
        tensor = numbers(6, 8)
        # gloo takes dense ones only.
        view = tensor.t() if group is OURS else tensor.t().contiguous()
        dist.all_reduce(view, group=group)
        return view

    both(call)
    # In the background, where there is no inference mode but the backend's.
    with torch.inference_mode():
        gathered = [torch.zeros(8, 6).t() for _ in range(SIZE)]
        dist.all_gather(gathered, numbers(6, 8), async_op=True).wait()
        assert all(torch.equal(each, numbers(6, 8, rank=rank)) for rank, each in enumerate(gathered))
    whole = numbers(6, 8)
    dist.broadcast(whole[:, 2:4], 0)
    assert torch.equal(whole[:, 2:4], numbers(6, 8, rank=0)[:, 2:4]) and torch.equal(whole[:, :2], numbers(6, 8)[:, :2])


@case
def negative_views() -> None:
    """Their memory has the opposite numbers, as that of a conjugate's imaginary part.

    Torch gives backends (2.14 and newer) copies of such views and drops what is written there, whichever backend it is:
    in place they are tested where torch gives a group the views.
    """
    is_given_views = isinstance(OURS, c10d.ProcessGroup) and type(OURS) is not c10d.ProcessGroup

    def negative() -> torch.Tensor:
        return torch._neg_view(numbers(4))

    def call(group: dist.ProcessGroup) -> list[torch.Tensor]:
        plain = (lambda tensor: tensor) if group is OURS else (lambda tensor: tensor.resolve_neg())
        in_place = []
        if is_given_views:
            largest, first = plain(negative()), plain(negative())
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            dist.broadcast(first, 0, group=group)
            in_place = [largest, first]
        gathered, exchanged = [torch.zeros(4) for _ in range(SIZE)], torch.zeros(2 * SIZE)
        dist.all_gather(gathered, plain(negative()), group=group)
        dist.all_to_all_single(exchanged, plain(torch._neg_view(numbers(2 * SIZE))), group=group)
        sent = plain(torch._neg_view(numbers(3)))
        received = torch.zeros(3)
        ops = [(dist.isend, sent, (RANK + 1) % SIZE), (dist.irecv, received, (RANK - 1) % SIZE)]
        for work in dist.batch_isend_irecv([dist.P2POp(op, each, peer, group) for op, each, peer in ops]):
            work.wait()
        return [each.clone() for each in (*in_place, *gathered, exchanged, received)]

    both(call)


@case
def broadcast() -> None:
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.int8):

        def call(group: dist.ProcessGroup, dtype=dtype) -> torch.Tensor:
            tensor = numbers(4, 9).to(dtype)
            dist.broadcast(tensor, SIZE - 1, group=group)
            return tensor

        both(call)
    tensor = torch.full((3,), RANK, dtype=torch.uint8).view(torch.float8_e4m3fnuz)
    dist.broadcast(tensor, 1)
    assert tensor.view(torch.uint8).tolist() == [1] * 3


@case
def reduce() -> None:
    def call(group: dist.ProcessGroup) -> torch.Tensor:
        tensor = numbers(9)
        dist.reduce(tensor, SIZE - 1, group=group)
        # Others' tensors are undefined.
        return tensor if RANK == SIZE - 1 else torch.zeros(9)

    both(call)


@case
def all_gather() -> None:
    def lists(group: dist.ProcessGroup) -> list[torch.Tensor]:
        outputs = [torch.zeros(3, 5) for _ in range(SIZE)]
        dist.all_gather(outputs, numbers(3, 5), group=group)
        return outputs

    def single(group: dist.ProcessGroup) -> torch.Tensor:
        output = torch.zeros(SIZE * 3, 5, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(output, numbers(3, 5, dtype=torch.bfloat16), group=group)
        return output

    both(lists)
    both(single)
    outputs = [torch.zeros(rank + 1) for rank in range(SIZE)]
    dist.all_gather(outputs, torch.full((RANK + 1,), float(RANK)))
    assert [output.tolist() for output in outputs] == [[float(rank)] * (rank + 1) for rank in range(SIZE)]
    # Of a block of the output.
    output = torch.zeros(SIZE * 4)
    own = output[4 * RANK : 4 * RANK + 4]
    own.fill_(RANK)
    dist.all_gather_into_tensor(output, own)
    assert output.tolist() == [float(rank) for rank in range(SIZE) for _ in range(4)]


@case
def coalesced() -> None:
    def reduced(group: dist.ProcessGroup) -> list[torch.Tensor]:
        tensors = [numbers(3), numbers(4, 4)]
        with dist._coalescing_manager(group):
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        return tensors

    both(reduced)
    outputs, blocks = [torch.zeros(SIZE * 2), torch.zeros(SIZE)], [torch.zeros(2), torch.zeros(1)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(output, torch.full((output.numel() // SIZE,), float(RANK)))
    manager.wait()
    with dist._coalescing_manager():
        for block, output in zip(blocks, outputs, strict=True):
            dist.reduce_scatter_tensor(block, output)
    assert all(torch.equal(block, torch.full_like(block, RANK * SIZE)) for block in blocks)
    # By calls that are not of one kind.
    first, second = numbers(3), numbers(2)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(first, async_op=True)
        dist.broadcast(second, 0, async_op=True)
    manager.wait()
    assert torch.equal(second, numbers(2, rank=0))


@case
def reduce_scatter() -> None:
    def lists(group: dist.ProcessGroup) -> torch.Tensor:
        output = torch.zeros(3, 2)
        dist.reduce_scatter(output, list(numbers(SIZE * 3, 2).chunk(SIZE)), group=group)
        return output

    def single(group: dist.ProcessGroup) -> torch.Tensor:
        output = torch.zeros(3, 2, dtype=torch.int64)
        dist.reduce_scatter_tensor(output, numbers(SIZE * 3, 2, dtype=torch.int64), OPS.MAX, group=group)
        return output

    both(lists)
    both(single)
    inputs = [torch.full((rank + 1,), float(RANK)) for rank in range(SIZE)]
    output = torch.zeros(RANK + 1)
    dist.reduce_scatter(output, inputs)
    assert output.tolist() == [float(sum(range(SIZE)))] * (RANK + 1)
    # Into a block of the input.
    whole = numbers(SIZE * 4)
    expected = sum(numbers(SIZE * 4, rank=rank) for rank in range(SIZE)).chunk(SIZE)[RANK]
    own = whole.chunk(SIZE)[RANK]
    dist.reduce_scatter_tensor(own, whole)
    assert torch.equal(own, expected)


@case
def all_to_all() -> None:
    def single(group: dist.ProcessGroup) -> torch.Tensor:
        output = torch.zeros(SIZE * 2, 3)
        dist.all_to_all_single(output, numbers(SIZE * 2, 3), group=group)
        return output

    def uneven(group: dist.ProcessGroup) -> torch.Tensor:
        # Rank r sends r + q rows to rank q.
        splits = [RANK + rank for rank in range(SIZE)]
        output = torch.zeros(sum(splits), 2)
        dist.all_to_all_single(output, numbers(sum(splits), 2), splits, splits, group=group)
        return output

    both(single)
    both(uneven)
    outputs = [torch.zeros(RANK + rank) for rank in range(SIZE)]
    dist.all_to_all(outputs, [torch.full((RANK + rank,), float(RANK)) for rank in range(SIZE)])
    assert [output.tolist() for output in outputs] == [[float(rank)] * (RANK + rank) for rank in range(SIZE)]


@case
def gather_and_scatter() -> None:
    def gather(group: dist.ProcessGroup) -> list[torch.Tensor]:
        outputs = [torch.zeros(5) for _ in range(SIZE)] if RANK == 1 else None
        dist.gather(numbers(5), outputs, dst=1, group=group)
        return outputs or []

    def scatter(group: dist.ProcessGroup) -> torch.Tensor:
        output = torch.zeros(5)
        dist.scatter(output, list(numbers(SIZE, 5)) if RANK == 1 else None, src=1, group=group)
        return output

    both(gather)
    both(scatter)


@case
def messages() -> None:
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    # More than there is room for on the way, and everybody sends first.
    large = torch.full((1 << 20,), float(RANK))
    received = torch.zeros(1 << 20)
    work = dist.isend(large, right)
    dist.recv(received, left)
    work.wait()
    assert torch.equal(received, torch.full((1 << 20,), float(left)))
    ops = [dist.P2POp(dist.irecv, received[:10], left), dist.P2POp(dist.isend, large[:10] + 1, right)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert received[:10].tolist() == [left + 1.0] * 10
    # Tags in another order than they were sent, and a collective before the receive.
    works = [dist.isend(torch.tensor([float(tag), float(RANK)]), right, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        pair = torch.zeros(2)
        dist.recv(pair, left, tag=tag)
        assert pair.tolist() == [tag, left]
    for work in works:
        work.wait()
    late = dist.irecv(received[:1], left)
    dist.all_reduce(torch.ones(4))
    dist.send(torch.tensor([7.0]), right)
    late.wait()
    assert received[0] == 7
    columns = torch.zeros(4, 4)[:, 1:3]
    work = dist.isend(numbers(4, 4)[:, 1:3], right)
    dist.recv(columns, left)
    work.wait()
    assert torch.equal(columns, numbers(4, 4, rank=left)[:, 1:3])


@case
def works_and_futures() -> None:
    tensors = [torch.ones(1000) for _ in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    # In order with calls that are waited for.
    last = torch.ones(3)
    dist.all_reduce(last)
    assert all(work.get_future().done() for work in works), "a later call has ended"
    assert all(work.wait() for work in works) and last.tolist() == [SIZE] * 3
    assert all(torch.equal(tensor, torch.full((1000,), float(SIZE))) for tensor in tensors)
    tensor = torch.ones(2)
    half = dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0] / 2)
    assert half.wait().tolist() == [SIZE / 2] * 2
    assert dist.barrier(async_op=True).wait()
    # Nothing holds tensors of calls that have ended, once another one has been made.
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    dist.barrier(async_op=True).wait()
    held = weakref.ref(tensor)
    del work, tensor
    gc.collect()
    assert held() is None
    tensor = torch.ones(2)
    # What fails in the background is told where it is waited for.
    group = dist.new_group(backend=sys.argv[1])
    work = dist.all_reduce(torch.ones(10 + RANK), group=group, async_op=True)
    raises(cw.Mismatch, f"rank {RANK}", work.wait)
    raises(RuntimeError, "Mismatch", work.get_future().wait)
    dist.destroy_process_group(group)
    # Of messages too, in the group's own ranks; a small one is on its way before anybody can tell its sender.
    if RANK == 0:
        dist.send(torch.ones(3), 1, tag=9)
    elif RANK == 1:
        work = dist.irecv(torch.ones(4), 0, tag=9)
        raises(cw.Mismatch, "message of tag 9 from rank 0 to rank 1 (0 sends, 1 receives): ", work.wait)
    # Callbacks may wait for calls. Rank 0's cannot be run before there is one.
    if RANK != 0:
        dist.barrier(group=GLOO)
    first = dist.all_reduce(torch.ones(2), async_op=True).get_future()

    def more(_: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        dist.all_reduce(tensor)
        return dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()[0]

    second = first.then(more)
    if RANK == 0:
        dist.barrier(group=GLOO)
    assert second.wait().tolist() == [SIZE] * 3 and tensor.tolist() == [SIZE] * 2
    # A wait that ends before the call does; rank 0 sends only after it.
    if RANK == 1:
        work = dist.irecv(tensor, 0)
        raises(
            cw.Timeout, "has not ended within 0:00:00.010000; it goes on", lambda: work.wait(timedelta(milliseconds=10))
        )
        dist.barrier(group=GLOO)
        work.wait()
    else:
        dist.barrier(group=GLOO)
        if RANK == 0:
            dist.send(tensor, 1)


@case
def objects() -> None:
    objects = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK, "text": "x" * RANK})
    assert objects == [{"rank": rank, "text": "x" * rank} for rank in range(SIZE)]
    payload = [["of", 0] if RANK == 0 else None]
    dist.broadcast_object_list(payload)
    assert payload == [["of", 0]]


# Before torch 2.14 a group is no set of backends.
HAS_BACKENDS = hasattr(torch._C._distributed_c10d.Backend, "all_gather_single")


@case
def groups() -> None:
    evens = dist.new_group(list(range(0, SIZE, 2)), backend=sys.argv[1])
    if RANK % 2 == 0:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=evens)
        assert tensor.tolist() == [len(range(0, SIZE, 2))] * 3
        dist.destroy_process_group(evens)
    if HAS_BACKENDS:
        splits_and_orders()


def splits_and_orders() -> None:
    halves = [list(range(SIZE // 2)), list(range(SIZE // 2, SIZE))]
    half = dist.split_group(split_ranks=halves)
    tensor = torch.full((2,), float(RANK))
    dist.all_reduce(tensor, group=half)
    assert tensor.tolist() == [float(sum(halves[RANK >= SIZE // 2]))] * 2
    dist.destroy_process_group(half)
    if RANK == 0:
        dist.destroy_process_group(dist.split_group(split_ranks=[[0]]))
    else:
        raises(cw.UsageError, f"rank {RANK} is in none of the splits", lambda: dist.split_group(split_ranks=[[0]]))
    reverse = dist.new_group(list(reversed(range(SIZE))), backend=sys.argv[1], sort_ranks=False)
    assert dist.get_rank(reverse) == SIZE - 1 - RANK
    tensor = torch.tensor([float(RANK)])
    dist.broadcast(tensor, group_src=0, group=reverse)
    assert tensor.item() == SIZE - 1
    dist.destroy_process_group(reverse)


@case
def functional_collectives() -> None:
    import torch.distributed._functional_collectives as funcol

    all_gather = funcol.all_gather_single if HAS_BACKENDS else funcol.all_gather_tensor
    reduce_scatter = funcol.reduce_scatter_single if HAS_BACKENDS else funcol.reduce_scatter_tensor

    def call(group: dist.ProcessGroup) -> list[torch.Tensor]:
        tensor = numbers(SIZE * 2, 3)
        results = [
            funcol.all_reduce(tensor, "sum", group),
            all_gather(tensor, 0, group),
            reduce_scatter(tensor, "sum", 0, group),
            funcol.all_to_all_single(tensor, None, None, group),
            *funcol.all_reduce_coalesced([tensor, tensor + 1], "max", group),
        ]
        return [torch.ops._c10d_functional.wait_tensor(result) for result in map(funcol.wait_tensor, results)]

    both(call)


for test in CASES:
    test()
    dist.barrier(group=GLOO)
    if RANK == 0:
        print(f"{test.__name__} ok", flush=True)
of_group = [report for report in cw.report() if report.name == f"torch.distributed group {OURS.group_name}"]
assert {"all_reduce", "all_gather", "send", "recv"} <= {count.operation for count in of_group[0].calls}
dist.destroy_process_group()
