"""Doctests that need a package run only where it is installed: those of ``narrowgauge[integrations]`` are not everywhere."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
# `from oracles.x import y` in any test, whatever its folder.
sys.path.insert(0, str(ROOT / "tests"))
pytest_plugins = ["tiers"]

from optional_packages import absent_packages, reason  # noqa: E402

SERVING = {
    path: path.read_text(encoding="utf-8")
    for room in ("integrations", "runs/loggers")
    for path in (ROOT / "src" / "narrowgauge" / room).rglob("*.py")
}
"""The modules that serve packages, which they import at once or in a function."""
collect_ignore = [str(path) for path, code in SERVING.items() if absent_packages(ast.parse(code).body)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the examples of a docstring that import a missing package."""
    if isinstance(item, pytest.DoctestItem) and item.dtest is not None:
        code = "".join(example.source for example in item.dtest.examples)
        missing = absent_packages(code + SERVING.get(item.path, ""))
        if missing:
            pytest.skip(reason(missing))
