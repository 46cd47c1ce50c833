#!/usr/bin/env python3
"""The whole comparison on GPUs in one run: collectives beside NCCL and torch's symmetric memory in rounds that
alternate, primitives, and mixtures of experts.

  python3 benches/gpu/compare.py --crossweft target/release/crossweft \\
      --own-library target/release/libcrossweft_nccl.so --ranks 2 --rounds 2 --out docs/results/2xH200

`cargo xtask gpu --ranks 2 --compare` bundles it with its programs for a machine without Rust. Rivals need a Python with
torch (this one, or `--python`); what cannot be measured is left out, said, and listed as absent. A collective: bf16,
each size in a CUDA graph of a call that lines the ranks up and, between events of the graph, 100 calls (20 from 1 MiB
on); 11 replays, the slowest rank. Where torch cannot time events inside graphs, the launch of a graph is in the rivals'
times, and "events inside graphs" is absent. Sends and receives, and everything on the host, are "one call, host's
clock". Beside "crossweft" there are ", eager" (one call until it is done), and of libraries ", host" (what a call takes
the host, of 200 at once, up to 1 MiB), which has no ratio; up to 16 MiB ", executor" (plans that have a kernel of their
own by the executor) and ", cold" (as many pairs of buffers take turns as have 120 MB, twice an H200's second-level
cache; torch's all-reduce, broadcast and reduce are in place, of as many bytes); and "by NCCL's interface" (torch on our
library). Choices are those that come with crossweft: its variables are unset, and what this machine was tuned to is not
used. `--library NAME=FILE` adds another library with NCCL's interface. DeepEP's own tests need its folder, and Python's
package crossweft installed.

In each round libraries come first, all collectives in one program, then crossweft, a program a collective. Sizes to
16 MiB of everything come before larger ones, whose results take the host up to a minute a program to check. A program
ends when `--budget` does, at the latest; what it had printed counts, and what is left then is listed as absent.

Writes OUT.json (everything), OUT.md (tables) and OUT-COLLECTIVE.svg, after each program, and when it is ended. An entry
is the median over the rounds of each round's median replay, microseconds a call; a ratio is the median of the rounds'
own, over the rounds that have both. NVLink multicast is left alone on all sides. With `--device cpu` it runs on the
host, beside gloo, to try it out. Exit status 1 if a result of crossweft's was wrong.
"""

import argparse
import functools
import json
import os
import pathlib
import signal
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from report import (  # noqa: E402, it lies beside this folder
    BENCH,
    MOST_PAIRS,
    OURS,
    Ended,
    bytes_of,
    human,
    json_lines,
    last_json,
    medians,
    pairs,
    plot,
    run,
    sizes_of,
    table,
)

USUAL = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send-recv")
COLLECTIVES = (*USUAL, "reduce", "gather", "scatter")
PARTS = ("collectives", "primitives", "moe")
#: Variants go up to here, and all else has its turn before what is larger.
SMALL = 16 << 20
#: And this before what is larger still: 1 GiB takes the host a minute to check.
MIDDLE = 256 << 20
#: Bytes of the inputs, or outputs, that take turns in one program: some sizes share it, with the pairs of the least.
ROOM = 2 << 30
#: Seconds of a program, at most.
LIMIT = 600
#: Layout, tokens of each rank, thread blocks: as docs/moe.md was measured.
MOE = (("ll-rank-major", "1", 64), ("ll-rank-major", "8,32,128", 132), ("ht-flat", "4096", 132))


def say(line):
    print(line, file=sys.stderr, flush=True)


def write_whole(path, text):
    """So that a file is the old one or the new one, whenever this is killed."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(text)
    aside.replace(path)


def span(sizes):
    return human(sizes[0]) if len(sizes) == 1 else f"{human(sizes[0])} to {human(sizes[-1])}"


def cold_programs(name, sizes, ranks):
    """Pairs of buffers, and the sizes that one program measures with them; and the sizes that would need too many."""
    programs, too_small = [], []
    for size in sizes:
        count = pairs(name, size, ranks)
        if count > MOST_PAIRS:
            too_small.append(size)
        elif programs and programs[-1][0] * size <= ROOM:
            programs[-1][1].append(size)
        else:
            programs.append((count, [size]))
    return programs, too_small


class Comparison:
    """What is measured, when, and what was found."""

    def __init__(self, options):
        self.options = options
        # What a user gets who has set nothing; an empty folder of caches is none, so there is no table of this machine.
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("CROSSWEFT_")}
        self.environment |= {
            "NCCL_NVLS_ENABLE": "0",
            "NVSHMEM_DISABLE_NVLS": "1",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "CROSSWEFT_CACHE_DIR": "",
            "OMP_NUM_THREADS": "1",
        }
        self.on_gpu = options.device == "cuda"
        self.sizes = sizes_of(options)
        self.wrong = 0
        self.record = {
            "date": time.strftime("%Y-%m-%d"),
            "what": "bf16, us of the slowest rank, [p50, min] of each round by bytes of the larger of input and output",
            "device": options.device,
            "ranks": options.ranks,
            "timed": {name: self.how(name) for name in options.collectives},
            "chosen": {},
            "cold_pairs": {},
            "libraries": {},
            "absent": {},
            "rounds": [{name: {} for name in options.collectives} for _ in range(options.rounds)],
        }
        self.libraries = self.find_libraries()

    def how(self, name):
        return "in a CUDA graph" if self.on_gpu and name != "send-recv" else "one call, host's clock"

    def absent(self, what, why):
        """Says why something is missing, once."""
        if what not in self.record["absent"]:
            self.record["absent"][what] = str(why)
            say(f"left out: {what}: {why}")

    def run(self, command, environment=None, fine=(0,)):
        """What a program prints that has its share of the time, at most: one that hangs must not take all of it."""
        left = self.options.until - time.monotonic()
        limit = min(LIMIT, self.options.budget / 3, left)
        return run(command, environment or self.environment, max(1, limit), fine)

    def run_for(self, keep, *what):
        """Hands what a program prints to `keep`, also if it fails then."""
        try:
            printed = self.run(*what)
        except Ended as error:
            keep(error.printed)
            raise
        keep(printed)

    def bench(self, what, *more):
        """The report of `crossweft bench`, whose wrong elements are counted."""
        command = [self.options.crossweft, "bench", what, "--device", self.options.device, "--format", "json", *more]
        report = last_json(self.run(command, fine=BENCH))
        self.wrong += sum(row.get("wrong", 0) for row in report.get("rows", []))
        return report

    def range(self, sizes):
        return ["--min", sizes[0], "--max", sizes[-1], "--factor", self.options.factor]

    def ours(self, found, name, variant, sizes, *more):
        """Fills contender -> bytes -> [p50, min]."""
        common = ["--dtype", "bf16", "--ranks", self.options.ranks, *self.range(sizes)]
        report = self.bench(name, *common, *more)
        if not variant:
            # The last is of the largest sizes.
            self.record["chosen"][name] = {fact: report[fact] for fact in ("version", "chosen", "chosen_by")}
        for row in report["rows"]:
            if row["wrong"]:
                self.absent(f"{name}{variant} of {row['bytes']} B", f"{row['wrong']} wrong elements")
                continue
            times = [("", "graph_us"), (", eager", "time_us")] if "graph_us_p50" in row else [("", "time_us")]
            for suffix, of in times:
                both = [row[f"{of}_p50"], row[f"{of}_min"]]
                found[name].setdefault(OURS + variant + suffix, {})[row["bytes"]] = both

    def theirs(self, found, library, suffix, sizes, names, *more):
        """As `ours`, by torch on a library of these, its own if there is no path: all collectives in one program."""
        options, path = self.options, self.libraries[library]
        environment = dict(self.environment)
        # Without the dashes, torchrun takes what follows for abbreviations of its own options.
        command = [options.python, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", options.ranks, "--", HERE / "torch_rivals.py", "--device", options.device]
        command += [*self.range(sizes), *more]
        if path:
            environment["LD_PRELOAD"] = str(path)
            command += ["--preloaded", path]
            # Ranks that share a GPU, if there are fewer of those.
            environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        self.run_for(functools.partial(self.keep, found, library, suffix), [*command, *names], environment)

    def keep(self, found, library, suffix, printed):
        """Puts what torch has measured where it belongs."""
        for line in json_lines(printed):
            if "library" in line:
                self.record["libraries"][library] = {"version": line["library"], "torch": line["torch"]}
            elif "absent" in line:
                self.absent(f"{line['absent']}, {library}{suffix}", line["why"])
            for what, both in line.get("times", {}).items():
                who = what.replace("library", library) if "library" in what else f"torch symmetric {what}"
                found[line["collective"]].setdefault(who + suffix, {})[line["bytes"]] = both

    def find_libraries(self):
        """Name -> path, None for torch's own."""
        found = {"NCCL" if self.on_gpu else "gloo": None}
        named = [entry.partition("=")[::2] for entry in self.options.library]
        if self.on_gpu and self.options.own_library:
            named.insert(0, (f"{OURS} by NCCL's interface", self.options.own_library))
        for name, path in named:
            if pathlib.Path(path).is_file():
                found[name] = pathlib.Path(path).resolve()
            else:
                self.absent(name, "its file is not there")
        return found

    def programs(self):
        """What is run, and how, one by one."""
        rounds = range(self.options.rounds)
        small = [size for size in self.sizes if size <= SMALL]
        middle = [size for size in self.sizes if SMALL < size <= MIDDLE]
        large = [size for size in self.sizes if size > MIDDLE]
        parts = self.options.parts
        yield "doctor", self.doctor
        if "collectives" in parts:
            for number in rounds:
                yield from self.round(number, small)
            # Of one round, until all else was measured.
            for number in rounds[:1]:
                yield from self.variants(number, small)
        if "primitives" in parts:
            yield "primitives", self.primitives
        if "moe" in parts:
            yield from self.moe()
        if "collectives" in parts:
            for sizes in (middle, large):
                for number in rounds:
                    yield from self.round(number, sizes)
            for number in rounds[1:]:
                yield from self.variants(number, small)

    def round(self, number, sizes):
        """The programs of a round: libraries first, so that each of crossweft's completes a comparison."""
        if not sizes:
            return
        found, names = self.record["rounds"][number], self.options.collectives
        when = f"{span(sizes)}, round {number + 1}"
        for library, path in self.libraries.items():
            more = ("--symmetric",) if path is None and self.on_gpu else ()
            yield f"{library}, {when}", functools.partial(self.theirs, found, library, "", sizes, names, *more)
        for name in names:
            more = ("--eager",) if self.on_gpu and name == "send-recv" else ()
            yield f"{name}, {OURS}, {when}", functools.partial(self.ours, found, name, "", sizes, *more)

    def variants(self, number, sizes):
        """The programs of what is measured beside, in graphs only: one by one, inputs are written before each call."""
        names = [name for name in self.options.collectives if name != "send-recv"]
        if not self.on_gpu or not sizes or not names:
            return
        if self.sizes[-1] > SMALL:
            self.absent(f"cold and executor, more than {human(SMALL)}", "they are measured up to there, for time")
        found, when = self.record["rounds"][number], f"round {number + 1}"
        for library, path in self.libraries.items():
            if not library.startswith(OURS):
                more = ("--cold", "--symmetric") if path is None else ("--cold",)
                how = functools.partial(self.theirs, found, library, ", cold", sizes, names, *more)
                yield f"{library}, cold, {span(sizes)}, {when}", how
        for name in names:
            programs, too_small = cold_programs(name, sizes, self.options.ranks)
            self.record["cold_pairs"][name] = {human(size): count for count, those in programs for size in those}
            if too_small:
                self.absent(f"{name}, cold, {span(too_small)}", f"it takes more than {MOST_PAIRS} pairs of buffers")
            for count, those in programs:
                how = functools.partial(self.ours, found, name, ", cold", those, "--rotate", count, "--device-time")
                yield f"{name}, {OURS}, cold, {span(those)}, {when}", how
        for name in names:
            how = functools.partial(self.ours, found, name, ", executor", sizes, "--executor", "--device-time")
            yield f"{name}, {OURS}, executor, {span(sizes)}, {when}", how

    def doctor(self):
        self.record["doctor"] = self.run([self.options.crossweft, "doctor"])

    def primitives(self):
        if not self.on_gpu:
            raise RuntimeError("they are measured on GPUs")
        self.record["primitives"] = self.bench("primitives")

    def moe(self):
        """The programs of mixtures of experts."""
        for layout, tokens, blocks in MOE if self.on_gpu else [(MOE[0][0], "4", 1)]:
            what = f"{layout}, {tokens} tokens, {blocks} blocks"
            yield f"mixture of experts, {what}", functools.partial(self.experts, what, layout, tokens, blocks)
        if not self.options.deep_ep:
            self.absent("DeepEP's tests", "give the folder that has them, --deep-ep")
            return
        for name in ("test_intranode.py", "test_low_latency.py"):
            yield f"DeepEP's {name}", functools.partial(self.deep_ep, name)

    def experts(self, what, layout, tokens, blocks):
        more = ["--ranks", self.options.ranks, "--layout", layout, "--tokens", tokens, "--blocks", blocks]
        self.record.setdefault("moe", {})[what] = self.bench("moe", *more, "--experts", 256)

    def deep_ep(self, name):
        tool = HERE.parents[1] / "python/tools/deep_ep_tests.py"
        script = pathlib.Path(self.options.deep_ep) / name

        def keep(printed):
            self.record.setdefault("deep_ep", {})[name] = printed.splitlines()

        self.run_for(keep, [self.options.python, tool, script, "--num-processes", self.options.ranks])

    def measure(self):
        """Runs all programs, and writes after each; those are named that the budget leaves out."""
        late = []
        for what, how in self.programs():
            left = self.options.until - time.monotonic()
            if left <= 0:
                late.append(what)
                continue
            say(f"[{left:.0f} s left] {what}")
            try:
                how()
            except (RuntimeError, ValueError, KeyError, OSError) as error:
                self.absent(what, error)
            self.write()
        if late:
            self.absent("; ".join(late), f"the {self.options.budget} s of --budget were over")

    def measured(self):
        """Whether there is anything to show."""
        measured = [*self.record["rounds"], {part: self.record.get(part) for part in PARTS[1:]}]
        return any(any(one.values()) for one in measured)

    def write(self):
        out = pathlib.Path(self.options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out.with_suffix(".json"), json.dumps(self.record, indent=1) + "\n")
        text = ""
        for name in self.options.collectives:
            text += self.picture(name, out.with_name(f"{out.name}-{name}.svg"))
        text += "".join(f"Absent: {what} ({why}).\n" for what, why in self.record["absent"].items())
        write_whole(out.with_suffix(".md"), text)

    def picture(self, name, path):
        """Draws all who were measured in any round, and returns their table."""
        each = [one[name] for one in self.record["rounds"]]
        who = sorted({who: None for one in each for who in one}, key=lambda who: who.partition(", ")[0] != OURS)
        if not who:
            return ""
        # One for each round, empty where it was not measured: ratios are of the same round.
        rounds = {one: [{size: both[0] for size, both in of.get(one, {}).items()} for of in each] for one in who}
        typical = medians(rounds)
        sizes = sorted({size for of in typical.values() for size in of})
        title = f"{name}, bf16, {self.options.ranks} ranks, {self.how(name)}"
        write_whole(path, plot(typical, sizes, title))
        return f"## {name}, {self.how(name)}\n\n{table(rounds, sizes)}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crossweft", default=str(HERE.parents[1] / "target/release/crossweft"))
    parser.add_argument("--own-library", metavar="FILE", help="libcrossweft_nccl.so")
    parser.add_argument(
        "--library", action="append", default=[], metavar="NAME=FILE", help="another one with NCCL's interface"
    )
    parser.add_argument("--python", default=sys.executable, help="one that has torch")
    parser.add_argument("--deep-ep", metavar="FOLDER", help="DeepEP's tests")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--min", type=bytes_of, default=1 << 10, metavar="BYTES")
    parser.add_argument("--max", type=bytes_of, default=1 << 30, metavar="BYTES")
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--collectives", nargs="+", default=USUAL, choices=COLLECTIVES)
    parser.add_argument("--budget", type=int, default=540, metavar="SECONDS", help="what has not ended then is ended")
    parser.add_argument("--out", default="results/compare", metavar="PREFIX")
    options = parser.parse_args()
    options.until = time.monotonic() + options.budget
    # What there is is written, and what runs is ended, then too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    comparison = Comparison(options)
    try:
        comparison.measure()
    finally:
        comparison.write()
    if not comparison.measured():
        sys.exit("nothing was measured")
    print(pathlib.Path(options.out).with_suffix(".md").read_text())
    if comparison.wrong:
        say(f"{OURS}: {comparison.wrong} wrong elements")
    return int(comparison.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
