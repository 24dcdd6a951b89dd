"""The table of update rules holds what the optimizers' classes and rules say, and reads options as it writes them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from narrowgauge.assembly.preparation import class_of, outer_names, prepare
from narrowgauge.optim import optimizers
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import MatrixRule
from narrowgauge.optim.rules.subspaces import USUAL_PROJECTION
from narrowgauge.spec.update_rules import UPDATE_RULES, get_rule

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


# ── prepare ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_prepare_takes_a_rule_by_name_and_its_options(rule: str) -> None:
    own = {option.name: option.in_training for option in get_rule(rule).options}
    _, made = prepare(nn.Linear(4, 4), "bfloat16/word", rule=rule, lr=1e-3, **own)
    made_by: Any = made
    group = {**LEFT_OUT, **made.param_groups[0]}
    assert type(made_by) is class_of(rule) and {name: group[name] for name in own} == own


def test_embeddings_and_a_head_are_outer_and_a_linear_layer_is_not() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.inner, self.head = nn.Embedding(4, 2), nn.Linear(2, 2), nn.Linear(2, 4)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    assert outer_names(Model()) == {"tokens.weight", "head.weight", "head.bias"}
    assert outer_names(nn.Linear(2, 2)) == set()
