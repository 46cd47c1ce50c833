"""The backend of torch.distributed, under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import killed, torchrun

HERE = Path(__file__).parent


@pytest.mark.parametrize(("ranks", "name"), [(2, "crossweft"), (4, "cpu:crossweft")])
def test_semantics(ranks: int, name: str) -> None:
    printed = torchrun(ranks, HERE / "backend_script.py", name)
    script = (HERE / "backend_script.py").read_text()
    assert printed.count(" ok\n") == script.count("\n@case\n"), printed


def test_training() -> None:
    printed = torchrun(2, HERE / "training_script.py")
    assert [line for line in printed.splitlines() if line.endswith(" ok")] == [
        "DDP ok",
        "DDP with static graph ok",
        "FSDP2 ok",
    ]


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d.Backend, "all_gather_single"),
    reason="before torch 2.14 a group of this backend is a whole one, which torch does not wrap",
)
def test_checks_of_torch() -> None:
    printed = torchrun(2, HERE / "checks_script.py", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert {"rank 0 ok", "rank 1 ok"} <= set(printed.splitlines())


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("again", ["again ok", "again ok"]),
        ("left", ["left ok", "left ok"]),
        ("under_way", ["True", "under way ok"]),
    ],
)
def test_ends(case: str, said: list[str]) -> None:
    assert torchrun(2, HERE / "ends_script.py", case).splitlines() == said


def test_a_rank_dies_before_its_first_message() -> None:
    assert killed(HERE / "ends_script.py", "first_message") == "first message ok\n"
