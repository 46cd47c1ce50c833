"""Element types and operations, as the Rust side calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from .._crossweft import _Op

#: Element types that can be reduced.
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint64: "u64",
    torch.uint32: "u32",
    torch.uint16: "u16",
    torch.uint8: "u8",
}

#: ``"sum"``, ``torch.distributed.ReduceOp.SUM``, ...
ReduceOp: TypeAlias = Any

_NAMES: dict[str, _Op] = {"SUM": "sum", "PRODUCT": "prod", "PROD": "prod", "MIN": "min", "MAX": "max", "AVG": "avg"}
#: What most calls give, for a single look.
_USUAL: dict[str, tuple[_Op, None]] = {name.lower(): (op, None) for name, op in _NAMES.items()}


def _kind(op: ReduceOp) -> tuple[str, Any]:
    """Its name in capitals, and what a PREMUL_SUM multiplies by; of anything else, how Python shows it."""
    if isinstance(op, str):
        return op.upper(), None
    # A ReduceOp proper has both in its state only.
    state = None if hasattr(op, "name") or not hasattr(op, "__getstate__") else op.__getstate__()
    kind, scale = state if isinstance(state, tuple) and len(state) == 2 else (op, None)
    return str(getattr(kind, "name", kind)).upper(), scale


def op_name(op: ReduceOp) -> str:
    """What the operation is called, for messages."""
    return _kind(op)[0]


def reduce_op(op: ReduceOp) -> tuple[_Op, Any] | None:
    """The operation, and what inputs are multiplied by before a sum, if so; ``None`` if there is no such operation."""
    if isinstance(op, str) and (usual := _USUAL.get(op)) is not None:
        return usual
    name, scale = _kind(op)
    if name == "PREMUL_SUM" and scale is not None:
        return "sum", scale
    known = _NAMES.get(name)
    return None if known is None else (known, None)
