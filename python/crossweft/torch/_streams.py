"""The order of calls on CUDA streams."""

from __future__ import annotations

from typing import Any

import torch


class StreamOrder:
    """Makes the calls of one communicator follow one another, whatever streams they are on.

    Between two calls on one stream that costs nothing on the device; a call on another one waits for what is on the
    stream of the call before. Calls that are captured into one graph follow one another in the same way. Of what runs
    outside of that graph a captured call knows nothing: it runs in the order of replays. One capture of calls of a
    communicator is under way at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index
        #: Of the last call that was not captured.
        self._handle = -1
        self._stream: Any = None
        #: Of the last one that was.
        self._captured: Any = None

    def enter(self) -> int:
        """The raw handle of the current stream, on which a call is about to be made."""
        handle: int = torch._C._cuda_getCurrentRawStream(self._index)
        if (
            handle != self._handle
            or torch.cuda.current_device() != self._index
            or torch.cuda.is_current_stream_capturing()
        ):
            self._change(handle)
        return handle

    def _change(self, handle: int) -> None:
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            if torch.cuda.is_current_stream_capturing():
                before, self._captured = self._captured, stream
                # If it is captured no longer, that was into another graph.
                if before is not None and before != stream and _is_capturing(before):
                    stream.wait_stream(before)
                return
        if handle == self._handle:
            return
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._handle, self._stream = handle, stream


def _is_capturing(stream: Any) -> bool:
    with torch.cuda.stream(stream):
        capturing: bool = torch.cuda.is_current_stream_capturing()
    return capturing
