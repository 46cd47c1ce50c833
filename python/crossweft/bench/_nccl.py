"""Libraries with NCCL's C interface, by ctypes: NCCL itself, and crossweft's."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
import torch.distributed as dist

#: Where crossweft's library is, if not beside this package or where the system's loader looks.
VARIABLE = "CROSSWEFT_NCCL_LIBRARY"

_DTYPES = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
_SUM = 0
_SYMMETRIC = 1


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class NcclError(Exception):
    """A call failed, or there is no library."""


class Nccl:
    """A communicator of all ranks of ``torch.distributed``."""

    def __init__(self, path: str) -> None:
        """Loads a library. Raises NcclError if that cannot be done."""
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise NcclError(str(error)) from None
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._communicator = ctypes.c_void_p()
        self._windows: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []

    def join(self) -> None:
        """Makes the communicator. Collective; comes first."""
        unique_id = _UniqueId()
        if dist.get_rank() == 0:
            self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        message = [bytes(unique_id)]
        dist.broadcast_object_list(message, src=0)
        joined = _UniqueId.from_buffer_copy(message[0])
        communicator, ranks = ctypes.byref(self._communicator), dist.get_world_size()
        self._call("ncclCommInitRank", communicator, ranks, joined, dist.get_rank())

    def all_reduce(self, tensor: torch.Tensor, stream: int = 0) -> torch.Tensor:
        """Replaces a tensor by the sum of all ranks'."""
        address, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        dtype, handle = _DTYPES[tensor.dtype], ctypes.c_void_p(stream)
        self._call("ncclAllReduce", address, address, count, dtype, _SUM, self._communicator, handle)
        return tensor

    def window(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor that all ranks can reach. Collective; its memory lives until windows are freed."""
        count = torch.Size(shape).numel()
        size = max(count * dtype.itemsize, 1)
        address, window = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("ncclMemAlloc", ctypes.byref(address), ctypes.c_size_t(size))
        registered = (self._communicator, address, ctypes.c_size_t(size), ctypes.byref(window), _SYMMETRIC)
        self._call("ncclCommWindowRegister", *registered)
        self._windows.append((window, address))
        if device.type == "cuda":
            flat = torch.as_tensor(_CudaBytes(address.value or 0, size), device=device)
            return flat.view(dtype)[:count].view(shape)
        memory = (ctypes.c_char * size).from_address(address.value or 0)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)

    def free_windows(self) -> None:
        """Frees the memory of all windows, whose tensors must not be used any more. Collective."""
        for window, address in self._windows:
            self._call("ncclCommWindowDeregister", self._communicator, window)
            self._call("ncclMemFree", address)
        self._windows.clear()

    def close(self) -> None:
        """Leaves. Collective."""
        self.free_windows()
        self._call("ncclCommDestroy", self._communicator)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise NcclError(f"{name}: {self._library.ncclGetErrorString(code).decode()}")


class _CudaBytes:
    """Bytes of device memory, as torch takes them without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def crossweft_library(given: str | None = None) -> str:
    """Where crossweft's library is: given, as ``CROSSWEFT_NCCL_LIBRARY`` says, beside this package, or where the
    system's loader looks. Raises NcclError if it is in none of these places."""
    name = "libcrossweft_nccl.so"
    for path in (given, os.environ.get(VARIABLE)):
        if path:
            if not Path(path).is_file():
                raise NcclError(f"there is no {path}")
            return path
    beside = Path(__file__).parents[1] / name
    if beside.is_file():
        return str(beside)
    # Not by find_library, which answers with the loader's name of what it finds: it is NCCL's, and NCCL may be loaded.
    try:
        ctypes.CDLL(name)
    except OSError:
        raise NcclError(f"{name} was not found; give --nccl-library or {VARIABLE}") from None
    return name
