"""What the check reads of small programs: each fault at its place, and nothing of a healthy one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from corpus.rows import edited
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Readings
from narrowgauge.spec.toml import load_toml

FOLDER = Path(__file__).parent
TEXT = (FOLDER / "program.py").read_text(encoding="utf-8")
ROWS = load_toml((FOLDER / "programs.toml").read_text(encoding="utf-8"))


def made(edits: list[list[str]]) -> dict[str, Any]:
    """Return the names of an edited program."""
    text = TEXT
    for old, new in edits:
        text = edited(text, old, new.strip("\n"))
    names: dict[str, Any] = {"ng": ng, "__name__": "program"}
    exec(compile(text, "program.py", "exec"), names)
    return names


def checked(names: dict[str, Any]) -> Readings:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        options = {name: names[name] for name in ("batch", "loss", "backward")}
        return ng.check(names["model"], names["optimizer"], **options)


@pytest.mark.parametrize("name", ROWS["faults"])
def test_a_fault_is_read_at_its_place(name: str) -> None:
    row = ROWS["faults"][name]
    result = checked(made(row["edits"]))
    readings = [r for r in result if r.what == row["kind"]]
    assert readings, result
    assert readings[0].tensor.startswith(row.get("tensor", "")), result
    if "value" in row:
        assert readings[0].value == pytest.approx(row["value"]), result
    for words in row.get("says", []):
        assert words in str(result), result


@pytest.mark.parametrize("name", ROWS["healthy"])
def test_a_healthy_program_is_clean_and_its_slope_is_measured(name: str) -> None:
    result = checked(made(ROWS["healthy"][name]))
    assert not len(result), result
    (slope,) = [line for line in result.lines if line.startswith("slope: ")]
    assert float(slope.partition("within ")[2]) <= 1e-8, slope


@pytest.mark.parametrize("name", ROWS["named"])
def test_what_is_not_judged_is_named_and_is_no_reading(name: str) -> None:
    row = ROWS["named"][name]
    result = checked(made(row["edits"]))
    assert not len(result) and row["says"] in str(result), result


def test_each_kind_of_the_check_has_a_fault_that_it_reads() -> None:
    by_check = {name for name, kind in KINDS.items() if kind.by.startswith("ng.check")}
    assert by_check <= {row["kind"] for row in ROWS["faults"].values()}
