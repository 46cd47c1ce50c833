"""The code of docs/dsl.md and of the README runs, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("page", "least"), [("docs/dsl.md", 8), ("README.md", 1)])
def test_code_blocks(page: str, least: int) -> None:
    text = (ROOT / page).read_text()
    names: dict[str, object] = {"__name__": "guide"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= least
    for block in blocks:
        # Lines as they are on the page, for messages.
        before = text[: block.start(1)].count("\n")
        exec(compile("\n" * before + block.group(1), page, "exec"), names)
