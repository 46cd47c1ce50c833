"""Events: tensors of the host are ready when a call returns, so nothing waits for any."""

from __future__ import annotations

from types import TracebackType
from typing import Any


class EventHandle:
    """An event that has happened."""

    def current_stream_wait(self) -> None:
        """Returns at once."""


class EventOverlap:
    """What an asynchronous call returns; ``event`` is ``None`` of a synchronous one."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Returns at once, for there is nothing to wait for."""

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.current_stream_wait()
