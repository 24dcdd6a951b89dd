"""The figures of the pages are those of the evidence, which says how each was measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from script_modules import ROOT, script_module

evidence = script_module("docs/evidence.py")
FIELDS = {"key", "claim", "target", "missed", "machine", "date", "command", "held_out", "holds"}
TABLES = (ROOT / "evidence" / "tables.toml").read_text(encoding="utf-8")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
MARGIN = 1.0
"""In nats: how far below the unigram level a baseline must end."""


@pytest.mark.parametrize("page", evidence.pages(), ids=lambda page: page.name)
def test_a_page_holds_the_figures_of_the_evidence(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert evidence.filled(text) == text, "run python docs/evidence.py"
    by_hand = CODE.sub("", evidence.CITATION.sub("", text))
    assert not re.search(r"\d ± ?\d", by_hand), "cite an interval"


def test_every_row_says_how_it_was_measured() -> None:
    """A page beside RESULTS cites each figure, but for misses."""
    results = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    cited = set(re.findall(r'key = "(.+?)"', TABLES))
    for page in evidence.pages():
        if page.name != "RESULTS.md":
            cited |= {match[2] for match in evidence.CITATION.finditer(page.read_text("utf-8"))}
    keys = []
    for name, section in evidence.sections().items():
        assert f"<!-- evidence: section {name} -->" in results
        held_out = [row["held_out"] for row in section]
        for row in section:
            keys.append(row["key"])
            figure = "cell" if "cell" in row else "figure"
            assert row.keys() == FIELDS | {figure}, row["key"]
            assert row["target"] or not row["missed"], row["key"]
            assert row["missed"] or row["key"] in cited, row["key"]
            assert evidence.figure(row) not in ("", "–"), row["key"]
        assert held_out == sorted(held_out, reverse=True)  # those held out from tuning stand first
    assert len(set(keys)) == len(keys)


def test_every_baseline_of_the_board_learned() -> None:
    runs = evidence.lines_of("benchmarks/trainings.jsonl")
    for row in ("master", "word"):
        baselines = evidence.chosen(runs, {"setting": "llama-1m", "row": row})
        assert baselines
        for run in baselines:
            assert run["loss"] < run["unigram"] - MARGIN


def run_of(row: str, seed: int, loss: float, **changed: Any) -> dict[str, Any]:
    return {"row": row, "seed": seed, "loss": loss, "vectors": "AVX2", **changed}


def test_all_pairs_of_one_seed_and_machine_count() -> None:
    masters = [run_of("master", seed, 4.0 + seed) for seed in (0, 1, 2)]
    naives = [run_of("naive", 0, 4.5), run_of("naive", 1, 5.5), run_of("naive", 3, 9.0)]
    naives += [run_of("naive", 2, 9.0, vectors="AVX512"), run_of("naive", 2, 9.0, lr=1e-3)]
    masters.append(run_of("master", 1, 6.0, vectors="AVX512"))
    naives.append(run_of("naive", 1, 7.5, vectors="AVX512"))
    both = evidence.pairs(naives, masters)
    assert [ours["loss"] - base["loss"] for ours, base in both] == [0.5, 0.5, 1.5]
    # The seed that two machines repeat counts once.
    assert evidence.differences(both) == [0.5, 1.0]


@pytest.mark.parametrize(
    ("here", "elsewhere", "is_shown"),
    [
        ((0.1, 0.1), (0.3, 0.3), True),  # apart by more than both intervals
        ((0.1, 0.1), (0.0, 0.4), False),
        ((0.1, 0.1), (-0.4, 0.2), True),  # of another sign
        ((0.1, 0.1), (-0.4,), False),  # without an interval
    ],
)
def test_machines_that_disagree_stand_beside_the_pooled_mean(
    here: tuple[float, ...], elsewhere: tuple[float, ...], is_shown: bool
) -> None:
    masters, words = [], []
    for vectors, losses in {"AVX2": here, "AVX512": elsewhere}.items():
        for seed, loss in enumerate(losses):
            masters.append(run_of("master", seed, 0.0, vectors=vectors))
            words.append(run_of("word", seed, loss, vectors=vectors))
    both = evidence.pairs(words, masters)
    text = evidence.interval(evidence.differences(both))
    if is_shown:
        text += f"; AVX2 {evidence.interval(here)}, AVX512 {evidence.interval(elsewhere)}"
    assert evidence.less(both) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.5], "+0.5000 (1 seed)"),
        ([0.5, 0.5], "+0.5000 ± 0.0000 (2 seeds)"),
        ([1.0, 2.0, 3.0], "+2.0000 ± 2.4841"),
        ([1.0, float("inf")], "diverged"),
    ],
)
def test_an_interval_is_student_s(values: list[float], text: str) -> None:
    assert evidence.interval(values) == text
