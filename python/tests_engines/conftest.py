"""Tests of what inference engines use: their plugins, in the engines' own code, and the benchmark. On processors.

They need torch, and the engines, installed without what these depend on: ``xtask/src/python.rs`` says how.
"""

from __future__ import annotations

import engine_stubs

engine_stubs.install()
