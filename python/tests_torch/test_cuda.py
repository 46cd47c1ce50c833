"""AllReduceCommunicator on CUDA tensors, its ranks as threads that share a GPU. Skipped where there is none.

Where nothing may run at the same time as another rank's kernel, ranks meet first: torch loads kernels when they are
first used, and waits for the device when a capture begins.
"""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import in_threads, on_host, torchrun

import crossweft as cw
from crossweft.torch import AllReduceCommunicator

HERE = Path(__file__).parent
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
RANKS = 2
#: Seconds after which a rank that waits in vain is told.
LIMIT = 30.0
#: Device-wide waits are part of beginning a capture.
CAPTURING = threading.Lock()
#: torch sets tensors of new memory up one after another: no rank's kernel waits meanwhile.
ALLOCATING = threading.Lock()


def on_gpu(ranks: int, rank_main: Callable[[AllReduceCommunicator], Any], limit: float = LIMIT) -> list[Any]:
    """Runs ``rank_main`` as every rank, in a thread with a stream of its own, all on the first GPU."""
    # Else the first thread that needs the allocator would hold up the others' kernels.
    torch.zeros(1 << 20, device="cuda")

    def one(communicator: cw.Communicator) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            ours = AllReduceCommunicator(communicator)
            assert ours.device == torch.device("cuda", 0)
            result = rank_main(ours)
            meet(ours)
            ours.check()
            return result

    return in_threads(ranks, one, device="cuda:0", timeout=limit)


def meet(ours: AllReduceCommunicator) -> None:
    """Returns when all ranks' kernels have ended."""
    torch.cuda.current_stream().synchronize()
    ours.communicator.barrier()


def captured(ours: AllReduceCommunicator, body: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of what ``body`` does, and what it returns."""
    body()
    meet(ours)
    graph = torch.cuda.CUDAGraph()
    with CAPTURING, torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        made = body()
    meet(ours)
    return graph, made


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers on the host, so that sums are exact in every type."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def stacked(ranks: int, *shape: int) -> torch.Tensor:
    return torch.stack([numbers(rank, *shape, dtype=torch.float64) for rank in range(ranks)])


def test_devices_by_number() -> None:
    unique_id = cw.UniqueId()
    with pytest.raises(cw.UsageError, match='there is no device `cuda:x`; give "cpu", "cuda", "cuda:0"'):
        cw.Communicator(0, 1, unique_id, device="cuda:x")
    with pytest.raises(cw.DeviceError):
        # Without a driver, or without so many devices.
        cw.Communicator(0, 1, unique_id, device="cuda:999")
    if torch.cuda.is_available():
        ours = AllReduceCommunicator(cw.Communicator(0, 1, unique_id, device="cuda:0"))
        assert ours.device == torch.device("cuda:0") and ours.communicator.device == "cuda:0"
        assert ours.why_not(torch.ones(3)) == "it is on cpu, the communicator on cuda:0"
        assert ours.all_reduce(torch.ones(3, device="cuda")).tolist() == [1, 1, 1]
        ours.close()


@needs_device
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_reduce(ranks: int) -> None:
    # Kernels of all types are tested elsewhere; compiling those of one takes seconds where that was never done.
    dtypes = [torch.bfloat16, torch.float32, torch.int64]

    def rank_main(ours: AllReduceCommunicator) -> None:
        for dtype in dtypes if ranks == 2 else dtypes[:1]:
            for shape in [(1,), (7, 5), (64, 4097), (2048, 1024)]:
                everybody = stacked(ranks, *shape)
                for op, expected in [("sum", everybody.sum(0)), ("max", everybody.amax(0))]:
                    tensor = numbers(ours.rank, *shape, dtype=dtype).cuda()
                    out = torch.empty_like(tensor)
                    meet(ours)
                    result = ours.all_reduce(tensor, op)
                    ours.all_reduce(tensor, op, out=out)
                    kept = tensor.clone()
                    assert ours.all_reduce_(tensor, op) is tensor
                    meet(ours)
                    for found in (result, out, tensor):
                        assert torch.equal(on_host(found), expected.to(dtype)), (dtype, shape, op)
                    assert torch.equal(on_host(kept), numbers(ours.rank, *shape, dtype=dtype)), "the input stays"
        with pytest.raises(cw.TensorError, match="it is on cpu, the communicator on cuda:0"):
            ours.all_reduce(torch.ones(3))

    on_gpu(ranks, rank_main)


@needs_device
def test_layouts() -> None:
    def rank_main(ours: AllReduceCommunicator) -> None:
        total = stacked(RANKS, 6, 10).sum(0).float()
        whole = numbers(ours.rank, 6, 10).cuda()
        transposed, columns, out = whole.clone().t(), whole[:, 2:7], torch.empty(10, 6, device="cuda")
        assert ours.should_all_reduce(transposed) and not ours.should_all_reduce(columns)
        meet(ours)
        result = ours.all_reduce(transposed)
        ours.all_reduce(transposed, out=out)
        ours.all_reduce_(transposed)
        ours.all_reduce_(columns)
        # At any element.
        odd = ours.all_reduce(whole.view(-1)[1:4])
        meet(ours)
        assert torch.equal(on_host(result), total.t()) and result.stride() == transposed.stride()
        assert torch.equal(on_host(out), total.t()) and torch.equal(on_host(transposed), total.t())
        assert torch.equal(on_host(whole[:, 2:7]), total[:, 2:7]) and torch.equal(
            on_host(whole[:, :2]), numbers(ours.rank, 6, 10)[:, :2]
        )
        expected = [total[0, 1].item(), *(RANKS * total[0, 2:4]).tolist()]
        assert on_host(odd).tolist() == expected
        paths = {(count.path, count.largest, count.calls) for count in ours.report().calls}
        assert paths == {("direct", 240, 2), ("staged", 240, 1), ("staged", 120, 1), ("direct", 12, 1)}

    on_gpu(RANKS, rank_main)


@needs_device
@pytest.mark.parametrize("ranks", [2, 3])
def test_other_collectives(ranks: int) -> None:
    def rank_main(ours: AllReduceCommunicator) -> None:
        for rows, columns in [(2, 3), (17, 1000)]:
            shape = (ranks * rows, columns)
            everybody = stacked(ranks, *shape).float()
            own = everybody[ours.rank].cuda()
            block = slice(ours.rank * rows, (ours.rank + 1) * rows)
            out = torch.empty(ranks * rows, columns, device="cuda")
            moved, wide = own.clone(), torch.empty(rows, 2 * columns, device="cuda")
            meet(ours)
            gathered = ours.all_gather(own[:rows], out)
            scattered = ours.reduce_scatter(own)
            ours.reduce_scatter(own, out=wide[:, ::2])
            exchanged = ours.all_to_all(own)
            ours.broadcast(moved, root=1)
            # To each rank as many rows more as its number.
            sent, received = list(range(ranks)), [ours.rank] * ranks
            uneven = ours.all_to_all(own[: sum(sent)], input_splits=sent, output_splits=received)
            meet(ours)
            begin = sum(sent[: ours.rank])
            assert torch.equal(on_host(uneven), everybody[:, begin : begin + ours.rank].reshape(-1, columns))
            assert torch.equal(on_host(gathered), everybody[:, :rows].reshape(shape)) and gathered is out
            assert torch.equal(on_host(scattered), everybody.sum(0)[block])
            assert torch.equal(on_host(wide[:, ::2]), everybody.sum(0)[block])
            assert torch.equal(on_host(exchanged), everybody[:, block].reshape(shape))
            assert torch.equal(on_host(moved), everybody[1])

    on_gpu(ranks, rank_main)


@needs_device
def test_calls_follow_one_another_on_any_streams() -> None:
    def rank_main(ours: AllReduceCommunicator) -> None:
        tensor = numbers(ours.rank, 1 << 20).cuda()
        streams = [torch.cuda.Stream() for _ in range(3)]
        ours.all_reduce(tensor)
        results = []
        meet(ours)
        for turn in range(30):
            stream = streams[turn % 3]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                # Nothing but the communicator orders these.
                results.append(ours.all_reduce(tensor))
        torch.cuda.current_stream().wait_stream(streams[29 % 3])
        meet(ours)
        expected = stacked(RANKS, 1 << 20).sum(0).float()
        assert all(torch.equal(on_host(result), expected) for result in results)

    on_gpu(RANKS, rank_main)


@needs_device
def test_ten_thousand_replays() -> None:
    count = 4099

    def rank_main(ours: AllReduceCommunicator) -> int:
        ours.prepare((count,), torch.int32)
        own = torch.arange(count, dtype=torch.int32, device="cuda") * (ours.rank + 1)
        total = torch.arange(count, dtype=torch.int32, device="cuda") * 3
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")

        def body() -> None:
            own.add_(ours.rank + 5)
            total.add_(11)
            wrong.add_((ours.all_reduce(own) != total).sum())
            # In place, of memory of the graph.
            wrong.add_((ours.all_reduce_(own.clone()) != total).sum())

        graph, _ = captured(ours, body)
        for turn in range(10_000):
            graph.replay()
            if turn % 500 == 499:
                meet(ours)
                assert int(wrong) == 0, turn
                # From outside, too.
                own.add_(turn)
                total.add_(2 * turn)
        meet(ours)
        # Once to warm up.
        assert own[0].item() == 10_001 * (ours.rank + 5) + sum(range(499, 10_000, 500))
        return int(wrong)

    assert on_gpu(RANKS, rank_main) == [0, 0]


@needs_device
def test_graphs_of_other_collectives() -> None:
    def rank_main(ours: AllReduceCommunicator) -> None:
        own = torch.zeros(4 * RANKS, 33, device="cuda")

        def body() -> tuple[torch.Tensor, ...]:
            moved = own.clone()
            # Not contiguous: copied within the graph.
            columns = own[:, 3:9]
            return (
                ours.all_gather(own),
                ours.reduce_scatter(own),
                ours.all_to_all(own),
                ours.broadcast(moved, root=1),
                ours.all_reduce(columns),
            )

        graph, (gathered, scattered, exchanged, moved, columns) = captured(ours, body)
        for turn in range(200):
            everybody = [torch.arange(own.numel()).float().view_as(own) * (rank + 1) + turn for rank in range(RANKS)]
            own.copy_(everybody[ours.rank])
            graph.replay()
            block = slice(4 * ours.rank, 4 * ours.rank + 4)
            total = sum(everybody)
            assert torch.equal(on_host(gathered), torch.cat(everybody))
            assert torch.equal(on_host(scattered), total[block])
            assert torch.equal(on_host(exchanged), torch.cat([each[block] for each in everybody]))
            assert torch.equal(on_host(moved), everybody[1])
            assert torch.equal(on_host(columns), total[:, 3:9])

    on_gpu(RANKS, rank_main)


@needs_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_all_reduce_rms_norm(dtype: torch.dtype) -> None:
    # Of the last size there is no fused call.
    for hidden, path in [(264, "fused"), (262, "unfused")]:
        _all_reduce_rms_norm(dtype, 5, hidden, path)


def _all_reduce_rms_norm(dtype: torch.dtype, tokens: int, hidden: int, path: str) -> None:
    weight = (torch.arange(hidden) % 7 / 4).to(dtype)
    residual = numbers(99, tokens, hidden, dtype=dtype)

    def rank_main(ours: AllReduceCommunicator) -> list[torch.Tensor]:
        # The same on either device.
        own = numbers(ours.rank, tokens, hidden, dtype=dtype).to(ours.device)
        kept, weights = residual.clone().to(ours.device), weight.to(ours.device)
        made = [kept]
        for per, scales in [("token", (tokens,)), ("group", (tokens, 3))]:
            quantised = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn, device=ours.device)
            scale = torch.empty(scales, device=ours.device)
            norm = ours.all_reduce_rms_norm(
                own, weights, residual=kept, epsilon=1e-5, quantised=quantised, scale=scale, per=per
            )
            made += [norm, quantised, scale]
        made.append(ours.all_reduce_rms_norm(own, weights))
        quantised = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn, device=ours.device)
        ours.all_reduce_rms_norm(own, weights, quantised=quantised, scale=1e-3)
        assert {(count.operation, count.path) for count in ours.report().calls} == {("all_reduce_rms_norm", path)}
        return [on_host(each) for each in (*made, quantised)]

    by_cpu = in_threads(RANKS, lambda communicator: rank_main(AllReduceCommunicator(communicator)))
    # What torch loads now it need not while kernels wait.
    on_gpu(1, rank_main)
    for here, there in zip(by_cpu, on_gpu(RANKS, rank_main), strict=True):
        assert torch.equal(here[0], there[0]), "the residual"
        for expected, found in zip(here[1:], there[1:], strict=True):
            # A last bit of the type, which may be one of f8e4m3; scales follow it.
            precision = torch.finfo(expected.dtype if expected.shape == (tokens, hidden) else dtype).eps
            torch.testing.assert_close(found.float(), expected.float(), rtol=2 * precision, atol=1e-6)


@needs_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_graphs_of_all_reduce_rms_norm(dtype: torch.dtype) -> None:
    # One launch of one-shot and norm, and two where there is more to reduce.
    for tokens, hidden in [(3, 1024), (200, 4096)]:
        _graph_of_all_reduce_rms_norm(dtype, tokens, hidden)


def _graph_of_all_reduce_rms_norm(dtype: torch.dtype, tokens: int, hidden: int) -> None:
    def rank_main(ours: AllReduceCommunicator) -> None:
        weight = (torch.arange(hidden) % 7 / 4).to(dtype).cuda()
        own = torch.zeros(tokens, hidden, dtype=dtype, device="cuda")
        fresh, kept = (numbers(99, tokens, hidden, dtype=dtype).cuda() for _ in range(2))
        quantised = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn, device="cuda")
        scale = torch.empty(tokens, device="cuda")

        def body() -> torch.Tensor:
            kept.copy_(fresh)
            return ours.all_reduce_rms_norm(own, weight, residual=kept, quantised=quantised, scale=scale)

        graph, norm = captured(ours, body)
        for turn in range(20):
            first = ours.world_size * turn
            own.copy_(numbers(first + ours.rank, tokens, hidden, dtype=dtype))
            graph.replay()
            meet(ours)
            made = [on_host(each).float() for each in (norm, kept, quantised, scale)]
            assert not any(each.isnan().any() for each in made)
            assert all(
                torch.equal(on_host(a).float(), b) for a, b in zip((body(), kept, quantised, scale), made, strict=True)
            )
            inputs = [numbers(first + rank, tokens, hidden).double() for rank in range(ours.world_size)]
            total = sum(inputs, start=fresh.cpu().double())
            assert torch.equal(made[1].double(), total), "the residual is the sum"
            expected = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.cpu().double()
            precision = torch.finfo(dtype).eps
            torch.testing.assert_close(made[0].double(), expected, rtol=2 * precision, atol=1e-6)
            times = made[2] * made[3].unsqueeze(-1)
            precision = torch.finfo(torch.float8_e4m3fn).eps
            torch.testing.assert_close(times, made[0], rtol=precision, atol=float(made[3].max()) * 2**-9)
            meet(ours)

    # What torch loads now it need not while kernels wait.
    on_gpu(1, rank_main)
    on_gpu(RANKS, rank_main)


@needs_device
def test_a_rank_that_does_not_come_is_told() -> None:
    told = threading.Event()

    def one(communicator: cw.Communicator) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            ours = AllReduceCommunicator(communicator)
            ours.prepare((1000,), torch.float32)
            tensor = torch.ones(1000, device="cuda")
            meet(ours)
            if ours.rank == 1:
                assert told.wait(4 * LIMIT)
                return
            try:
                ours.all_reduce_(tensor)
                torch.cuda.current_stream().synchronize()
                with pytest.raises(cw.Timeout, match="rank 1"):
                    ours.check()
                with pytest.raises(cw.Error):
                    ours.all_reduce_(tensor)
            finally:
                told.set()

    in_threads(RANKS, one, device="cuda:0", timeout=3.0)


@needs_device
def test_an_abort_ends_kernels() -> None:
    def one(communicator: cw.Communicator) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            ours = AllReduceCommunicator(communicator)
            ours.prepare((1000,), torch.float32)
            tensor = torch.ones(1000, device="cuda")
            meet(ours)
            if ours.rank == 1:
                communicator.abort("enough of it")
                return
            ours.all_reduce_(tensor)
            # Long before the communicator's own limit.
            torch.cuda.current_stream().synchronize()
            with pytest.raises(cw.Aborted, match="enough of it"):
                ours.check()

    # Not waited for.
    in_threads(RANKS, one, device="cuda:0", timeout=3600.0)


def why_no_inductor() -> str | None:
    """Triton compiles what it launches kernels with."""
    if importlib.util.find_spec("triton") is None:
        return "Inductor's kernels need triton"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "triton needs a C compiler"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "triton needs Python.h"
    return None


@needs_device
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor", marks=pytest.mark.skipif(why_no_inductor() is not None, reason=why_no_inductor() or "")
        ),
    ],
)
def test_processes(backend: str) -> None:
    printed = torchrun(2, HERE / "cuda_script.py", backend)
    assert {"rank 0 ok", "rank 1 ok"} <= set(printed.splitlines()), printed


@needs_device
def test_a_first_start_says_what_it_does(tmp_path: Path) -> None:
    kept = {"CUDA_CACHE_PATH": str(tmp_path / "driver"), "CROSSWEFT_CACHE_DIR": str(tmp_path / "ours")}
    first, later = (torchrun(2, HERE / "start_script.py", **kept).splitlines() for _ in range(2))
    for printed in (first, later):
        assert {"rank 0 ok", "rank 1 ok"} <= set(printed), printed
    # For those who want the times: pytest -rP.
    print(*first, *later, sep="\n")
    # What is soon there is not worth a word, as everything is that the driver has kept.
    began = "the driver compiles kernels that it has not kept from an earlier start"
    seconds = next(float(line.split()[2]) / 1e3 for line in first if line.startswith("first start: "))
    assert seconds < 1 or any(began in line for line in first), first
    assert not any(began in line for line in later), later


@needs_device
@pytest.mark.parametrize("name", ["crossweft", "cpu:gloo,cuda:crossweft"])
def test_backend(name: str) -> None:
    printed = torchrun(2, HERE / "cuda_backend_script.py", name)
    script = (HERE / "cuda_backend_script.py").read_text()
    assert printed.count(" ok\n") == script.count("\n@case\n"), printed


@needs_device
def test_training() -> None:
    printed = torchrun(2, HERE / "training_script.py", "cuda")
    assert [line for line in printed.splitlines() if line.endswith(" ok")] == [
        "DDP ok",
        "DDP with static graph ok",
        "FSDP2 ok",
    ]


@needs_device
@pytest.mark.parametrize("ranks", [2, 3])
def test_tensors_of_the_pool_are_reduced_where_they_lie(ranks: int) -> None:
    # Beyond what goes in one hop, which needs no symmetric memory.
    small, large = (33, 40), (3 << 10, 1 << 10)

    def rank_main(ours: AllReduceCommunicator) -> None:
        with ALLOCATING:
            outside = numbers(ours.rank, *small).cuda()
        pool = cw.torch.mem_pool(ours, 256 << 20)
        assert pool.nbytes == 256 << 20 and not pool.holds(outside)
        ours.prepare(large, torch.float32, operations=("all_reduce", "all_gather", "reduce_scatter"))
        for shape in (small, large):
            everybody = stacked(ranks, *shape).float()
            with ALLOCATING, torch.cuda.use_mem_pool(pool):
                tensor, out = torch.empty(shape, device="cuda"), torch.empty(shape, device="cuda")
                gathered = torch.empty(ranks * shape[0], shape[1], device="cuda")
            assert pool.holds(tensor) and pool.holds(out) and pool.used > 0
            tensor.copy_(everybody[ours.rank])
            meet(ours)
            with ALLOCATING:
                made = ours.all_reduce(tensor)
            assert pool.holds(made)
            ours.all_reduce(tensor, out=out)
            ours.all_gather(tensor, out=gathered)
            meet(ours)
            total = everybody.sum(0)
            assert torch.equal(on_host(made), total) and torch.equal(on_host(out), total)
            assert torch.equal(on_host(gathered), everybody.reshape(gathered.shape))
            assert torch.equal(on_host(tensor), everybody[ours.rank]), "the input stays"
            meet(ours)
            ours.all_reduce_(tensor)
            block = ours.reduce_scatter(gathered, out=out)
            meet(ours)
            assert torch.equal(on_host(tensor), total)
            assert torch.equal(on_host(block), ranks * everybody[ours.rank])
            del tensor, out, gathered, made, block
        ours.all_reduce_(outside)
        meet(ours)
        assert torch.equal(on_host(outside), stacked(ranks, *small).sum(0).float())
        counts = {(count.operation, count.path): count for count in ours.report().calls}
        assert set(counts) == {(name, "symmetric") for name in ("all_reduce", "all_gather", "reduce_scatter")} | {
            ("all_reduce", "direct")
        }
        assert counts["all_reduce", "symmetric"].algorithms == ("two-shot",), ours.report()
        with pytest.raises(cw.UsageError, match="has a pool already"):
            ours.mem_pool(1 << 20)
        with ALLOCATING, pytest.raises(torch.OutOfMemoryError), torch.cuda.use_mem_pool(pool):
            torch.empty(1 << 30, device="cuda")

    on_gpu(ranks, rank_main)


@needs_device
def test_graphs_whose_memory_is_the_pool() -> None:
    def rank_main(ours: AllReduceCommunicator) -> None:
        pool = ours.mem_pool(256 << 20)
        shape = (1 << 11, 1 << 10)
        ours.prepare(shape, torch.float32)
        own = torch.zeros(shape, device="cuda")
        meet(ours)
        graph = torch.cuda.CUDAGraph()
        with (
            CAPTURING,
            torch.cuda.graph(
                graph, pool=pool.id, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ),
        ):
            # An activation, which is born in the pool, and its sum.
            total = ours.all_reduce_(own * 2)
        assert pool.holds(total)
        assert [count.path for count in ours.report().calls] == ["symmetric"]
        meet(ours)
        for turn in range(50):
            own.fill_(turn + ours.rank)
            # Else the kernel that fills would perhaps be loaded while another rank's waits.
            meet(ours)
            graph.replay()
            assert on_host(total).unique().tolist() == [2 * sum(turn + rank for rank in range(RANKS))]

    on_gpu(RANKS, rank_main)


@needs_device
def test_tensors_at_different_places_of_the_pool_are_told() -> None:
    def one(communicator: cw.Communicator) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            ours = AllReduceCommunicator(communicator)
            pool = ours.mem_pool(64 << 20)
            ours.prepare((1000,), torch.float32)
            with ALLOCATING, torch.cuda.use_mem_pool(pool):
                if ours.rank == 1:
                    kept = torch.ones(1000, device="cuda")
                    assert pool.holds(kept)
                tensor = torch.ones(1000, device="cuda")
            meet(ours)
            with pytest.raises(cw.Error, match="in the same order"):
                # One of them is told by the call, and ends the other's.
                ours.all_reduce_(tensor)
                torch.cuda.current_stream().synchronize()
                ours.check()

    in_threads(RANKS, one, device="cuda:0", timeout=3600.0)
