"""How long calls take: that of the slowest rank, with all of them lined up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ._columns import Call, Case, Column, Machine


@dataclass(frozen=True)
class Times:
    """Microseconds of one column for one case."""

    p50: float
    least: float


class Clock:
    """Times calls on processors one by one, on GPUs in batches between two events."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._is_cuda = machine.device.type == "cuda"
        self._token = torch.zeros(1, dtype=torch.int32, device=machine.device)

    def calls(self, nbytes: int) -> int:
        """How many calls of one round are timed, or lie between two events."""
        if self._machine.shared:
            # Ranks that share a GPU take turns, milliseconds long.
            return 4
        if nbytes <= 64 << 10:
            return 100
        return 40 if nbytes <= 1 << 20 else 10 if nbytes <= 16 << 20 else 4

    def measure(self, column: Column, calls: list[Call], case: Case) -> list[float]:
        """This rank's times of one round, microseconds a call."""
        count = self.calls(case.nbytes)
        if not self._is_cuda:
            return self._on_processors(calls[0], count)
        return self._on_gpu(column, calls, count)

    def slowest(self, times: list[float]) -> list[float]:
        """For each time, that of the rank which took longest. Collective."""
        every = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(every, op=dist.ReduceOp.MAX)
        return [float(each) for each in every]

    def line_up(self) -> None:
        """Leaves when all ranks have come, within a microsecond of each other on processors."""
        self._machine.ours.communicator.all_reduce(self._token)

    def _on_processors(self, call: Call, count: int) -> list[float]:
        times = []
        for turn in range(-max(2, count // 10), count):
            call.refresh(turn)
            self.line_up()
            start = time.perf_counter_ns()
            call.run()
            taken = time.perf_counter_ns() - start
            if turn >= 0:
                times.append(taken / 1e3)
        return times

    def _on_gpu(self, column: Column, calls: list[Call], count: int) -> list[float]:
        stream: Any = torch.cuda.Stream(self._machine.device)  # type: ignore[no-untyped-call,unused-ignore]
        with torch.cuda.stream(stream):
            for turn, call in enumerate(calls):
                call.refresh(turn)
                call.run()
            stream.synchronize()
            batch: Callable[[], object] = lambda: [calls[turn % len(calls)].run() for turn in range(count)]  # noqa: E731
            if column.is_graph:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    batch()
                batch = graph.replay
            times = []
            for turn in range(2 if self._machine.shared else 5):
                for call in calls:
                    call.refresh(turn)
                dist.barrier()
                torch.cuda.synchronize()
                begin, end = (_event() for _ in range(2))
                # One ahead, so that no rank's batch begins before all have come.
                self.line_up()
                begin.record(stream)
                batch()
                end.record(stream)
                stream.synchronize()
                # The first is for caches.
                if turn:
                    times.append(begin.elapsed_time(end) * 1e3 / count)
        return times


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,unused-ignore]


def times_of(samples: list[float]) -> Times:
    """Median and least."""
    return Times(statistics.median(samples), min(samples))
