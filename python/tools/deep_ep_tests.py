#!/usr/bin/env python3
"""Runs one of DeepEP's own test scripts, unchanged, with ``import deep_ep`` being crossweft.compat.deep_ep.

    python deep_ep_tests.py [--one-device] [--limit SECONDS] SCRIPT [ARGUMENT...]

SCRIPT is DeepEP's tests/test_intranode.py or tests/test_low_latency.py (of 1.2.1, say), with its utils.py beside it;
its arguments are its own: ``--num-processes 2``. It needs what the script needs: torch with CUDA, numpy, and NCCL for
``torch.distributed``.

With ``--one-device`` every process works on device 0. NCCL refuses to be used so; libcrossweft_nccl.so does not, if it
is given as LD_PRELOAD.

The last line says how the script ended, after how many seconds. Exit status: the script's, 124 if it took too long.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: What the script and the processes that it starts find as deep_ep: it puts the package in its own place.
MODULE = """
from crossweft.compat.deep_ep import install

install(shadow=True)
"""

#: Before it, with one device for all.
ONE_DEVICE = """
import torch
import torch.distributed

_set_device, _init_process_group = torch.cuda.set_device, torch.distributed.init_process_group


def _init(*args, device_id=None, **kwargs):
    return _init_process_group(*args, device_id=None if device_id is None else torch.device("cuda:0"), **kwargs)


torch.cuda.set_device = lambda device: _set_device(0)
torch.distributed.init_process_group = _init
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--one-device", action="store_true")
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "deep_ep.py").write_text((ONE_DEVICE if given.one_device else "") + MODULE)
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        environment.setdefault("MASTER_PORT", str(free_port()))
        start = time.monotonic()
        command = [sys.executable, str(given.script), *given.arguments]
        # A session of its own, so that all of its processes can be ended.
        running = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            status = running.wait(given.limit)
            ended = "passed" if status == 0 else f"failed with {status}"
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            status, ended = 124, "took too long"
    print(f"{given.script.name} {' '.join(given.arguments)}: {ended}, {time.monotonic() - start:.1f} s", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
