"""What tests share."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import pytest

import crossweft as cw

T = TypeVar("T")


def in_threads(
    ranks: int,
    rank_main: Callable[[cw.Communicator], T],
    timeout: float = 30,
    device: Literal["cpu", "cuda"] = "cpu",
) -> list[T]:
    """Runs ``rank_main`` as every rank of a job, each in a thread; raises the first rank's error."""
    unique_id = cw.UniqueId(timeout=timeout)
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def one(rank: int) -> None:
        try:
            communicator = cw.Communicator(rank, ranks, unique_id, timeout=timeout, device=device)
            results[rank] = rank_main(communicator)
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


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a Python of its own."""

    def run(script: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)

    return run
