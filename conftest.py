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


def run_at_import(code: str) -> list[ast.stmt]:
    """The statements of a module, and those that it tries."""
    body = ast.parse(code).body
    return [*body, *(each for tried in body if isinstance(tried, ast.Try) for each in tried.body)]


collect_ignore = [str(path) for path, code in SERVING.items() if absent_packages(run_at_import(code))]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the examples of a docstring that import a missing package."""
    if isinstance(item, pytest.DoctestItem) and item.dtest is not None:
        code = "".join(example.source for example in item.dtest.examples)
        missing = absent_packages(code + SERVING.get(item.path, ""))
        if missing:
            pytest.skip(reason(missing))
