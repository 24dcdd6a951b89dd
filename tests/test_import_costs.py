"""What an import costs: PyTorch takes a second, and what takes seconds more is imported by the function that needs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

EXPENSIVE = (
    "accelerate",
    "datasets",
    "lightning",
    "scipy",
    "torch.distributed.checkpoint",
    "transformers",
)
"""They take 0.3 to 3 CPU-seconds each. ``torch._dynamo`` is not here: PyTorch imports it with the first optimizer."""
ABOUT_THEM = (
    "checkpoints/dcp_files.py",
    "integrations/*.py",
    "integrations/**/*.py",
    "profiling/*.py",
    "transforms/scal*.py",
    "transforms/unit_*.py",
)
"""Modules that subclass or change what these packages define: functions import them."""


def test_no_other_module_imports_what_takes_seconds() -> None:
    """In one process, so that a module also pays for what it imports."""
    package = SOURCE / "narrowgauge"
    paths = [
        path.relative_to(SOURCE).with_suffix("")
        for path in sorted(package.rglob("*.py"))
        if path.stem not in ("__init__", "__main__") and not any(path.match(pattern) for pattern in ABOUT_THEM)
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {['.'.join(path.parts) for path in paths]}:\n"
        "    importlib.import_module(name)\n"
        f"    if found := [each for each in {EXPENSIVE} if each in sys.modules]:\n"
        "        sys.exit(f'{name} imports {found}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
