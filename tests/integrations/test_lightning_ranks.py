"""Two ranks under Lightning's DDP and FSDP2 hold the same stored weights and delayed scales, and resume with the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import narrowgauge

pytest.importorskip(
    "lightning.pytorch", reason="narrowgauge[lightning] is not installed: ./dev test integrations installs it"
)


def test_ddp_and_fsdp2_agree_and_resume(tmp_path: Path) -> None:
    source = str(Path(narrowgauge.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    program = Path(__file__).with_name("lightning_ranks.py")
    words = [sys.executable, str(program), str(tmp_path), "float8-delayed/compact", "int8-row/word/reproducible"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for recipe in found.values():
        for each in recipe.values():
            assert each["equal"] and each["whole"] == each["resumed"] and each["losses"] == each["parts"]
        assert recipe["ddp"] == recipe["fsdp2"]
