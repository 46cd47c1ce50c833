"""What a process with a GPU hears of another that goes wrong, through NCCL's interface.

    python faults_cuda.py LIBRARY [NAME...]

LIBRARY is libcrossweft_nccl.so; NAMEs are cases to run instead of all. Each case has two processes of its own, each
with a GPU if there are two, or else sharing one. Prints a line for each, with how long it took to hear, and exits with
1 if one has failed. Needs nothing but the CUDA driver.
"""

from __future__ import annotations

import array
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

RANKS = 2
COUNT = 250_000
FLOAT32, SUM = 7, 0
NO_TYPE = 99
SUCCESS, INVALID_ARGUMENT, REMOTE_ERROR = 0, 4, 6
# How long a fault may take to be heard of, and how long one of which nobody is told may: it might still be mended.
SOON, PATIENCE = 1.0, 12.0


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Gpu:
    """A stream of a GPU, and memory for `COUNT` numbers there, by the driver."""

    def __init__(self, number: int) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        self.call("cuDeviceGet", ctypes.byref(device), number % count.value)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.stream, self.data = ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.call("cuMemAlloc_v2", ctypes.byref(self.data), ctypes.c_size_t(4 * COUNT))
        self.fill(1.0)

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.driver, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def fill(self, value: float) -> None:
        numbers = array.array("f", [value]) * COUNT
        self.call("cuMemcpyHtoD_v2", self.data, numbers.tobytes(), ctypes.c_size_t(4 * COUNT))

    def numbers(self) -> set[float]:
        """The values that are in its memory."""
        numbers = ctypes.create_string_buffer(4 * COUNT)
        self.call("cuMemcpyDtoH_v2", numbers, self.data, ctypes.c_size_t(4 * COUNT))
        return set(array.array("f", numbers.raw))

    def is_idle(self) -> bool:
        return self.driver.cuStreamQuery(self.stream) == 0

    def synchronize(self) -> None:
        self.call("cuStreamSynchronize", self.stream)


class Ranks:
    """This process's communicator, and its GPU."""

    def __init__(self, library: str) -> None:
        self.rank = int(os.environ["RANK"])
        self.gpu = Gpu(self.rank)
        self.nccl = ctypes.CDLL(library)
        self.nccl.ncclGetLastError.restype = ctypes.c_char_p
        self.nccl.ncclGetLastError.argtypes = [ctypes.c_void_p]
        identity = UniqueId()
        if self.rank == 0:
            self.ok(self.nccl.ncclGetUniqueId(ctypes.byref(identity)))
            self.tell(bytes(identity).hex())
        else:
            ctypes.memmove(ctypes.byref(identity), bytes.fromhex(self.hear()), 128)
        self.comm = ctypes.c_void_p()
        self.ok(self.nccl.ncclCommInitRank(ctypes.byref(self.comm), RANKS, identity, self.rank))
        self.ok(self.all_reduce())
        self.gpu.synchronize()

    def tell(self, text: str) -> None:
        os.write(int(os.environ["TO"]), text.encode() + b"\n")

    def hear(self) -> str:
        text = b""
        while not text.endswith(b"\n"):
            part = os.read(int(os.environ["FROM"]), 1)
            if not part:
                raise AssertionError("the other process has ended")
            text += part
        return text.decode().strip()

    def ok(self, code: int) -> None:
        assert code == SUCCESS, f"{code}: {self.words()}"

    def words(self) -> str:
        return self.nccl.ncclGetLastError(None).decode()

    def all_reduce(self, dtype: int = FLOAT32) -> int:
        at, count = ctypes.c_void_p(self.gpu.data.value), ctypes.c_size_t(COUNT)
        return self.nccl.ncclAllReduce(at, at, count, dtype, SUM, self.comm, self.gpu.stream)

    def receive(self) -> int:
        return self.message(self.nccl.ncclRecv)

    def send(self) -> int:
        return self.message(self.nccl.ncclSend)

    def message(self, function: Callable[..., int]) -> int:
        at, count = ctypes.c_void_p(self.gpu.data.value), ctypes.c_size_t(COUNT)
        return function(at, count, FLOAT32, 1 - self.rank, self.comm, self.gpu.stream)

    def waits(self) -> None:
        """Sees that what was called waits on the device."""
        time.sleep(0.2)
        assert not self.gpu.is_idle()

    def error(self, limit: float) -> str:
        """The words of the error that the communicator comes to have, which must be a remote one."""
        code, end = ctypes.c_int(), time.monotonic() + limit
        while code.value == SUCCESS and time.monotonic() < end:
            self.ok(self.nccl.ncclCommGetAsyncError(self.comm, ctypes.byref(code)))
            time.sleep(0.001)
        text = self.nccl.ncclGetLastError(self.comm).decode()
        assert code.value == REMOTE_ERROR, f"{code.value} after {limit} s: {text}"
        return text

    def hears(self, words: str, limit: float, since: float) -> None:
        """Hears of the other rank within `limit` seconds, after which what waited has ended."""
        text = self.error(limit)
        heard = time.monotonic() - since
        assert words in text, text
        self.gpu.synchronize()
        print(f"  heard after {heard:.3f} s, ended after {time.monotonic() - since:.3f} s: {text}", flush=True)
        self.ok(self.nccl.ncclCommAbort(self.comm))


Case = Callable[[Ranks], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def killed(ranks: Ranks) -> None:
    if ranks.rank == 1:
        ranks.hear()
        ranks.tell(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.ok(ranks.all_reduce())
    ranks.waits()
    ranks.tell("now")
    ranks.hears("rank 1", SOON, float(ranks.hear()))


@case
def killed_sender(ranks: Ranks) -> None:
    if ranks.rank == 1:
        ranks.hear()
        ranks.tell(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.ok(ranks.receive())
    ranks.waits()
    ranks.tell("now")
    ranks.hears("rank 1", SOON, float(ranks.hear()))


def leaves(ranks: Ranks, call: Callable[[], int]) -> None:
    if ranks.rank == 1:
        ranks.hear()
        ranks.tell(str(time.monotonic()))
        ranks.ok(ranks.nccl.ncclCommDestroy(ranks.comm))
        ranks.hear()
        return
    ranks.ok(call())
    ranks.waits()
    ranks.tell("now")
    ranks.hears("rank 1 has left", SOON, float(ranks.hear()))
    ranks.tell("heard")


@case
def left(ranks: Ranks) -> None:
    leaves(ranks, ranks.all_reduce)


@case
def sender_left(ranks: Ranks) -> None:
    leaves(ranks, ranks.receive)


@case
def left_after_sending(ranks: Ranks) -> None:
    """What was sent before arrives, however late it is received."""
    if ranks.rank == 1:
        ranks.gpu.fill(7.0)
        ranks.ok(ranks.send())
        ranks.gpu.synchronize()
        ranks.ok(ranks.nccl.ncclCommDestroy(ranks.comm))
        ranks.tell("left")
        return
    ranks.hear()
    time.sleep(2.0)
    ranks.ok(ranks.receive())
    ranks.gpu.synchronize()
    assert ranks.gpu.numbers() == {7.0}
    ranks.ok(ranks.nccl.ncclCommDestroy(ranks.comm))


@case
def refused(ranks: Ranks) -> None:
    if ranks.rank == 1:
        ranks.hear()
        ranks.tell(str(time.monotonic()))
        assert ranks.all_reduce(NO_TYPE) == INVALID_ARGUMENT
        ranks.error(PATIENCE)
        ranks.ok(ranks.nccl.ncclCommAbort(ranks.comm))
        return
    ranks.ok(ranks.all_reduce())
    ranks.waits()
    ranks.tell("now")
    ranks.hears("rank 1 has refused", PATIENCE, float(ranks.hear()))


@case
def aborted_by_a_thread(ranks: Ranks) -> None:
    """Of a rank whose launch waits; both end."""
    if ranks.rank == 1:
        ranks.tell("here")
        ranks.hears("ncclCommAbort", 30.0, time.monotonic())
        return
    ranks.hear()
    ranks.ok(ranks.all_reduce())
    ranks.waits()
    took: list[float] = []

    def abort() -> None:
        start = time.monotonic()
        ranks.ok(ranks.nccl.ncclCommAbort(ranks.comm))
        took.append(time.monotonic() - start)

    thread = threading.Thread(target=abort)
    thread.start()
    ranks.gpu.synchronize()
    thread.join()
    print(f"  aborted in {took[0]:.3f} s", flush=True)
    assert took[0] <= SOON, took


def one_process() -> int:
    CASES[os.environ["CASE"]](Ranks(os.path.abspath(sys.argv[1])))
    return 0


def run(name: str) -> bool:
    """Whether the processes of a case have ended as they should."""
    pipes = [os.pipe() for _ in range(RANKS)]
    processes = []
    for rank in range(RANKS):
        own = {"FROM": str(pipes[rank][0]), "TO": str(pipes[1 - rank][1]), "RANK": str(rank), "CASE": name}
        ends = (pipes[rank][0], pipes[1 - rank][1])
        processes.append(subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **own}, pass_fds=ends))
    for pipe in pipes:
        for end in pipe:
            os.close(end)
    codes = [process.wait() for process in processes]
    expected = [0, -signal.SIGKILL if name.startswith("killed") else 0]
    outcome = "ok" if codes == expected else f"FAILED {codes}"
    print(f"{name}: {outcome}", flush=True)
    return codes == expected


def main() -> int:
    outcomes = [run(name) for name in sys.argv[2:] or CASES]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(one_process() if "RANK" in os.environ else main())
