"""What tests with torch share."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import crossweft as cw

T = TypeVar("T")

#: Seconds that nothing here should need.
TIMEOUT = 240.0


def in_threads(
    ranks: int, rank_main: Callable[[cw.Communicator], T], *, device: str = "cpu", timeout: float = TIMEOUT
) -> list[T]:
    """Runs ``rank_main`` as every rank of a job, each in a thread; raises the first rank's error."""
    unique_id = cw.UniqueId(timeout=timeout)
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def one(rank: int) -> None:
        try:
            results[rank] = rank_main(cw.Communicator(rank, ranks, unique_id, device=device, timeout=timeout))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy there, asked for when the stream has ended: copies of all streams share queues, and one behind a kernel
    that waits for another rank, on the same GPU, would hold up that rank's.
    """
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()
    return tensor.cpu()


def torchrun(ranks: int, script: Path, *arguments: str, **variables: str) -> str:
    """Runs a script under torchrun, with variables of the environment, and returns what its ranks print."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with tempfile.TemporaryDirectory() as logs:
        # torchrun's ranks do not buffer: on one pipe, their lines would come in pieces, between each other's.
        launch += [f"--log-dir={logs}", "--redirects=3"]
        command = [sys.executable, *launch, str(script), *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
        said = [path.read_text() for path in sorted(Path(logs).glob("**/stdout.log"))]
        complained = [path.read_text() for path in sorted(Path(logs).glob("**/stderr.log"))]
    if ran.returncode != 0:
        everything = "\n".join([ran.stdout, ran.stderr, *said, *complained])
        pytest.fail(f"{' '.join(command)} ended with {ran.returncode}:\n{everything}")
    assert len(said) == ranks
    return "".join(said)


def killed(script: Path, *arguments: str) -> str:
    """Runs a script as two ranks, of which the second kills itself, and returns what the first prints."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    ranks = []
    for rank in range(2):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(script), *arguments]
        ranks.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables}
            )
        )
    said = []
    for running in ranks:
        try:
            said.append(running.communicate(timeout=120))
        except subprocess.TimeoutExpired:
            running.kill()
            said.append(running.communicate())
    statuses = [running.returncode for running in ranks]
    assert statuses == [0, -signal.SIGKILL], (statuses, said)
    return said[0][0]
