"""Events. On CUDA they are of streams; tensors of the host are ready when a call returns, so nothing waits for any."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch


class EventHandle:
    """What the current CUDA stream was asked to do before; where CUDA is not used, nothing."""

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

    def current_stream_wait(self) -> None:
        """Lets what the current stream is asked to do from here on wait for it. Returns at once."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """What an asynchronous call returns; ``event`` is ``None`` of a synchronous one."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event = event
        #: Kept as long as this is.
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """As :meth:`EventHandle.current_stream_wait`."""
        if self.event is not None:
            self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.current_stream_wait()
