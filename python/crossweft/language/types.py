"""Words that instructions take."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NoReturn

from .._crossweft import caller
from ..errors import ProgramError

__all__ = ["BufferType", "ReduceOperationType", "ReplicationPolicy", "SyncType", "ThreadBlockGroup"]


class _Word(Enum):
    def __str__(self) -> str:
        return str(self.value)


class SyncType(_Word):
    """Where the threads of a block meet around an instruction; see the package's page."""

    none = "none"
    before = "before"
    after = "after"
    both = "both"


class BufferType(_Word):
    """Which buffer of a rank."""

    input = "i"
    output = "o"
    scratch = "s"


class ReduceOperationType(_Word):
    """How elements of several ranks become one."""

    sum = "sum"
    prod = "prod"
    min = "min"
    max = "max"


class ReplicationPolicy(_Word):
    """Which part of the data each instance of a program handles.

    ``interleaved``: chunks are cut into as many as there are instances, and those of one instance lie behind those of
    the other. ``none``: each instance has a slice of every instruction's data.
    """

    interleaved = "interleaved"
    none = "none"


class ThreadBlockGroup:
    """Thread blocks that share an instruction's data in equal slices."""

    def __init__(self, tb_list: Sequence[int]) -> None:
        self.tb_list = list(tb_list)
        if len(set(self.tb_list)) != len(self.tb_list):
            misuse(f"a thread block is twice in the group {self.tb_list}")

    def get_internal_id(self, tb: int) -> int:
        """Which slice is ``tb``'s."""
        if tb not in self.tb_list:
            misuse(f"thread block {tb} is not in the group {self.tb_list}")
        return self.tb_list.index(tb)

    def numtb(self) -> int:
        """How many there are."""
        return len(self.tb_list)

    def __repr__(self) -> str:
        return f"ThreadBlockGroup({self.tb_list})"


def misuse(reason: str) -> NoReturn:
    """Refuses the user's line."""
    file, line = caller()
    raise ProgramError(f"{file}:{line}: {reason}", file=file, line=line)


def blocks(tb: int | None, tb_group: ThreadBlockGroup | None) -> list[int]:
    """The thread blocks that execute an instruction."""
    if tb is not None and tb_group is None:
        return [tb]
    if tb_group is not None and tb is None:
        return tb_group.tb_list
    misuse("give either tb, a thread block, or tb_group, several that share the data")
