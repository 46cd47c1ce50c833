"""docs/torch.md: what it shows runs and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import torchrun


def test_first_use(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()
    blocks = re.findall(r"```(python|text)\n(.*?)```", guide, re.DOTALL)
    (_, code), (_, printed) = blocks[:2]
    script = tmp_path / "first_use.py"
    script.write_text(code)
    found = torchrun(2, script)
    # Which algorithm it is may have been measured on this machine.
    for line in printed.splitlines():
        assert re.sub(", [a-z-]+$", "", line) in found
