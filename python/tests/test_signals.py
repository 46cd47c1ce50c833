"""Signals while a call waits: what a handler raises ends the wait, what it only does does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

# Rank 1 never comes to what rank 0 does last.
WAITING = """
import sys, threading, crossweft as cw
what = sys.argv[1]
unique_id = cw.UniqueId()
data = bytearray(64)
others = []
if what != "join":
    joining = threading.Thread(target=lambda: others.append(cw.Communicator(1, 2, unique_id)))
    joining.start()
    communicator = cw.Communicator(0, 2, unique_id)
    joining.join()
if what == "launch":
    other = threading.Thread(target=lambda: others[0].all_reduce(bytearray(64)))
    other.start()
    communicator.all_reduce(data)
    other.join()
try:
    print("ready", flush=True)
    if what == "join":
        cw.Communicator(0, 2, unique_id)
    elif what == "barrier":
        communicator.barrier()
    else:
        communicator.all_reduce(data)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("what", ["join", "barrier", "prepare", "launch"])
def test_ctrl_c_ends_a_wait(what: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING, what],
        stdout=subprocess.PIPE,
        text=True,
        # Whoever started the tests may have had it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "interrupted\n"
    assert child.wait(timeout=20) == 0


HANDLING = """
import os, signal, threading, crossweft as cw
seen = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: seen.set())
unique_id = cw.UniqueId()
def other():
    communicator = cw.Communicator(1, 2, unique_id)
    communicator.all_reduce(bytearray(8))
    os.kill(os.getpid(), signal.SIGUSR1)
    # Comes only when rank 0's handler has run, which it does while it waits for this.
    assert seen.wait(20)
    communicator.all_reduce(bytearray(8))
threading.Thread(target=other).start()
communicator = cw.Communicator(0, 2, unique_id)
communicator.all_reduce(bytearray(8))
communicator.all_reduce(bytearray(8))
print("done")
"""


def test_handlers_run_while_a_call_waits() -> None:
    ran = subprocess.run([sys.executable, "-c", HANDLING], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "done\n", ran.stderr
