"""``watch``, and ``--watch`` of commands that train: a process that serves the page and ends with the one that asked for it."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from narrowgauge.cli import watching
from narrowgauge.cli.main import main
from narrowgauge.errors import RankError

RANK = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}


def test_the_page_is_served_until_standard_input_ends(tmp_path: Path) -> None:
    folder = tmp_path / "not here yet"
    command = [sys.executable, "-m", "narrowgauge", "watch", str(folder), "--no-open", "--until-closed"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None and process.stderr is not None
        address = process.stderr.readline().strip()
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert "Waiting for a run" in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(address[: address.rindex("/", 0, -1)] + "/", timeout=30)
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert not folder.exists()


def test_a_training_that_is_watched_has_a_process_that_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], subprocess.Popen[bytes]]] = []
    real = subprocess.Popen

    def start(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        made: subprocess.Popen[bytes] = real([sys.executable, "-c", "import sys; sys.stdin.read()"], **how)
        started.append((command, made))
        return made

    monkeypatch.setattr(watching.subprocess, "Popen", start)
    with watching.watching(tmp_path / "run", True):
        ((command, process),) = started
        assert command[2:] == ["narrowgauge", "watch", str(tmp_path / "run"), "--until-closed"]
        assert process.poll() is None
    assert process.returncode == 0
    with watching.watching(tmp_path / "run", False):
        assert len(started) == 1


def test_of_several_ranks_the_first_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching.subprocess, "Popen", lambda *_, **__: pytest.fail("a second rank watches"))
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    with watching.watching(tmp_path, True):
        pass
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RankError, match="Name it"), watching.watching(None, True):
        pass


def test_a_folder_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(main, ["watch", "no-such-run", "--no-open"])
    assert result.exit_code == 2 and "there is no such folder" in result.output


def test_an_address_to_notify_that_is_none_costs_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["watch", str(tmp_path), "--no-open", "--notify", "ftp://a"])
    assert result.exit_code == 2 and "is no address to send to" in result.output
