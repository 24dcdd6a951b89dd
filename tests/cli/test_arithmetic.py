"""``narrowgauge show arithmetic``: this machine, two machines, and one line for what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from narrowgauge.cli.main import main
from narrowgauge.gauges import arithmetic as measuring
from narrowgauge.runs.arithmetic import Arithmetic
from narrowgauge.runs.writer import RunWriter

HERE = Arithmetic({"threads": "1", "torch": "2.13.0"}, {"softmax": "pairwise #1", "function exp": "0.50 ulp #2"})
THERE = Arithmetic({"threads": "2", "torch": "2.13.0"}, {"softmax": "sequential #3", "function exp": "0.50 ulp #2"})


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of this machine and a run of another one."""
    monkeypatch.setattr(measuring, "measure_arithmetic", lambda device: HERE)
    (tmp_path / "here.json").write_text(json.dumps(HERE.to_toml()))
    RunWriter.create(tmp_path / "run", {"config": {}, "arithmetic": THERE.to_toml()}).close()
    return tmp_path


def arithmetic(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["show", "arithmetic", *map(str, words)])


def test_this_machine_is_printed_and_its_json_read_again(machines: Path) -> None:
    lines = arithmetic().stdout.splitlines()
    assert "softmax: pairwise #1" in lines and "threads: 1" in lines
    (machines / "again.json").write_text(arithmetic("--json").stdout)
    agreed = arithmetic(machines / "again.json")
    assert agreed.stdout.startswith("None of 2 measured properties differ.")


def test_two_machines_are_told_apart(machines: Path) -> None:
    found = arithmetic(machines / "run")
    assert "attention weights differ in last bits" in found.stdout
    assert "1 of 2 measured properties differ.\nsetting threads: 1 and 2\n" in found.stdout
    told = json.loads(arithmetic(machines / "here.json", machines / "run", "--json").stdout)
    (difference,) = told["differences"]
    assert difference["probe"] == "softmax" and difference["results"] == ["pairwise #1", "sequential #3"]
    assert told["settings"] == {"threads": ["1", "2"]}
