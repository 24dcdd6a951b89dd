"""The rows of bugs of public threads: each cites a thread, its right words can be said, and an answer is judged so."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from benchmark_modules import benchmark_module
from narrowgauge.analysis.diagnosis.causes import CAUSES
from narrowgauge.analysis.diagnosis.pairs.reasons import REASONS
from narrowgauge.runs.departure_table import DEPARTURES, PIECES

public_bugs = benchmark_module("public_bugs")
public_loop = benchmark_module("_public_loop")
rows = pytest.mark.parametrize("row", public_bugs.ROWS, ids=lambda row: row.name)


@rows
def test_a_row_cites_a_thread_and_its_right_words_can_be_said(row: Any) -> None:
    assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", row.source)
    assert "." in row.wrong
    assert row.audit <= DEPARTURES.keys() | {f"{piece}-departs" for piece in PIECES}
    assert row.pair <= REASONS.keys()
    assert row.rows <= CAUSES.keys()


def test_each_thread_is_cited_once_and_the_parts_do_not_change_with_other_rows() -> None:
    sources = [row.source for row in public_bugs.ROWS]
    assert len(sources) == len(set(sources)) >= 60
    parts = {row.name: public_bugs.part_of(row) for row in public_bugs.ROWS}
    assert len(parts) == len(public_bugs.ROWS), "two rows have one name"
    assert set(parts.values()) <= set(public_bugs.PARTS)
    assert parts["sum-of-micro-batches"] == "seen"
    assert {parts["untied"], parts["never-zeroed"]} <= {"tuning", "aside"}


@pytest.mark.parametrize(
    ("part", "rows"),
    [("unseen", public_bugs.UNSEEN), ("later", public_bugs.LATER), ("third", public_bugs.THIRD)],
    ids=["unseen", "later", "third"],
)
def test_rows_that_no_rule_was_mended_with_are_parts_of_their_own(part: str, rows: tuple[Any, ...]) -> None:
    assert [row for row in public_bugs.ROWS if public_bugs.part_of(row) == part] == list(rows)
    assert len(rows) >= 30


class _Text:
    def batch(self, place: int, size: int, length: int, seed: int) -> Any:
        return np.random.default_rng((place, seed)).integers(1, 500, (size, length))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a scheduler that steps too early is a row
@pytest.mark.parametrize("row", [*public_bugs.UNSEEN, *public_bugs.LATER, *public_bugs.THIRD], ids=lambda row: row.name)
def test_an_unseen_bug_is_planted_into_its_loop_and_the_loop_takes_a_step(row: Any) -> None:
    with torch.random.fork_rng():
        loop = public_loop.PublicLoop(row.setting, _Text())
        methods = {name for name in dir(loop) if callable(getattr(loop, name))}
        row.plant(loop)
        assert {name for name, value in vars(loop).items() if callable(value)} <= methods
        assert loop.one_step()[1].isfinite()


@pytest.mark.parametrize("name", [*public_bugs.KINDS, *public_bugs.MORE_KINDS])
def test_a_healthy_loop_learns(name: str) -> None:
    setting, adjust = {**public_bugs.KINDS, **public_bugs.MORE_KINDS}[name]
    with torch.random.fork_rng():
        loop = public_loop.PublicLoop(setting, _Text())
        methods = {name for name in dir(loop) if callable(getattr(loop, name))}
        adjust(loop)
        assert {name for name, value in vars(loop).items() if callable(value)} <= methods
        start = [p.detach().clone() for p in loop.model.parameters()]
        assert all(bool(torch.stack(loop.one_step()[1:]).isfinite().all()) for _ in range(2))
        assert any(not torch.equal(p, q) for p, q in zip(start, loop.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("said", "is_note", "answer"),
    [
        ([], False, "silent"),
        (["clip-norm", "rate"], False, "first"),
        (["rate", "clip-norm"], False, "wrong"),
        (["rate"], True, "located"),
    ],
)
def test_an_answer_is_judged_by_what_comes_first(said: list[str], is_note: bool, answer: str) -> None:
    assert public_bugs.answer(said, {"clip-norm"}, is_note) == answer
