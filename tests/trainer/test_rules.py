"""Trainings by matrix rules: the same bits after a resume, and another rule is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from narrowgauge.runs.record import read_run
from narrowgauge.trainer import loop
from trainer.tiny_runs import assert_same_run, call, settings, words_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.usefixtures("one_thread")

CASES: dict[str, dict[str, Any]] = {
    "muon": {"rule": "muon"},
    # The subspace is found anew at steps 4 and 7, of which a resume after step 4 must not make another.
    "galore": {"rule": "galore", "rule_options": "rank=4,update_proj_gap=3"},
    "gradnorm_lorp": {"rule": "gradnorm_lorp", "rule_options": "rank=4,update_proj_gap=3"},
}


def edit(folder: Path, **changes: Any) -> None:
    record = tomllib.loads((folder / "run.toml").read_text())
    (folder / "run.toml").write_text(tomli_w.dumps({**record, "config": {**record["config"], **changes}}))


@pytest.mark.parametrize("rule", ["gradnorm_lorp", "muon"])
def test_a_matrix_rule_goes_on_with_the_same_bits(rule: str, place: Path, tmp_path: Path) -> None:
    whole = settings(place, tmp_path / "whole", recipe="bfloat16/word", gauges_every=4, **CASES[rule])
    assert call(*words_of(whole)).exit_code == 0
    loop.train(replace(whole, out=str(tmp_path / "run"), stop_after=4))
    assert call("resume", str(tmp_path / "run")).exit_code == 0
    run = read_run(tmp_path / "run")
    assert_same_run(run, read_run(tmp_path / "whole"), gauges=False)
    assert run.steps[-1]["loss"] < run.steps[0]["loss"] - 0.01


def test_another_rule_is_refused_at_a_resume_even_where_changes_are_accepted(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    loop.train(settings(place, folder, recipe="bfloat16/word", **CASES["galore"], stop_after=4))
    edit(folder, rule="gradnorm_lorp")
    for words in ((), ("--accept-changes",)):
        result = call("resume", str(folder), *words)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert "holds the states of rule 'galore', and rule 'gradnorm_lorp' was requested" in result.stderr
