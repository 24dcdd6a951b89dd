"""The board: records that notice an edit, runs of other rules that are refused, verdicts, the page and the figure."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmark_modules import benchmark_module
from narrowgauge.errors import RecordError
from narrowgauge.runs.writer import RunWriter
from script_modules import script_module

records, costs_of = benchmark_module("_board_records"), benchmark_module("_board_costs")
figures, methods = benchmark_module("_board_figure"), benchmark_module("_board_methods")
RULES = dataclasses.replace(
    records.RULES,
    betas=(0.95, 0.999),
    lrs=(1e-3, 1e-4),
    seeds=(0, 1, 2),
    resolve=0.005,
    tokens={0: "a", 1: "b", 2: "c"},
)
"""The board's, with cells and seeds of these tests."""
EIGHT = {"master": 16.0, "word": 8.01, "naive": 8.0, "torch AdamW bfloat16": 8.0}


@pytest.fixture(scope="module")
def board() -> ModuleType:
    return benchmark_module("board")


def run(
    row: str = "word", loss: float = 5.0, seed: int = 0, cell: tuple[float, float] = RULES.cells[0], **changes: Any
) -> Any:
    """A record by the rules."""
    given: dict[str, Any] = {
        "row": row, "recipe": f"bfloat16/{row}", "package": "", "rule": "adamw", "beta2": cell[0], "lr": cell[1], "seed": seed,
        "val_loss": repr(loss), "bytes_per_param": EIGHT.get(row, 8.0), "step_seconds": 0.1, "wall_seconds": 30.0, "edq": 1.0,
        "noise": 0.1, "diverged": "", "weights": "00", "narrowgauge": "0.1.0", "torch": "2.13.0", "python": "3.11.7",
        "vectors": "AVX2", "threads": 1, "date": "2026-11-23", "settings": RULES.settings_hash, "data": RULES.tokens.get(seed),
    }  # fmt: skip
    return records.RunRecord(**{**given, **changes})


def stalled(row: str, error: str) -> Any:
    """A record of the stall case."""
    given = {"package": "", "bytes_per_param": 8.0, "edq": None, "noise": None, "date": "2026-11-23", "settings": ""}
    about = {"narrowgauge": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "vectors": "AVX2"}
    return records.StallRecord(row=row, error=error, **given, **about)


def whole(
    row: str, differences: Mapping[int, float] | Callable[[tuple[float, float], int], float], **changes: Any
) -> list[Any]:
    """A row's records in every cell and seed, so far from 5.0."""
    apart = differences if callable(differences) else lambda cell, seed: differences[seed]
    return [
        run(row, 5.0 + apart(cell, seed), seed, cell, **changes)
        for cell, seed in itertools.product(RULES.cells, RULES.seeds)
    ]


BASE = whole("master", {0: 0.0, 1: 0.0, 2: 0.0})


def cost(row: str, *found: Any) -> Any:
    return next(each for each in costs_of.costs([*BASE, *found], RULES) if each.row == row)


# ── records ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_line_gives_the_record_back_to_the_last_bit() -> None:
    record = run(loss=5.754979722201824)
    line = records.line_of(record)
    assert records.record_of(line) == record and records.record_of(line).loss == 5.754979722201824
    assert list(json.loads(line))[-1] == "sha256"


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ('"val_loss": "5.0"', '"val_loss": "4.0"'),
        ('"seed": 0', '"seed": 1'),
        ('"kind": "run"', '"kind":"run"'),
        (', "sha256"', ', "more": 1, "sha256"'),
    ],
)
def test_an_edited_line_is_noticed(what: str, instead: str) -> None:
    line = records.line_of(run())
    assert not records.faults([line], RULES) and what in line
    assert records.faults([line, line.replace(what, instead)], RULES)[0] == (
        "line 2: the line was edited: it does not match its sha256."
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": "0" * 16}, "its settings have the hash 0000000000000000"),
        ({"data": "1"}, "its tokens are 1, and the rules' for seed 0"),
        ({"lr": 0.5}, "beta2 0.95, lr 0.5, seed 0 is not in the rules"),
        ({"seed": 9}, "seed 9 is not in the rules"),
        ({"val_loss": "5.00"}, "val_loss '5.00' is no float as repr has it"),
    ],
)
def test_a_record_of_other_rules_is_a_fault(changes: dict[str, Any], reason: str) -> None:
    assert reason in records.faults([records.line_of(run(**changes))], RULES)[0]


def test_a_rule_that_changes_changes_the_hash_of_the_settings() -> None:
    changed = [
        dataclasses.replace(RULES, **each) for each in ({"steps": 201}, {"schedule": "linear"}, {"eval_batches": 8})
    ]
    assert len({rules.settings_hash for rules in (RULES, *changed)}) == 4
    # Cells and seeds are columns of each record, so a further one leaves the others as they are.
    assert dataclasses.replace(RULES, seeds=(0, 1, 2, 3)).settings_hash == RULES.settings_hash


def test_the_same_run_is_appended_once_and_another_outcome_is_told(tmp_path: Path) -> None:
    file = tmp_path / "board.jsonl"
    assert records.append([run(), run(seed=1)], file, RULES) == ([run(), run(seed=1)], [])
    added, contradictions = records.append([run(), run(seed=1, loss=4.0), run(vectors="AVX512")], file, RULES)
    assert added == [run(vectors="AVX512")]
    assert contradictions == [
        "word, beta2 0.95, lr 0.001, seed 1 is recorded with validation loss 5.0, and this run has validation loss 4.0."
    ]
    assert records.faults(records.lines_in(file), RULES) == [] and len(records.read(file, RULES)) == 3
    twice = [*records.lines_in(file), records.line_of(run())]
    assert records.faults(twice, RULES) == ["line 4: the same run is on line 1."]


def test_a_damaged_file_is_not_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "board.jsonl"
    file.write_text(records.line_of(run()).replace("5.0", "4.0") + "\n")
    with pytest.raises(RecordError, match=r"board\.jsonl, line 1: the line was edited"):
        records.append([run(seed=1)], file, RULES)
    assert len(records.lines_in(file)) == 1


# ── differences and verdicts ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("apart", "verdict"),
    [
        ({0: 0.001, 1: 0.0012, 2: 0.0011}, "as master"),
        ({0: 0.0, 1: 0.0, 2: 0.0}, "as master"),
        ({0: 0.02, 1: 0.021, 2: 0.022}, "worse"),
        ({0: -0.02, 1: -0.021, 2: -0.022}, "lower"),
        ({0: -0.02, 1: 0.004, 2: -0.001}, "no worse"),
        ({0: -0.04, 1: 0.05, 2: 0.01}, "not distinguishable"),
    ],
)
def test_the_verdict_is_that_of_the_interval_over_all_cells(apart: dict[int, float], verdict: str) -> None:
    assert cost("word", *whole("word", apart)).verdict.partition(" (")[0] == verdict


def test_what_is_not_distinguishable_names_the_seeds_that_would_tell() -> None:
    from narrowgauge.analysis.comparison.resolution import seeds_needed

    apart = {0: -0.004, 1: 0.01, 2: 0.002}
    found = cost("word", *whole("word", apart))
    spread = (4 * 49e-6) ** 0.5 / 4  # four cells, each with the variance of these three
    needed = seeds_needed(spread, RULES.resolve)
    assert needed is not None and needed > 3
    assert found.verdict == f"not distinguishable ({needed} seeds would tell)"


def test_a_cell_that_is_worse_is_named() -> None:
    bad = RULES.cells[1]
    found = cost("word", *whole("word", lambda cell, seed: 0.012 + seed * 1e-4 if cell == bad else seed * 1e-4))
    assert found.verdict == "as master; worse at beta2 0.95, lr 0.0001"
    assert cost("word", *whole("word", {0: 0.02, 1: 0.021, 2: 0.022})).verdict == "worse"  # everywhere: said once


@pytest.mark.parametrize(
    ("apart", "error", "verdict"),
    [
        (-0.02, "0.794", "lower; small updates wrong"),
        (-0.02, "1.55", "lower; small updates wrong"),
        (-0.02, "0.5", "lower"),
        (0.0, "0.999", "as master"),
        (0.02, "0.999", "worse"),
    ],
)
def test_lower_does_not_stand_alone_where_small_updates_are_wrong(apart: float, error: str, verdict: str) -> None:
    found = cost("word", *whole("word", {0: apart, 1: apart + 1e-4, 2: apart - 1e-4}), stalled("word", error))
    assert found.verdict == verdict


def test_no_lower_row_of_the_board_has_wrong_small_updates_unsaid() -> None:
    found = [each for each in costs_of.costs(records.read()) if each.verdict.startswith("lower") and each.stall]
    wrong = [each for each in found if float(each.stall.error) > costs_of.MOST_WRONG]
    assert {"float8/collage-light", "float8/collage-plus"} <= {each.row for each in wrong}
    for each in found:
        assert ("small updates wrong" in each.verdict) == (each in wrong), each.row


def test_the_verdict_in_a_word_has_no_numbers_and_no_names_of_cells() -> None:
    bad = RULES.cells[1]
    in_one = cost("word", *whole("word", lambda cell, seed: 0.012 + seed * 1e-4 if cell == bad else seed * 1e-4))
    in_two = cost("word", *whole("word", lambda cell, seed: 0.012 if cell[0] == 0.95 else 0.001 + seed * 1e-4))
    apart = cost("word", *whole("word", {0: -0.004, 1: 0.01, 2: 0.002}))
    assert [each.word for each in (in_one, in_two, apart, cost("word"), cost("word", run()))] == [
        "as master; worse in a cell", "worse", "not distinguishable", "not run", "incomplete",
    ]  # fmt: skip
    assert in_two.verdict.startswith("worse; worse at")


def test_an_incomplete_a_diverged_and_a_missing_row_have_no_interval() -> None:
    rows = whole("word", {0: 0.0, 1: 0.0, 2: 0.0})
    partly = cost("word", *rows[:-1])
    assert partly.verdict == "incomplete (11 of 12 pairs)" and partly.over_all is None
    away = cost(
        "word", *rows[:-1], run("word", float("nan"), 2, RULES.cells[-1], diverged="its validation loss is nan")
    )
    assert away.verdict == "diverged (1 of 12 runs)" and away.over_all is None
    assert cost("naive").verdict == "not run" and cost("naive").bytes_per_param == 8
    assert cost("master").verdict == "baseline"


def test_runs_are_paired_with_the_same_vectors_and_torch_only() -> None:
    same = {0: 0.0, 1: 0.0, 2: 0.0}
    assert cost("word", *whole("word", same, vectors="AVX512")).num_pairs == 0
    assert cost("word", *whole("word", same, torch="2.14.0")).num_pairs == 0
    # Of two kinds of arithmetic the one with more pairs is shown, never a mixture.
    mixed = [*whole("word", same)[:5], *whole("word", {0: 1.0, 1: 1.0, 2: 1.0}, vectors="AVX512")]
    found = cost("word", *mixed)
    assert found.num_pairs == 5 and {each.vectors for each in found.runs} == {"AVX2"}


def test_computes_over_word_are_compared_with_word() -> None:
    word = whole("word", {0: 0.5, 1: 0.5, 2: 0.5})
    narrow = cost("mxfp4/word", *word, *whole("mxfp4/word", {0: 0.6, 1: 0.6, 2: 0.6}, recipe="mxfp4/word"))
    assert narrow.baseline == "word" and narrow.over_all.mean == pytest.approx(0.1)
    assert costs_of.baseline_of("nvfp4+eden/word") == "word"  # a variant is in no table of computes
    assert [costs_of.baseline_of(row) for row in ("mxfp4/states8", "float16/master", "float32")] == ["master"] * 3


# ── runs become records ─────────────────────────────────────────────────────────────────────────────────────────────


def write_run(folder: Path, board: ModuleType, job: Any, loss: float, edq: float = 1.0, **changes: Any) -> None:
    """A finished run of a job, as the trainer leaves one."""
    config = {**job.settings(board.options_of(folder.parent, RULES)).filled().to_dict(), **changes}
    about = {
        "config": config,
        "versions": {"narrowgauge": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "machine": {"capability": "AVX2", "num_threads": 1, "device": "cpu"},
        "data": {"fingerprint": RULES.tokens[job.seed], "tokens": 1},
    }
    with RunWriter.create(folder, about) as writer:
        for step in (1, 2, 3):
            writer.step({"step": step, "loss": loss, "seconds": 0.25})
        writer.eval({"step": 3, "val_loss": loss, "tokens": 3})
        figures = {"bytes_per_param": 8.0, "wall_seconds": 9.0, "weights_fingerprint": "0a", "edq": edq, "noise": 0.5}
        writer.summary({"recipe": config["recipe"], "val_loss": loss, "steps": 3, **figures})


def test_finished_runs_are_imported_and_others_are_refused_with_a_line(board: ModuleType, tmp_path: Path) -> None:
    loss = 5.754979722201824
    for row, value in (("master", 5.75), ("word", loss)):
        job = board.job(row, RULES.cells[0], 1, RULES)
        write_run(tmp_path / job.name, board, job, value)
    other = board.job("word", RULES.cells[0], 2, RULES)
    write_run(tmp_path / other.name, board, other, 5.0, steps=100)
    write_run(tmp_path / "mine", board, other, 5.0)
    with RunWriter.create(tmp_path / "loop", {"config": {"recipe": "bfloat16/word"}}) as writer:
        writer.summary({"val_loss": 5.0})
    with RunWriter.create(tmp_path / "on-its-way", {"config": {}}):
        pass
    found, refusals, unfinished = board.imported(tmp_path, RULES)
    assert [(each.row, each.loss, each.step_seconds, each.vectors) for each in found] == [
        ("master", 5.75, 0.25, "AVX2"), ("word", loss, 0.25, "AVX2"),
    ]  # fmt: skip
    assert unfinished == 1 and refusals == [
        "loop is not by the board's rules: it records no machine.",
        "mine is not by the board's rules: its folder's name does not end in -betaBETA2-lrRATE-seedSEED.",
        f"{other.name} is not by the board's rules: steps = 100, and the rules say {RULES.steps}.",
    ]
    assert records.faults(map(records.line_of, found), RULES) == []
    (word,) = (each for each in costs_of.costs(found, RULES) if each.row == "word")
    assert word.pairs == {RULES.cells[0]: (loss - 5.75,)}


def test_published_states_are_a_row_of_their_own_though_master_trains_them(board: ModuleType, tmp_path: Path) -> None:
    job = board.job("published/fp8-lm", RULES.cells[0], 0, RULES)
    assert job.recipe == "bfloat16/master" and board.row_named("published/fp8-lm") == "published/fp8-lm"
    write_run(tmp_path / job.name, board, job, 5.5)
    (tmp_path / job.name / "published.json").write_text('{"bytes_per_param": 9.0}')
    (found,), refusals, _ = board.imported(tmp_path, RULES)
    assert (found.row, found.bytes_per_param, found.edq, refusals) == ("published/fp8-lm", 9.0, None, [])
    master = run("master", torch="2.13.0")
    (row,) = (each for each in costs_of.costs([master, found], RULES) if each.row == "published/fp8-lm")
    assert row.baseline == "master" and row.pairs == {RULES.cells[0]: (0.5,)}
    assert "FP8-LM" in costs_of.source_of("published/fp8-lm") and cost("published/coat").bytes_per_param > 8


def test_a_run_that_diverged_becomes_a_record_that_says_so(board: ModuleType, tmp_path: Path) -> None:
    job, nan = board.job("naive", RULES.cells[0], 0, RULES), float("nan")
    write_run(tmp_path / job.name, board, job, nan, edq=nan)
    (found,), refusals, _ = board.imported(tmp_path, RULES)
    assert (found.val_loss, found.edq, found.noise, refusals) == ("nan", None, 0.5, [])
    assert found.diverged == "its validation loss is nan"
    line = records.line_of(found)
    assert records.faults([line], RULES) == [] and cost("naive", found).verdict == "diverged (1 of 1 runs)"


def test_the_stall_case_is_recorded_once_for_each_row(board: ModuleType) -> None:
    case = board.stall.Stall.make(16, 10)
    rows = [
        row
        for row in (*board.STORAGES, *costs_of.PUBLISHED, *costs_of.PEERS)
        if row not in ("naive", "published/flashoptim", "torch AdamW bfloat16")
    ]
    about = {"vectors": board.torch.backends.cpu.get_cpu_capability(), "torch": board.torch.__version__}
    known = {
        "package": "",
        "error": "1.0",
        "bytes_per_param": 8.0,
        "edq": None,
        "noise": None,
        "settings": "",
        "date": "",
    }
    there = [records.StallRecord(row=row, narrowgauge="", python="", **about, **known) for row in rows]
    ours, formulas, theirs = board.stall_records(case, there)
    assert (ours.row, ours.package, theirs.row) == ("naive", "", "torch AdamW bfloat16")
    assert (formulas.row, formulas.package, formulas.edq) == ("published/flashoptim", "", None)
    assert (
        float(ours.error) > 0.9 and ours.edq is not None and theirs.package.startswith("torch ") and theirs.edq is None
    )
    assert records.faults(map(records.line_of, (ours, formulas, theirs))) == []
    assert board.stall_records(case, [*there, ours, formulas, theirs]) == []
    assert cost("naive", ours).stall == ours and cost("float8-row/naive", run("float8-row/naive"), ours).stall == ours


def test_what_says_only_where_a_run_was_written_is_no_rule(board: ModuleType) -> None:
    wanted = board.job("word", RULES.cells[0], 0, RULES).settings(board.options_of(Path("runs"), RULES))
    there = wanted.filled().to_dict()
    assert records.difference({**there, "gauges_every": 1, "audit_every": 3, "threads": 2, "out": "x"}, wanted) == ""
    assert records.difference({**there, "lr": 2e-3}, wanted) == "lr = 0.002, and the rules say 0.001"
    assert records.difference({**there, "activation_checkpointing": True}, wanted).startswith(
        "activation_checkpointing"
    )
    assert records.difference({**there, "tokenizer": "mine.json"}, wanted).startswith("tokenizer = 'mine.json'")


def test_only_what_is_missing_is_trained_and_announced(board: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board.torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(board.torch, "__version__", "2.13.0")
    wanted = board.jobs([board.row_named("bfloat16/naive")], RULES)
    assert [job.storage for job in wanted[:2]] == ["master", "naive"] and len(wanted) == 24
    assert board.missing(wanted, [*BASE, run("naive")]) == [job for job in wanted[3:] if job.storage == "naive"]
    assert board.missing(wanted, whole("master", {0: 0.0, 1: 0.0, 2: 0.0}, vectors="AVX512")) == wanted
    assert board.announcement(wanted, []).endswith("no run is recorded yet, so the time is not known")
    assert "24 runs to train, about 12 min " in board.announcement(wanted, BASE)
    assert board.announcement([], BASE) == "nothing to train: every run is recorded"


# ── the repository's records, the page and the figure ───────────────────────────────────────────────────────────────


def test_the_records_are_as_they_were_written() -> None:
    assert records.faults(records.lines_in()) == []


def test_the_figures_are_those_of_the_records() -> None:
    found = list(costs_of.costs(records.read()))
    assert len(figures.FIGURES) == 2 and len({file.read_bytes() for file in figures.FIGURES}) == 2
    for file, colours in figures.FIGURES.items():
        assert file.read_text(encoding="utf-8") == figures.figure(found, colours), (
            f"docs/images/{file.name} is not that of docs/board.jsonl: ./dev bench board --draw"
        )


def test_light_and_dark_figures_differ_in_their_style_alone() -> None:
    light, dark = (figures.figure([], colours) for colours in (figures.LIGHT, figures.DARK))
    assert light != dark and re.sub(r"<style>.*?</style>", "", light, flags=re.DOTALL) == re.sub(
        r"<style>.*?</style>", "", dark, flags=re.DOTALL
    )


def test_the_page_has_a_row_for_everything_and_the_figures_of_the_records() -> None:
    page = script_module("docs/costs.py").on_page_markdown(
        (records.FILE.parent / "board.md").read_text(encoding="utf-8")
    )
    assert "<!-- board" not in page
    for each in costs_of.costs(records.read()):
        line = next(line for line in page.splitlines() if line.startswith(f"| `{each.row}` |"))
        assert f" {each.verdict} |" in line
        assert each.over_all is None or f"| {each.over_all.text} |" in line
        lines = [line for line in page.splitlines() if line.startswith(f"| `{each.row}` |")]
        assert len(lines) == 1 + bool(each.runs)
        for cell in records.RULES.cells if each.runs and not each.is_baseline else ():
            assert f"| {'–' if each.of_cell(cell) is None else each.of_cell(cell).text} |" in lines[1]
    rules = records.RULES
    assert f"`{rules.settings_hash}`" in page and all(f"`{tokens}`" in page for tokens in rules.tokens.values())
    assert f"± {rules.resolve:g} nats" in page and f"stall error exceeds {costs_of.MOST_WRONG:g}" in page
    explained = re.findall(r"^\| ([\w, …]+) \|", page, re.MULTILINE)
    words = {word.strip() for entry in explained for word in entry.split(",")}
    assert {
        "as master",
        "no worse",
        "worse",
        "lower",
        "small updates wrong",
        "not distinguishable",
        "diverged",
        "incomplete",
        "not run",
    } <= words


# ── the published methods ───────────────────────────────────────────────────────────────────────────────────────────

LOGGED = [row for method in methods.METHODS for row in method.rows if isinstance(row, methods.Logged)]


def test_a_method_has_a_line_with_the_figures_of_its_rows() -> None:
    page = script_module("docs/costs.py").by_method().splitlines()
    assert len(page) == 2 + len(methods.METHODS)
    rows = list(dict.fromkeys(row for method in methods.METHODS for row in method.rows if isinstance(row, str)))
    found = {each.row: each for each in costs_of.costs(records.read(), rows=rows)}
    for method, line in zip(methods.METHODS, page[2:], strict=True):
        name, source, *columns, more = (cell.strip() for cell in line.strip("|").split("|"))
        assert (name, source, more) == (method.name, method.source, method.more)
        assert (
            method.published and method.ours and {len(column.split("<br>")) for column in columns} == {len(method.rows)}
        )
        for row, *cells in zip(method.rows, *(column.split("<br>") for column in columns), strict=True):
            if isinstance(row, str):
                loss = "–" if found[row].over_all is None else found[row].over_all.text
                assert cells[0].endswith(f"`{row}`") and cells[2:4] == [loss, found[row].baseline]
                assert cells[1] == f"{found[row].bytes_per_param:.2f}" and cells[5] == found[row].word
            else:
                assert cells[1].startswith(row.size) and cells[2] == (row.loss or "–") and cells[5] == row.verdict


def test_what_is_said_of_collages_quality_is_what_the_records_show() -> None:
    docs = records.FILE.parent
    page = script_module("docs/costs.py").on_page_markdown(
        (docs / "ideas" / "range-of-storages.md").read_text(encoding="utf-8")
    )
    found = {each.row: each for each in costs_of.costs(records.read())}
    for row in ("collage-light", "collage-plus", "split", "word"):
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{row}` | "))
        assert all(f"| {found[row].of_cell(cell).text} |" in line for cell in records.RULES.cells)
        worse = [cell for cell in records.RULES.cells if found[row].of_cell(cell).low > 0.001]
        assert [beta2 for beta2, _ in worse] == ([0.999, 0.999] if row == "collage-light" else [])
        assert found[row].word.startswith("as master")


def test_the_logs_summary_has_the_boards_figures() -> None:
    index = (records.FILE.parent / "log" / "index.md").read_text(encoding="utf-8")
    (line,) = (line for line in index.splitlines() if line.startswith("| the board, nats above `master`, 200 steps"))
    _, what, figures_of_rows, *_ = (cell.strip() for cell in line.split("|"))
    rows = re.findall(r"`([\w-]+)`", what.partition(":")[2])
    found = {each.row: each.over_all for each in costs_of.costs(records.read())}
    said = [f"{found[row].mean:+.4f} ± {found[row].half:.4f}".replace("-", "−") for row in rows]
    assert len(rows) == 6 and figures_of_rows.replace("*", "").split(", ") == said


def test_the_methods_of_the_sources_are_listed() -> None:
    assert [method.name for method in methods.METHODS] == [
        "Mixed precision", "LLM.int8()", "FP8 end to end", "Collage", "Scalify", "GaLore", "GradNormLoRP",
        "Distributed low precision",
    ]  # fmt: skip
    rows = {row for method in methods.METHODS for row in method.rows}
    assert {"float8-row/states8", "float16/float32", "float32/float32"} <= rows


def test_what_has_no_record_yet_is_not_run() -> None:
    (found,) = costs_of.costs(BASE, RULES, ["float8-row/states8"])
    assert (found.word, found.bytes_per_param, found.baseline) == ("not run", 6.0, "master")


@pytest.mark.parametrize("logged", LOGGED, ids=lambda logged: logged.row)
def test_a_figure_of_the_log_stands_in_its_line_there(logged: Any) -> None:
    log = (records.FILE.parent / "log" / f"{logged.page}.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^#+ {re.escape(logged.section)}\n(.*?)(?=^##|\Z)", log, re.MULTILINE | re.DOTALL)
    (line,) = (line for line in section.splitlines() if line.startswith(logged.line))
    cells = [cell.strip(" *") for cell in line.split("|")]
    assert {logged.size, logged.loss} - {""} <= set(cells)


def test_a_loss_of_the_log_gets_the_boards_verdict() -> None:
    assert {logged.row: logged.verdict for logged in LOGGED} == {
        "galore/float32": "not run",
        "galore/states8": "not distinguishable",
        "galore/states8, two-sided": "lower; by a smaller rate",
        "gradnorm_lorp/float32": "not run",
        "gradnorm_lorp/states8": "lower; by a smaller rate",
        "compressed8": "as float32 sums",
        "compressed4": "not distinguishable",
    }


def test_papers_are_cited_as_elsewhere() -> None:
    root = Path(__file__).parents[1]
    files = [*(root / "src").rglob("*.py"), *(root / "docs" / "ideas").glob("*.md")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    for method in methods.METHODS:
        numbers = re.findall(r"\d{4}\.\d{5}", method.source)
        assert numbers and not [number for number in numbers if number not in text], method.name


def test_the_figure_shows_complete_rows_with_labels_apart() -> None:
    rows = {"word": 0.0001, "naive": 0.2, "torch AdamW bfloat16": 0.21, "stochastic": 0.0002, "kahan": 0.0001}
    found = [
        record for row, apart in rows.items() for record in whole(row, {0: apart, 1: apart + 1e-4, 2: apart - 1e-4})
    ]
    text = figures.figure(costs_of.costs([*BASE, *found[:-1]], RULES))  # one run of kahan is missing
    assert text == figures.figure(costs_of.costs([*BASE, *found[:-1]], RULES))
    root = ElementTree.fromstring(text)
    svg = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{svg}circle")) == 4 + 1
    labels = [each for each in root.findall(f"{svg}text") if each.get("class") in ("ours", "others")]
    assert {each.text: each.get("class") for each in labels} == {
        "word": "ours", "stochastic": "ours", "naive": "ours", "torch AdamW bfloat16": "others", "master": "ours",
    }  # fmt: skip
    zero = next(each for each in root.findall(f"{svg}line") if each.get("class") == "axis zero").get("y1")
    assert zero in {each.get("cy") for each in root.findall(f"{svg}circle")}, "the baseline is a row at zero"
    heights = sorted(float(each.get("y", "nan")) for each in labels if each.text != "master")  # of the rows of 8 bytes
    assert all(after - before >= figures.LINE - 0.11 for before, after in itertools.pairwise(heights))
    assert heights[0] >= figures.TOP - 20 and heights[-1] <= figures.BOTTOM + 10
