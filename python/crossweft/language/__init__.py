"""A language for communication algorithms.

A program is written as if one thread did everything, one instruction after the other, for all ranks: copies, puts,
reductions, each with the thread block that executes it. Compiling it makes a :class:`crossweft.Plan`: where the data
needs synchronisation and the program has none it is inserted, instructions are fused, and the checker proves the
result or names the line at fault. ``docs/dsl.md`` is a tutorial.

>>> import crossweft as cw
>>> from crossweft.language import AllGather, CollectiveProgram, MemoryChannel, Rank
>>> ranks = 2
>>> with CollectiveProgram("all-gather", AllGather(ranks, 1), ranks) as program:
...     for rank in range(ranks):
...         mine, out = Rank(rank).get_input_buffer()[:], Rank(rank).get_output_buffer()
...         Rank(rank).copy(out[rank], mine, tb=0)
...         for peer in range(ranks):
...             if peer != rank:
...                 channel = MemoryChannel(peer, rank)
...                 channel.put(Rank(peer).get_output_buffer()[rank], mine, tb=0)
>>> plan = cw.compile(program)
>>> plan.run_local([b"a", b"b"])
[bytearray(b'ab'), bytearray(b'ab')]

Names and meanings are those of MSCCL++'s DSL where it has them; :mod:`crossweft.compat.mscclpp` runs its programs
unchanged. What differs: dependencies across thread blocks and ranks are found too, data may be indexed by one chunk
(``buffer[3]``), and ``data_sync`` changes nothing, because signals, waits, semaphores and barriers always order all
threads of their block.
"""

from .._crossweft import Chunk
from .channel import MemoryChannel, PortChannel, SwitchChannel
from .collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    CustomCollective,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    SendRecv,
    TestCollective,
)
from .program import JSON, AlgoSpec, CollectiveProgram, LoopIterationContext
from .rank import BaseBuffer, Buffer, Rank, Semaphore
from .types import (
    BufferType,
    ReduceOperationType,
    ReplicationPolicy,
    SyncType,
    ThreadBlockGroup,
)

__all__ = [
    "JSON",
    "AlgoSpec",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "BaseBuffer",
    "Broadcast",
    "Buffer",
    "BufferType",
    "Chunk",
    "Collective",
    "CollectiveProgram",
    "CustomCollective",
    "Gather",
    "LoopIterationContext",
    "MemoryChannel",
    "PortChannel",
    "Rank",
    "Reduce",
    "ReduceOperationType",
    "ReduceScatter",
    "ReplicationPolicy",
    "Scatter",
    "Semaphore",
    "SendRecv",
    "SwitchChannel",
    "SyncType",
    "TestCollective",
    "ThreadBlockGroup",
]
