"""docs/moe-python.md: what it shows runs and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import torchrun

GUIDE = (Path(__file__).parents[2] / "docs" / "moe-python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)


def test_all_code_is_run() -> None:
    assert len(BLOCKS) == GUIDE.count("```python\n") == 3


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_guide(index: int, tmp_path: Path) -> None:
    code, printed = BLOCKS[index]
    script = tmp_path / "guide.py"
    script.write_text(code)
    # Buffers by DeepEP's name would be on a GPU if there is one, which the guide's tensors are not.
    found = torchrun(2, script, CUDA_VISIBLE_DEVICES="")
    for line in printed.splitlines():
        assert line in found
