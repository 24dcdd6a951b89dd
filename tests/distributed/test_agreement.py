"""What ranks compare before the first step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import narrowgauge
from narrowgauge.distributed.launch.agreement import describe_rank, first_difference, source_digest


def test_the_first_rank_that_differs_is_named() -> None:
    same = {"lr": 0.1, "torch": "2.13"}
    assert first_difference([same, dict(same)]) == ""
    assert first_difference([same, same, {**same, "torch": "2.12"}, {**same, "lr": 1}]) == (
        "rank 2 has torch = 2.12, and rank 0 has 2.13"
    )


def test_a_missing_value_is_a_difference_on_either_side() -> None:
    assert first_difference([{"a": 1}, {}]) == "rank 1 has a = None, and rank 0 has 1"
    assert first_difference([{}, {"a": 1}]) == "rank 1 has a = 1, and rank 0 has None"


def test_many_differences_are_counted() -> None:
    found = first_difference([dict.fromkeys("abcde", 0), dict.fromkeys("abcde", 1)])
    assert found.count("rank 0 has") == 3
    assert found.endswith("(and 2 more)")


def test_a_rank_is_described_by_what_changes_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    before = describe_rank()
    assert before["narrowgauge"] == narrowgauge.__version__
    assert re.fullmatch(r"[0-9a-f]{16}", before["source of narrowgauge"])
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert (
        first_difference([before, describe_rank()]) == "rank 1 has ATEN_CPU_CAPABILITY = avx2, and rank 0 has not set"
    )


def test_the_digest_sees_every_byte_and_name(tmp_path: Path) -> None:
    def digest(name: str, files: dict[str, str]) -> str:
        for file, text in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
        return source_digest(tmp_path / name)

    first = digest("1", {"a.py": "x", "b/c.py": "y"})
    assert digest("2", {"a.py": "x", "b/c.py": "y", "d.txt": "z"}) == first
    assert digest("3", {"a.py": "x", "b/c.py": "Y"}) != first
    assert digest("4", {"a.py": "x", "b/d.py": "y"}) != first
