"""Which tests and doctests are collected: those inside frameworks only with ``--frameworks``, which installs them."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
# `from oracles.x import y` in any test, whatever its folder.
sys.path.insert(0, str(ROOT / "tests"))

# Modules that import a framework, at once or in a function.
ADAPTERS = [
    ROOT / "src" / "narrowgauge" / "integrations" / name
    for name in ("huggingface.py", "lightning.py", "torchtitan.py", "peft.py", "accelerate.py")
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--frameworks", action="store_true", help="also run the tests that are marked `frameworks`"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of tests inside frameworks: they import the framework."""
    if config.getoption("--frameworks"):
        return None
    if collection_path in ADAPTERS:
        return True
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    text = collection_path.read_text("utf-8") if is_test else ""
    return True if "\npytestmark = " in text and "pytest.mark.frameworks" in text else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--frameworks"):
        return
    left_out = [item for item in items if item.get_closest_marker("frameworks")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Let each test and example draw the same numbers, whatever ran before it in its process."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
