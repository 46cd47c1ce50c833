"""Custom ops, under torchrun: each rank compiles its own graphs."""

from __future__ import annotations

from pathlib import Path

from conftest import torchrun


def test_ops_and_compile() -> None:
    printed = torchrun(2, Path(__file__).with_name("compile_script.py"))
    assert sorted(line[:21] for line in printed.splitlines()) == [
        f"rank {rank} ok with aot_eager"[:21] for rank in (0, 1)
    ]
