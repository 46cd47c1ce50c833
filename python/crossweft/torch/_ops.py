"""Custom ops, so that ``torch.compile`` sees calls as nodes of its graphs.

Graphs cannot hold objects, so ops name their communicator: :func:`register` gives it the name.

``crossweft::`` and

* ``all_reduce(Tensor tensor, str op, str group) -> Tensor``
* ``all_reduce_(Tensor(a!) tensor, str op, str group) -> ()``
* ``all_gather(Tensor tensor, int world_size, str group) -> Tensor``, ``(world_size * n, ...)``
* ``reduce_scatter(Tensor tensor, str op, int world_size, str group) -> Tensor``, ``(n / world_size, ...)``
* ``all_reduce_rms_norm(Tensor tensor, Tensor weight, float epsilon, str group) -> Tensor``
* ``all_reduce_add_rms_norm(Tensor tensor, Tensor(a!) residual, Tensor weight, float epsilon, str group) -> Tensor``
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UsageError
from ._communicator import AllReduceCommunicator

if TYPE_CHECKING:
    from typing_extensions import Self

#: What the names stand for: an op gets a text and nothing else. Entries belong to registrations.
_NAMED: dict[str, AllReduceCommunicator] = {}


class Registration:
    """A name under which ops find a communicator, until this is closed or nobody holds it."""

    def __init__(self, name: str, communicator: AllReduceCommunicator) -> None:
        if name in _NAMED:
            raise UsageError(f"there is a communicator called {name!r} already; close its registration first")
        _NAMED[name] = communicator
        self._name = name
        self._close = weakref.finalize(self, _NAMED.pop, name)

    @property
    def name(self) -> str:
        """What to give to ops as ``group``."""
        return self._name

    def close(self) -> None:
        """The name stands for nothing any more. May be called again."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def register(name: str, communicator: AllReduceCommunicator) -> Registration:
    """Lets ops find ``communicator`` as ``name``, as long as what this returns is held and not closed.

    Compiled graphs have the name in them. Raises UsageError if the name is taken.
    """
    return Registration(name, communicator)


def _named(name: str, world_size: int | None = None) -> AllReduceCommunicator:
    communicator = _NAMED.get(name)
    if communicator is None:
        known = ", ".join(map(repr, sorted(_NAMED))) or "none"
        raise UsageError(f"no communicator is called {name!r} (there are: {known}); crossweft.torch.register one")
    if world_size not in (None, communicator.world_size):
        raise UsageError(f"{name!r} has {communicator.world_size} ranks, not {world_size}")
    return communicator


def _all_reduce(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return _named(group).all_reduce(tensor, op)


def _all_reduce_(tensor: torch.Tensor, op: str, group: str) -> None:
    _named(group).all_reduce_(tensor, op)


def _all_gather(tensor: torch.Tensor, world_size: int, group: str) -> torch.Tensor:
    return _named(group, world_size).all_gather(tensor)


def _reduce_scatter(tensor: torch.Tensor, op: str, world_size: int, group: str) -> torch.Tensor:
    return _named(group, world_size).reduce_scatter(tensor, op)


def _all_reduce_rms_norm(tensor: torch.Tensor, weight: torch.Tensor, epsilon: float, group: str) -> torch.Tensor:
    return _named(group).all_reduce_rms_norm(tensor, weight, epsilon=epsilon)


def _all_reduce_add_rms_norm(
    tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, group: str
) -> torch.Tensor:
    return _named(group).all_reduce_rms_norm(tensor, weight, residual=residual, epsilon=epsilon)


def _without_gradients(name: str) -> Callable[..., Any]:
    """What autograd runs of an op that has no gradients, also while it is traced: they would pass as if nothing had
    been done."""

    def run(*arguments: Any) -> Any:
        needed = (each.requires_grad for each in arguments if isinstance(each, torch.Tensor))
        if torch.is_grad_enabled() and any(needed):
            raise UsageError(f"{name} has no gradients; call it under torch.no_grad(), or take ops that have")
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.crossweft, name)(*arguments)

    return run


# What they give, for tracing.


def _fake_all_reduce(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
    return torch.empty_like(tensor)


def _fake_all_reduce_(tensor: torch.Tensor, op: str, group: str) -> None:
    return None


def _fake_all_gather(tensor: torch.Tensor, world_size: int, group: str) -> torch.Tensor:
    return tensor.new_empty((world_size * (tensor.shape[0] if tensor.dim() else 1), *tensor.shape[1:]))


def _fake_reduce_scatter(tensor: torch.Tensor, op: str, world_size: int, group: str) -> torch.Tensor:
    return tensor.new_empty((tensor.shape[0] // world_size, *tensor.shape[1:]))


def _fake_all_reduce_rms_norm(tensor: torch.Tensor, weight: torch.Tensor, epsilon: float, group: str) -> torch.Tensor:
    return torch.empty_like(tensor)


def _fake_all_reduce_add_rms_norm(
    tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, group: str
) -> torch.Tensor:
    return torch.empty_like(tensor)


# Gradients of the sum of all ranks' losses.


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.arguments = inputs[1:]


def _of_sum(op: str) -> None:
    if op != "sum":
        raise UsageError(f"only sums have gradients, not {op!r}")


def _all_reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    op, group = ctx.arguments
    _of_sum(op)
    return torch.ops.crossweft.all_reduce(grad, op, group), None, None


def _all_gather_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    world_size, group = ctx.arguments
    return torch.ops.crossweft.reduce_scatter(grad, "sum", world_size, group), None, None


def _reduce_scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    op, world_size, group = ctx.arguments
    _of_sum(op)
    return torch.ops.crossweft.all_gather(grad, world_size, group), None, None, None


def _define() -> torch.library.Library:
    """Defines the ops as long as the library that it returns lives."""
    library = torch.library.Library("crossweft", "DEF")
    ops = {
        "all_reduce(Tensor tensor, str op, str group) -> Tensor": (
            _all_reduce,
            _fake_all_reduce,
            _all_reduce_backward,
        ),
        "all_reduce_(Tensor(a!) tensor, str op, str group) -> ()": (_all_reduce_, _fake_all_reduce_, None),
        "all_gather(Tensor tensor, int world_size, str group) -> Tensor": (
            _all_gather,
            _fake_all_gather,
            _all_gather_backward,
        ),
        "reduce_scatter(Tensor tensor, str op, int world_size, str group) -> Tensor": (
            _reduce_scatter,
            _fake_reduce_scatter,
            _reduce_scatter_backward,
        ),
        "all_reduce_rms_norm(Tensor tensor, Tensor weight, float epsilon, str group) -> Tensor": (
            _all_reduce_rms_norm,
            _fake_all_reduce_rms_norm,
            None,
        ),
        # Another op, since torch (2.15) does not compile one whose tensor that is written may be none.
        "all_reduce_add_rms_norm(Tensor tensor, Tensor(a!) residual, Tensor weight, float epsilon, str group)"
        " -> Tensor": (
            _all_reduce_add_rms_norm,
            _fake_all_reduce_add_rms_norm,
            None,
        ),
    }
    for schema, (run, fake, backward) in ops.items():
        name = schema.split("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)
        torch.library.register_fake(f"crossweft::{name}", fake, lib=library)
        if backward is None:
            library.impl(name, _without_gradients(name), "Autograd")
        else:
            torch.library.register_autograd(f"crossweft::{name}", backward, setup_context=_keep, lib=library)
    return library


#: Keeps the ops.
LIBRARY = _define()
