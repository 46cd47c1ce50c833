"""Tensors that are born in memory which all ranks reach."""

from __future__ import annotations

from typing import Any

import torch

from .. import _crossweft
from .._crossweft import Communicator


class SymmetricPool(torch.cuda.MemPool):  # type: ignore[misc, unused-ignore]
    """A pool of torch's allocator whose memory is part of a communicator's symmetric memory."""

    def __init__(self, communicator: Communicator, nbytes: int) -> None:
        names = communicator.make_pool(nbytes)
        # Kept: torch's pool does not keep its allocator in all versions.
        self._functions: Any = torch.cuda.memory.CUDAPluggableAllocator(_crossweft.__file__, *names)
        super().__init__(self._functions.allocator())
        self._communicator = communicator
        pool = communicator.pool
        assert pool is not None
        self._begin, self._bytes, _ = pool

    @property
    def nbytes(self) -> int:
        """How much memory it has on each rank, in bytes."""
        return self._bytes

    @property
    def used(self) -> int:
        """Bytes that torch has taken of it, in use by tensors or kept for others."""
        pool = self._communicator.pool
        return 0 if pool is None else pool[2]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in it."""
        offset: int = tensor.data_ptr() - self._begin
        return 0 <= offset < self._bytes

    def __repr__(self) -> str:
        return f"<SymmetricPool of {self._bytes} bytes on {self._communicator.device}>"
