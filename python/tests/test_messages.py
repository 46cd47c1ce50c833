"""Sends and receives, and collectives with blocks of any size."""

from __future__ import annotations

import array
import signal
import subprocess
from collections.abc import Callable

import pytest
from conftest import in_threads

import crossweft as cw


def test_send_and_receive() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        peer = 1 - communicator.rank
        for count in [0, 1, 7, 100_000]:
            mine = array.array("i", [communicator.rank + 5] * count)
            out = array.array("i", [0] * count)
            if communicator.rank == 0:
                communicator.send(mine, peer)
                assert communicator.recv(out, peer) is out
            else:
                communicator.recv(out, peer)
                communicator.send(mine, peer)
            assert out == array.array("i", [peer + 5] * count)

    in_threads(2, rank_main)


def test_a_group_has_no_order() -> None:
    ranks = 3

    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        communicator.prepare_messages()
        out = [array.array("i", [-1] * 50_000) for _ in range(ranks)]
        with communicator.group() as group:
            for peer in range(ranks):
                group.recv(out[peer], peer)
                group.send(array.array("i", [10 * rank + peer] * 50_000), peer)
        for peer in range(ranks):
            assert set(out[peer]) == {10 * peer + rank}
        # Two of a pair, in order; then the group is empty.
        first, second = bytearray(1), bytearray(2)
        group = communicator.group()
        group.recv(first, (rank + 1) % ranks)
        group.recv(second, (rank + 1) % ranks)
        group.send(b"a", (rank + 2) % ranks)
        group.send(b"bc", (rank + 2) % ranks)
        group.run()
        group.run()
        assert (first, second) == (b"a", b"bc")

    in_threads(ranks, rank_main)


def test_collectives_with_blocks_of_any_size() -> None:
    ranks = 3
    counts = [2, 0, 3]

    def ints(*values: int) -> array.array[int]:
        return array.array("i", values)

    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        own = ints(*([rank] * counts[rank]))
        out = ints(*([-1] * 5))
        assert communicator.all_gather_v(own, out, counts) is out
        assert out == ints(0, 0, 2, 2, 2)
        # With gaps, and what is there already.
        out = ints(*([-1] * 7))
        start = [4, 6, 0][rank]
        out[start : start + counts[rank]] = own
        communicator.all_gather_v(None, out, counts, displacements=[4, 6, 0])
        assert out == ints(2, 2, 2, -1, 0, 0, -1)

        # Rank r sends r + q elements to rank q.
        sent = [rank + peer for peer in range(ranks)]
        data = array.array("i", [10 * rank + p for p in range(ranks) for _ in range(sent[p])])
        out = array.array("i", [-1] * sum(sent))
        communicator.all_to_all_v(data, out, sent, sent)
        assert out == array.array("i", [10 * p + rank for p in range(ranks) for _ in range(sent[p])])
        out = array.array("i", [-1] * sum(sent))
        reverse = [sum(sent[p + 1 :]) for p in range(ranks)]
        communicator.all_to_all_v(data, out, sent, sent, recv_displacements=reverse)
        assert out == array.array("i", [10 * p + rank for p in reversed(range(ranks)) for _ in range(sent[p])])

        # Counts and displacements that lie in memory, which a call looks at.
        out = array.array("i", [-1] * sum(sent))
        there = array.array("q", sent)
        where = array.array("Q", reverse)
        communicator.all_to_all_v(data, out, there, array.array("Q", sent), recv_displacements=where)
        assert out == array.array("i", [10 * p + rank for p in reversed(range(ranks)) for _ in range(sent[p])])
        there[0] = -1
        with pytest.raises(cw.TensorError, match="a block of -1 elements"):
            communicator.all_to_all_v(data, out, there, sent)

        data = ints(*(value + rank for value in range(5)))
        out = array.array("i", [-1] * counts[rank])
        communicator.reduce_scatter_v(data, out, counts)
        assert out == [ints(3, 6), ints(), ints(9, 12, 15)][rank]
        communicator.reduce_scatter_v(data, out, counts, op="max")
        assert out == [ints(2, 3), ints(), ints(4, 5, 6)][rank]

    in_threads(ranks, rank_main)


def test_calls_that_cannot_be() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        data = bytearray(8)
        with pytest.raises(cw.UsageError, match="no rank 2 in a world of 2"):
            communicator.send(data, 2)
        with pytest.raises(cw.TensorError, match="read-only"):
            communicator.recv(b"x", 0)
        group = communicator.group()
        group.recv(data, 0)
        group.send(memoryview(data)[4:], 0)
        with pytest.raises(cw.TensorError, match="overlaps another one of the group"):
            group.run()
        with pytest.raises(cw.TensorError, match="overlap"):
            communicator.all_gather_v(data, data, [4, 4])
        with pytest.raises(cw.UsageError, match="3 counts; there are 2 ranks"):
            communicator.all_gather_v(b"x", data, [1, 2, 3])
        with pytest.raises(cw.TensorError, match="elements of u8, the output of i32"):
            communicator.reduce_scatter_v(data, array.array("i", [0]), [4, 4])
        # What an error ends is not run.
        with pytest.raises(KeyError), communicator.group() as group:
            group.send(data, 0)
            raise KeyError
        # And all is as good as new.
        peer = 1 - communicator.rank
        with communicator.group() as group:
            group.send(b"still here", peer)
            group.recv(out := bytearray(10), peer)
        assert out == b"still here"

    in_threads(2, rank_main)


def test_messages_that_do_not_match() -> None:
    def rank_main(communicator: cw.Communicator) -> cw.Mismatch:
        peer = 1 - communicator.rank
        with pytest.raises(cw.Mismatch, match="rank 0 sent rank 1 2000000 bytes of u8") as error:
            if communicator.rank == 0:
                communicator.send(bytearray(2_000_000), peer)
            else:
                communicator.recv(array.array("i", [0]), peer)
        with pytest.raises(cw.Poisoned):
            communicator.send(b"x", peer)
        return error.value

    for rank, error in enumerate(in_threads(2, rank_main)):
        assert (error.rank, error.peer) == (rank, 1 - rank)
        assert "asked for 4 bytes of i32" in str(error)


def test_an_interrupt_ends_a_receive(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    script = """
import os, signal, threading
import crossweft as cw

# Shells have programs in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
unique_id = cw.UniqueId(timeout=30)
heard = []

def other():
    communicator = cw.Communicator(1, 2, unique_id, timeout=30)
    communicator.prepare_messages()
    try:
        communicator.recv(bytearray(8), 0)
    except cw.Aborted as error:
        heard.append(error.peer)

thread = threading.Thread(target=other)
thread.start()
communicator = cw.Communicator(0, 2, unique_id, timeout=30)
communicator.prepare_messages()
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    communicator.recv(bytearray(8), 1)
except KeyboardInterrupt:
    print("interrupted")
thread.join()
print(heard)
"""
    done = python(script)
    assert done.returncode != -signal.SIGINT
    assert done.stdout.split("\n")[:2] == ["interrupted", "[0]"], done.stderr
