"""States of ``torch.optim`` and of what follows its names, taken into every storage: cut and told, or refused in a sentence."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import narrowgauge as ng
from narrowgauge.spec.storages import STORAGES
from optim.pairs import build, everything, is_legal, parameters
from optim.scenarios import CUT, storage_error
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


CASES = [(rule, storage) for rule in ("adamw", "sgd") for storage in CUT if is_legal(rule, storage)]


@pytest.mark.parametrize(("rule", "storage"), CASES, ids=["-".join(case) for case in CASES])
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


def test_a_weight_that_was_set_beforehand_stands() -> None:
    """A checkpoint is loaded weights first; a master of what was there before must not come back."""
    ours = build("adamw", parameters("master"), "master")
    take_steps(ours, range(2))
    with torch.no_grad():
        parameters_of(ours)[0].fill_(0.125)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours.load_state_dict(trained("adamw", "master").state_dict())
    (adopted,) = [str(w.message) for w in said]  # and float32 moments are not cut
    assert "modified outside this optimizer" in adopted
    assert (ours.stored(parameters_of(ours)[0]) == 0.125).all()


def test_a_state_made_by_bfloat16_weights_fits_where_it_lies() -> None:
    params = parameters("naive")
    theirs = torch.optim.AdamW(params)
    for p, gradient in zip(params, step_gradients(params, 0), strict=True):
        p.grad = gradient
    theirs.step()
    ours = build("adamw", parameters("no-master"), "no-master")  # whose moments are bfloat16 and float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.stored(parameters_of(ours)[0], "exp_avg"), theirs.state[params[0]]["exp_avg"].float())


def as_if(rule: str, state: dict[str, Any], storage: str = "word") -> tuple[ng.Optimizer, dict[str, Any]]:
    """An optimizer, and a plain state dict in which its first parameter has that state."""
    optimizer = build(rule, parameters(storage), storage)
    return optimizer, {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}


@pytest.mark.parametrize("state", [{}, {"momentum_buffer": None}])
@pytest.mark.parametrize("rule", ["sgd", "plain sgd"])
def test_no_momentum_is_no_state(rule: str, state: dict[str, Any]) -> None:
    optimizer, saved = as_if(rule, state)
    optimizer.load_state_dict(saved)
    fresh = build(rule, parameters("word"), "word", lr=0.1)
    for each in (optimizer, fresh):
        take_steps(each, range(2))
    assert_same_bits(everything(optimizer), everything(fresh))


@pytest.mark.filterwarnings("ignore:The state that was loaded")
@pytest.mark.parametrize(
    ("rule", "name"), [("lion", "exp_avg"), ("sgd", "momentum_buffer"), ("muon", "momentum_buffer")]
)
def test_rules_that_count_no_steps_need_none(rule: str, name: str) -> None:
    """Lion's state, as its authors and others keep it, has one tensor."""
    value = torch.linspace(-1, 1, 120).reshape(12, 10)
    optimizer, saved = as_if(rule, {name: value})
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.stored(parameters_of(optimizer)[0], name), value, rtol=0.05, atol=1e-3)
    take_steps(optimizer, range(1))


def moment(*shape: int) -> Tensor:
    return torch.ones(shape or (12, 10))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("adamw", {"exp_avg": moment(), "exp_avg_sq": moment()}, "needs 'step'. ng.convert takes states of Adam and AdamW"),
    ("adamw", {"step": 3, "exp_avg": moment()}, "'exp_avg_sq', which is missing"),
    ("adamw", {"step": 3, "exp_avg": moment(), "exp_avg_sq": moment(), "max_exp_avg_sq": moment()},
     "'max_exp_avg_sq', which it does not have"),
    ("adamw", {"step": 3, "state1": moment(), "state2": moment()}, "'state1', which it does not have. ng.convert"),
    ("lion", {"step": 3, "exp_avg": moment(), "exp_avg_sq": moment()}, "'exp_avg_sq', which it does not have"),
    ("adamw", {"step": 3, "exp_avg": moment(3), "exp_avg_sq": moment()}, r"'exp_avg' to load is .* of shape \(3,\)"),
    ("adamw", {"step": 3, "exp_avg": moment().to(torch.int8), "exp_avg_sq": moment()}, "is torch.int8 of shape"),
    ("adafactor", {"step": 3, "row_var": moment(12, 1), "col_var": moment(1, 10)}, "'col_var', which it does not have"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "state", "answer"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("storage", ["word", "float32"])
def test_what_is_no_state_of_the_rule_is_refused_and_nothing_is_lost(
    rule: str, state: dict[str, Any], answer: str, storage: str
) -> None:
    optimizer, saved = as_if(rule, state, storage)
    take_steps(optimizer, range(2))
    before = everything(optimizer)
    with pytest.raises(ng.errors.RecipeError, match=answer):
        optimizer.load_state_dict(saved)
    assert_same_bits(before, everything(optimizer))


def test_an_amsgrad_is_refused_by_its_flag_too() -> None:
    with pytest.raises(ng.errors.RecipeError, match="amsgrad = True"):
        build("adamw", parameters("word"), "word").load_state_dict(trained("adamw", "word", amsgrad=True).state_dict())


@pytest.mark.parametrize("rule", ["adamw", "sgd", "lion"])
def test_a_state_of_ours_without_its_count_is_refused(rule: str) -> None:
    """Nor with what a flattened state puts in place of what it did not find."""
    optimizer = build(rule, parameters("word"), "word")
    take_steps(optimizer, range(1))
    before, saved = everything(optimizer), optimizer.state_dict()
    for nothing in ({}, {"step": None}, {"step": {}}):
        entry = {name: value for name, value in saved["state"][0].items() if name != "step"}
        with pytest.raises(ng.errors.RecipeError, match=f"rule '{rule}' needs 'step'. ng.convert"):
            optimizer.load_state_dict({**saved, "state": {**saved["state"], 0: {**entry, **nothing}}})
    assert_same_bits(before, everything(optimizer))


@pytest.mark.parametrize(("rule", "storage"), CASES, ids=["-".join(case) for case in CASES])
def test_a_flattened_state_is_the_state(rule: str, storage: str) -> None:
    """As torchtitan saves it: one dict from ``state.weight.exp_avg`` and the like to tensors, read back into a new optimizer.

    A storage with scales by row is refused: torch looks up only what an entry shows, and a scale is no state.
    """
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def begun(seed: int) -> tuple[nn.Module, ng.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(24, 16).to(getattr(torch, STORAGES[storage].visible))
        options = {"momentum": 0.9} if rule == "sgd" else {}
        optimizer = {"adamw": ng.AdamW, "sgd": ng.SGD}[rule](model.parameters(), lr=0.01, storage=storage, **options)
        return model, optimizer

    def stepped(model: nn.Module, optimizer: ng.Optimizer, first: int) -> None:
        for step in range(first, first + 2):
            for p, gradient in zip(model.parameters(), step_gradients(list(model.parameters()), step), strict=True):
                p.grad = gradient
            optimizer.step()
        optimizer.zero_grad()

    model, optimizer = begun(0)
    stepped(model, optimizer, 0)
    saved = get_optimizer_state_dict(model, optimizer, options=flat)
    assert "state.weight.step" in saved
    other, ours = begun(1)
    other.load_state_dict(model.state_dict())
    if any(name.endswith("_bound") for name in saved):
        with pytest.raises(ng.errors.RecipeError, match="needs"):
            set_optimizer_state_dict(other, ours, saved, options=flat)
        return
    set_optimizer_state_dict(other, ours, saved, options=flat)
    stepped(model, optimizer, 2)
    stepped(other, ours, 2)
    assert_same_bits(everything(optimizer), everything(ours))
