"""Plans: read, checked, run with all ranks as threads."""

from __future__ import annotations

import array
import json
import os

import pytest

import crossweft as cw

ALGORITHMS = ["one-shot", "two-shot", "two-shot-staged", "ring", "switch"]


def floats(*values: float) -> array.array[float]:
    return array.array("f", values)


def broken() -> cw.Plan:
    """An all-reduce that signals and waits only after it has read and written its peer's memory."""
    plan = json.loads(cw.Plan.all_reduce("two-shot", 2).to_json())
    for rank in plan["ranks"]:
        (ops,) = rank["blocks"]
        ops.sort(key=lambda op: op["op"] in {"signal", "wait"})
    return cw.Plan.from_json(json.dumps(plan))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_reduce_in_one_process(algorithm: str, ranks: int) -> None:
    plan = cw.Plan.all_reduce(algorithm, ranks, thread_blocks=2)
    assert plan.check().ok
    inputs = [array.array("q", range(rank, rank + 1001)) for rank in range(ranks)]
    outputs = plan.run_local(inputs, seed=ranks)
    shift = sum(range(ranks))
    expected = array.array("q", [ranks * i + shift for i in range(1001)])
    assert outputs == [expected] * ranks


def test_what_a_plan_says_of_itself() -> None:
    plan = cw.Plan.all_reduce("ring", 4, thread_blocks=3)
    assert (plan.name, plan.ranks, plan.collective) == ("ring", 4, "all-reduce")
    assert (plan.input_blocks, plan.output_blocks, plan.thread_blocks) == (1, 1, 3)
    assert plan.reduce_op is None and plan.in_place == "any"
    assert "ring" in repr(plan) and "4 ranks" in repr(plan)
    again = cw.Plan.from_json(plan.to_json())
    assert again == plan and hash(again) == hash(plan) and again.content_hash == plan.content_hash
    assert again != cw.Plan.all_reduce("ring", 4) and plan != "ring"


def test_files_of_both_formats(tmp_path) -> None:
    plan = cw.Plan.all_reduce("two-shot", 2)
    own = tmp_path / "own.json"
    own.write_text(plan.to_json())
    assert cw.Plan.from_file(own) == plan
    theirs = tmp_path / "theirs.json"
    theirs.write_text(cw.Plan.from_json(plan.to_json()).to_mscclpp())
    imported = cw.Plan.from_file(str(theirs))
    assert imported.check() and imported.collective == "all-reduce"
    assert cw.Plan.from_mscclpp(theirs.read_bytes()) == imported
    with pytest.raises(FileNotFoundError) as missing:
        cw.Plan.from_file(tmp_path / "nothing")
    assert missing.value.filename == str(tmp_path / "nothing")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "crossweft-plan", "version": 7}'])
def test_what_is_no_plan(text: str) -> None:
    with pytest.raises(cw.PlanError):
        cw.Plan.from_json(text)


def test_an_unsound_plan_names_the_operation() -> None:
    plan = json.loads(cw.Plan.all_reduce("one-shot", 2).to_json())
    plan["ranks"][1]["blocks"][0][0]["from"]["index"] = 9
    with pytest.raises(cw.PlanError) as error:
        cw.Plan.from_json(json.dumps(plan))
    assert (error.value.rank, error.value.thread_block, error.value.op) == (1, 0, 0)
    assert isinstance(error.value, ValueError) and isinstance(error.value, cw.Error)


def test_the_checker_names_rank_block_and_operation() -> None:
    plan = broken()
    with pytest.raises(cw.CheckError) as error:
        plan.check()
    report = plan.check(raises=False)
    assert not report and not report.ok and report.plan == "two-shot"
    first = report.diagnostics[0]
    assert first.code in {"race", "pairing", "deadlock"}
    assert first.file is None and first.line is None
    assert str(error.value) == str(report) and str(first) in str(report)
    assert (error.value.rank, error.value.op) == (first.rank, first.op)
    assert [d.code for d in error.value.diagnostics] == [d.code for d in report.diagnostics]


def test_plans_of_more_than_a_plan_can_have_are_refused_at_once() -> None:
    most = 2**32 - 1
    with pytest.raises(cw.PlanError, match=f"{most} ranks; 1 to 4096"):
        cw.Plan.all_reduce("one-shot", most)
    with pytest.raises(cw.PlanError, match=f"{most} thread blocks; 1 to 4096"):
        cw.Plan.all_reduce("ring", 2, thread_blocks=most)


def test_a_refused_plan_does_not_run() -> None:
    with pytest.raises(cw.CheckError):
        broken().run_local([floats(1), floats(2)])


def test_operations_and_types() -> None:
    plan = cw.Plan.all_reduce("one-shot", 2)
    assert plan.run_local([floats(1, -2), floats(3, 4)], op="max") == [floats(3, 4)] * 2
    assert plan.run_local([floats(2), floats(3)], op="prod") == [floats(6)] * 2
    halves = [bytes.fromhex("003c"), bytes.fromhex("0040")]  # 1.0 and 2.0
    assert plan.run_local(halves, dtype="float16") == [bytearray.fromhex("0042")] * 2
    bf16 = [array.array("H", [0x3F80]), array.array("H", [0x4000])]
    assert plan.run_local(bf16, dtype="bfloat16") == [array.array("H", [0x4040])] * 2
    with pytest.raises(cw.UsageError, match="sum, prod, min, max, avg"):
        plan.run_local([floats(1), floats(2)], op="nand")
    with pytest.raises(cw.UsageError, match="no element type `f12`"):
        plan.run_local([floats(1), floats(2)], dtype="f12")
    with pytest.raises(cw.TensorError, match="elements of f32, but dtype says i32"):
        plan.run_local([floats(1), floats(2)], dtype="i32")


def test_wrong_numbers_and_sizes_of_tensors() -> None:
    plan = cw.Plan.all_reduce("one-shot", 2)
    with pytest.raises(cw.UsageError, match="1 inputs"):
        plan.run_local([floats(1)])
    with pytest.raises(cw.TensorError, match="input of rank 1 has 8 bytes, but should have 4"):
        plan.run_local([floats(1), floats(1, 2)])
    with pytest.raises(cw.TensorError, match="output of rank 0 has 8 bytes"):
        plan.run_local([floats(1), floats(1)], [floats(1, 2), floats(1)])
    with pytest.raises(cw.TensorError, match="output of rank 1 has elements of f64"):
        plan.run_local([floats(1)] * 2, [floats(0), array.array("d", [0])])
    one = floats(1)
    with pytest.raises(cw.TensorError, match="overlaps"):
        plan.run_local([one, floats(2)], [one, floats(0)])
    with pytest.raises(cw.TensorError, match="read-only"):
        plan.run_local([floats(1), floats(2)], [floats(0), b"1234"], dtype="f32")


def test_pages(tmp_path) -> None:
    plan = cw.Plan.all_reduce("two-shot", 2)
    path = tmp_path / "plan.html"
    assert plan.show(path, bytes=[4096]) == str(path)
    html = path.read_text()
    assert html.startswith("<!") and "two-shot" in html and html == plan.to_html(bytes=[4096])
    temporary = plan.show(topology="cpu")
    assert temporary.endswith(".html")
    os.remove(temporary)
    frame = plan._repr_html_()
    assert frame.startswith("<iframe ") and frame.count('"') == 6
    times = [plan.predict(size) for size in (64, 1 << 20, 64 << 20)]
    assert 0 < times[0] < times[1] < times[2]
    with pytest.raises(FileNotFoundError):
        plan.show(path, topology="mars")
    with pytest.raises(cw.UsageError, match="topology /dev/zero"):
        plan.predict(64, topology="/dev/zero")
    with pytest.raises(cw.PlanError):
        plan.show(path, bytes=[1] * 9)
