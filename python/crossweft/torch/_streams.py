"""The order of calls on CUDA streams."""

from __future__ import annotations

from typing import Any

import torch


class StreamOrder:
    """Makes the calls of one communicator follow one another, whatever streams they are on.

    Between two calls on one stream that costs nothing; a call on another one waits for what is on the stream of the
    call before. What is captured into graphs is left alone: it runs in the order of replays.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index
        self._handle = -1
        self._stream: Any = None

    def enter(self) -> int:
        """The raw handle of the current stream, on which a call is about to be made."""
        handle: int = torch._C._cuda_getCurrentRawStream(self._index)
        if handle != self._handle:
            self._change(handle)
        return handle

    def _change(self, handle: int) -> None:
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return
            stream = torch.cuda.current_stream()
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._handle, self._stream = handle, stream
