"""The table of update rules holds what the optimizers' classes and rules say, and reads options as it writes them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.assembly.preparation import class_of, outer_names, prepare
from narrowgauge.errors import RecipeError
from narrowgauge.optim import optimizers
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import LR_SCALES, MatrixRule
from narrowgauge.optim.rules.subspaces import PROJECTIONS, USUAL_PROJECTION
from narrowgauge.spec.update_rules import UPDATE_RULES, Choice, get_rule, option_text

RATES = {"params", "lr", "weight_decay", "options"}
LEFT_OUT = {
    "proj_type": USUAL_PROJECTION
}  # a group has no such entry where it is this, as groups saved before it was there


def signature(rule: str) -> dict[str, Any]:
    """What a rule's class takes beside rates and the options of all optimizers, with its defaults."""
    found = inspect.signature(class_of(rule)).parameters
    return {name: each.default for name, each in found.items() if name not in RATES}


def test_every_optimizer_has_a_row_and_every_row_an_optimizer() -> None:
    named = {
        name
        for name, each in vars(optimizers).items()
        if isinstance(each, type) and issubclass(each, Optimizer) and each is not Optimizer and name[0] != "_"
    }
    assert {row.optimizer for row in UPDATE_RULES.values()} == named


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_a_row_has_its_classes_options_and_defaults(rule: str) -> None:
    row, taken = get_rule(rule), signature(rule)
    shared = {"betas": "beta1" in row.settings, row.eps_option: "eps" in row.settings}
    for name, is_taken in shared.items():
        assert (name in taken) == is_taken
        taken.pop(name, None)
    assert {option.name: option.default for option in row.options} == taken
    assert "weight_decay" in row.settings


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_a_row_is_of_the_rule_that_steps(rule: str) -> None:
    made = class_of(rule)([nn.Parameter(torch.zeros(2, 2, dtype=torch.float32))], storage="float32")
    assert made.rule.name == rule
    assert isinstance(made.rule, MatrixRule) == get_rule(rule).is_matrix
    if isinstance(made.rule, MatrixRule):
        defaults = {**LEFT_OUT, **made.defaults}
        assert {name: defaults[name] for name in made.rule.defaults} == made.rule.defaults


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_options_are_read_as_they_are_written(rule: str) -> None:
    row = get_rule(rule)
    for values in ({o.name: o.default for o in row.options}, row.in_training("")):
        assert row.read(row.text(values)) == values
        assert {name: type(value) for name, value in row.read(row.text(values)).items()} == {
            name: type(value) for name, value in values.items()
        }
    for option in row.options:
        option.law.check(option.name, option.in_training)


@pytest.mark.parametrize(
    ("rule", "name", "table"), [("muon", "adjust_lr_fn", LR_SCALES), ("galore", "proj_type", PROJECTIONS)]
)
def test_choices_are_those_of_the_rule(rule: str, name: str, table: dict[str, Any]) -> None:
    law = {option.name: option.law for option in get_rule(rule).options}[name]
    assert isinstance(law, Choice) and law.names == tuple(table)


@pytest.mark.parametrize(
    ("rule", "text", "said", "advice"),
    [
        ("muon", "momentun=0.9", "gives 'momentun' to rule 'muon', which has momentum, nesterov", "Did you mean 'momentum'?"),
        ("adamw", "momentum=0.9", "which has no options of its own", "narrowgauge show rules"),
        ("lion", "betas=0.9", "gives 'betas' to rule 'lion'", "--beta1"),
        ("muon", "lr=0.1", "gives 'lr' to rule 'muon'", "--lr"),
        ("muon", "momentum", "gives 'momentum' without a value", "Write momentum=0.95."),
        ("muon", "momentum=0.9,momentum=0.8", "gives 'momentum' twice", "Write momentum=0.95."),
        ("muon", "momentum=much", "momentum = 'much' was requested; it must be a number, at least 0 and below 1", ""),
        ("muon", "momentum=1.0", "momentum = 1.0 was requested; it must be at least 0 and below 1", ""),
        ("muon", "ns_steps=2.5", "ns_steps = '2.5' was requested; it must be an integer, at least 1", ""),
        ("muon", "nesterov=perhaps", "nesterov = 'perhaps' was requested; it must be true or false", ""),
        ("muon", "ns_dtype=bfloat61", "ns_dtype = 'bfloat61' was requested", "Did you mean 'bfloat16'?"),
        ("galore", "rank=0", "rank = 0 was requested; it must be at least 1", ""),
        ("adafactor", "eps=1e-30", "eps = '1e-30' was requested; it must be two numbers with a slash between", ""),
        ("adafactor", "clip_threshold=none", "clip_threshold = 'none' was requested; it must be a number, above 0", ""),
    ],
)  # fmt: skip
def test_options_that_a_rule_does_not_have_are_refused_in_one_line(
    rule: str, text: str, said: str, advice: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        get_rule(rule).read(text)
    assert said in str(refused.value) and advice in str(refused.value) and "\n" not in str(refused.value)


def test_a_pair_and_none_have_a_text() -> None:
    row = get_rule("adafactor")
    assert row.read("eps = none/0.01, beta1 = 0.9") == {"eps": (None, 0.01), "beta1": 0.9}
    assert row.read("beta1=NONE") == {"beta1": None}
    assert option_text((None, 0.01)) == "none/0.01"


# ── prepare ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_prepare_takes_a_rule_by_name_and_its_options(rule: str) -> None:
    own = {option.name: option.in_training for option in get_rule(rule).options}
    _, made = prepare(nn.Linear(4, 4), "bfloat16/word", rule=rule, lr=1e-3, **own)
    made_by: Any = made
    group = {**LEFT_OUT, **made.param_groups[0]}
    assert type(made_by) is class_of(rule) and {name: group[name] for name in own} == own


def test_a_name_that_no_rule_has_and_a_name_beside_a_class_are_refused_before_the_model_is_changed() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RecipeError, match=r"no update rule is named 'moun'\. Did you mean 'muon'\?"):
        prepare(model, "bfloat16/word", rule="moun")
    with pytest.raises(RecipeError, match="rule = 'muon' was requested beside an optimizer"):
        prepare(model, "bfloat16/word", rule="muon", optimizer=ng.Lion)
    assert model.weight.dtype is torch.float32


def test_embeddings_and_a_head_are_outer_and_a_linear_layer_is_not() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.inner, self.head = nn.Embedding(4, 2), nn.Linear(2, 2), nn.Linear(2, 4)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    assert outer_names(Model()) == {"tokens.weight", "head.weight", "head.bias"}
    assert outer_names(nn.Linear(2, 2)) == set()
