"""``python -m crossweft.compat.mscclpp [--shadow] PROGRAM [ARGUMENT...]``: runs a program of MSCCL++'s DSL."""

from __future__ import annotations

import os
import runpy
import sys

from . import install


def main() -> None:
    arguments = sys.argv[1:]
    shadow = arguments[:1] == ["--shadow"]
    arguments = arguments[shadow:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(f"usage: {(__doc__ or '').split('``')[1]}")
    if not os.path.isfile(arguments[0]):
        sys.exit(f"there is no program {arguments[0]}")
    # As `python PROGRAM` has it.
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    install(shadow=shadow)
    runpy.run_path(arguments[0], run_name="__main__")


main()
