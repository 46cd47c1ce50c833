"""What programs compute: how many chunks inputs and outputs have, and what the result is.

A message is one block of input or output. ``chunk_factor`` is the number of chunks of a block; of an all-reduce,
whose only block every rank reduces its share of, the number of chunks of a share. ``inplace`` says that input and
output are one buffer; what is only input must then not be written elsewhere.
"""

from __future__ import annotations

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Collective",
    "CustomCollective",
    "Gather",
    "Reduce",
    "ReduceScatter",
    "Scatter",
    "SendRecv",
    "TestCollective",
]


class Collective:
    """The base of all. ``name`` is the word for it in plans."""

    name = "custom"

    def __init__(self, num_ranks: int, chunk_factor: int = 1, inplace: bool = False) -> None:
        self.num_ranks = num_ranks
        self.chunk_factor = chunk_factor
        self.inplace = inplace

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_ranks}, {self.chunk_factor}, {self.inplace})"


class AllReduce(Collective):
    """Every rank's output is the reduction of all inputs."""

    name = "allreduce"


class AllGather(Collective):
    """Block ``r`` of every output is rank ``r``'s input."""

    name = "allgather"


class ReduceScatter(Collective):
    """Rank ``r``'s output is the reduction of block ``r`` of all inputs."""

    name = "reducescatter"


class AllToAll(Collective):
    """Block ``q`` of rank ``r``'s output is block ``r`` of rank ``q``'s input."""

    name = "alltoall"


class SendRecv(Collective):
    """Rank ``r + 1``'s output is rank ``r``'s input, around the ring."""

    name = "sendrecv"


class _Rooted(Collective):
    def __init__(self, num_ranks: int, chunk_factor: int = 1, inplace: bool = False, root: int = 0) -> None:
        super().__init__(num_ranks, chunk_factor, inplace)
        self.root = root


class Broadcast(_Rooted):
    """Every rank's output is the root's input."""

    name = "broadcast"


class Reduce(_Rooted):
    """The root's output is the reduction of all inputs; the others' is not looked at."""

    name = "reduce"


class Gather(_Rooted):
    """Block ``r`` of the root's output is rank ``r``'s input; the others' is not looked at."""

    name = "gather"


class Scatter(_Rooted):
    """Rank ``r``'s output is block ``r`` of the root's input."""

    name = "scatter"


class CustomCollective(Collective):
    """What the program says, by ``CollectiveProgram.expect``: each chunk of input and output is a block."""

    name = "custom"

    def __init__(self, num_ranks: int, input_size: int, output_size: int) -> None:
        super().__init__(num_ranks)
        self.input_size = input_size
        self.output_size = output_size


class TestCollective(CustomCollective):
    """Anything: chunks of input and output as given, and no statement of what the result is."""

    name = "test"
    #: pytest is not to collect it.
    __test__ = False
