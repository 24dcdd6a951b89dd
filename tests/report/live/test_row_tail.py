"""Reading a growing file by offset: whole rows alone, each once, and again from where the file was rewritten."""

from __future__ import annotations

import math
import os
from pathlib import Path

from narrowgauge.report.live.row_tail import RowTail
from narrowgauge.runs.lines import line_of


def rows(first: int, last: int, loss: float = 2.0) -> bytes:
    return b"".join(line_of({"step": step, "loss": loss}) for step in range(first, last + 1))


def steps(found: list[dict[str, object]]) -> list[object]:
    return [row["step"] for row in found]


def test_a_row_is_given_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    tail = RowTail(file)
    assert tail.read() == (0, [], True)
    text = rows(1, 3)
    file.write_bytes(text[:-5])
    assert steps(tail.read().rows) == [1, 2]
    assert tail.read() == (2, [], True)
    with file.open("ab") as stream:
        stream.write(text[-5:])
    assert tail.read() == (2, [{"step": 3, "loss": 2.0}], True)


def test_a_long_file_is_read_in_pieces_without_losing_a_row(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_bytes(rows(1, 500))
    tail, found = RowTail(file), []
    for _ in range(500):
        news = tail.read(most_bytes=100)  # less than three rows
        found += steps(news.rows)
        if news.is_all:
            break
    assert found == list(range(1, 501))


def test_a_row_longer_than_a_piece_is_read(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_bytes(line_of({"step": 1, "message": "a" * 1000}) + rows(2, 2))
    tail = RowTail(file)
    found = [row for _ in range(3) for row in tail.read(most_bytes=100).rows]
    assert steps(found) == [1, 2]


def test_rows_that_a_rollback_cut_off_are_replaced_by_what_was_written_after_it(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_bytes(rows(1, 100))
    tail = RowTail(file)
    tail.read()
    # As many bytes as before, and longer than before: the size tells nothing.
    for last in (100, 140):
        file.write_bytes(rows(1, 60) + rows(61, last, loss=3.0 + last))
        os.utime(file, ns=(last, last))
        news = tail.read()
        assert news.kept == 60 and steps(news.rows) == list(range(61, last + 1))
        assert {row["loss"] for row in news.rows} == {3.0 + last}
    file.write_bytes(rows(1, 20))
    assert tail.read() == (20, [], True)
    file.unlink()
    assert tail.read() == (0, [], True)
    file.write_bytes(rows(1, 2))
    assert steps(tail.read().rows) == [1, 2]


def test_a_damaged_line_is_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_bytes(rows(1, 2) + b'{"step":3,"lo\r\n' + b"[1]\n" + rows(4, 4) + line_of({"step": 5, "loss": "nan"}))
    tail = RowTail(file)
    found = tail.read().rows
    assert [row.get("step") for row in found] == [1, 2, None, None, 4, 5]
    assert tail.num_damaged == 2 and math.isnan(found[-1]["loss"])
