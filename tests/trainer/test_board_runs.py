"""Trainings of the board, on a tiny model: rows of ours and of other packages become records of the same rules."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmark_modules import benchmark_module
from narrowgauge.trainer.data.dataset import prepare_data

board = benchmark_module("board")
RULES = benchmark_module("_board_records").RULES


def test_rows_of_ours_and_of_a_peer_are_trained_into_records(place: Path, tmp_path: Path) -> None:
    changes = {
        "betas": (0.95,),
        "lrs": (1e-3,),
        "seeds": (0,),
        "steps": 4,
        "warmup_steps": 1,
        "eval_batches": 2,
        "held_out": 0.2,
    }
    sizes = {"batch_size": 4, "sequence_length": 16, "model": str(place / "model"), "data": str(place / "text")}
    rules = dataclasses.replace(RULES, **changes, **sizes)
    wanted = board.jobs(["torch AdamW bfloat16"], rules)
    assert [job.storage for job in wanted] == ["master", "torch AdamW bfloat16"]
    assert board.train(wanted, tmp_path, rules) == 0
    refused = board.imported(tmp_path, rules)[1]
    assert len(refused) == 2 and all("its tokens are" in line for line in refused)
    tokens = prepare_data(rules.data, tmp_path / "again", vocab_size=280, held_out=0.2, seed=0).fingerprint
    found, refused, _ = board.imported(tmp_path, dataclasses.replace(rules, tokens={0: tokens}))
    assert refused == [] and [each.row for each in found] == ["master", "torch AdamW bfloat16"]
    ours, theirs = found
    assert theirs.package.startswith("torch ") and theirs.edq is None and theirs.bytes_per_param == 8
    # The same start and the same batches: they differ by what bfloat16 loses, and both have learned.
    assert theirs.loss != ours.loss == pytest.approx(theirs.loss, abs=0.05)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/summary.json")}
    assert board.train(wanted, tmp_path, rules) == 0
    assert before == {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/summary.json")}  # finished: kept
