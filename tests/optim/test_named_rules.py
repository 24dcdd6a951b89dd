"""The table of update rules holds what the optimizers' classes and rules say, and reads options as
it writes them.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from narrowgauge.optim import optimizers
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import MatrixRule
from narrowgauge.spec.update_rules import UPDATE_RULES
from optim.scenarios import OPTIMIZERS

RATES = {"params", "lr", "weight_decay", "options"}


def test_every_optimizer_has_a_row_and_every_row_an_optimizer() -> None:
    classes = {cls for cls in Optimizer.__subclasses__() if cls.__module__ == optimizers.__name__}
    assert set(OPTIMIZERS.values()) == classes


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_a_row_has_its_classes_options_and_defaults_and_names_the_rule_that_steps(
    rule: str,
) -> None:
    row = UPDATE_RULES[rule]
    options = {}
    for name, p in inspect.signature(OPTIMIZERS[rule]).parameters.items():
        if name not in RATES:
            options[name] = p.default
    shared = {"betas": "beta1" in row.settings, "eps": "eps" in row.settings}
    for name, is_option in shared.items():
        assert (name in options) == is_option
        options.pop(name, None)
    assert row.options.keys() == options.keys()
    assert "weight_decay" in row.settings
    optimizer = OPTIMIZERS[rule](
        [nn.Parameter(torch.zeros(2, 2, dtype=torch.float32))], storage="float32"
    )
    assert optimizer.rule.name == rule and isinstance(optimizer.rule, MatrixRule) == row.is_matrix
