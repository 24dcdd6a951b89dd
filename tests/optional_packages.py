"""Which packages a piece of code imports that are not installed."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib.util import find_spec

# What a name or a package needs to be imported, beyond what pip installs on every machine.
NEEDS = {"Trainer": "accelerate", "TrainingArguments": "accelerate", "torchtitan": "triton"}


def absent_packages(code: str) -> list[str]:
    """Return the packages that code imports anywhere and that are not installed."""
    needed = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            needed |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            needed.add(node.module.partition(".")[0])
            needed |= {NEEDS[alias.name] for alias in node.names if alias.name in NEEDS}
    needed |= {NEEDS[name] for name in needed if name in NEEDS}
    return sorted(name for name in needed if find_spec(name) is None)


def reason(packages: Iterable[str]) -> str:
    """Say why something is skipped."""
    return f"{', '.join(packages)} not installed: ./dev test --frameworks installs what is missing"
