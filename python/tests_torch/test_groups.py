"""Communicators of process groups, under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import torchrun


@pytest.mark.parametrize(("how", "ranks"), [("no group", 2), ("group", 4)])
def test_groups(how: str, ranks: int) -> None:
    printed = torchrun(ranks, Path(__file__).with_name("group_script.py"), how)
    assert sorted(printed.split("\n")) == ["", *(f"rank {rank} ok" for rank in range(ranks))]
