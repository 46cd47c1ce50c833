"""The order of calls on CUDA streams, with streams that only note what they wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossweft.torch import _streams


class Stream:
    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.is_capturing = False
        self.waits: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        # The driver refuses anything else.
        assert self.is_capturing == other.is_capturing
        self.waits.append(other.handle)


class Device:
    """What is asked of torch, of a device whose current stream is ``current``."""

    def __init__(self) -> None:
        self.current = Stream(0)
        self.cuda = SimpleNamespace(
            current_device=lambda: 0,
            current_stream=lambda: self.current,
            device=nullcontext,
            is_current_stream_capturing=lambda: self.current.is_capturing,
            stream=self.on,
        )
        self._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: self.current.handle)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(_streams, "torch", device)
    return device


def called(device: Device, order: Any, *streams: Stream) -> list[list[int]]:
    """What each of the streams has waited for, after a call on each in turn."""
    for stream in streams:
        with device.on(stream):
            assert order.enter() == stream.handle
    return [stream.waits for stream in streams]


def test_a_call_waits_for_the_one_before_on_another_stream(device: Device) -> None:
    order = _streams.StreamOrder(torch.device("cuda", 0))
    first, second = Stream(1), Stream(2)
    called(device, order, first, first, second, second, first)
    assert (first.waits, second.waits) == ([2], [1])


def test_calls_of_one_capture_follow_one_another(device: Device) -> None:
    order = _streams.StreamOrder(torch.device("cuda", 0))
    outside, first, second = Stream(1), Stream(2), Stream(3)
    # The stream that is captured has run calls before, too.
    called(device, order, outside, first)
    first.waits.clear()
    first.is_capturing = second.is_capturing = True
    called(device, order, first, second, second, first)
    assert (first.waits, second.waits) == ([3], [2])
    # Outside nothing was called meanwhile, on any other stream.
    first.is_capturing = second.is_capturing = False
    called(device, order, first, outside)
    assert (first.waits, outside.waits) == ([3], [2])
    # Another capture knows nothing of the one before, nor of what runs.
    second.is_capturing = True
    called(device, order, second)
    assert second.waits == [2]
