"""Ranks: their buffers, and what they do alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .._crossweft import Chunk, Memory
from .program import current
from .types import BufferType, ReduceOperationType, SyncType, ThreadBlockGroup, blocks, misuse

__all__ = ["BaseBuffer", "Buffer", "Rank", "Semaphore"]


class BaseBuffer:
    """A buffer of a rank, in chunks: ``buffer[2:4]``, ``buffer[3]``, ``buffer[:]``."""

    def __init__(self, rank: int, buffer_type: BufferType, memory: Memory) -> None:
        self.rank = rank
        self.buffer_type = buffer_type
        self._memory = memory

    @property
    def size(self) -> int:
        """Number of chunks."""
        return len(self._memory)

    def __len__(self) -> int:
        return len(self._memory)

    def __iter__(self) -> Iterator[Chunk]:
        # Python would ask for one index after the other, for ever: what lies behind the end is refused later.
        return (self[index] for index in range(self.size))

    def __getitem__(self, key: slice | int) -> Chunk:
        if isinstance(key, slice):
            if key.step not in (None, 1):
                misuse(f"chunks follow one another: a step of {key.step} cannot be")
            start = 0 if key.start is None else key.start
            stop = self.size if key.stop is None else key.stop
        else:
            start, stop = key, key + 1
        if start < 0 or stop < start:
            misuse(f"there are no chunks {start} to {stop} (exclusive)")
        return self._memory.chunks(start, stop)

    def __repr__(self) -> str:
        return f"<{self.buffer_type.name} of rank {self.rank}: {self.size} chunks>"


class Buffer(BaseBuffer):
    """``size`` more chunks of scratch memory on ``rank``, for bytes or packets."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, BufferType.scratch, current().recorder.scratch(rank, size))


class Rank:
    """A rank, and what it does alone.

    Every instruction takes ``tb``, the thread block that executes it, or ``tb_group``, several that share the data.
    """

    def __init__(self, rank: int) -> None:
        self._program = current()
        self._input = self._program.recorder.input(rank)
        self.rank = rank

    def get_input_buffer(self) -> BaseBuffer:
        """Its input."""
        return BaseBuffer(self.rank, BufferType.input, self._input)

    def get_output_buffer(self) -> BaseBuffer:
        """Its output."""
        output = self._program.recorder.output(self.rank)
        return BaseBuffer(self.rank, BufferType.output, output)

    def copy(
        self,
        dst_chunk: Chunk,
        src_chunk: Chunk,
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
    ) -> None:
        """Copies."""
        self._is_own(dst_chunk, src_chunk)
        self._program.recorder.copy(dst_chunk, src_chunk, blocks(tb, tb_group))

    def copy_packets(
        self,
        dst_chunk: Chunk,
        src_chunk: Chunk,
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
    ) -> None:
        """Copies into scratch memory, as packets."""
        self._is_own(dst_chunk, src_chunk)
        self._program.recorder.copy_packets(dst_chunk, src_chunk, blocks(tb, tb_group))

    def unpack_packets(
        self,
        dst_chunk: Chunk,
        src_chunk: Chunk,
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
    ) -> None:
        """Waits for the packets in ``src_chunk`` and copies what is in them."""
        self._is_own(dst_chunk, src_chunk)
        self._program.recorder.unpack_packets(dst_chunk, src_chunk, blocks(tb, tb_group))

    def reduce(
        self,
        src_chunk: Chunk,
        other_chunks: Sequence[Chunk],
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
        dst_chunk: Chunk | None = None,
        reduce_op: ReduceOperationType = ReduceOperationType.sum,
        packet: bool = False,
    ) -> None:
        """Reduces ``src_chunk`` and the others to ``dst_chunk``, or to ``src_chunk``.

        With ``packet`` it waits for the others, which are packets.
        """
        self._is_own(src_chunk, *other_chunks)
        if not other_chunks:
            misuse("there is nothing to reduce with: other_chunks is empty")
        self._program.check_reduce_op(reduce_op)
        recorder = self._program.recorder
        reduce = recorder.reduce_packets if packet else recorder.reduce
        dst = src_chunk if dst_chunk is None else dst_chunk
        reduce(dst, src_chunk, list(other_chunks), blocks(tb, tb_group))

    def barrier(self, tb_list: Sequence[int]) -> None:
        """Its thread blocks meet; of one, its threads do."""
        self._program.recorder.barrier(self.rank, list(tb_list))

    def _is_own(self, *chunks: Chunk) -> None:
        for chunk in chunks:
            if chunk.rank != self.rank:
                misuse(f"{chunk} is not of rank {self.rank}, which executes this")

    def __repr__(self) -> str:
        return f"Rank({self.rank})"


class Semaphore:
    """A counter among the thread blocks of a rank."""

    def __init__(self, rank: int, initial_value: int) -> None:
        self._recorder = current().recorder
        self._semaphore = self._recorder.semaphore(rank, initial_value)
        self.rank = rank
        self.initial_value = initial_value

    def acquire(self, tb: int, data_sync: SyncType = SyncType.both) -> None:
        """Waits until it is above 0, and takes one."""
        self._recorder.acquire(self._semaphore, tb)

    def release(self, tb: int, data_sync: SyncType = SyncType.both) -> None:
        """Adds one, after all that the thread block did before."""
        self._recorder.release(self._semaphore, tb)
