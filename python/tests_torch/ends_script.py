"""How ranks of the backend end: ``ends_script.py CASE``, with the variables of torchrun."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import crossweft as cw
import crossweft.torch

LIMIT = timedelta(seconds=100)
PATIENCE = 20.0


def again() -> None:
    """Groups of the same names, one after the other."""
    for number in range(3):
        dist.init_process_group("crossweft", timeout=LIMIT)
        rank = dist.get_rank()
        tensor = torch.full((4,), float(number + rank))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0 * number + 1] * 4
        for sender in range(2):
            message = torch.full((3,), float(number + rank))
            if rank == sender:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, sender)
                assert message.tolist() == [number + sender] * 3
        dist.destroy_process_group()
    print("again ok")


def first_message() -> None:
    """Nobody waits for the first message of a rank that has died."""
    dist.init_process_group("crossweft", timeout=LIMIT)
    if dist.get_rank() == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    received = torch.zeros(3)
    for work in (dist.irecv(received, 1), dist.isend(torch.ones(3), 1)):
        try:
            work.wait()
        except cw.PeerLost as error:
            assert "message of tag 0 from rank" in str(error) and error.peer == 1, error
        else:
            raise AssertionError("nothing raised")
    assert time.monotonic() - started < PATIENCE
    # It has not the group to leave in order.
    print("first message ok", flush=True)
    os._exit(0)


def left() -> None:
    """Nor for that of one that has left."""
    dist.init_process_group("crossweft", timeout=LIMIT)
    started = time.monotonic()
    if dist.get_rank() == 0:
        try:
            dist.recv(torch.zeros(3), 1)
        except cw.PeerLost as error:
            assert "has left" in str(error), error
        else:
            raise AssertionError("nothing raised")
        assert time.monotonic() - started < PATIENCE
    else:
        dist.destroy_process_group()
    print("left ok")


def under_way() -> None:
    """An interpreter ends although nobody has waited for calls, which never end."""
    dist.init_process_group("crossweft", timeout=LIMIT)
    rank = dist.get_rank()
    dist.barrier()
    if rank == 0:
        print(dist.all_reduce(torch.ones(8), async_op=True) is not None)
        dist.irecv(torch.ones(8), 1)
    else:
        try:
            dist.recv(torch.zeros(3), 0, tag=5)
        except cw.Aborted as error:
            assert "rank 0 has ended with calls under way" in str(error), error
            print("under way ok")


CASES = {"again": again, "first_message": first_message, "left": left, "under_way": under_way}
CASES[sys.argv[1]]()
