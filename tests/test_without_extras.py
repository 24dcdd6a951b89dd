"""The suite where no extra is installed, as in a fresh clone: what needs a package is left out, and says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ABSENT = ("triton", "torchtitan", "lightning", "accelerate", "peft", "trl")
PLACES = (
    "src/narrowgauge/integrations",
    "src/narrowgauge/runs/loggers",
    "tests/cuda/test_host.py",
    "tests/cuda/test_sharded_host.py",
)


def test_what_needs_an_absent_package_is_skipped(tmp_path: Path) -> None:
    """CI installs the extras, so nothing else would see a test that fails without them."""
    (tmp_path / "without_extras.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n")
    given = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        "PYTEST_ADDOPTS": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "without_extras", "-rs", *PLACES]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "Triton is not installed" in done.stdout and " passed" in done.stdout
