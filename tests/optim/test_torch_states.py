"""States of ``torch.optim`` and of what follows its names, taken into every storage: cut and told, or refused in a sentence."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from optim.pairs import build, everything, parameters
from optim.scenarios import REPRESENTATIVES, storage_error
from tensors import assert_same_bits, parameters_of, step_gradients, take_steps

THEIRS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def trained(rule: str, storage: str, steps: int = 3, **options: Any) -> torch.optim.Optimizer:
    """A torch optimizer of float32 weights, as they are before a storage cuts them."""
    params = [nn.Parameter(p.detach().float()) for p in parameters(storage)]
    optimizer = THEIRS[rule](params, lr=0.01, **({"momentum": 0.9} if rule == "sgd" else {}), **options)
    for step in range(steps):
        for p, gradient in zip(params, step_gradients(params, step), strict=True):
            p.grad = gradient
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("rule", "storage"), [*(("adamw", storage) for storage in REPRESENTATIVES), ("sgd", "compact")]
)
def test_moments_are_cut_and_that_is_told(rule: str, storage: str) -> None:
    theirs = trained(rule, storage)
    ours = build(rule, parameters(storage), storage, lr=0.01)
    ours.adopt({p: q.detach() for p, q in zip(parameters_of(ours), parameters_of(theirs), strict=True)})
    weights = [ours.stored(p) for p in parameters_of(ours)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours.load_state_dict(theirs.state_dict())
    lossy = False
    for p, q, weight in zip(parameters_of(ours), parameters_of(theirs), weights, strict=True):
        assert torch.equal(ours.stored(p), weight)
        assert ours.num_steps(p) == (3 if rule == "adamw" else 1)  # which torch's SGD does not count
        for name, value in theirs.state[q].items():
            if name != "step":
                role = "exp_avg_sq" if name == "exp_avg_sq" else "exp_avg"
                floor = 2.0**-14 * float(value.abs().max())
                torch.testing.assert_close(
                    ours.stored(p, name), value, rtol=2 * storage_error(storage, role, p.ndim), atol=floor
                )
                lossy |= not torch.equal(ours.stored(p, name), value)
    told = [str(w.message) for w in said if "was cut" in str(w.message)]
    assert len(told) == lossy
    assert not lossy or f"bits in '{storage}'" in told[0]
    take_steps(ours, range(3, 4))


@pytest.mark.parametrize("rule", THEIRS)
def test_in_float32_a_run_goes_on_as_torchs(rule: str) -> None:
    theirs, ours = trained(rule, "float32"), build(rule, parameters("float32"), "float32", lr=0.01)
    with torch.no_grad():
        for p, q in zip(parameters_of(ours), parameters_of(theirs), strict=True):
            p.copy_(q)
    ours.load_state_dict(theirs.state_dict())
    for step in range(3, 6):
        for p, q, gradient in zip(
            parameters_of(ours), parameters_of(theirs), step_gradients(parameters_of(ours), step), strict=True
        ):
            p.grad, q.grad = gradient, gradient.clone()
        ours.step()
        theirs.step()
    for p, q in zip(parameters_of(ours), parameters_of(theirs), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


def moment(*shape: int) -> Tensor:
    return torch.ones(shape or (12, 10))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("adamw", {"exp_avg": moment(), "exp_avg_sq": moment()}, "'step' is missing. ng.load_states takes states of Adam and AdamW"),
    ("adamw", {"step": 3, "exp_avg": moment()}, "'exp_avg_sq' is missing"),
    ("adamw", {"step": 3, "exp_avg": moment(), "exp_avg_sq": moment(), "max_exp_avg_sq": moment()},
     "'max_exp_avg_sq' is unknown"),
    ("adamw", {"step": 3, "state1": moment(), "state2": moment()}, "'state1' is unknown. ng.load_states"),
    ("lion", {"step": 3, "exp_avg": moment(), "exp_avg_sq": moment()}, "'exp_avg_sq' is unknown"),
    ("adamw", {"step": 3, "exp_avg": moment(3), "exp_avg_sq": moment()}, r"'exp_avg' is .* of shape \(3,\)"),
    ("adamw", {"step": 3, "exp_avg": moment().to(torch.int8), "exp_avg_sq": moment()}, "is torch.int8 of shape"),
    ("adafactor", {"step": 3, "row_var": moment(12, 1), "col_var": moment(1, 10)}, "'col_var' is unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "state", "answer"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_state_of_the_rule_is_refused_and_nothing_is_lost(
    rule: str, state: dict[str, Any], answer: str
) -> None:
    optimizer = build(rule, parameters("word"), "word")
    saved = {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}
    take_steps(optimizer, range(2))
    before = everything(optimizer)
    with pytest.raises(ng.errors.RecipeError, match=answer):
        optimizer.load_state_dict(saved)
    assert_same_bits(before, everything(optimizer))
