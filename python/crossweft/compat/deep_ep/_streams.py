"""On which CUDA streams calls are, and what they wait for there. On the host a call is over when it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...torch._streams import StreamOrder
from .utils import EventHandle, EventOverlap

#: Makes the event of a call out of the tensors that it returns.
Ends = Callable[..., EventOverlap]


class Streams:
    """The caller's streams, and one of the buffer's own for asynchronous calls. Calls follow one another on all of
    them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: For asynchronous calls; ``None`` on the host.
        self.own = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._order = StreamOrder(device) if device.type == "cuda" else None

    @contextmanager
    def call(
        self, given: Iterable[Any], previous: EventOverlap | None = None, asynchronous: bool = False
    ) -> Iterator[Ends]:
        """A call on the tensors ``given``, after ``previous`` if there is one and otherwise after what the caller's
        stream was asked for. An asynchronous one is on the stream of its own, and its event is what to wait for."""
        if self.own is None or self._order is None:
            yield lambda *tensors: EventOverlap(EventHandle() if asynchronous else None)
            return
        caller = torch.cuda.current_stream(self.device)
        if not asynchronous:
            if previous is not None:
                previous.current_stream_wait()
            self._order.enter()
            yield lambda *tensors: EventOverlap()
            return
        with torch.cuda.stream(self.own):
            if previous is not None and previous.event is not None:
                previous.current_stream_wait()
            else:
                self.own.wait_stream(caller)
            self._order.enter()
            # Whoever allocated a tensor must know who else uses it before its memory is used again.
            used_on(self.own, given)

            def ends(*tensors: Any) -> EventOverlap:
                used_on(caller, tensors)
                return EventOverlap(EventHandle())

            yield ends


def used_on(stream: Any, tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        if isinstance(tensor, tuple):
            used_on(stream, tensor)
        elif isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(stream)
