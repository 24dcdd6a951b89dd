"""The board's tables follow from its records, and a cell whose models did not learn is not shown."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from narrowgauge.trainer.data.dataset import Dataset
from script_modules import benchmark_module


@pytest.fixture(scope="module")
def board() -> Any:
    return benchmark_module("board")


def record(
    board: Any,
    row: str,
    seed: int,
    loss: float | None,
    cell: tuple[float, float] = (3e-3, 0.95),
    **changed: Any,
) -> Any:
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(board.Record):
        fields[f.name] = "" if f.type == "str" else 0
    fields |= {
        "recipe": f"bfloat16/{row}",
        "model": "llama-1m",
        "vectors": "AVX512",
        "unigram": 6.3,
        "bigram": 4.1,
    }
    fields |= {"steps": 800, "batch_size": 8, "sequence_length": 128, "final_lr": 1e-6}
    fields |= {"row": row, "seed": seed, "val_loss": loss, "lr": cell[0], "beta2": cell[1]}
    return board.Record(**fields | changed)


def test_the_page_holds_the_tables_of_the_records(board: Any) -> None:
    page = board.PAGE.read_text()
    assert board.filled_page(page) == page, "write it with ./dev bench board --page"


def test_only_pairs_of_one_seed_and_arithmetic_count(board: Any) -> None:
    runs = [record(board, "master", seed, 4.0 + seed) for seed in (0, 1, 2)]
    runs += [
        record(board, "naive", 0, 4.5),
        record(board, "naive", 1, 5.5),
        record(board, "naive", 3, 9.0),
    ]
    runs += [
        record(board, "naive", 2, 9.0, vectors="AVX2"),
        record(board, "naive", 2, 9.0, (1e-3, 0.95)),
    ]
    assert board.differences(runs, "naive", (3e-3, 0.95)) == [0.5, 0.5]
    assert "(2 seeds)" in board.shown([[0.5, 0.5]]) and "(1 seed)" in board.shown([[0.5]])
    assert board.shown([[1.0, 2.0, 3.0]]) == "+2.0000 ± 2.4841"


def test_a_cell_whose_baseline_did_not_learn_is_refused(board: Any) -> None:
    runs = []
    for row, loss in (("master", 5.29), ("naive", 5.5)):
        runs.append(record(board, row, 0, loss))
    runs += [
        record(board, row, 0, loss, (1e-3, 0.95))
        for row, loss in (("master", 5.31), ("naive", 5.777))
    ]
    text = board.section(runs, board.SETTINGS["llama-1m"])
    assert "Refused: lr 0.001, beta2 0.95" in text
    assert "+0.2100 (1 seed)" in text
    assert "0.467" not in text


def test_levels_are_cross_entropies(board: Any) -> None:
    tokens = np.tile(np.array([0, 1, 2, 3]), 1000)
    setting = dataclasses.replace(
        board.SETTINGS["llama-1m"], batch_size=2, sequence_length=8, eval_sequences=8
    )
    unigram, bigram = board.levels(Dataset(tokens, tokens, vocab_size=4), setting)
    assert unigram == pytest.approx(np.log(4), abs=1e-6)
    assert bigram == pytest.approx(-np.log((1000 + 50 / 4) / 1050), abs=1e-3)
