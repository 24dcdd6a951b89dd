"""``watch`` serves the page of runs at an address with a token."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest


def test_the_page_is_served_at_its_address_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "narrowgauge", "watch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with urllib.request.urlopen(address, timeout=30) as answer:
                assert "Waiting for a run" in answer.read().decode()
            parent = address[: address.rindex("/", 0, -1)] + "/"
            for wrong, host in ((parent, {}), (address + "file", {}), (address, {"Host": "evil.example"})):
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    urllib.request.urlopen(urllib.request.Request(wrong, headers=host), timeout=30)
        finally:
            process.kill()
    assert not any(tmp_path.iterdir())
