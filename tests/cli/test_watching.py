"""``watch`` serves the page of runs at an address with a token."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from narrowgauge.runs.writer import RunWriter


def test_the_page_is_served_at_its_address_alone(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", {"config": {"recipe": "bfloat16/word", "model": "llama-1m"}}) as writer:
        writer.append("steps", {"step": 1, "loss": 5.0})
    files = sorted(tmp_path.rglob("*"))
    command = [sys.executable, "-m", "narrowgauge", "watch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with urllib.request.urlopen(address, timeout=30) as answer:
                assert "llama-1m in bfloat16/word" in answer.read().decode()
            parent = address[: address.rindex("/", 0, -1)] + "/"
            requests = (
                (parent, {}),
                (f"{parent}{'x' * 32}/", {}),
                (address + "file", {}),
                (address, {"Host": "evil.example"}),
            )
            for wrong, host in requests:
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    urllib.request.urlopen(urllib.request.Request(wrong, headers=host), timeout=30)
        finally:
            process.kill()
    assert sorted(tmp_path.rglob("*")) == files
