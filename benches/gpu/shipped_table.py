#!/usr/bin/env python3
"""Makes a table that ships with the library of those that `crossweft tune` has written on a machine of that kind.

  python3 benches/gpu/shipped_table.py crates/crossweft-collective/tables/2xH200.json tuning-....json ...

What is special to the machine is left out, and so are candidates that are never the best by a hair: `src/shipped.rs` says for which
machines a table is.
"""

import argparse
import json
import sys

NEAR = 1.03


def trimmed(measured):
    """Without candidates that are far from the best everywhere."""
    near = {
        at
        for row in measured["rows"]
        for at, us in enumerate(row["us"])
        if us is not None and us <= NEAR * min(x for x in row["us"] if x is not None)
    }
    keep = sorted(near)
    rows = [{"bytes": row["bytes"], "us": [row["us"][at] for at in keep]} for row in measured["rows"]]
    return {**measured, "candidates": [measured["candidates"][at] for at in keep], "rows": rows}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="the table to write")
    parser.add_argument("sources", nargs="+", help="files or JSON reports of `crossweft tune`, of one kind of machine")
    options = parser.parse_args()
    measurements, kinds = [], []
    for source in options.sources:
        with open(source, encoding="utf-8") as file:
            table = json.load(file)
        # The tuner's report has it inside.
        table = table.get("table", table)
        measurements += [trimmed(one) for one in table.pop("measurements")]
        gpus = sorted({name.split(",")[0] for name in table["fingerprint"]})
        kinds.append((gpus, table["world_size"]))
    if any(kind != kinds[0] for kind in kinds):
        sys.exit("the tables are of several kinds of machines, or numbers of ranks; give those of one")
    table["fingerprint"] = {f"{gpu}, each rank its own": table["world_size"] for gpu in gpus}
    lines = []
    for one in measurements:
        head = {key: one[key] for key in ("collective", "place", "dtype", "op")}
        candidates = ",\n    ".join(json.dumps(candidate) for candidate in one["candidates"])
        rows = ",\n    ".join(json.dumps(row) for row in one["rows"])
        lines.append(
            json.dumps(head)[:-1] + f',\n  "candidates": [\n    {candidates} ],\n  "rows": [\n    {rows} ] }}'
        )
    with open(options.target, "w", encoding="utf-8") as file:
        file.write(json.dumps(table)[:-1] + ',\n"measurements": [\n' + ",\n".join(lines) + "\n] }\n")


if __name__ == "__main__":
    main()
