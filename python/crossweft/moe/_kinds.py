"""Arrays of the kind that a caller has."""

from __future__ import annotations

import array
import math
from collections.abc import Sequence
from typing import Any, Protocol

from .._crossweft import describe


class Kind(Protocol):
    """Makes arrays of one library."""

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """Of any content."""

    def full(self, shape: Sequence[int], dtype: str, value: int) -> Any:
        """Of one value."""


class _Torch:
    def __init__(self, like: Any) -> None:
        # Not the tensor, which may be large: handles last.
        self._device = like.device

    def _dtype(self, dtype: str) -> Any:
        import torch

        names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f8e4m3": "float8_e4m3fn"}
        return getattr(torch, names.get(dtype) or dtype.replace("i", "int"))

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        import torch

        return torch.empty(tuple(shape), dtype=self._dtype(dtype), device=self._device)

    def full(self, shape: Sequence[int], dtype: str, value: int) -> Any:
        import torch

        return torch.full(tuple(shape), value, dtype=self._dtype(dtype), device=self._device)


class _Numpy:
    #: What numpy itself has no type for is integers of the same size.
    _NAMES = {"bf16": "uint16", "f16": "float16", "f32": "float32", "f8e4m3": "uint8", "i32": "int32", "i64": "int64"}

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        import numpy

        return numpy.empty(tuple(shape), dtype=self._NAMES[dtype])

    def full(self, shape: Sequence[int], dtype: str, value: int) -> Any:
        import numpy

        return numpy.full(tuple(shape), value, dtype=self._NAMES[dtype])


class _Buffers:
    """Without shapes: ``bytearray`` of tokens and scales, ``array.array`` of the rest."""

    _CODES = {"i32": "i", "i64": "q", "f32": "f"}
    _BYTES = {"bf16": 2, "f16": 2, "f8e4m3": 1}

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        count = math.prod(shape)
        if dtype in self._BYTES:
            return bytearray(count * self._BYTES[dtype])
        code = self._CODES[dtype]
        return array.array(code, bytes(count * array.array(code).itemsize))

    def full(self, shape: Sequence[int], dtype: str, value: int) -> Any:
        return array.array(self._CODES[dtype], [value]) * math.prod(shape)


def kind_of(tensor: Any) -> Kind:
    """What makes arrays like ``tensor``."""
    if hasattr(tensor, "new_empty") and hasattr(tensor, "numel"):
        return _Torch(tensor)
    if hasattr(tensor, "__array_interface__"):
        return _Numpy()
    return _Buffers()


def dtype_of(tensor: Any) -> str:
    """Its element type, as the Rust side calls it."""
    return str(describe(tensor)["dtype"])
