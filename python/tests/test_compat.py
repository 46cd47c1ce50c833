"""Programs of MSCCL++'s DSL, by its own names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import crossweft as cw
from crossweft.compat import mscclpp as compat

PROGRAM = """
import argparse
from mscclpp.language.channel import *
from mscclpp.language.rank import *
from mscclpp.language.general import *
from mscclpp.language.program import *
from mscclpp.language.collectives import *


def all_gather(name, ranks, instances):
    with CollectiveProgram(
        name, AllGather(ranks, 1, True), ranks, instances=instances, num_threads_per_block=512, max_message_size=2**20
    ):
        for src in range(ranks):
            for dst in range(ranks):
                if src != dst:
                    out = Rank(src).get_output_buffer()
                    channel = MemoryChannel(dst, src)
                    channel.signal(tb=0, relaxed=True)
                    channel.wait(tb=0, data_sync=SyncType.after, relaxed=True)
                    channel.put(Rank(dst).get_output_buffer()[src : src + 1], out[src : src + 1], tb=0)
                    channel.signal(tb=0, data_sync=SyncType.before)
                    channel.wait(tb=0)
        print(JSON())


parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int)
parser.add_argument("--instances", type=int, default=1)
arguments = parser.parse_args()
all_gather("theirs", arguments.ranks, arguments.instances)
"""


@pytest.fixture
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "crossweft.compat.mscclpp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=program.parent)


@pytest.mark.parametrize("instances", [1, 2])
def test_a_program_runs_unchanged(tmp_path: Path, instances: int) -> None:
    program = tmp_path / "all_gather.py"
    program.write_text(PROGRAM)
    ran = run(program, str(program), "--ranks=3", f"--instances={instances}")
    assert ran.returncode == 0, ran.stderr
    theirs = json.loads(ran.stdout)
    assert theirs["name"] == "theirs" and theirs["collective"] == "allgather"
    assert theirs["num_threads_per_block"] == 512 and theirs["max_message_size"] == 2**20
    # Once, not squared.
    assert [len(gpu["threadblocks"]) for gpu in theirs["gpus"]] == [instances] * 3
    plan = cw.Plan.from_mscclpp(ran.stdout)
    assert plan.check()
    inputs = [bytes([rank] * 96) for rank in range(3)]
    assert plan.run_local(inputs) == [bytearray(b"".join(inputs))] * 3


def test_an_error_names_the_program(tmp_path: Path) -> None:
    program = tmp_path / "wrong.py"
    program.write_text(PROGRAM.replace("out[src : src + 1]", "out[src : src + 2]"))
    ran = run(program, str(program), "--ranks=2")
    line = 1 + PROGRAM[: PROGRAM.index("channel.put")].count("\n")
    assert ran.returncode == 1
    assert f"crossweft.errors.ProgramError: {program}:{line}: " in ran.stderr
    assert run(program).stderr.startswith("usage: python -m crossweft.compat.mscclpp")


def test_an_installed_mscclpp_is_not_hidden_silently(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import mscclpp; print(mscclpp.__version__)")
    (tmp_path / "mscclpp.py").write_text("__version__ = 'theirs'")
    ran = run(program, str(program))
    assert "ShadowError: mscclpp is installed" in ran.stderr and str(tmp_path) in ran.stderr
    assert run(program, "--shadow", str(program)).stdout == f"{cw.__version__}\n"


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    ran = run(tmp_path / "none.py", str(tmp_path / "none.py"))
    assert ran.returncode == 1 and ran.stderr == f"there is no program {tmp_path / 'none.py'}\n"


def test_nothing_is_there_unless_asked_for() -> None:
    with pytest.raises(ImportError):
        import mscclpp
    compat.install()
    compat.install()
    import mscclpp.language.program

    assert mscclpp.language.program.CollectiveProgram is compat.CollectiveProgram
    with pytest.raises(ImportError):
        import mscclpp.ext
    compat.uninstall()
    with pytest.raises(ImportError):
        import mscclpp


def test_compile(installed: None) -> None:
    import mscclpp
    from mscclpp.language.collectives import AllReduce
    from mscclpp.language.program import CollectiveProgram
    from mscclpp.language.rank import Buffer, Rank
    from mscclpp.language.utils import AlgoSpec

    def algorithm(spec: AlgoSpec, tb: int) -> CollectiveProgram:
        with CollectiveProgram.from_spec(spec) as program:
            Buffer(0, 1)
            Rank(0).copy(Rank(0).get_output_buffer()[0:1], Rank(0).get_input_buffer()[0:1], tb=tb)
        return program

    spec = AlgoSpec(
        name="alone",
        collective=AllReduce(1, 1, False),
        nranks_per_node=1,
        world_size=1,
        in_place=False,
        instances=1,
        protocol="Simple",
        tags={"default": 1},
    )
    plan = mscclpp.compile(algorithm, spec, 0, tb=3)
    assert isinstance(plan, cw.Plan) and plan.run_local([b"abc"]) == [b"abc"]
    assert json.loads(algorithm(spec, 0).to_json(indent=None))["inplace"] is False
