"""Outputs for inputs: of the same kind, the size that a plan asks for."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

from .errors import TensorError


def outputs(inputs: Sequence[Any], blocks: tuple[int, int]) -> list[Any]:
    """An output for every input: ``blocks`` are those of input and output of one message."""
    return [_output(tensor, blocks) for tensor in inputs]


def _output(tensor: Any, blocks: tuple[int, int]) -> Any:
    if hasattr(tensor, "new_empty") and hasattr(tensor, "numel"):  # torch
        return tensor.new_empty(_scaled(tensor.numel(), blocks))
    if hasattr(tensor, "__array_interface__"):  # numpy
        import numpy

        return numpy.empty(_scaled(tensor.size, blocks), dtype=tensor.dtype)
    if isinstance(tensor, array.array):
        return array.array(tensor.typecode, bytes(_scaled(len(tensor), blocks) * tensor.itemsize))
    try:
        size = memoryview(tensor).nbytes
    except TypeError:
        raise TensorError(f"no output can be made like a {type(tensor).__name__}; give outputs") from None
    return bytearray(_scaled(size, blocks))


def _scaled(count: int, blocks: tuple[int, int]) -> int:
    of_input, of_output = blocks
    if of_input == 0:
        raise TensorError("the plan has no input that tells the size of its output; give outputs")
    if count % of_input:
        raise TensorError(f"an input of {count} elements is no {of_input} blocks")
    return count // of_input * of_output
