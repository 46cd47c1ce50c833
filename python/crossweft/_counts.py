"""What became of calls: counts by path and reason, for :func:`crossweft.report`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._crossweft import Communicator

#: Operations of :class:`crossweft.torch.AllReduceCommunicator` that a selector chooses for, as ``explain`` calls them.
_EXPLAINED = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "reduce_scatter": "reduce-scatter",
}


@dataclass(frozen=True)
class CallCount:
    """Calls of one kind whose sizes lie between the same two powers of two."""

    operation: str
    #: ``direct``, or ``symmetric``: in memory that all ranks reach; or ``staged``: copied, as the tensor was not dense.
    path: str
    dtype: str
    #: How it reduces; empty where nothing is reduced.
    op: str
    calls: int
    #: Bytes of the larger of input and output, the smallest and largest that were seen.
    smallest: int
    largest: int
    #: What the smallest and the largest take, by name; empty where nothing is chosen.
    algorithms: tuple[str, ...]


@dataclass(frozen=True)
class RefusalCount:
    """Tensors that were not taken, for one reason."""

    operation: str
    reason: str
    calls: int


@dataclass(frozen=True)
class CommunicatorReport:
    """What became of the calls of one communicator."""

    name: str
    rank: int
    world_size: int
    device: str
    calls: tuple[CallCount, ...]
    refused: tuple[RefusalCount, ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: rank {self.rank} of {self.world_size} on {self.device}"]
        for count in self.calls:
            op = f" {count.op}" if count.op else ""
            sizes = f"{count.smallest}" if count.smallest == count.largest else f"{count.smallest} to {count.largest}"
            algorithms = f", {' and '.join(count.algorithms)}" if count.algorithms else ""
            lines.append(
                f"  {count.operation}{op} of {count.dtype}, {sizes} bytes: {count.calls} {count.path}{algorithms}"
            )
        lines += [f"  {count.operation} refused {count.calls} times: {count.reason}" for count in self.refused]
        return "\n".join(lines)


class Counts:
    """Counts of one communicator."""

    def __init__(self, name: str, communicator: Communicator) -> None:
        self._name = name
        self._communicator = communicator
        # By operation, path, type, operation and the size's power of two: calls, smallest and largest.
        self._calls: dict[tuple[str, str, str, str, int], list[int]] = {}
        self._refused: dict[tuple[str, str], int] = {}
        _LIVE.add(self)

    def call(self, operation: str, path: str, dtype: str, op: str, nbytes: int) -> None:
        """Counts a call."""
        key = (operation, path, dtype, op, nbytes.bit_length())
        entry = self._calls.get(key)
        if entry is None:
            self._calls[key] = [1, nbytes, nbytes]
            return
        entry[0] += 1
        if nbytes < entry[1]:
            entry[1] = nbytes
        elif nbytes > entry[2]:
            entry[2] = nbytes

    def refuse(self, operation: str, reason: str) -> None:
        """Counts a tensor that was not taken."""
        key = (operation, reason)
        self._refused[key] = self._refused.get(key, 0) + 1

    def report(self) -> CommunicatorReport:
        """All counts until now."""
        communicator = self._communicator
        return CommunicatorReport(
            name=self._name,
            rank=communicator.rank,
            world_size=communicator.world_size,
            device=communicator.device,
            calls=tuple(
                CallCount(*key[:4], calls, smallest, largest, self._algorithms(key, (smallest, largest)))
                for key, (calls, smallest, largest) in sorted(self._calls.items())
            ),
            refused=tuple(RefusalCount(*key, calls) for key, calls in sorted(self._refused.items())),
        )

    def _algorithms(self, key: tuple[str, str, str, str, int], sizes: Iterable[int]) -> tuple[str, ...]:
        operation, path, dtype, op, _ = key
        collective = _EXPLAINED.get(operation)
        if collective is None:
            return ()
        chosen: dict[str, None] = {}
        for nbytes in sizes:
            # Pre-multiplied sums are sums.
            reduce_op = "avg" if op == "avg" else op if op in ("prod", "min", "max") else "sum"
            explanation = self._communicator.explain(
                collective,
                nbytes,
                dtype=dtype,
                op=reduce_op,  # type: ignore[arg-type]
                symmetric=path == "symmetric",
            )
            chosen[str(explanation["chosen"])] = None
        return tuple(chosen)


#: Those that somebody still holds. Only reports read it.
_LIVE: weakref.WeakSet[Counts] = weakref.WeakSet()


def report() -> list[CommunicatorReport]:
    """What became of the calls of this process's :class:`crossweft.torch.AllReduceCommunicator` objects: how many took
    which path and algorithm by size, and how many tensors were refused for which reason."""
    return sorted((counts.report() for counts in list(_LIVE)), key=lambda each: each.name)
