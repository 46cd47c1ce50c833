#!/usr/bin/env python3
"""The whole comparison on GPUs in one run: collectives beside NCCL and torch's symmetric memory in rounds that
alternate, primitives, and mixtures of experts.

  python3 benches/gpu/compare.py --crossweft target/release/crossweft \\
      --own-library target/release/libcrossweft_nccl.so --ranks 2 --rounds 2 --out docs/results/2xH200

`cargo xtask gpu --ranks 2 --compare` bundles it with its programs for a machine without Rust. Rivals need a Python with
torch (this one, or `--python`); what cannot be measured is left out, said, and listed as absent. A collective: bf16,
each size in a CUDA graph of 100 calls (20 from 1 MiB on), one call ahead to line the ranks up, 11 replays, the slowest
rank; sends and receives one by one, by the host's clock. Beside "crossweft" there are ", executor" (plans that have a
kernel of their own by the executor), ", cold" (eight pairs of buffers take turns; torch's all-reduce, broadcast and
reduce are in place, so theirs are eight buffers), ", eager" (one call until it is done; of libraries, what a call takes
the host) and "by NCCL's interface" (torch on our library). `--library NAME=FILE` adds another library with NCCL's
interface. DeepEP's own tests need its folder, and Python's package crossweft installed.

Writes OUT.json (everything), OUT.md (tables) and OUT-COLLECTIVE.svg, after each part, and when it is ended. An entry
is the median over the rounds of each round's median replay, microseconds a call; a ratio is the median of the rounds'
own. NVLink multicast is left alone on all sides, and tables that this machine was tuned to are not used. With
`--device cpu` it runs on the host, beside gloo, to try it out. Exit status 1 if a result of crossweft's was wrong.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from report import BENCH, OURS, last_json, medians, plot, run, table  # noqa: E402, it lies beside this folder

USUAL = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send-recv")
COLLECTIVES = (*USUAL, "reduce", "gather", "scatter")
PARTS = ("collectives", "primitives", "moe")
#: Pairs of buffers that take turns, where caches are to be cold.
COLD = 8
#: Layout, tokens of each rank.
MOE = (("ll-rank-major", "1,8,32,128"), ("ht-flat", "4096"))


def say(line):
    print(line, file=sys.stderr, flush=True)


class Comparison:
    """What is measured, and what was found."""

    def __init__(self, options):
        self.options = options
        self.environment = {
            **os.environ,
            "NCCL_NVLS_ENABLE": "0",
            "NVSHMEM_DISABLE_NVLS": "1",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "CROSSWEFT_TUNING": "off",
            "OMP_NUM_THREADS": "1",
        }
        self.environment.pop("CROSSWEFT_MULTICAST", None)
        self.on_gpu = options.device == "cuda"
        self.wrong = 0
        self.record = {
            "date": time.strftime("%Y-%m-%d"),
            "what": "bf16, us of the slowest rank, [p50, min] of each round by bytes of the larger of input and output",
            "device": options.device,
            "ranks": options.ranks,
            "chosen": {},
            "libraries": {},
            "absent": {},
            "rounds": [],
        }

    def absent(self, what, why):
        """Says why something is missing, once."""
        if what not in self.record["absent"]:
            self.record["absent"][what] = str(why)
            say(f"left out: {what}: {why}")

    def attempt(self, what, measure, *arguments):
        """What `measure` finds; None, and said, if there is no time for it or it fails."""
        if time.monotonic() > self.options.until:
            return self.absent(what, f"the {self.options.budget} s of --budget were over")
        try:
            return measure(*arguments)
        except (RuntimeError, ValueError, OSError) as error:
            return self.absent(what, error)

    def bench(self, what, *more):
        """The report of `crossweft bench`, whose wrong elements are counted."""
        command = [self.options.crossweft, "bench", what, "--device", self.options.device, "--format", "json", *more]
        report = last_json(run(command, self.environment, fine=BENCH))
        self.wrong += sum(row.get("wrong", 0) for row in report.get("rows", []))
        return report

    def ours(self, collective, *more):
        """Suffix -> bytes -> [p50, min]: what was timed, and what was beside it."""
        options = self.options
        sizes = ["--min", str(options.min), "--max", str(options.max), "--factor", str(options.factor)]
        report = self.bench(collective, "--dtype", "bf16", "--ranks", str(options.ranks), *sizes, *more)
        facts = {fact: report[fact] for fact in ("version", "chosen", "chosen_by")}
        self.record["chosen"].setdefault(collective, facts)
        found = {}
        for row in report["rows"]:
            if row["wrong"]:
                self.absent(f"{collective} of {row['bytes']} B", f"{row['wrong']} wrong elements")
                continue
            times = [("", "graph_us"), (", eager", "time_us")] if "graph_us_p50" in row else [("", "time_us")]
            for suffix, of in times:
                found.setdefault(suffix, {})[row["bytes"]] = [row[f"{of}_p50"], row[f"{of}_min"]]
        return found

    def theirs(self, path, names, *more):
        """The report of torch on a library, its own if there is no path."""
        options = self.options
        environment = dict(self.environment)
        # Without the dashes, torchrun takes what follows for abbreviations of its own options.
        command = [options.python, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", options.ranks, "--", HERE / "torch_rivals.py", "--device", options.device]
        command += ["--min", options.min, "--max", options.max, "--factor", options.factor, *more]
        if path:
            environment["LD_PRELOAD"] = str(path)
            command += ["--preloaded", path]
            # Ranks that share a GPU, if there are fewer of those.
            environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        return last_json(run([*command, *names], environment))

    def round(self, found):
        """Fills collective -> contender -> bytes -> [p50, min]."""
        for name in self.options.collectives:
            variants = {"": ()}
            if self.on_gpu and name == "send-recv":
                variants = {"": ("--eager",)}
            elif self.on_gpu:
                variants[", executor"] = ("--executor", "--device-time")
                variants[", cold"] = ("--rotate", str(COLD), "--device-time")
            for variant, more in variants.items():
                clocks = self.attempt(f"{name}, {OURS}{variant}", self.ours, name, *more)
                for suffix, by_size in (clocks or {}).items():
                    found[name][OURS + variant + suffix] = by_size
        for library, path in self.libraries():
            variants = {"": ("--symmetric",) if path is None and self.on_gpu else ()}
            if self.on_gpu and not library.startswith(OURS):
                variants[", cold"] = ("--rotate", str(COLD))
            for suffix, more in variants.items():
                # Calls one by one find their buffers as they left them.
                names = [name for name in self.options.collectives if not suffix or name != "send-recv"]
                report = self.attempt(library + suffix, self.theirs, path, names, *more)
                if report:
                    self.keep(report, library, suffix, found)

    def keep(self, report, library, suffix, found):
        """Puts what torch has measured where it belongs."""
        self.record["libraries"][library] = {"version": report["library"], "torch": report["torch"]}
        for what, why in report["absent"].items():
            self.absent(f"{what}, {library}{suffix}", why)
        for name, times in report["times"].items():
            for what, by_size in times.items():
                who = what.replace("library", library) if "library" in what else f"torch symmetric {what}"
                found[name][who + suffix] = {int(size): both for size, both in by_size.items()}

    def libraries(self):
        """Name and path, None for torch's own."""
        found = [("NCCL" if self.on_gpu else "gloo", None)]
        named = [entry.partition("=")[::2] for entry in self.options.library]
        if self.on_gpu and self.options.own_library:
            named.insert(0, (f"{OURS} by NCCL's interface", self.options.own_library))
        for name, path in named:
            if pathlib.Path(path).is_file():
                found.append((name, pathlib.Path(path).resolve()))
            else:
                self.absent(name, "its file is not there")
        return found

    def rounds(self):
        for number in range(self.options.rounds):
            say(f"round {number + 1} of {self.options.rounds}")
            found = {name: {} for name in self.options.collectives}
            # What there is of it counts if somebody has had enough.
            self.record["rounds"].append(found)
            self.round(found)
            self.write()

    def primitives(self):
        if not self.on_gpu:
            self.absent("primitives", "they are measured on GPUs")
            return
        say("primitives")
        self.record["primitives"] = self.attempt("primitives", self.bench, "primitives")

    def moe(self):
        reports = self.record["moe"] = {}
        for layout, tokens in MOE:
            say(f"mixture of experts, {layout}")
            tokens = tokens if self.on_gpu else "4"
            more = ["--ranks", str(self.options.ranks), "--layout", layout, "--tokens", tokens, "--experts", "256"]
            reports[layout] = self.attempt(f"mixture of experts, {layout}", self.bench, "moe", *more)
        if not self.options.deep_ep:
            self.absent("DeepEP's tests", "give the folder that has them, --deep-ep")
            return
        tool = HERE.parents[1] / "python/tools/deep_ep_tests.py"
        printed = self.record["deep_ep"] = {}
        for name in ("test_intranode.py", "test_low_latency.py"):
            say(f"DeepEP's {name}")
            script = pathlib.Path(self.options.deep_ep) / name
            command = [self.options.python, tool, script, "--num-processes", self.options.ranks]
            printed[name] = (self.attempt(f"DeepEP's {name}", run, command, self.environment) or "").splitlines()

    def measure(self):
        self.record["doctor"] = self.attempt("doctor", run, [self.options.crossweft, "doctor"], self.environment)
        for part, how in (("collectives", self.rounds), ("primitives", self.primitives), ("moe", self.moe)):
            if part in self.options.parts:
                how()
                self.write()

    def write(self):
        """Whether there was anything to write."""
        measured = [*self.record["rounds"], self.record.get("moe", {})]
        if not self.record.get("primitives") and not any(it for one in measured for it in one.values()):
            return False
        out = pathlib.Path(self.options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(self.record, indent=1) + "\n")
        text = ""
        for name in self.options.collectives:
            rounds = {}
            for one in self.record["rounds"]:
                for contender, times in one[name].items():
                    rounds.setdefault(contender, []).append({size: both[0] for size, both in times.items()})
            # What is not in every round has no ratio to what is.
            whole = max(map(len, rounds.values()), default=0)
            rounds = {who: found for who, found in rounds.items() if len(found) == whole}
            if OURS not in rounds:
                continue
            typical = medians(rounds)
            sizes = sorted({size for of in typical.values() for size in of})
            text += f"## {name}\n\n{table(rounds, sizes)}\n"
            picture = out.with_name(f"{out.name}-{name}.svg")
            picture.write_text(plot(typical, sizes, f"{name}, bf16, {self.options.ranks} ranks"))
        text += "".join(f"Absent: {what} ({why}).\n" for what, why in self.record["absent"].items())
        out.with_suffix(".md").write_text(text)
        return True


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
    parser.add_argument("--min", type=int, default=1 << 10)
    parser.add_argument("--max", type=int, default=1 << 30)
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--collectives", nargs="+", default=USUAL, choices=COLLECTIVES)
    parser.add_argument("--budget", type=int, default=3600, metavar="SECONDS", help="start no program later than that")
    parser.add_argument("--out", default="results/compare", metavar="PREFIX")
    options = parser.parse_args()
    options.until = time.monotonic() + options.budget
    # What there is is written, and what runs is ended, then too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    comparison = Comparison(options)
    try:
        comparison.measure()
    finally:
        written = comparison.write()
    if not written:
        sys.exit("nothing was measured")
    print(pathlib.Path(options.out).with_suffix(".md").read_text())
    if comparison.wrong:
        say(f"{OURS}: {comparison.wrong} wrong elements")
    return int(comparison.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
