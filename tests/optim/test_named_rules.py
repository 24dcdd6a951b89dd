"""The table of update rules holds what the optimizers' classes and rules say, and reads options as
it writes them.
"""

import inspect

import pytest

from narrowgauge.optim import optimizers
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import MatrixRule
from narrowgauge.spec.update_rules import UPDATE_RULES
from optim.pairs import build, narrow
from optim.scenarios import OPTIMIZERS


def test_every_optimizer_has_a_row_and_every_row_an_optimizer():
    classes = {cls for cls in Optimizer.__subclasses__() if cls.__module__ == optimizers.__name__}
    assert set(OPTIMIZERS.values()) == classes


@pytest.mark.parametrize("rule", UPDATE_RULES)
def test_a_row_has_its_classes_options_and_defaults_and_names_the_rule_that_steps(
    rule,
):
    row = UPDATE_RULES[rule]
    options = inspect.signature(OPTIMIZERS[rule]).parameters.keys()
    assert {"params", "options", *row.option_names} - {"seed"} == options
    assert "weight_decay" in row.settings
    optimizer = build(rule, [narrow(2, 2)], "word")
    assert optimizer.rule.name == rule and isinstance(optimizer.rule, MatrixRule) == row.is_matrix
