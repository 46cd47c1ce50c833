"""Whether tensors are what a call reads them as: the memory alone does not say."""

from __future__ import annotations

import math
from typing import Any

from ..errors import TensorError


def check(what: str, tensor: Any, columns: int, size: int = 4, places: tuple[int, ...] = ()) -> None:
    """Raises TensorError if rows have other than ``columns`` elements of ``size`` bytes, which may be given as bytes.

    If there are ``places``, rows lie in those: ``[*places, columns]``, or as many rows. What has no shape, or one
    dimension, is taken as it lies.
    """
    check_sign(what, tensor)
    shape = tuple(getattr(tensor, "shape", None) or ())
    if len(shape) < 2:
        return
    each = getattr(tensor, "itemsize", size)
    if shape[-1] != (columns * size if each == 1 else columns):
        raise TensorError(
            f"the shape of the {what} is {shape}, of {each} bytes an element; "
            f"a row must be {columns} elements of {size} bytes"
        )
    if places and shape[:-1] not in (places, (math.prod(places),)):
        raise TensorError(f"the shape of the {what} is {shape}; it must be {(*places, shape[-1])}")


def check_sign(what: str, tensor: Any) -> None:
    """Raises TensorError if torch has yet to negate what lies in memory."""
    is_negative = getattr(tensor, "is_neg", None)
    if is_negative is not None and is_negative():
        raise TensorError(f"a negative view was given as {what}: its memory has the other sign; give its resolve_neg()")
