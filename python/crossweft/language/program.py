"""Programs, and the one that is being written."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from .._crossweft import Chunk, Plan
from .._crossweft import Program as Recorder
from .collectives import Collective, CustomCollective
from .types import ReduceOperationType, ReplicationPolicy, misuse

__all__ = ["JSON", "AlgoSpec", "CollectiveProgram", "LoopIterationContext"]

#: The program of the innermost ``with`` of this thread or task.
_current: ContextVar[CollectiveProgram] = ContextVar("crossweft program")


@dataclass(frozen=True)
class AlgoSpec:
    """What an algorithm is to be compiled for: the arguments of a program."""

    name: str
    collective: Collective
    nranks_per_node: int
    world_size: int
    in_place: bool
    instances: int = 1
    protocol: str = "Simple"
    instr_fusion: bool = True
    auto_sync: bool = True
    replication_policy: ReplicationPolicy = ReplicationPolicy.interleaved
    reuse_resources: bool = False
    num_threads_per_block: int = 1024
    use_double_scratch_buffer: bool = False
    buffer_alignment: int = 16
    min_message_size: int = 0
    max_message_size: int = 2**64 - 1
    tags: dict[str, Any] = field(default_factory=dict)


class CollectiveProgram:
    """A program over all ranks. Instructions inside ``with`` are recorded into it.

    ``instances`` copies of it run side by side on parts of the data, as ``replication_policy`` says.
    ``instr_fusion`` merges neighbouring instructions into one operation; ``auto_sync`` inserts synchronisation where
    the data needs it. ``reduce_op`` is the operation that the plan is for, ``None`` leaves it to the caller.
    Sizes of messages are those of the larger buffer, in bytes, inclusive. ``protocol`` (Simple or LL),
    ``reuse_resources``, ``num_threads_per_block`` and ``buffer_alignment`` are kept for MSCCL++'s sake: a plan says
    itself what are packets, and the executor knows its device.
    """

    def __init__(
        self,
        name: str,
        collective: Collective,
        num_ranks: int,
        instances: int = 1,
        protocol: str = "Simple",
        instr_fusion: bool = True,
        auto_sync: bool = True,
        replication_policy: ReplicationPolicy = ReplicationPolicy.interleaved,
        reuse_resources: bool = False,
        num_threads_per_block: int = 1024,
        use_double_scratch_buffer: bool = False,
        buffer_alignment: int = 16,
        min_message_size: int = 0,
        max_message_size: int = 2**64 - 1,
        reduce_op: ReduceOperationType | str | None = ReduceOperationType.sum,
    ) -> None:
        if protocol not in ("Simple", "LL"):
            misuse(f"there is no protocol {protocol!r}; there are Simple and LL")
        if collective.num_ranks != num_ranks:
            misuse(f"the collective is for {collective.num_ranks} ranks, the program for {num_ranks}")
        self.name = name
        self.collective = collective
        self.num_ranks = num_ranks
        self.instances = instances
        self.protocol = protocol
        self.instr_fusion = instr_fusion
        self.auto_sync = auto_sync
        self.replication_policy = replication_policy
        self.reuse_resources = reuse_resources
        self.num_threads_per_block = num_threads_per_block
        self.use_double_scratch_buffer = use_double_scratch_buffer
        self.buffer_alignment = buffer_alignment
        self.min_message_size = min_message_size
        self.max_message_size = max_message_size
        self.reduce_op = None if reduce_op is None else ReduceOperationType(str(reduce_op))
        options: dict[str, Any] = {
            "in_place": collective.inplace,
            "instances": instances,
            "interleaved": replication_policy == ReplicationPolicy.interleaved,
            "fuse": instr_fusion,
            "auto_sync": auto_sync,
            "double_scratch": use_double_scratch_buffer,
            "sizes": (min_message_size, max_message_size),
            "reduce_op": None if reduce_op is None else str(reduce_op),
            "chunk_factor": collective.chunk_factor,
        }
        if isinstance(collective, CustomCollective):
            options["shape"] = (collective.input_size, collective.output_size)
        root = getattr(collective, "root", None)
        if root is not None:
            options["root"] = root
        self.recorder = Recorder(str(name), collective.name, num_ranks, **options)
        self._entered: list[Token[CollectiveProgram]] = []

    @classmethod
    def from_spec(cls, spec: AlgoSpec) -> CollectiveProgram:
        """The program that a specification describes."""
        return cls(
            spec.name,
            spec.collective,
            spec.world_size,
            instances=spec.instances,
            protocol=spec.protocol,
            instr_fusion=spec.instr_fusion,
            auto_sync=spec.auto_sync,
            replication_policy=spec.replication_policy,
            reuse_resources=spec.reuse_resources,
            num_threads_per_block=spec.num_threads_per_block,
            use_double_scratch_buffer=spec.use_double_scratch_buffer,
            buffer_alignment=spec.buffer_alignment,
            min_message_size=spec.min_message_size,
            max_message_size=spec.max_message_size,
        )

    def __enter__(self) -> CollectiveProgram:
        self._entered.append(_current.set(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _current.reset(self._entered.pop())

    def compile(self) -> Plan:
        """The plan of what is recorded so far, which the checker accepts, or raises CheckError."""
        return self.recorder.compile()

    def to_json(self) -> str:
        """The plan as a file."""
        return self.compile().to_json()

    def expect(self, output: Chunk, inputs: Sequence[Chunk]) -> None:
        """States what a custom collective computes: the chunks of ``output`` hold the reduction of ``inputs``.

        What nothing is stated about may hold anything.
        """
        self.recorder.expect(output, list(inputs))

    def check_reduce_op(self, op: ReduceOperationType | str) -> None:
        """Refuses an instruction that is for another operation than the program."""
        if self.reduce_op is not None and str(op) != str(self.reduce_op):
            misuse(
                f"the instruction reduces by {op}, the program by {self.reduce_op}; "
                f"say reduce_op={str(op)!r} to the program"
            )


def current() -> CollectiveProgram:
    """The program that instructions are recorded into."""
    program = _current.get(None)
    if program is None:
        misuse("there is no program here; write it inside `with CollectiveProgram(...):`")
    return program


def JSON() -> str:
    """The plan of the program that is being written, as a file."""
    return current().to_json()


class LoopIterationContext:
    """Instructions inside ``with`` are repeated on one piece of their data after the other.

    There are as many pieces of ``unit`` bytes as cover ``num_chunks`` chunks.
    """

    def __init__(self, unit: int, num_chunks: int) -> None:
        self.unit = unit
        self.num_chunks = num_chunks

    def __enter__(self) -> None:
        current().recorder.begin_loop(self.unit, self.num_chunks)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        current().recorder.end_loop()
