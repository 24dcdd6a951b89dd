"""The figures of the pages are those of the evidence, which says how each was measured."""

import math
import re
from typing import Any

import pytest

from script_modules import ROOT, script_module

evidence = script_module("docs/evidence.py")
FIELDS = {"key", "claim", "target", "missed", "command"}
TABLES = (ROOT / "evidence" / "tables.toml").read_text(encoding="utf-8")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
MARGIN = 1.0
"""In nats: how far below the unigram level a baseline must end."""


@pytest.mark.parametrize("page", evidence.pages(), ids=lambda page: page.name)
def test_a_page_holds_the_figures_of_the_evidence(page):
    text = page.read_text(encoding="utf-8")
    assert evidence.filled(text) == text, "run python docs/evidence.py"
    by_hand = CODE.sub("", evidence.CITATION.sub("", text))
    assert not re.search(r"\d ± ?\d", by_hand), "cite an interval"


def test_every_row_says_how_it_was_measured():
    """A page beside RESULTS cites each figure, but for misses."""
    results = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    cited = set(re.findall(r'key = "(.+?)"', TABLES))
    for page in evidence.pages():
        if page.name != "RESULTS.md":
            cited |= {match[2] for match in evidence.CITATION.finditer(page.read_text("utf-8"))}
    keys = []
    for name, section in evidence.sections().items():
        assert f"<!-- evidence: section {name} -->" in results
        for row in section:
            keys.append(row["key"])
            figure = {"cell"} if "cell" in row else {"figure", "measured"}
            assert row.keys() == FIELDS | figure, row["key"]
            assert evidence.measured(row)
            assert row["target"] or not row["missed"], row["key"]
            assert row["missed"] or row["key"] in cited, row["key"]
            assert evidence.figure(row) not in ("", "–"), row["key"]
    assert len(set(keys)) == len(keys)


def test_every_baseline_of_the_board_learned():
    runs = evidence.lines_of("benchmarks/trainings.jsonl")
    for row in ("master", "word"):
        baselines = evidence.chosen(runs, {"setting": "llama-1m", "row": row})
        assert baselines
        for run in baselines:
            assert run["loss"] < run["unigram"] - MARGIN


def run_of(row: str, seed: int, loss: float, **changed: Any) -> dict[str, Any]:
    return {"row": row, "seed": seed, "loss": loss, "text": "A", "processor": "AVX2", **changed}


def test_all_pairs_of_one_seed_and_machine_count():
    masters = [run_of("master", 0, 4.0), run_of("master", 1, 5.0)]
    masters.append(run_of("master", 1, 6.0, processor="AVX512"))
    naives = [run_of("naive", 0, 4.5), run_of("naive", 1, 5.5), run_of("naive", 3, 9.0)]
    naives.append(run_of("naive", 0, 9.0, processor="AVX512"))
    naives += [run_of("naive", 0, 9.0, lr=1e-3), run_of("naive", 1, 7.5, processor="AVX512")]
    both = evidence.pairs(naives, masters)
    assert [ours["loss"] - base["loss"] for ours, base in both] == [0.5, 0.5, 1.5]
    # The seed that two machines repeat counts once.
    assert evidence.differences(both) == [0.5, 1.0]


def test_two_texts_are_never_pooled():
    """A seed is a sample of one text; a cell shows the text with the most seeds, the newest of
    these.
    """
    masters, words = [], []
    for text, seeds in {"A": (0, 1), "B": (0, 1), "C": (0,)}.items():
        for seed in seeds:
            masters.append(run_of("master", seed, 4.0, text=text))
            words.append(run_of("word", seed, 4.0 + ord(text), text=text, date=f"0{text}"))
    both = evidence.pairs(words, masters)
    assert evidence.differences(both) == [65.0, 65.0, 66.0, 66.0, 67.0]
    assert {run["text"] for run in evidence.of_one_text(words)} == {"B"}


def test_pairs_agree_in_the_digests_of_the_baseline_and_a_share_is_of_today():
    today = {"word": {"steps: adamw word": evidence.digest("steps: adamw word")}, "master": {}}
    older = {
        "word": {"steps: adamw word": "other bits"},
        "master": {"steps: adamw master": "other"},
    }
    words = [run_of("word", 0, 1.0, digests=today), run_of("word", 0, 2.0, digests=older)]
    words.append(run_of("word", 0, 3.0))
    masters = [run_of("master", 0, 0.0, digests=older), run_of("master", 0, 0.5, digests=today)]
    both = evidence.pairs(words, masters)
    assert [run["loss"] - base["loss"] for run, base in both] == [0.5, 2.0]
    assert evidence.tracked(words) == "† 1 of 3 runs are of today's bits"
    assert evidence.tracked(words[:1]) == ""
    assert evidence.tracked(words[2:]) == "not tracked"


@pytest.mark.parametrize(
    ("scale", "seeds", "text"),
    [
        (0.004, 0, "no two runs to compare yet"),
        (0.004, 1, "-0.0040 (1 seed), no answer before 12 seeds"),
        (0.004, 4, "+0.0020 ± 0.0061 (90%, 4 seeds), no answer before 12 seeds"),
        (0.004, 12, "+0.0020 ± 0.0024 (90%, 12 seeds), within ± 0.01"),
        (0.013, 12, "+0.0065 ± 0.0079 (90%, 12 seeds), not shown to be within ± 0.01"),
        (math.nan, 12, "diverged, not shown to be within ± 0.01"),
    ],
)
def test_equivalence_is_two_one_sided_tests(scale, seeds, text):
    """Student's t of 90 % is 2.3534 with 3 degrees of freedom, and 1.7959 with 11."""
    words = [run_of("word", seed, scale * (seed % 4 - 1)) for seed in range(seeds)]
    masters = [run_of("master", seed, 0.0) for seed in range(12)]
    assert evidence.equivalence(evidence.pairs(words, masters)) == text
    words += [run_of("master turned", 0, -0.003), run_of("master turned", 1, 0.001)]
    if seeds:
        text += "; `master` with one bit of one weight changed at the start ends 0.0020 away"
        text += " (mean of 2)"
    assert evidence.equivalence(evidence.pairs(words, masters)) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.5], "+0.5000 (1 seed)"),
        ([0.5, 0.5], "+0.5000 ± 0.0000 (2 seeds)"),
        ([1.0, 2.0, 3.0], "+2.0000 ± 2.4841"),
        ([1.0, float("inf")], "diverged"),
    ],
)
def test_an_interval_is_student_s(values, text):
    assert evidence.interval(values) == text
