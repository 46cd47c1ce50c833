"""Communicators: threads and processes, plans and collectives on them, errors with their fields."""

from __future__ import annotations

import array
import json
import os
import pickle
import subprocess
import sys
import threading

import pytest
from conftest import in_threads

import crossweft as cw


def test_all_reduce_in_place_and_out_of_place() -> None:
    def rank_main(communicator: cw.Communicator) -> tuple[array.array[float], array.array[float]]:
        data = array.array("f", [communicator.rank + 1] * 100)
        out = array.array("f", [0] * 100)
        assert communicator.all_reduce(data, out) is out
        assert communicator.all_reduce(data, op="max") is data
        large = bytearray(b"\1" * 300_000)
        communicator.all_reduce(large)
        assert set(large) == {communicator.world_size}
        return out, data

    for out, data in in_threads(3, rank_main):
        assert out == array.array("f", [6] * 100)
        assert data == array.array("f", [3] * 100)


def test_sums_of_scaled_inputs() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        for scale in (0.5, -2.0):
            data = array.array("f", [rank + 1] * 100)
            out = array.array("f", [0] * 100)
            communicator.all_reduce(data, out, scale=scale * (rank + 1))
            assert data == array.array("f", [rank + 1] * 100)
            # 1 * 1 + 2 * 2 + 3 * 3
            assert out == array.array("f", [14 * scale] * 100)
        # By an element: each rank its own.
        data = array.array("i", [10 + rank] * 3)
        communicator.reduce_scatter(data, scale=array.array("i", [rank - 1]))
        assert data[rank] == -10 + 12
        data = array.array("i", [7])
        communicator.reduce(data, root=1, scale=rank)
        assert data[0] == (21 if rank == 1 else 7)

    in_threads(3, rank_main)


def test_all_reduce_with_rms_normalisation() -> None:
    hidden, tokens = 8, 3

    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        own = array.array("f", [(rank + 1) * (token + 1) for token in range(tokens) for _ in range(hidden)])
        weight = array.array("f", [0.5] * hidden)
        residual = array.array("f", [1] * (tokens * hidden))
        output = array.array("f", bytes(4 * tokens * hidden))
        quantised, scale = bytearray(tokens * hidden), array.array("f", [0] * tokens)
        written = {"residual": residual, "quantised": quantised, "scale": scale}
        assert communicator.all_reduce_rms_norm(own, weight, output, epsilon=0.0, **written) is output
        # 1 + 2 of each token's number, and the residual.
        assert list(residual[::hidden]) == [4.0, 7.0, 10.0]
        # All elements of a token are the same, so each is 1 times the weight.
        assert list(output) == pytest.approx([0.5] * (tokens * hidden))
        assert list(scale) == pytest.approx([0.5 / 448] * tokens)
        # 448, the largest of f8e4m3.
        assert set(quantised) == {0x7E}
        # Without a residual, by a scale that is given, of more tokens than before.
        own = array.array("f", [rank - 4] * (8 * tokens * hidden))
        output, quantised = array.array("f", own), bytearray(len(own))
        communicator.all_reduce_rms_norm(own, weight, output, quantised=quantised, scale=0.25)
        assert list(output) == pytest.approx([-0.5] * len(own))
        # -2.
        assert set(quantised) == {0xC0}

        for given, message in [
            ({"quantised": quantised}, "belong together"),
            ({"quantised": quantised, "scale": scale, "per": "row"}, "no scales per `row`"),
            ({"residual": array.array("d", [0])}, "the residual has elements of f64, not f32"),
            ({"residual": output}, "output and residual overlap"),
            ({"residual": array.array("f", [0])}, "the residual in bytes has 4, not 768"),
            ({"epsilon": -1.0}, "an epsilon of -1"),
        ]:
            with pytest.raises(ValueError, match=message):
                communicator.all_reduce_rms_norm(own, weight, output, **given)

    in_threads(2, rank_main)


def test_scales_that_do_not_fit() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        data = array.array("i", [1, 2])
        with pytest.raises(cw.UsageError, match="i32 has no number 0.5"):
            communicator.all_reduce(data, scale=0.5)
        with pytest.raises(cw.TensorError, match="scale has 8 bytes; give a number, or one element of i32"):
            communicator.all_reduce(data, scale=array.array("i", [1, 2]))
        with pytest.raises(cw.Error, match="before a sum only, not before max"):
            communicator.all_reduce(data, op="max", scale=2)

    in_threads(1, rank_main)


@pytest.mark.parametrize("count", [1, 7, 40_000])
def test_every_collective(count: int) -> None:
    ranks, root = 3, 1

    def ints(*values: int) -> array.array[int]:
        """Blocks of one value each."""
        return array.array("i", [value for value in values for _ in range(count)])

    def rank_main(communicator: cw.Communicator) -> None:
        rank = communicator.rank
        mine = ints(10 * rank)
        each = ints(*(10 * rank + block for block in range(ranks)))
        nothing = array.array("i")
        everyone = ints(0, 10, 20)

        out = ints(-1, -1, -1)
        assert communicator.all_gather(mine, out) is out
        assert out == everyone
        both = ints(*(10 * rank if block == rank else -1 for block in range(ranks)))
        assert communicator.all_gather(both) == everyone

        out = ints(-1)
        communicator.reduce_scatter(each, out)
        assert out == ints(30 + 3 * rank)
        both = each[:]
        communicator.reduce_scatter(both, op="max")
        assert both[rank * count : (rank + 1) * count] == ints(20 + rank)

        out = ints(-1, -1, -1)
        communicator.all_to_all(each, out)
        assert out == ints(rank, 10 + rank, 20 + rank)
        assert communicator.all_to_all(each[:]) == out

        out = ints(-1)
        communicator.broadcast(mine, out, root=root)
        assert out == ints(10 * root)
        out = mine[:]
        assert communicator.broadcast(out, root=root) is out
        assert out == ints(10 * root)

        out = ints(-1)
        communicator.reduce(mine, out if rank == root else nothing, root=root)
        communicator.reduce(mine, out, root=root, op="sum")
        assert out == ints(30 if rank == root else -1)
        out = mine[:]
        communicator.reduce(out, op="min")
        assert out == (ints(0) if rank == 0 else mine)

        out = ints(-1, -1, -1)
        communicator.gather(mine, out if rank == root else nothing, root=root)
        assert out == (everyone if rank == root else ints(-1, -1, -1))

        out = ints(-1)
        communicator.scatter(each if rank == root else nothing, out, root=root)
        assert out == ints(10 * root + rank)

    in_threads(ranks, rank_main)


def test_tensors_that_do_not_fit_a_collective() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        one, two, three = (array.array("i", [0] * count) for count in (1, 2, 3))
        with pytest.raises(cw.TensorError, match="1 and 2 blocks of one size"):
            communicator.all_gather(one, three)
        with pytest.raises(cw.TensorError, match="no 2 blocks"):
            communicator.all_to_all(bytearray(3))
        with pytest.raises(cw.TensorError, match="input has 8 bytes, the output 4"):
            communicator.broadcast(two, one)
        if communicator.rank == 0:
            with pytest.raises(cw.TensorError, match="the output 0"):
                communicator.gather(one, array.array("i"))
        with pytest.raises(cw.UsageError, match="rank 2 is the root, but there are 2 ranks"):
            communicator.broadcast(one, root=2)

    in_threads(2, rank_main)


def test_registered_plans_are_chosen_and_explained() -> None:
    def named(name: str) -> cw.Plan:
        return cw.Plan.from_json(json.dumps(json.loads(cw.Plan.all_reduce("ring", 2).to_json()) | {"name": name}))

    def rank_main(communicator: cw.Communicator) -> None:
        data = array.array("f", [communicator.rank + 1] * 128)
        communicator.all_reduce(data)
        before = communicator.explain("all-reduce", 512)
        assert before["chosen"] == "one-shot"
        communicator.register(named("mine"))
        after = communicator.explain("all-reduce", 512)
        assert after["chosen"] == "mine"
        (mine,) = (one for one in after["candidates"] if one["name"] == "mine")
        assert (mine["verdict"], mine["origin"]) == ("chosen", "Python")
        assert mine["predicted_us"] < before["candidates"][0]["predicted_us"]
        refused = communicator.explain("all-reduce", 512)["candidates"][1]
        assert (refused["name"], refused["verdict"]) == ("two-shot", "refused")
        assert communicator.explain("all-gather", 512)["message_bytes"] == 256
        out = array.array("f", [0] * 128)
        data = array.array("f", [communicator.rank + 1] * 128)
        assert communicator.all_reduce(data, out) == array.array("f", [3] * 128)
        assert communicator.all_reduce(data) == out
        with pytest.raises(cw.PlanError, match="a built-in algorithm named `ring`"):
            communicator.register(named("ring"))
        with pytest.raises(cw.Mismatch, match="rank 0 has registered plan"):
            name = "zero" if communicator.rank == 0 else "mine"
            communicator.register(named(name))
        with pytest.raises(cw.UsageError, match="no collective `reduce-all`"):
            communicator.explain("reduce-all", 8)

    in_threads(2, rank_main)


@pytest.mark.parametrize("algorithm", ["one-shot", "two-shot", "ring"])
def test_plans(algorithm: str) -> None:
    plan = cw.Plan.all_reduce(algorithm, 2)

    def rank_main(communicator: cw.Communicator) -> None:
        for count in [1, 7, 40_000, 3]:
            data = array.array("i", [communicator.rank + 5] * count)
            out = array.array("i", [0] * count)
            assert plan.run(communicator, data, out) is out
            assert out == array.array("i", [11] * count)
            plan.run(communicator, data)
            assert data == out
        prepared = plan.prepare(communicator, dtype="f32", max_bytes=64, op="min")
        assert prepared.max_bytes == 64 and prepared.staged == (algorithm == "two-shot")
        data = array.array("f", [communicator.rank - 1.5] * 16)
        assert prepared.run(data) == array.array("f", [-1.5] * 16)
        with pytest.raises(cw.UsageError, match="up to 64"):
            prepared.run(array.array("f", [0] * 17))
        with pytest.raises(cw.TensorError, match="dtype says f32"):
            prepared.run(array.array("d", [0]))

    in_threads(2, rank_main)


def test_small_things() -> None:
    def rank_main(communicator: cw.Communicator) -> list[bytes]:
        assert communicator.world_size == 2 and communicator.device == "cpu"
        assert f"rank {communicator.rank} of 2" in repr(communicator)
        communicator.barrier()
        return communicator.all_gather_bytes(b"%d" % communicator.rank)

    assert in_threads(2, rank_main) == [[b"0", b"1"]] * 2


def test_a_plan_of_another_size_is_refused() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        with pytest.raises(cw.UsageError, match="3 ranks") as error:
            cw.Plan.all_reduce("ring", 3).run(communicator, bytearray(8))
        assert error.value.plan == "ring"

    in_threads(2, rank_main)


def test_ranks_that_disagree() -> None:
    plan = cw.Plan.all_reduce("ring", 2)

    def rank_main(communicator: cw.Communicator) -> None:
        op = "sum" if communicator.rank == 0 else "max"
        with pytest.raises(cw.Mismatch, match="rank") as error:
            plan.run(communicator, bytearray(8), op=op)
        assert error.value.peer == 1 - communicator.rank

    in_threads(2, rank_main)


def test_a_rank_that_does_not_come() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        data = bytearray(8)
        communicator.all_reduce(data)
        if communicator.rank == 1:
            assert over.wait(120)
            return
        try:
            with pytest.raises(cw.Timeout) as error:
                communicator.all_reduce(data)
            assert isinstance(error.value, TimeoutError)
            assert error.value.plan and error.value.rank == 0 and error.value.thread_block == 0
            with pytest.raises(cw.Poisoned):
                communicator.all_reduce(data)
        finally:
            over.set()

    over = threading.Event()
    # Long enough for what must be done in time.
    in_threads(2, rank_main, timeout=8)


def test_a_rank_that_aborts() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        data = bytearray(8)
        communicator.all_reduce(data)
        if communicator.rank == 1:
            communicator.abort("out of paper")
            return
        with pytest.raises(cw.Aborted, match="out of paper") as error:
            communicator.all_reduce(data)
        assert error.value.peer == 1

    in_threads(2, rank_main)


def test_a_block_that_fails_ends_the_job() -> None:
    def rank_main(communicator: cw.Communicator) -> None:
        if communicator.rank == 1:
            with pytest.raises(ZeroDivisionError), communicator as same:
                assert same is communicator
                raise ZeroDivisionError("division by zero")
            return
        with pytest.raises(cw.Aborted, match="ZeroDivisionError: division by zero"):
            with communicator:
                communicator.barrier()

    in_threads(2, rank_main)
    with cw.Communicator(0, 1, cw.UniqueId()) as communicator:
        communicator.barrier()
    with pytest.raises(cw.UsageError, match="has left"):
        communicator.barrier()


def test_unique_ids() -> None:
    unique_id = cw.UniqueId()
    text = str(unique_id)
    assert cw.UniqueId.from_text(text).__bytes__() == bytes(unique_id)
    assert str(pickle.loads(pickle.dumps(unique_id))) == text
    assert text[64:96] not in repr(unique_id)
    for wrong in ["", "abc", "0" * 256]:
        with pytest.raises(cw.UsageError):
            cw.UniqueId.from_text(wrong)
    with pytest.raises(cw.UsageError, match="128"):
        cw.UniqueId.from_bytes(b"1")
    with pytest.raises(cw.UsageError):
        cw.UniqueId(bind="no such interface")
    with pytest.raises(cw.UsageError, match="does not exist"):
        cw.Communicator(2, 2, unique_id)
    with pytest.raises(cw.Timeout) as error:
        # Long enough for this rank to come.
        cw.Communicator(0, 2, cw.UniqueId(timeout=3), timeout=10)
    assert list(error.value.missing or []) == [1]


@pytest.mark.parametrize("seconds", [1e19, 2e9, float("inf"), float("nan"), -1.0])
def test_timeouts_that_no_clock_has(seconds: float) -> None:
    unique_id = cw.UniqueId()
    plan = cw.Plan.all_reduce("one-shot", 1)
    for call in (
        lambda: cw.UniqueId(timeout=seconds),
        lambda: cw.Communicator(0, 1, unique_id, timeout=seconds),
        lambda: plan.run_local([b"abcd"], timeout=seconds),
    ):
        with pytest.raises(cw.UsageError, match="give 0 to 1000000000"):
            call()
    assert cw.Communicator(0, 1, unique_id, timeout=1e9).timeout == 1e9


def test_devices() -> None:
    with pytest.raises(cw.UsageError, match='"cuda"'):
        cw.Communicator(0, 1, cw.UniqueId(), device="quantum")  # type: ignore[arg-type]
    auto = cw.Communicator(0, 1, cw.UniqueId(), device="auto")
    if auto.device == "cpu":
        with pytest.raises(cw.DeviceError, match='device="cpu"'):
            cw.Communicator(0, 1, cw.UniqueId(), device="cuda")
    communicator = cw.Communicator(0, 1, cw.UniqueId())
    with pytest.raises(cw.UsageError, match="stream"):
        cw.Plan.all_reduce("ring", 1).run(communicator, bytearray(4), stream=7)


RANK = """
import array, crossweft as cw
communicator = cw.Communicator.from_env()
data = array.array("d", [communicator.rank] * 1000)
cw.Plan.all_reduce("ring", communicator.world_size).run(communicator, data)
print(sum(data), communicator.rank)
"""


def launched(ranks: int, script: str, variables) -> list[str]:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | variables(rank),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0] * ranks
    return outputs


def test_processes_of_a_launcher() -> None:
    def torchrun(rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(os.getpid()),
        }

    assert launched(3, RANK, torchrun) == [f"3000.0 {rank}\n" for rank in range(3)]


def test_processes_with_a_unique_id() -> None:
    unique_id = cw.UniqueId()

    def variables(rank: int) -> dict[str, str]:
        return {
            "CROSSWEFT_RANK": str(rank),
            "CROSSWEFT_WORLD_SIZE": "2",
            "CROSSWEFT_UNIQUE_ID": str(unique_id),
        }

    assert launched(2, RANK, variables) == [f"1000.0 {rank}\n" for rank in range(2)]


def test_without_a_launcher(python) -> None:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CROSSWEFT_", "OMPI_", "PMI", "SLURM_")) and name not in {"RANK", "WORLD_SIZE"}
    }
    ran = python("import crossweft; crossweft.Communicator.from_env()", env=clean)
    assert ran.returncode == 1 and "crossweft.errors.LaunchError: no launcher" in ran.stderr
    ran = python("import crossweft; crossweft.Communicator.from_env()", env=clean | {"RANK": "0"})
    assert "LaunchError: environment variable WORLD_SIZE" in ran.stderr


def test_a_killed_peer_is_named() -> None:
    script = """
import os, signal, crossweft as cw
communicator = cw.Communicator.from_env()
data = bytearray(8)
communicator.all_reduce(data)
if communicator.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    communicator.all_reduce(data)
except cw.PeerLost as error:
    print(error.peer, isinstance(error, ConnectionError))
"""
    unique_id = cw.UniqueId()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ
            | {
                "CROSSWEFT_RANK": str(rank),
                "CROSSWEFT_WORLD_SIZE": "2",
                "CROSSWEFT_UNIQUE_ID": str(unique_id),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert children[0].communicate(timeout=60)[0] == "1 True\n"
    children[1].wait(timeout=10)


def test_torch_is_needed_for_process_groups_only(python) -> None:
    ran = python(
        "import sys; sys.modules['torch'] = None\nimport crossweft as cw\ncw.Communicator.from_process_group()"
    )
    assert "ImportError: Communicator.from_process_group needs torch" in ran.stderr


def test_import_needs_nothing(python) -> None:
    ran = python(
        "import sys\n"
        "for name in ['numpy', 'torch', 'cupy', 'mpi4py', 'mscclpp']: sys.modules[name] = None\n"
        "import crossweft as cw\n"
        "plan = cw.Plan.all_reduce('ring', 2)\n"
        "print(plan.run_local([bytearray(b'12'), bytearray(b'ab')])[1])"
    )
    assert ran.stdout == "bytearray(b'\\x92\\x94')\n", ran.stderr


FORKS = """
import os, sys, threading, warnings
import crossweft as cw
from crossweft import moe

# Of forks beside threads.
warnings.simplefilter("ignore", DeprecationWarning)

unique_id = cw.UniqueId()
communicators = [None, None]

def join(rank):
    communicators[rank] = cw.Communicator(rank, 2, unique_id, timeout=30)

def both(call):
    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

def use(rank):
    communicator = communicators[rank]
    data = bytearray(b"\\1" * 100_000)
    communicator.all_reduce(data)
    assert set(data) == {2}
    got = bytearray(1)
    with communicator.group() as group:
        group.send(bytearray([rank]), 1 - rank)
        group.recv(got, 1 - rank)
    assert got[0] == 1 - rank

def prepare(rank):
    prepared[rank] = cw.Plan.all_reduce("ring", 2).prepare(communicators[rank], dtype="u8", max_bytes=100)
    groups[rank] = moe.Group(communicators[rank], experts=2, max_tokens=4, hidden=32, top_k=1, dtype="f32")

prepared, groups = [None, None], [None, None]
for call in (join, use, prepare):
    both(call)
child = os.fork()
if child == 0:
    mine = communicators[1]
    data = bytearray(8)
    calls = [
        lambda: mine.all_reduce(data), mine.barrier, lambda: mine.send(data, 0), mine.check, mine.leave,
        lambda: mine.abort("no"), lambda: mine.check_peer(0, "a test"), lambda: prepared[1].run(data),
        lambda: moe.Group(mine, experts=2, max_tokens=4, hidden=32, top_k=1, dtype="f32"),
    ]
    for index, call in enumerate(calls):
        try:
            call()
        except cw.UsageError as error:
            assert "only forked" in str(error), error
        else:
            print(f"call {index} went through")
    with mine:
        # All objects go with the interpreter.
        sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
both(use)
"""


def test_a_forked_child_leaves_a_communicator_to_its_parent(python) -> None:
    ran = python(FORKS)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "7\n", "")
