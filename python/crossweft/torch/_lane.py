"""Calls that are made one after another, in the background if the caller does not wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ..errors import UsageError

T = TypeVar("T")


class Lane:
    """Runs calls in the order in which they are given.

    Calls that somebody waits for run in that thread if nothing is before them, others in a thread of the lane, which
    comes with the first and goes with :meth:`close`. It is a daemon: an interpreter that ends does not wait for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], T]) -> T:
        """Makes a call and returns what it returns, or raises what it raises."""
        with self._changed:
            here = not self._busy and not self._waiting
            if here:
                self._busy = True
        if not here:
            return self.start(call).result()
        try:
            return call()
        finally:
            self._done()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Makes a call in the background. Raises UsageError after :meth:`close`."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise UsageError(f"{self._name} were closed: the process group has been destroyed")
            self._waiting.append((call, future))  # type: ignore[arg-type]
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return future

    def close(self, patience: float = 0.0) -> bool:
        """Ends the thread once all calls have been made. Waits for it at most ``patience`` seconds, and says if it has.

        A thread that is in a call, or lets go of its tensors, while the interpreter ends takes the process with it.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(patience)
        return not thread.is_alive()

    def _done(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._busy and (self._waiting or self._closed))
                if not self._waiting:
                    return
                call, future = self._waiting.popleft()
                self._busy = True
            # Futures are told before the next call begins.
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            # What a thread refers to lives until its next call.
            del call, future
            self._done()
