"""The groups of a buffer, made when their shapes are first used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import torch

from ... import moe
from ..._crossweft import Communicator
from ...errors import TensorError, UsageError
from ._config import TOP_K

_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def type_of_sums(dtype: torch.dtype) -> str:
    """In what type tokens of ``dtype`` come back."""
    if dtype == torch.float8_e4m3fn:
        return "bf16"
    if dtype not in _NAMES:
        raise TensorError(f"tokens of {dtype}; they can be bfloat16, float16, float32, or float8_e4m3fn with scales")
    return _NAMES[dtype]


class Shape(NamedTuple):
    """What a group is for."""

    experts: int
    max_tokens: int
    hidden: int
    dtype: str


class Groups:
    """Groups by shape. Ranks ask for the same ones in the same order; one that is not there is made, collectively.

    On a GPU each takes as many multiprocessors as ``blocks`` says.
    """

    def __init__(
        self, communicator: Communicator, timeout: float, *, blocks: int | None = None, masking: bool = False
    ) -> None:
        self._communicator = communicator
        self._timeout = timeout
        self._blocks = blocks
        self.masking = masking
        self._masked = [False] * communicator.world_size
        #: The one that was asked for last is the last.
        self._groups: dict[Shape, moe.Group] = {}

    def __iter__(self) -> Iterator[moe.Group]:
        return iter(list(self._groups.values()))

    def __len__(self) -> int:
        return len(self._groups)

    def forget(self, group: moe.Group) -> None:
        """Lets a group go with its handles; it is made anew when its shape is asked for again."""
        self._groups = {shape: each for shape, each in self._groups.items() if each is not group}

    def of(self, shape: Shape) -> moe.Group:
        """The group for exactly this shape."""
        found = self._groups.pop(shape, None)
        if found is not None:
            self._groups[shape] = found
        else:
            found = moe.Group(
                self._communicator,
                experts=shape.experts,
                max_tokens=shape.max_tokens,
                hidden=shape.hidden,
                top_k=TOP_K,
                dtype=shape.dtype,
                blocks=self._blocks,
                timeout=self._timeout,
                masking=self.masking,
            )
            self._groups[shape] = found
            self._mask()
        return found

    def at_least(self, shape: Shape) -> moe.Group:
        """One for as many tokens, or more. It takes the place of smaller ones, which last as long as their handles."""
        alike = [found for found in self._groups if found._replace(max_tokens=0) == shape._replace(max_tokens=0)]
        for found in alike:
            if found.max_tokens >= shape.max_tokens:
                return self._groups[found]
        made = self.of(shape)
        for found in alike:
            del self._groups[found]
        return made

    @property
    def masked(self) -> list[bool]:
        """Ranks that are left out of all groups."""
        return list(self._masked)

    def set_masked(self, rank: int, masked: bool) -> None:
        ranks, own = self._communicator.world_size, self._communicator.rank
        if rank == own or not 0 <= rank < ranks:
            raise UsageError(f"rank {rank} cannot be masked; it can be one of {ranks} but this one")
        for group in self._groups.values():
            group.set_masked(rank, masked)
        self._masked[rank] = masked

    def share_masks(self) -> None:
        """Lets all groups leave out what one does, so that a rank that is gone is waited for once."""
        if self.masking:
            for group in self._groups.values():
                self._masked = [a or b for a, b in zip(self._masked, group.masked, strict=True)]
            self._mask()

    def _mask(self) -> None:
        for group in self._groups.values():
            for rank, (now, wanted) in enumerate(zip(group.masked, self._masked, strict=True)):
                if wanted and not now:
                    # One whose calls are under way finds out by itself, or is told the next time.
                    with suppress(UsageError):
                        group.set_masked(rank, True)
