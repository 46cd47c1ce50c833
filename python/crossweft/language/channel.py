"""Channels between ranks.

Every instruction is executed by the channel's source, ``src_rank``. The k-th channel from a to b ends where the k-th
of the same kind from b to a begins: signals sent with the one are waited for with the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from .._crossweft import Chunk
from .program import current
from .types import (
    BufferType,
    ReduceOperationType,
    SyncType,
    ThreadBlockGroup,
    blocks,
    misuse,
)

__all__ = ["MemoryChannel", "PortChannel", "SwitchChannel"]


class MemoryChannel:
    """The source's kernel reads and writes the destination's memory itself."""

    def __init__(self, dst_rank: int, src_rank: int) -> None:
        self._program = current()
        self._recorder = self._program.recorder
        self._channel = self._recorder.memory_channel(dst_rank, src_rank)
        self.dst_rank = dst_rank
        self.src_rank = src_rank

    def signal(self, tb: int, data_sync: SyncType = SyncType.both, relaxed: bool = False) -> None:
        """Signals the destination, after all that the thread block did before.

        A relaxed signal tells only that this rank has begun.
        """
        self._recorder.signal(self._channel, tb, relaxed)

    def wait(self, tb: int, data_sync: SyncType = SyncType.both, relaxed: bool = False) -> None:
        """Waits for a signal of the destination."""
        self._recorder.wait(self._channel, tb, relaxed)

    def get(
        self,
        dst_chunk: Chunk,
        src_chunk: Chunk,
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
    ) -> None:
        """Copies from the destination to the source."""
        self._recorder.get(self._channel, dst_chunk, src_chunk, blocks(tb, tb_group))

    def put(
        self,
        dst_chunk: Chunk,
        src_chunk: Chunk,
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
    ) -> None:
        """Copies from the source to the destination."""
        self._recorder.put(self._channel, dst_chunk, src_chunk, blocks(tb, tb_group))

    def put_packets(
        self,
        dst_chunk: Chunk,
        src_chunk: Chunk,
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
    ) -> None:
        """Copies to scratch memory of the destination, as packets, which need no signal."""
        self._recorder.put_packets(self._channel, dst_chunk, src_chunk, blocks(tb, tb_group))

    def read_put_packets(
        self,
        dst_chunk: Chunk,
        src_chunk: Chunk,
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
    ) -> None:
        """Waits for the packets in ``src_chunk`` and puts them to the destination."""
        self._recorder.read_put_packets(self._channel, dst_chunk, src_chunk, blocks(tb, tb_group))

    def reduce(
        self,
        local_src_chunk: Chunk,
        remote_src_chunks: Sequence[Chunk],
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
        local_dst_chunk: Chunk | None = None,
        reduce_op: ReduceOperationType = ReduceOperationType.sum,
    ) -> None:
        """Reduces the source's chunk and those of the destination to the source."""
        self._program.check_reduce_op(reduce_op)
        dst = local_src_chunk if local_dst_chunk is None else local_dst_chunk
        others = list(remote_src_chunks)
        self._recorder.read_reduce(self._channel, dst, local_src_chunk, others, blocks(tb, tb_group))


class PortChannel:
    """A proxy moves the data, at the source's request."""

    def __init__(self, dst_rank: int, src_rank: int) -> None:
        self._recorder = current().recorder
        self._channel = self._recorder.port_channel(dst_rank, src_rank)
        self.dst_rank = dst_rank
        self.src_rank = src_rank

    def signal(self, tb: int, data_sync: SyncType = SyncType.both) -> None:
        """Signals the destination, after the puts before."""
        self._recorder.signal(self._channel, tb, False)

    def wait(self, tb: int, data_sync: SyncType = SyncType.both) -> None:
        """Waits for a signal of the destination."""
        self._recorder.wait(self._channel, tb, False)

    def flush(self, tb: int, data_sync: SyncType = SyncType.both) -> None:
        """Waits until everything put has arrived."""
        self._recorder.flush(self._channel, tb)

    def put(self, dst_chunk: Chunk, src_chunk: Chunk, tb: int) -> None:
        """Copies from the source to the destination."""
        self._recorder.put(self._channel, dst_chunk, src_chunk, [tb])

    def put_with_signal(self, dst_chunk: Chunk, src_chunk: Chunk, tb: int) -> None:
        """Puts, and signals the destination when the data has arrived."""
        self._recorder.put_with_signal(self._channel, dst_chunk, src_chunk, tb)

    def put_with_signal_and_flush(self, dst_chunk: Chunk, src_chunk: Chunk, tb: int) -> None:
        """Puts, signals the destination when the data has arrived, and waits until then."""
        self._recorder.put_with_signal_and_flush(self._channel, dst_chunk, src_chunk, tb)

    def put_packets(self, dst_chunk: Chunk, src_chunk: Chunk, tb: int) -> None:
        """Copies the packets in ``src_chunk``, which must be there, as they are."""
        self._recorder.put_packets(self._channel, dst_chunk, src_chunk, [tb])

    def read_put_packets(
        self,
        dst_chunk: Chunk,
        src_chunk: Chunk,
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
    ) -> None:
        """Waits for the packets in ``src_chunk`` and copies them as they are."""
        self._recorder.read_put_packets(self._channel, dst_chunk, src_chunk, blocks(tb, tb_group))


class SwitchChannel:
    """Buffers of several ranks, reached at once where the hardware has multicast."""

    def __init__(self, rank_list: Sequence[int], buffer_type: BufferType) -> None:
        self._program = current()
        self._recorder = self._program.recorder
        self._switch = self._recorder.switch_channel(list(rank_list), str(buffer_type))
        self.rank_list = list(rank_list)
        self.buffer_type = buffer_type

    def at_rank(self, rank: int) -> SwitchChannel.SwitchChannelRankView:
        """What ``rank`` does with it."""
        if rank not in self.rank_list:
            misuse(f"rank {rank} is not a member of the switch channel of ranks {self.rank_list}")
        return self.SwitchChannelRankView(self, rank)

    def reduce(
        self,
        rank: int,
        buffer_offset: int,
        size: int,
        dst_chunk: Chunk,
        tb: int | None = None,
        reduce_op: ReduceOperationType = ReduceOperationType.sum,
        tb_group: ThreadBlockGroup | None = None,
    ) -> None:
        """Reduces ``size`` chunks from ``buffer_offset`` of all members' buffers to ``dst_chunk``."""
        self._program.check_reduce_op(reduce_op)
        self._has_size(dst_chunk, size)
        self._recorder.switch_reduce(self._switch, rank, buffer_offset, dst_chunk, blocks(tb, tb_group))

    def broadcast(
        self,
        rank: int,
        src_chunk: Chunk,
        buffer_offset: int,
        size: int,
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
    ) -> None:
        """Copies ``src_chunk`` to ``size`` chunks from ``buffer_offset`` of all members' buffers."""
        self._has_size(src_chunk, size)
        self._recorder.switch_broadcast(self._switch, rank, buffer_offset, src_chunk, blocks(tb, tb_group))

    def broadcast_packets(
        self,
        rank: int,
        src_chunk: Chunk,
        buffer_offset: int,
        size: int,
        tb: int | None = None,
        tb_group: ThreadBlockGroup | None = None,
    ) -> None:
        """Waits for the packets in ``src_chunk`` and copies them to all members' scratch memories."""
        self._has_size(src_chunk, size)
        self._recorder.switch_broadcast_packets(self._switch, rank, buffer_offset, src_chunk, blocks(tb, tb_group))

    @staticmethod
    def _has_size(chunk: Chunk, size: int) -> None:
        if chunk.size != size:
            misuse(f"{chunk} has {chunk.size} chunks, but size is {size}")

    class SwitchChannelRankView:
        """A switch channel as one of its members has it."""

        def __init__(self, channel: SwitchChannel, rank: int) -> None:
            self._channel = channel
            self._rank = rank

        def reduce(
            self,
            buffer_offset: int,
            size: int,
            dst_chunk: Chunk,
            tb: int | None = None,
            reduce_op: ReduceOperationType = ReduceOperationType.sum,
            tb_group: ThreadBlockGroup | None = None,
        ) -> None:
            """Reduces chunks of all members to ``dst_chunk``."""
            self._channel.reduce(self._rank, buffer_offset, size, dst_chunk, tb, reduce_op, tb_group)

        def broadcast(
            self,
            src_chunk: Chunk,
            buffer_offset: int,
            size: int,
            tb: int | None = None,
            tb_group: ThreadBlockGroup | None = None,
        ) -> None:
            """Copies ``src_chunk`` to all members."""
            self._channel.broadcast(self._rank, src_chunk, buffer_offset, size, tb, tb_group)

        def broadcast_packets(
            self,
            src_chunk: Chunk,
            buffer_offset: int,
            size: int,
            tb: int | None = None,
            tb_group: ThreadBlockGroup | None = None,
        ) -> None:
            """Waits for packets and copies them to all members."""
            self._channel.broadcast_packets(self._rank, src_chunk, buffer_offset, size, tb, tb_group)
