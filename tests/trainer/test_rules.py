"""Trainings by every update rule: what steps which parameter, the record, the same bits after a resume, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from narrowgauge.analysis.comparison.labels import run_labels
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import Run, read_run
from narrowgauge.spec.update_rules import get_rule
from narrowgauge.trainer import loop, session
from narrowgauge.trainer.config import TrainConfig
from trainer.tiny_runs import assert_same_run, call, settings, words_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.usefixtures("one_thread")

INNER, OUTER = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"
STATES = {
    "sgd": {"momentum_buffer"},
    "muon": {"momentum_buffer"},
    "adafactor": {"exp_avg_sq_row", "exp_avg_sq_col"},
    "gradnorm_lorp": {
        "projector", "projected_exp_avg", "projected_exp_avg_sq", "magnitude_exp_avg", "magnitude_exp_avg_sq",
    },
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "muon": {"rule": "muon"},
    "adafactor": {"rule": "adafactor"},
    "sgd": {"rule": "sgd", "rule_options": "momentum=0.9", "lr": 0.3},
    # The subspace is found anew at steps 4 and 7, of which a resume after step 4 must not make another.
    "galore": {"rule": "galore", "rule_options": "rank=4,update_proj_gap=3"},
    "gradnorm_lorp": {"rule": "gradnorm_lorp", "rule_options": "rank=4,update_proj_gap=3"},
}


@pytest.fixture(scope="module")
def trained(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A training by each rule, through the command line."""
    folder, made = tmp_path_factory.mktemp("rules"), {}
    for rule, changes in [(rule, CASES[rule]) for rule in STATES]:
        made_of = settings(place, folder / rule, recipe="bfloat16/word", gauges_every=4, **changes)
        result = call(*words_of(made_of))
        assert result.exit_code == 0, result.stderr
        made[rule] = read_run(folder / rule)
    return made


@pytest.mark.parametrize("rule", STATES)
def test_a_rule_steps_matrices_and_adamw_what_is_left_to_it(rule: str, trained: dict[str, Run]) -> None:
    run = trained[rule]
    optimizer = session.load(run.path).optimizer
    parameters = {name: parameter for parameter, name in optimizer.parameter_names().items()}

    def states(parameter: str) -> set[str]:
        return set(optimizer.state[parameters[parameter]].shapes_of_states)

    assert states(INNER) == STATES[rule]
    assert states(OUTER) == ({"exp_avg", "exp_avg_sq"} if get_rule(rule).is_matrix else STATES[rule])
    own = get_rule(rule).in_training(str(CASES[rule].get("rule_options", "")))
    left_out = {"proj_type": "std"}  # of groups, where it is this
    assert all({name: ({**left_out, **group})[name] for name in own} == own for group in optimizer.param_groups)
    losses = [row["loss"] for row in run.steps]
    assert losses[-1] < losses[0] - 0.01
    assert INNER in run.gauges[-1]["updates"]


def edit(folder: Path, **changes: Any) -> None:
    record = tomllib.loads((folder / "run.toml").read_text())
    (folder / "run.toml").write_text(tomli_w.dumps({**record, "config": {**record["config"], **changes}}))


@pytest.mark.parametrize("rule", ["gradnorm_lorp", "muon"])
def test_a_matrix_rule_goes_on_with_the_same_bits(
    rule: str, place: Path, trained: dict[str, Run], tmp_path: Path
) -> None:
    loop.train(settings(place, tmp_path / "run", recipe="bfloat16/word", gauges_every=4, **CASES[rule], stop_after=4))
    assert call("resume", str(tmp_path / "run")).exit_code == 0
    assert_same_run(read_run(tmp_path / "run"), trained[rule], gauges=False)


def test_another_rule_is_refused_at_a_resume_even_where_changes_are_accepted(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    loop.train(settings(place, folder, recipe="bfloat16/word", **CASES["galore"], stop_after=4))
    edit(folder, rule="gradnorm_lorp")
    for words in ((), ("--accept-changes",)):
        result = call("resume", str(folder), *words)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert "holds the states of rule 'galore', and rule 'gradnorm_lorp' was requested" in result.stderr


# ── the settings ────────────────────────────────────────────────────────────────────────────────────────────────────


def refusal(**changes: Any) -> str:
    with pytest.raises(NarrowgaugeError) as refused:
        TrainConfig(out="new", **changes).validated()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_a_rule_does_not_take_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "it must be one of adamw, adam, sgd" in (said := refusal(rule="moun")) and "Did you mean 'muon'?" in said
    assert "rule 'sgd' has no beta1, and beta1 = 0.8 was set. Omit --beta1." in refusal(rule="sgd", beta1=0.8)
    assert "rule 'sgd' has no learning rate" in (said := refusal(rule="sgd")) and "Set --lr" in said
    assert "Did you mean 'momentum'?" in refusal(rule="muon", rule_options="momentom=0.5")
    recipe = settings(Path(), Path(), recipe="bfloat16/collage-plus").recipe
    assert "a matrix product is not defined. Take 'split'" in refusal(rule="galore", recipe=recipe)
    assert not list(tmp_path.iterdir())
    assert TrainConfig(out="new", rule="sgd", lr=0.1).validated().lr == 0.1


def test_a_comparison_trains_all_recipes_by_its_rule(place: Path, tmp_path: Path) -> None:
    made = settings(place, tmp_path / "out", rule="muon", rule_options="momentum=0.9").to_dict()
    words = [
        word
        for name, value in made.items()
        if name not in ("recipe", "seed") and not isinstance(value, bool)
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    result = call("compare", "--recipes", "bfloat16/word,bfloat16/states8", *words)
    assert result.exit_code == 0, result.stderr
    runs = [read_run(folder) for folder in sorted((tmp_path / "out").glob("*-seed0"))]
    assert run_labels(runs) == ["bfloat16/states8 by muon", "bfloat16/word by muon"]
    assert {(run.config["rule"], run.config["rule_options"].split(",")[0]) for run in runs} == {
        ("muon", "momentum=0.9")
    }
    assert "bfloat16/word by muon" in result.stdout
    again = call("compare", "--recipes", "bfloat16/word", *words, "--rule", "lion", "--rule-options", "")
    assert again.exit_code == 2 and "rule = 'muon'" in again.stderr
