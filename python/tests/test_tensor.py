"""Memory of other libraries, by every protocol."""

from __future__ import annotations

import array
import ctypes

import pytest

import crossweft as cw
from crossweft._crossweft import describe

PLAN = cw.Plan.all_reduce("one-shot", 2)


@pytest.mark.parametrize(
    ("tensor", "dtype", "nbytes", "readonly"),
    [
        (b"1234", "u8", 4, True),
        (bytearray(5), "u8", 5, False),
        (memoryview(bytearray(6))[2:], "u8", 4, False),
        (array.array("b", [1]), "i8", 1, False),
        (array.array("h", [1]), "i16", 2, False),
        (array.array("I", [1]), "u32", 4, False),
        (array.array("q", [1, 2]), "i64", 16, False),
        (array.array("d", [1, 2]), "f64", 16, False),
        ((ctypes.c_float * 3)(), "f32", 12, False),
        (bytearray(0), "u8", 0, False),
    ],
)
def test_buffers(tensor: object, dtype: str, nbytes: int, readonly: bool) -> None:
    found = describe(tensor)
    assert (found["dtype"], found["nbytes"], found["readonly"]) == (dtype, nbytes, readonly)
    assert found["device"] == "cpu" and found["protocol"] == "buffer"


def test_what_is_no_tensor() -> None:
    for nothing in [None, 3, "text", [1, 2], object()]:
        with pytest.raises(cw.TensorError, match="no tensor"):
            describe(nothing)
    with pytest.raises(cw.TensorError, match="contiguous"):
        describe(memoryview(bytearray(8))[::2])
    with pytest.raises(cw.TensorError, match="format"):
        describe((ctypes.c_longdouble * 2)())


def test_alignment() -> None:
    memory = bytearray(17)
    shift = 1 if describe(memory)["address"] % 4 == 0 else 0
    odd = memoryview(memory)[shift : shift + 8]
    with pytest.raises(cw.TensorError, match="aligned"):
        PLAN.run_local([odd, bytearray(8)], dtype="f32")


def test_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    for name in ["int8", "uint16", "int32", "uint64", "float16", "float32", "float64"]:
        inputs = [numpy.arange(12, dtype=name).reshape(3, 4), numpy.ones((3, 4), dtype=name)]
        outputs = PLAN.run_local(inputs)
        assert all(out.dtype == name for out in outputs)
        for out in outputs:
            numpy.testing.assert_array_equal(out.reshape(3, 4), inputs[0] + inputs[1])
    with pytest.raises(cw.TensorError, match="contiguous"):
        describe(numpy.zeros((4, 4))[:, ::2])
    with pytest.raises(cw.TensorError, match="format"):
        describe(numpy.zeros(2, dtype="complex64"))
    constant = numpy.ones(2)
    constant.flags.writeable = False
    assert describe(constant)["readonly"]
    assert describe(numpy.zeros(3, dtype="float32"))["protocol"] == "buffer"


class DLDevice(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("id", ctypes.c_int32)]


class DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


class DLManagedTensor(ctypes.Structure):
    _fields_ = [
        ("tensor", DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Dlpack:
    """A tensor of two rows that speaks DLPack, of a version, type, layout and device of the test's choice."""

    def __init__(
        self,
        *,
        versioned: bool = True,
        code: int = 2,
        bits: int = 32,
        lanes: int = 1,
        readonly: bool = False,
        device: tuple[int, int] = (1, 0),
        strides: tuple[int, int] | None = None,
        major: int = 1,
    ) -> None:
        self.memory = (ctypes.c_char * 64)()
        self.deleted = 0
        self.device = device
        self.versioned = versioned
        self.asked: dict[str, object] = {}
        self.shape = (ctypes.c_int64 * 2)(2, 3)
        self.strides = (ctypes.c_int64 * 2)(*strides) if strides else None
        self.deleter = Deleter(self._delete)
        self.managed = DLManagedTensorVersioned() if versioned else DLManagedTensor()
        self.managed.deleter = ctypes.cast(self.deleter, ctypes.c_void_p)
        tensor = self.managed.tensor
        tensor.data = ctypes.addressof(self.memory)
        tensor.device = DLDevice(*device)
        tensor.dtype = DLDataType(code, bits, lanes)
        tensor.ndim = 2
        tensor.shape = self.shape
        if self.strides:
            tensor.strides = self.strides
        tensor.byte_offset = 8
        if versioned:
            self.managed.major = major
            self.managed.flags = int(readonly)

    def _delete(self, _managed: int) -> None:
        self.deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: object) -> object:
        if not self.versioned and "max_version" in arguments:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.asked = arguments
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return new_capsule(ctypes.addressof(self.managed), name, None)


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack(versioned: bool) -> None:
    tensor = Dlpack(versioned=versioned, strides=(3, 1))
    found = describe(tensor)
    assert found["address"] == ctypes.addressof(tensor.memory) + 8
    assert (found["nbytes"], found["dtype"], found["protocol"]) == (24, "f32", "dlpack")
    assert tensor.asked.get("max_version") == ((1, 0) if versioned else None)
    assert tensor.deleted == 1


@pytest.mark.parametrize(
    ("code", "bits", "dtype"),
    [(4, 16, "bf16"), (10, 8, "f8e4m3"), (12, 8, "f8e5m2"), (2, 16, "f16"), (0, 64, "i64"), (6, 8, "u8")],
)
def test_dlpack_types(code: int, bits: int, dtype: str) -> None:
    assert describe(Dlpack(code=code, bits=bits))["dtype"] == dtype


def test_dlpack_refusals() -> None:
    cases = [
        (Dlpack(strides=(6, 2)), "not contiguous"),
        (Dlpack(strides=(1, 2)), "not contiguous"),
        (Dlpack(code=5), "element types"),
        (Dlpack(lanes=4), "element types"),
        (Dlpack(device=(10, 0)), "kind 10"),
        (Dlpack(major=2), "version is 2"),
    ]
    for tensor, reason in cases:
        with pytest.raises(cw.TensorError, match=reason):
            describe(tensor)
        assert tensor.deleted == 1
    assert describe(Dlpack(readonly=True))["readonly"]
    assert describe(Dlpack(device=(2, 3)))["device"] == "cuda:3"
    assert describe(Dlpack(device=(3, 0)))["device"] == "cpu"
    with pytest.raises(cw.TensorError, match="read-only"):
        PLAN.run_local([bytearray(24)] * 2, [Dlpack(readonly=True), bytearray(24)], dtype="f32")
    with pytest.raises(cw.TensorError, match="on cuda:3"):
        PLAN.run_local([Dlpack(device=(2, 3)), bytearray(24)], [bytearray(24)] * 2)


Getter = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
Current = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class DLPackExchangeAPI(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_work_stream", ctypes.c_void_p),
    ]


def test_dlpack_c_exchange_api() -> None:
    @Getter
    def managed(object: Dlpack, out: ctypes._Pointer[ctypes.c_void_p]) -> int:
        out[0] = ctypes.addressof(object.managed)
        return 0

    @Current
    def stream(kind: int, device: int, out: ctypes._Pointer[ctypes.c_void_p]) -> int:
        out[0] = 1000 * kind + device
        return 0

    table = DLPackExchangeAPI(major=1, minor=3)
    table.managed_from_object = ctypes.cast(managed, ctypes.c_void_p)
    table.current_work_stream = ctypes.cast(stream, ctypes.c_void_p)
    # One of a later version, which leads to the one that is known.
    later = DLPackExchangeAPI(major=9, previous=ctypes.addressof(table))

    class Fast(Dlpack):
        __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(later), b"dlpack_exchange_api", None)

        def __dlpack__(self, **arguments: object) -> object:
            raise AssertionError("the C exchange API comes first")

    tensor = Fast(device=(2, 1))
    found = describe(tensor)
    assert found["protocol"] == "dlpack C exchange API"
    assert (found["nbytes"], found["device"], found["stream"]) == (24, "cuda:1", 2001)
    assert tensor.deleted == 1
    one, two = Fast(), Fast()
    for tensor, value in [(one, 1.5), (two, 2.0)]:
        ctypes.memmove(ctypes.addressof(tensor.memory) + 8, (ctypes.c_float * 6)(*[value] * 6), 24)
    output = [array.array("f", [0] * 6), array.array("f", [0] * 6)]
    PLAN.run_local([one, two], output)
    assert output == [array.array("f", [3.5] * 6)] * 2


class CudaArray:
    def __init__(self, **changes: object) -> None:
        self.__cuda_array_interface__ = {
            "shape": (2, 3),
            "typestr": "<f2",
            "data": (0x7F0000000000, False),
            "version": 3,
            "strides": None,
        } | changes


def test_cuda_array_interface() -> None:
    found = describe(CudaArray(stream=1))
    assert (found["device"], found["nbytes"], found["dtype"]) == ("cuda", 12, "f16")
    assert found["stream"] == 0 and not found["readonly"]
    assert describe(CudaArray(strides=(6, 2)))["nbytes"] == 12
    with pytest.raises(cw.TensorError, match="contiguous"):
        describe(CudaArray(strides=(12, 2)))
    with pytest.raises(cw.TensorError, match="typestr|type"):
        describe(CudaArray(typestr="<c8"))
