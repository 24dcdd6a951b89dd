"""What check and a recorded run read of each fault, and of each healthy program."""

from __future__ import annotations

import re

import pytest

from corpus.rows import COLUMNS, FAULTS, HEALTHY, PROGRAMS, Row
from measuring.conftest import loud as loud
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Reading
from script_modules import script_module

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


def is_at(row: Row, reading: Reading) -> bool:
    """Return whether a reading has the place and the value of a row."""
    if not re.search(row.tensor, reading.tensor):
        return False
    for name in ("step", "stage", "value"):
        expected = getattr(row, name)
        if expected is not None and getattr(reading, name) != pytest.approx(expected):
            return False
    return True


@pytest.mark.parametrize("row", [*FAULTS, *HEALTHY, *PROGRAMS], ids=lambda row: row.name)
def test_a_row_is_read_as_the_table_says(row, tmp_path):
    told = []
    for column in row.asked:
        result = COLUMNS[column](row, tmp_path / "run")
        assert {r.what for r in result.readings} == {*getattr(row, column)}, result
        told += result
        assert all(words in str(result) for words in row.says), result
        if not row.is_loop and row.section == "healthy":
            (slope,) = [line for line in result.lines if line.startswith("slope: ")]
            assert float(slope.partition("within ")[2]) <= 1e-8, slope
    assert any(is_at(row, reading) for reading in told) or not (told or row.tensor), told


def test_the_page_counts_the_faults_and_the_healthy_loops():
    twins = [row for row in FAULTS if row.asked == ["run"] and not row.run]
    named = [row for row in FAULTS if row.check or row.run]
    healthy = [row for row in HEALTHY if row.section == "healthy"]
    count = script_module("docs/evidence.py").corpus()
    assert count.startswith(f"{len(named)} of {len(FAULTS) - len(twins)} named")
    assert count.endswith(f"0 of {len(healthy) + len(twins)} healthy loops accused")


def test_each_kind_of_the_check_has_a_fault_that_it_reads():
    by_check = {name for name, kind in KINDS.items() if kind.by.startswith("ng.check")}
    read = set()
    for row in (*FAULTS, *PROGRAMS):
        read.update(row.check)
    assert by_check <= read
