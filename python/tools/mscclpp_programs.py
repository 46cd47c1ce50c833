#!/usr/bin/env python3
"""Compiles and runs every DSL program of an MSCCL++ checkout, unchanged, and prints a table.

    python mscclpp_programs.py CHECKOUT [--ranks 8] [--per-node 4] [--only TEXT] [--commit ID]

Programs are those of python/mscclpp/language/tests, test/executor-tests/algos and python/mscclpp/default_algos. Each
runs in a process of its own, through crossweft.compat.mscclpp. Its plans must pass the checker, give right results on
the CPU executor (all ranks as threads, random integers, several sizes, thread blocks in order and in a random order),
written and read again as MSCCL++'s execution plans as well. Right is what numpy says; of programs that state no
collective, that the plan and its exported form agree. It needs numpy.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import json
import math
import re
import runpy
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

SUITES = [
    "python/mscclpp/language/tests",
    "test/executor-tests/algos",
    "python/mscclpp/default_algos",
]
#: Seconds that a program may take.
TIMEOUT = 240
#: Bytes of a message, about.
SIZES = [1, 4_000, 300_000]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--ranks", type=int, default=8, help="of programs that take any number")
    parser.add_argument("--per-node", type=int, default=4, help="ranks of a node, of programs for several")
    parser.add_argument("--only", default="", help="only programs whose path contains this")
    parser.add_argument("--commit", help="of the checkout, where git cannot tell")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(judge(options.checkout, options.child, options)))
        return 0
    programs = [path for path in find(options.checkout) if options.only in path]
    print(f"MSCCL++ at {options.commit or commit(options.checkout)}, ", end="")
    print(f"crossweft at {commit(Path(__file__).parent)}\n")
    print("| program | ranks | compiled | checked | ran | read again | ms | reason |")
    print("|---|---|---|---|---|---|---|---|")
    counts = {"right": 0, "not": 0}
    for path in programs:
        for row in in_a_process(options, path):
            good = row["ran"] not in ("no", "-") and row["again"] != "no"
            counts["right" if good else "not"] += 1
            cells = [
                path_of(path, row),
                row["ranks"],
                row["compiled"],
                row["checked"],
                row["ran"],
                row["again"],
            ]
            cells += [row.get("ms", ""), row["reason"].replace("|", "\\|").replace("\n", " ")]
            print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)
    print(f"\n{counts['right']} rows right, {counts['not']} not, of {len(programs)} programs")
    return 0


def path_of(path: str, row: dict[str, Any]) -> str:
    variant = row.get("variant")
    return f"`{path}`" + (f" ({variant})" if variant else "")


def find(checkout: Path) -> list[str]:
    found = []
    for suite in SUITES:
        paths = sorted((checkout / suite).rglob("*.py"))
        found += [str(path.relative_to(checkout)) for path in paths if path.name != "__init__.py"]
    if not found:
        sys.exit(f"{checkout} has none of {', '.join(SUITES)}: it is no checkout of MSCCL++")
    return found


def commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or "an unknown commit"


def in_a_process(options: argparse.Namespace, path: str) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, str(options.checkout), "--child", path]
    command += ["--ranks", str(options.ranks), "--per-node", str(options.per_node)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return [blank(f"took more than {TIMEOUT} s")]
    if ran.returncode != 0:
        return [blank((ran.stderr.strip().splitlines() or [f"ended with {ran.returncode}"])[-1])]
    return list(json.loads(ran.stdout.splitlines()[-1]))


def blank(reason: str) -> dict[str, Any]:
    return {"ranks": "-", "compiled": "no", "checked": "-", "ran": "-", "again": "-", "reason": reason}


# --- in the process of one program ---


def judge(checkout: Path, path: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    from crossweft.compat import mscclpp

    mscclpp.install()
    programs: list[tuple[str, Any]] = []
    try:
        if "default_algos" in path:
            programs = default_algorithms(checkout, path, options)
        else:
            programs = [("", program) for program in scripts(checkout, path, options)]
    except Exception as error:
        return [blank(explain(error))]
    return [one(variant, program) for variant, program in programs]


def scripts(checkout: Path, path: str, options: argparse.Namespace) -> list[Any]:
    """Runs a program as a script; returns what it has written out as JSON."""
    from crossweft.compat.mscclpp import CollectiveProgram

    written: list[Any] = []

    def to_json(program: CollectiveProgram, *_: object, **__: object) -> str:
        # What it does with the text is nobody's business; compiling has its turn below.
        written.append(program)
        return "{}"

    CollectiveProgram.to_json = to_json  # type: ignore[method-assign]
    script = checkout / path
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments(script, options)]
    with redirect_stdout(io.StringIO()):
        runpy.run_path(str(script), run_name="__main__")
    if not written:
        raise RuntimeError("it has written no plan")
    return written


def arguments(script: Path, options: argparse.Namespace) -> list[str]:
    """Arguments that a script asks for and has no default of."""
    values = {
        "name": script.stem,
        "num_gpus": options.ranks,
        "gpus_per_node": options.per_node,
        "nnodes": options.ranks // options.per_node,
        "tbg_size": 2,
    }
    found = []
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "add_argument":
            continue
        name = str(getattr(node.args[0], "value", "")).lstrip("-")
        has_default = any(keyword.arg == "default" for keyword in node.keywords)
        if name in values and (not has_default or name == "nnodes"):
            found.append(f"--{name}={values[name]}")
    return found


def default_algorithms(checkout: Path, path: str, options: argparse.Namespace) -> list[tuple[str, Any]]:
    """The programs that a function makes, of a few specifications."""
    from mscclpp.language.collectives import AllGather, AllReduce, ReduceScatter  # type: ignore[import-not-found]
    from mscclpp.language.utils import AlgoSpec  # type: ignore[import-not-found]

    name = Path(path).stem
    spec_of_file = importlib.util.spec_from_file_location(name, checkout / path)
    assert spec_of_file is not None and spec_of_file.loader is not None
    module = importlib.util.module_from_spec(spec_of_file)
    spec_of_file.loader.exec_module(module)
    function = getattr(module, name)
    kind = {"allgather": AllGather, "allreduce": AllReduce, "reducescatter": ReduceScatter}[name.split("_")[0]]
    programs = []
    # The all-reduce's own script asks for no synchronisation beyond its packets; the others have none of their own.
    own = kind is not AllReduce
    cases = [(2, 1, own), (2, 2, own), (4, 1, own), (4, 2, own), (2, 1, not own)]
    for nodes, group, auto_sync in cases:
        if kind is AllGather and group > 1:
            continue
        per_node = options.per_node
        ranks = nodes * per_node
        spec = AlgoSpec(
            name=name,
            collective=kind(ranks, 1, True),
            nranks_per_node=per_node,
            world_size=ranks,
            in_place=True,
            instances=1,
            protocol="LL",
            auto_sync=auto_sync,
            reuse_resources=True,
            use_double_scratch_buffer=True,
        )
        words = {} if kind is AllGather else {"thread_block_group_size": group}
        variant = f"{nodes} nodes, groups of {group}" + ("" if auto_sync else ", no auto_sync")
        programs.append((variant, function(spec, **words)))
    return programs


def explain(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def one(variant: str, program: Any) -> dict[str, Any]:
    import crossweft as cw

    row: dict[str, Any] = blank("") | {"variant": variant, "ranks": program.num_ranks}
    start = time.perf_counter()
    try:
        plan = program.compile()
    except cw.CheckError as error:
        return row | {"compiled": "yes", "checked": "no", "reason": shorten(error.diagnostics[0].text)}
    except Exception as error:
        return row | {"reason": shorten(explain(error))}
    row |= {"compiled": "yes", "checked": "yes", "ms": round(1000 * (time.perf_counter() - start))}
    try:
        row["ran"] = run(plan, None)
    except Exception as error:
        return row | {"ran": "no", "reason": shorten(explain(error))}
    try:
        again = cw.Plan.from_mscclpp(plan.to_mscclpp())
    except cw.PlanError as error:
        return row | {"again": "-", "reason": shorten(f"not for MSCCL++: {error}")}
    try:
        again.check()
        row["again"] = run(again, plan)
    except Exception as error:
        row |= {"again": "no", "reason": shorten(explain(error))}
    return row


def shorten(text: str) -> str:
    # Their own paths, without the checkout's.
    text = re.sub(rf"[^\s`'\"]*/(?=(?:{'|'.join(SUITES)})/)", "", text)
    return text.strip() if len(text) < 420 else text.strip()[:417] + "..."


def run(plan: Any, other: Any) -> str:
    """Whether results are right, or those of ``other`` where nothing says what is right."""
    import numpy

    multiple = math.lcm(plan.message_multiple, 8, *([other.message_multiple] if other else []))
    least, most = plan.message_bytes
    if plan.input_blocks == plan.output_blocks == 0:
        return "no data"
    random = numpy.random.default_rng(1)
    for about in SIZES:
        size = max(-(-about // multiple), -(-least // multiple), 1) * multiple
        if size > most:
            continue
        words = size // 4
        shape = plan.input_blocks * words
        inputs = [random.integers(-(2**20), 2**20, shape, dtype="int32") for _ in range(plan.ranks)]
        expected = reference(plan, inputs, words)
        if expected is None and other is not None:
            expected = run_once(other, inputs, words, None)
        for seed in (None, 7):
            outputs = run_once(plan, inputs, words, seed)
            if expected is None:
                continue
            for rank, (got, wanted) in enumerate(zip(outputs, expected, strict=True)):
                wrong = int((got != wanted).sum())
                if wrong:
                    raise RuntimeError(f"{wrong} wrong elements of {len(got)} on rank {rank}, {size} bytes")
    stated = plan.collective != "test"
    return "right" if stated or other is not None else "ended"


def run_once(plan: Any, inputs: list[Any], words: int, seed: int | None) -> list[Any]:
    import numpy

    # What a program leaves alone is 0.
    outputs = [numpy.zeros(plan.output_blocks * words, dtype="int32") for _ in inputs]
    return list(plan.run_local([data.copy() for data in inputs], outputs, seed=seed))


def reference(plan: Any, inputs: list[Any], words: int) -> list[Any] | None:
    import numpy

    ranks = range(plan.ranks)
    total = sum(inputs[1:], start=inputs[0].copy())
    blocks = [data.reshape(-1, words) if words and data.size else data for data in inputs]
    match plan.collective:
        case "all-reduce":
            return [total for _ in ranks]
        case "all-gather":
            return [numpy.concatenate(inputs) for _ in ranks]
        case "reduce-scatter":
            return [total.reshape(-1, words)[rank] for rank in ranks]
        case "all-to-all":
            return [numpy.concatenate([blocks[q][rank] for q in ranks]) for rank in ranks]
        case "send-recv":
            return [inputs[rank - 1] for rank in ranks]
    return None


if __name__ == "__main__":
    sys.exit(main())
