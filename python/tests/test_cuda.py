"""Tensors on CUDA devices: plans and all-reduce in the order of a stream. Skipped where there is no device.

Memory and streams come from the driver by ctypes, so that no library of tensors is needed.
"""

from __future__ import annotations

import array
import ctypes
from typing import Any

import pytest
from conftest import in_threads

import crossweft as cw

COUNT = 100_000


def driver() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        pytest.skip(f"no CUDA driver: {error}")
    count = ctypes.c_int()
    if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        pytest.skip("the CUDA driver sees no device")
    return library


class Gpu:
    """A rank's device: its primary context, current in this thread, and a stream of its own.

    Ranks that share a process and a GPU must not share a stream: one's kernel would wait behind another's that
    waits for it.
    """

    def __init__(self, communicator: cw.Communicator) -> None:
        self.library = driver()
        ordinal = int(communicator.device.removeprefix("cuda:"))
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", ctypes.byref(stream), 1)  # non-blocking
        self.stream = stream.value or 0

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def tensor(self, values: array.array[float]) -> Tensor:
        return Tensor(self, values)


class Tensor:
    def __init__(self, gpu: Gpu, values: array.array[float]) -> None:
        self.gpu, self.count = gpu, len(values)
        address = ctypes.c_uint64()
        gpu.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * self.count))
        self.address = address
        host = (ctypes.c_char * (4 * self.count)).from_buffer(values)
        gpu.call("cuMemcpyHtoD_v2", address, host, ctypes.c_size_t(4 * self.count))
        self.__cuda_array_interface__ = {
            "shape": (self.count,),
            "typestr": "<f4",
            "data": (address.value, False),
            "strides": None,
            "version": 3,
        }

    def values(self) -> array.array[float]:
        """What is there once the stream has come to its end."""
        self.gpu.call("cuStreamSynchronize", ctypes.c_void_p(self.gpu.stream))
        values = array.array("f", bytes(4 * self.count))
        host = (ctypes.c_char * (4 * self.count)).from_buffer(values)
        self.gpu.call("cuMemcpyDtoH_v2", host, self.address, ctypes.c_size_t(4 * self.count))
        return values


@pytest.mark.parametrize("algorithm", ["one-shot", "two-shot", "ring"])
def test_plans_run_in_the_order_of_a_stream(algorithm: str) -> None:
    driver()
    plan = cw.Plan.all_reduce(algorithm, 2, thread_blocks=2)

    def rank_main(communicator: cw.Communicator) -> None:
        gpu = Gpu(communicator)
        data = gpu.tensor(array.array("f", [communicator.rank + 1] * COUNT))
        out = gpu.tensor(array.array("f", [0] * COUNT))
        prepared = plan.prepare(communicator, dtype="f32", max_bytes=4 * COUNT)
        for _ in range(3):
            prepared.run(data, out, stream=gpu.stream)
        assert out.values() == array.array("f", [3] * COUNT)
        prepared.check()
        plan.run(communicator, data, stream=gpu.stream)
        plan.run(communicator, data, stream=gpu.stream)
        assert data.values() == array.array("f", [6] * COUNT)
        # What is on the host goes through the device's memory.
        host = array.array("f", [communicator.rank] * COUNT)
        assert plan.run(communicator, host) == array.array("f", [1] * COUNT)

    in_threads(2, rank_main, device="cuda")


def test_all_reduce() -> None:
    driver()

    def rank_main(communicator: cw.Communicator) -> None:
        gpu = Gpu(communicator)
        data = gpu.tensor(array.array("f", [communicator.rank + 1] * COUNT))
        out = gpu.tensor(array.array("f", [0] * COUNT))
        communicator.all_reduce(data, out, op="max", stream=gpu.stream)
        communicator.all_reduce(data, stream=gpu.stream)
        assert out.values() == array.array("f", [2] * COUNT)
        assert data.values() == array.array("f", [3] * COUNT)
        with pytest.raises(cw.UsageError, match="on the host"):
            communicator.all_reduce(array.array("f", [1]))

    in_threads(2, rank_main, device="cuda")


def test_messages_and_blocks_of_any_size() -> None:
    driver()

    def rank_main(communicator: cw.Communicator) -> None:
        rank, peer = communicator.rank, 1 - communicator.rank
        gpu = Gpu(communicator)
        data = gpu.tensor(array.array("f", [rank + 1] * COUNT))
        out = gpu.tensor(array.array("f", [0] * COUNT))
        # As many of rank 0's elements as of rank 1's and 10 more.
        counts = [COUNT // 2 + 5, COUNT // 2 - 5]
        mine = gpu.tensor(array.array("f", [rank + 3] * counts[rank]))
        part = gpu.tensor(array.array("f", [0] * counts[rank]))
        communicator.prepare_messages(reduces=["f32"])
        with communicator.group() as group:
            group.recv(array.array("f"), peer)
            group.send(array.array("f"), peer)
            with pytest.raises(cw.TensorError, match="on the host"):
                group.run()
        group = communicator.group()
        group.recv(out, peer)
        group.send(data, peer)
        group.run(stream=gpu.stream)
        assert out.values() == array.array("f", [peer + 1] * COUNT)
        if rank == 0:
            communicator.send(data, peer, stream=gpu.stream)
        else:
            communicator.recv(out, peer, stream=gpu.stream)
            assert out.values() == array.array("f", [1] * COUNT)
        communicator.all_gather_v(mine, out, counts, stream=gpu.stream)
        assert out.values() == array.array("f", [3] * counts[0] + [4] * counts[1])
        communicator.reduce_scatter_v(data, part, counts, stream=gpu.stream)
        assert part.values() == array.array("f", [3] * counts[rank])
        communicator.all_to_all_v(data, out, [COUNT // 2] * 2, [COUNT // 2] * 2, stream=gpu.stream)
        assert out.values() == array.array("f", [1] * (COUNT // 2) + [2] * (COUNT // 2))
        communicator.check()

    in_threads(2, rank_main, device="cuda")


def test_a_communicator_of_the_cpu_refuses_them() -> None:
    driver()
    cuda = cw.Communicator(0, 1, cw.UniqueId(), device="cuda")
    data = Gpu(cuda).tensor(array.array("f", [1]))
    with pytest.raises(cw.TensorError, match='device="cuda"'):
        cw.Communicator(0, 1, cw.UniqueId()).all_reduce(data)


def test_all_reduce_with_rms_normalisation() -> None:
    driver()
    hidden, tokens = 1024, 3

    def rank_main(communicator: cw.Communicator) -> None:
        gpu = Gpu(communicator)
        numbers = [token + 1 for token in range(tokens) for _ in range(hidden)]
        own = gpu.tensor(array.array("f", [(communicator.rank + 1) * number for number in numbers]))
        weight = gpu.tensor(array.array("f", [0.5] * hidden))
        residual = gpu.tensor(array.array("f", [1] * (tokens * hidden)))
        output = gpu.tensor(array.array("f", [0] * (tokens * hidden)))
        scale = gpu.tensor(array.array("f", [0] * tokens))
        # Their bytes are what counts.
        quantised = gpu.tensor(array.array("f", [0] * (tokens * hidden // 4)))
        quantised.__cuda_array_interface__ |= {"shape": (tokens * hidden,), "typestr": "|u1"}
        written = {"residual": residual, "quantised": quantised, "scale": scale}
        communicator.all_reduce_rms_norm(own, weight, output, epsilon=0.0, stream=gpu.stream, **written)
        # 1 + 2 of each token's number, and the residual.
        assert list(residual.values()[::hidden]) == [4.0, 7.0, 10.0]
        assert list(output.values()) == pytest.approx([0.5] * (tokens * hidden))
        assert list(scale.values()) == pytest.approx([0.5 / 448] * tokens)
        # 448, the largest of f8e4m3.
        assert set(quantised.values().tobytes()) == {0x7E}
        with pytest.raises(cw.TensorError, match="the scale has 12 bytes, not 96"):
            communicator.all_reduce_rms_norm(
                own, weight, output, quantised=quantised, scale=scale, per="group", stream=gpu.stream
            )
        with pytest.raises(cw.UsageError, match="on the host"):
            host = array.array("f", [0] * hidden)
            communicator.all_reduce_rms_norm(host, host, array.array("f", host))

    in_threads(2, rank_main, device="cuda")
