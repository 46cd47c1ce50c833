"""The communicator that a slot of an engine is given."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from typing_extensions import Self

from .._crossweft import __version__
from ..torch import AllReduceCommunicator
from ..torch._dtypes import DTYPES

T = TypeVar("T")
N = TypeVar("N", int, float)

#: The largest tensor that is taken unless ``CROSSWEFT_MAX_BYTES`` says otherwise: what decoding reduces. Memory is set
#: aside for it.
MAX_BYTES = 16 << 20
#: Seconds that a call may take unless ``CROSSWEFT_TIMEOUT`` says otherwise.
TIMEOUT = 600.0
#: Element types of activations unless ``CROSSWEFT_DTYPES`` says otherwise; on a GPU they are prepared before graphs are
#: captured, which takes its time.
ACTIVATIONS = "bfloat16,float16,float32"
#: After how many questions the counts are logged first; then after ten times as many, and so on. Engines stop their
#: processes without a word, so nobody else would ask for them.
FIRST_REPORT = 1000


@dataclass(frozen=True)
class Settings:
    """What must be the same on every rank."""

    crossweft: str
    host: str
    device: str
    max_bytes: int
    timeout: float
    dtypes: str

    @classmethod
    def of_this_rank(cls, device: torch.device) -> Settings:
        """From the environment. Raises ValueError if a variable makes no sense."""
        dtypes = os.environ.get("CROSSWEFT_DTYPES", ACTIVATIONS)
        for name in dtypes.split(","):
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise ValueError(f"CROSSWEFT_DTYPES: torch has no type {name!r}; give such as {ACTIVATIONS}")
        return cls(
            crossweft=__version__,
            host=_host(),
            device=device.type,
            max_bytes=_number("CROSSWEFT_MAX_BYTES", int, MAX_BYTES),
            timeout=time_limit(),
            dtypes=dtypes,
        )


def time_limit() -> float:
    """Seconds that a call may take. Raises ValueError if the variable makes no sense."""
    return _number("CROSSWEFT_TIMEOUT", float, TIMEOUT)


def _number(variable: str, kind: type[N], usual: N) -> N:
    """What a variable says, which is more than 0."""
    said = os.environ.get(variable)
    if said is None:
        return usual
    try:
        number = kind(said)
    except ValueError:
        number = kind("0")
    if not 0 < number < float("inf"):
        raise ValueError(f"{variable} is {said!r}, which is no {kind.__name__} above 0; the usual one is {usual}")
    return number


class EngineCommunicator(AllReduceCommunicator):
    """An :class:`~crossweft.torch.AllReduceCommunicator` that heeds an engine's conditions, and logs what it takes.

    ``conditions`` say why nothing may be taken at the moment, or ``None``; they must say the same on every rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        settings: Settings,
        name: str,
        log: logging.Logger,
        conditions: Sequence[Callable[[], str | None]] = (),
    ) -> None:
        super().__init__(
            group,
            device=device,
            max_bytes=settings.max_bytes,
            timeout=settings.timeout,
            name=name,
        )
        self._conditions = tuple(conditions)
        self._log = log
        self._told: set[tuple[bool, torch.dtype, int]] = set()
        self._dtypes = tuple(getattr(torch, name) for name in settings.dtypes.split(","))
        self._asked, self._next_report = 0, FIRST_REPORT
        # Types that alone are taken; all if none.
        self._prepared: tuple[torch.dtype, ...] = ()

    @classmethod
    def create(
        cls,
        group: dist.ProcessGroup,
        device: torch.device,
        name: str,
        log: logging.Logger,
        conditions: Sequence[Callable[[], str | None]] = (),
    ) -> Self | None:
        """One that works on every rank of ``group``, or ``None`` on all of them, with a line in ``log`` that says why.

        Collective; never raises for what is wrong with a rank, because the others would then wait for it.
        """
        try:
            mine: Settings | str = Settings.of_this_rank(device)
        except ValueError as error:
            mine = str(error)
        every = gather(group, mine)
        problem = _disagreement(every)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        made = None
        if problem is None and isinstance(mine, Settings):
            failure = None
            begun = time.monotonic()
            try:
                made = cls(group, device, mine, name, log, conditions)
                made._get_ready(device)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
                if made is not None:
                    # The others may be in a call that this rank is not going to make.
                    made.communicator.abort(failure)
            failures = gather(group, failure)
            problem = next((f"rank {rank}: {each}" for rank, each in enumerate(failures) if each), None)
        if made is not None and problem is None:
            if made.rank == 0:
                about = (name, made.device, made.max_bytes, time.monotonic() - begun)
                log.info("crossweft is used for %s: on %s, for up to %d bytes, ready after %.2f s", *about)
            return made
        log.error("crossweft is not used for %s, the engine's own collectives are: %s", name, problem)
        if made is not None:
            made.close()
        return None

    def _get_ready(self, device: torch.device) -> None:
        """Whatever the first calls would do: nothing can be prepared while a graph is captured."""
        if self.device != device:
            raise RuntimeError(f"the communicator computes on {self.device}, the engine's tensors are on {device}")
        if device.type != "cuda":
            return
        self.communicator.compile([DTYPES[dtype] for dtype in self._dtypes])
        for dtype in self._dtypes:
            if self.rank == 0:
                self._log.info("crossweft, %s: preparing kernels and memory for %s", self.name, dtype)
            block = torch.zeros(self.max_bytes // dtype.itemsize, dtype=dtype, device=device)
            self.all_reduce_(block)
            self.all_reduce(block)
            part = block[: block.numel() // self.world_size]
            self.all_gather(part)
            self.reduce_scatter(block[: part.numel() * self.world_size])
        torch.cuda.synchronize(device)
        self._prepared = self._dtypes

    def why_not(self, tensor: torch.Tensor, op: object = "sum") -> str | None:
        """As the communicator says, or as the engine's conditions do."""
        reason = super().why_not(tensor, op)
        if reason is None and self._prepared and tensor.dtype not in self._prepared:
            reason = f"its elements are of {tensor.dtype}, which was not prepared before graphs are captured"
        return reason or next(filter(None, (condition() for condition in self._conditions)), None)

    def should_all_reduce(self, tensor: torch.Tensor, op: object = "sum") -> bool:
        """Whether an all-reduce of the tensor is taken. Counts those that are not, and logs the first of each kind."""
        taken = super().should_all_reduce(tensor, op)
        nbytes = tensor.numel() * tensor.element_size()
        key = (taken, tensor.dtype, nbytes.bit_length())
        if key not in self._told:
            self._told.add(key)
            self._tell(tensor, nbytes, op, taken)
        self._asked += 1
        if self._asked == self._next_report:
            self._next_report *= 10
            self._tell_counts()
        return taken

    def should_gather(self, out: torch.Tensor | None, tensor: torch.Tensor) -> bool:
        """Whether an all-gather into ``out`` (a new tensor if ``None``) is taken without a copy. Counts those that are
        not."""
        reason = self.why_not(tensor)
        if reason is None and tensor.numel() * tensor.element_size() * self.world_size > self.max_bytes:
            reason = f"its output has more than max_bytes ({self.max_bytes}) bytes"
        if reason is None and not (tensor.is_contiguous() and (out is None or out.is_contiguous())):
            reason = "input or output is not contiguous"
        if reason is None and out is not None and (out.dtype, out.device) != (tensor.dtype, tensor.device):
            reason = f"input is {tensor.dtype} on {tensor.device}, output {out.dtype} on {out.device}"
        if reason is None and out is not None and out.numel() != tensor.numel() * self.world_size:
            reason = "the output is not as large as all inputs"
        if reason is not None:
            self._counts.refuse("all_gather", reason)
        return reason is None

    def should_reduce_scatter(self, tensor: torch.Tensor) -> bool:
        """Whether a reduce-scatter of the tensor's rows is taken. Counts those that are not."""
        reason = self.why_not(tensor)
        if reason is None and not (tensor.dim() and tensor.shape[0] % self.world_size == 0):
            reason = f"its rows are no {self.world_size} blocks of one size"
        if reason is not None:
            self._counts.refuse("reduce_scatter", reason)
        return reason is None

    def _tell(self, tensor: torch.Tensor, nbytes: int, op: object, taken: bool) -> None:
        if self.rank != 0:
            return
        about = f"all-reduces of {tensor.dtype} of about {nbytes} bytes"
        if taken:
            chosen = self.communicator.explain("all-reduce", nbytes, dtype=tensor.dtype)["chosen"]
            self._log.info("crossweft, %s: takes %s, by %s", self.name, about, chosen)
        else:
            self._log.info("crossweft, %s: leaves %s to the engine: %s", self.name, about, self.why_not(tensor, op))

    def _tell_counts(self) -> None:
        if self.rank == 0:
            self._log.info("crossweft until now, %s", self.report())

    def close(self) -> None:
        """Leaves in good order, and logs what became of all calls."""
        if self._asked and not self.disabled:
            self._tell_counts()
        super().close()


def gather(group: dist.ProcessGroup, value: T) -> list[T]:
    """Everybody's value, in rank order."""
    values: list[T | None] = [None] * dist.get_world_size(group)
    # Engines make groups in inference mode, in which gloo's objects cannot be written.
    with torch.inference_mode(False):
        dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def _disagreement(every: Sequence[Settings | str]) -> str | None:
    """What keeps ranks with these settings, or faults in their settings, from working together."""
    first = every[0]
    for rank, settings in enumerate(every):
        if isinstance(settings, str):
            return f"rank {rank}: {settings}"
        if isinstance(first, str):
            continue
        for field, mine, theirs in zip(fields(first), astuple(first), astuple(settings), strict=True):
            if mine == theirs:
                continue
            if field.name == "host":
                return f"rank {rank} is on another host than rank 0; all ranks of a group must be on one"
            return f"{field.name} is {mine} on rank 0 and {theirs} on rank {rank}; give all ranks the same"
    return None


def _host() -> str:
    """The same for processes that can share memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
