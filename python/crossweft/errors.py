"""What calls raise.

Every exception is an :class:`Error` with the message and, as attributes, what the message names. An attribute
that does not apply is ``None``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._crossweft import Diagnostic

__all__ = [
    "Aborted",
    "CapacityError",
    "CheckError",
    "DeviceError",
    "Error",
    "LaunchError",
    "Mismatch",
    "PeerLost",
    "PlanError",
    "Poisoned",
    "ProgramError",
    "ShadowError",
    "TensorError",
    "Timeout",
    "UsageError",
]


class Error(Exception):
    """The base of all."""

    #: This rank.
    rank: int | None = None
    #: The rank that it is about.
    peer: int | None = None
    #: The plan's name.
    plan: str | None = None
    #: The thread block of the operation.
    thread_block: int | None = None
    #: The operation: its index in its thread block, or index and name.
    op: int | str | None = None
    #: Ranks that did not come.
    missing: Sequence[int] | None = None
    #: The line of the user's program.
    file: str | None = None
    line: int | None = None

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        for name, value in fields.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return self.message


class PlanError(Error, ValueError):
    """A plan cannot be read, or its structure is unsound."""


class ProgramError(PlanError):
    """A line of a program makes no sense; ``file`` and ``line`` say which."""


class CheckError(PlanError):
    """The checker does not accept a plan; ``diagnostics`` has the faults."""

    diagnostics: Sequence[Diagnostic]

    def __init__(self, message: str, diagnostics: Sequence[Diagnostic] = ()) -> None:
        super().__init__(message)
        self.diagnostics = diagnostics
        if diagnostics:
            first = diagnostics[0]
            self.rank, self.thread_block, self.op = first.rank, first.thread_block, first.op
            self.file, self.line = first.file, first.line


class ShadowError(Error, ImportError):
    """A package of the same name is installed."""


class TensorError(Error, ValueError):
    """A tensor cannot be used: its type, device, layout, size or alignment."""


class UsageError(Error, ValueError):
    """A call makes no sense, or does not fit the plan or the job."""


class CapacityError(Error, ValueError):
    """More tokens came than an output has room for; complete the dispatch again with more."""


class LaunchError(Error, RuntimeError):
    """The launcher's environment is incomplete, or there is none."""


class DeviceError(Error, RuntimeError):
    """A device is not there, or failed."""


class Timeout(Error, TimeoutError):
    """A deadline passed; everybody seems to be alive."""


class PeerLost(Error, ConnectionError):
    """Another rank died, or left."""


class Aborted(Error):
    """A rank ended the job."""


class Mismatch(Error):
    """Ranks make different calls."""


class Poisoned(Error):
    """An earlier call failed, so that the counters of this plan are out of step: make a new communicator."""
