"""Where the calls of a process group are made: on host tensors, or on CUDA tensors in the order of streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch
from torch._C import _distributed_c10d as c10d

from .._crossweft import Communicator
from ..errors import Timeout
from ._lane import Lane
from ._streams import StreamOrder

#: A call, given the communicator that it is to be made on.
Call: TypeAlias = Callable[[Communicator], object]


class HostWork(c10d.Work):  # type: ignore[misc, unused-ignore]
    """Calls in the background. ``wait`` raises what they raise.

    torch hands out works that pass on ``wait`` and ``get_future`` only; whether one has ended, its future tells.
    """

    def __init__(self, calls: Sequence[Future[list[torch.Tensor]]]) -> None:
        super().__init__()
        self.calls = calls

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until they have ended; without a timeout, as long as calls of the group may take."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        for call in self.calls:
            try:
                call.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except FutureTimeout:
                # It may be what the call raised.
                if not call.done():
                    raise Timeout(f"a call of crossweft has not ended within {timeout}; it goes on") from None
                raise
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the calls' outputs."""
        done: torch.futures.Future[Any] = torch.futures.Future()
        # An exception that Python sets is none to C++; what a callback raises is.
        told = done.then(lambda _: [tensor for call in self.calls for tensor in call.result()])
        left = len(self.calls)
        asking = threading.get_ident()
        lock = threading.Lock()

        def one_more(_: object) -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = left == 0
            if not is_last:
                return
            if threading.get_ident() == asking:
                done.set_result(None)
                return
            # Callbacks may wait for further calls, so the thread that makes calls must not run them. An interpreter
            # that ends waits for this one: it must not be stopped inside of torch.
            thread = threading.Thread(target=done.set_result, args=(None,), name="crossweft callbacks")
            # One that is ending already starts none, and nobody is left who could wait for the future.
            with suppress(RuntimeError):
                thread.start()

        for call in self.calls:
            call.add_done_callback(one_more)
        if not self.calls:
            done.set_result(None)
        return told


class CudaWork(c10d.Work):  # type: ignore[misc, unused-ignore]
    """Calls on streams of the group. ``wait`` makes the current stream wait, the caller only until they are there."""

    def __init__(self, device: torch.device, ends: Sequence[Future[Any]], outputs: list[torch.Tensor]) -> None:
        """``ends`` are events behind the calls, once they have been put on their streams."""
        super().__init__()
        self.device, self.ends, self.outputs = device, list(ends), outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """What is put on the current stream from now on comes after it. The timeout is that of the calls."""
        stream = torch.cuda.current_stream(self.device)
        for end in self.ends:
            stream.wait_event(end.result())
        return True

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the device has done it."""
        return all(end.done() and end.result().query() for end in self.ends)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the calls' outputs; waiting for it is as ``wait``."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[self.device])
        # What is done by then on the stream that is current is what a future waits for.
        stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call,unused-ignore]
        with torch.cuda.stream(stream):
            self.wait()
            future.set_result(self.outputs)
        return future


class HostSide:
    """Calls on host tensors: in the caller's thread if it waits, else in a thread of the group, in order.

    In inference mode, where tensors of inference mode may be written too, in whatever thread that is.
    """

    def __init__(self, communicator: Communicator, lane: Lane) -> None:
        self.communicator = communicator
        self._lane = lane

    def now(self, call: Call) -> None:
        """Makes a call."""

        def run() -> None:
            with torch.inference_mode():
                call(self.communicator)

        self._lane.run(run)

    def later(self, call: Call, outputs: list[torch.Tensor], _used: Sequence[torch.Tensor]) -> HostWork:
        """Makes a call in the background."""

        def run() -> list[torch.Tensor]:
            with torch.inference_mode():
                call(self.communicator)
            return outputs

        return HostWork([self._lane.start(run)])


class CudaSide:
    """Calls on CUDA tensors: on the current stream if the caller waits, else on a stream of its own, in order."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.device = torch.device(communicator.device)
        self._order = StreamOrder(self.device)
        self._background: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call,unused-ignore]
        self._lock = threading.Lock()

    def now(self, call: Call) -> None:
        """Puts a call on the current stream."""
        with self._lock, torch.cuda.device(self.device), torch.inference_mode():
            self._order.enter()
            call(self.communicator)

    def later(self, call: Call, outputs: list[torch.Tensor], used: Sequence[torch.Tensor]) -> CudaWork:
        """Puts a call on the stream, behind what is on the current one. ``used`` are its tensors."""
        end: Future[Any] = Future()
        end.set_result(self.after(torch.cuda.current_stream(self.device).record_event(), call, used))
        return CudaWork(self.device, [end], outputs)

    def after(self, event: Any, call: Call, used: Sequence[torch.Tensor]) -> Any:
        """Puts a call on the stream, behind an event. Returns the event behind it."""
        stream = self._background
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            self.now(call)
            end = stream.record_event()
        for tensor in used:
            tensor.record_stream(stream)
        return end
