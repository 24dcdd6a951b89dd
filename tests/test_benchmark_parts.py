"""A benchmark of evidence takes up where it was, reuses nothing of other settings or other code, and says how long it takes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmark_modules import benchmark_module

parts = benchmark_module("_parts")
OF_PARTS = ("stall", "second_moments", "audit_readings", "four_bits", "compressed_gradients")
OF_RUNS = ("board", "quality", "rules", "int8_outliers")
UNITS = {"seconds": 1, "minutes": 60, "hours": 3600}


class Desk:
    """A benchmark of three rows, which counts what it makes and may be interrupted."""

    def __init__(self, out: Path) -> None:
        self.out, self.made, self.notes, self.stop_at = out, list[str](), list[str](), ""
        self.machine, self.options, self.note = (
            {"torch": "2.13.0", "load": "1"},
            argparse.Namespace(quick=False),
            self.notes.append,
        )

    def make(self, name: str) -> dict[str, Any]:
        if name == self.stop_at:
            raise KeyboardInterrupt
        self.made.append(name)
        return {"": name, "error": 0.1, "range": (1, 2)}

    def run(self, **settings: Any) -> Any:
        """The table; what was made for it is in ``made``."""
        self.made.clear()
        wanted = [parts.Part(name, settings, lambda name=name: self.make(name), 10.0) for name in ("a", "b/c", "d")]
        return parts.complete(wanted, self.out, self)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "out")


def test_an_interrupted_benchmark_goes_on_where_it_was(desk: Desk) -> None:
    desk.stop_at = "d"
    with pytest.raises(KeyboardInterrupt):
        desk.run(steps=4)
    assert desk.made == ["a", "b/c"]
    desk.stop_at = ""
    resumed = desk.run(steps=4)
    assert desk.made == ["d"]
    assert desk.run(steps=4) == resumed and desk.made == [] and list(resumed) == ["a", "b/c", "d"]
    assert resumed == Desk(desk.out / "whole").run(steps=4)  # a row that is read is one that was just made


def test_no_part_of_other_settings_other_code_or_another_machine_is_reused(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.run(steps=4)
    desk.run(steps=5)
    assert len(desk.made) == 3
    desk.run(steps=4)
    assert desk.made == []  # the files of other settings stand side by side
    desk.machine = {"torch": "2.13.0", "load": "9"}
    desk.run(steps=4)
    assert desk.made == []
    desk.machine = {"torch": "2.14.0", "load": "9"}
    desk.run(steps=4)
    assert len(desk.made) == 3
    monkeypatch.setattr(parts, "code_hash", lambda: "other")
    desk.run(steps=4)
    assert len(desk.made) == 3


def test_an_edit_of_a_benchmarks_code_is_other_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("LR = 1e-5")
    module = ModuleType("mine")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "mine", module)
    monkeypatch.setattr(parts, "HERE", tmp_path.resolve())
    before = parts.code_hash()
    assert parts.code_hash() == before
    file.write_text("LR = 1e-4")
    assert parts.code_hash() != before


def test_a_damaged_file_is_made_again(desk: Desk) -> None:
    whole = desk.run(steps=4)
    for file, damage in zip(sorted(desk.out.glob("*.json")), (b"", b"{}", b"[1]"), strict=True):
        file.write_bytes(damage)
    assert desk.run(steps=4) == whole and len(desk.made) == 3


def test_it_says_first_how_many_parts_are_missing_and_about_how_long_they_take(desk: Desk) -> None:
    announced = parts.announcement
    assert (
        announced([10.0] * 3, [], Path("x")) == "3 of 3 parts are missing in x, about 30 s by what they took elsewhere"
    )
    assert announced([10.0], [(10.0, 40.0)], Path("x"), "run") == (
        "1 of 2 runs is missing in x, about 40 s by what the others took"
    )
    desk.run(steps=4)
    desk.run(steps=4)
    assert desk.notes == [
        announced([10.0] * 3, [], desk.out),
        f"nothing is missing: {desk.out} holds 3 parts; remove it to begin anew",
    ]


def test_progress_is_shown_on_a_terminal_alone(
    desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.run(steps=4)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    desk.run(steps=5)
    assert "1 of 3: a; about 30 s left" in capsys.readouterr().err


# ── the benchmarks ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_stall_case_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stall, made = benchmark_module("stall"), list[str]()
    row_of: Callable[..., Any] = stall.our_row
    monkeypatch.setattr(stall, "STORAGES", {name: stall.STORAGES[name] for name in ("naive", "word", "master")})
    monkeypatch.setattr(stall, "PUBLISHED", {})
    monkeypatch.setattr(stall, "PEERS", ())

    def counted(case: Any, name: str) -> Any:
        made.append(name)
        if made == ["naive", "word"]:
            raise KeyboardInterrupt
        return row_of(case, name)

    monkeypatch.setattr(stall, "our_row", counted)
    arguments = ["--quick", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        stall.main(arguments)
    assert stall.main(arguments) == 0
    assert made == ["naive", "word", "word", "master"]


def flat(found: Any) -> Iterator[Any]:
    """All parts of a benchmark's tables."""
    if isinstance(found, parts.Part):
        yield found
    else:
        each: Iterable[Any] = found.values() if isinstance(found, dict) else found
        for one in each:
            yield from flat(one)


def stated_seconds(module: ModuleType) -> float:
    """What the docstring says of all that a benchmark does by default."""
    told = re.search(r"take[s\w ]* about\s+(\d+)\s+(\w+)\s+on\s+2\s+cores", module.__doc__ or "")
    assert told, f"{module.__name__} does not say how long it takes."
    return float(told[1]) * UNITS[told[2]]


@pytest.mark.parametrize("name", OF_PARTS)
def test_a_benchmark_of_parts_says_how_long_they_take(name: str) -> None:
    module = benchmark_module(name)
    wanted = list(flat(module.parts(module.flags().parse_args([]))))
    assert len({part.name for part in wanted}) == len(wanted)
    assert sum(part.seconds for part in wanted) == pytest.approx(stated_seconds(module), rel=0.2)


@pytest.mark.parametrize("name", OF_RUNS)
def test_a_benchmark_of_runs_says_how_long_they_take(name: str) -> None:
    told = " ".join((benchmark_module(name).__doc__ or "").split())
    assert re.search(r"take[s]? [^.]*(\d+|one|two) (seconds|minutes|hours)", told)


def test_missing_runs_are_announced_by_the_boards_records_or_by_finished_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quality = benchmark_module("quality")
    options = quality.flags().parse_args(["--out", str(tmp_path), "--storages", "word", "--seeds", "0"])
    quality.fill(options)
    wanted, usual = quality.jobs(options), quality.recorded_seconds(options)
    assert usual(wanted[0]) > 0 and quality.missing(wanted, options, lambda job: 60.0) == (
        f"4 of 4 runs are missing in {tmp_path}, about 4 min by what they took elsewhere"
    )
    options.steps *= 2
    assert quality.recorded_seconds(options)(wanted[0]) == pytest.approx(2 * usual(wanted[0]))
