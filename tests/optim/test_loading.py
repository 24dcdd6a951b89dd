"""States of torch.optim, in and out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import DataError

MOMENTS = ("exp_avg", "exp_avg_sq")


class Packed(Tensor):
    """A tensor of codes, as other libraries keep moments."""


GOOD = {"step": 3, "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
REFUSALS: dict[str, tuple[dict[Any, Any], list[dict[str, Any]], str]] = {
    "amsgrad": ({0: {**GOOD, "max_exp_avg_sq": torch.zeros(4)}}, [{"params": [0]}], ", max_exp_avg_sq, step"),
    "no step": ({0: {name: GOOD[name] for name in MOMENTS}}, [{"params": [0]}], "is of exp_avg, exp_avg_sq[.]"),
    # As fused optimizers keep it: their moments may be divided by the bias correction.
    "a group's step": ({0: {name: GOOD[name] for name in MOMENTS}}, [{"params": [0], "step": 3}], "is of exp_avg, exp_avg_sq[.]"),
    "another shape": ({0: {**GOOD, "exp_avg": torch.zeros(5)}}, [{"params": [0]}], "its state has shape"),
    "more parameters": ({0: GOOD}, [{"params": [0, 1]}], r"have \[2\] parameters, and the optimizer.s \[1\]"),
    "names as keys": ({"0": GOOD}, [{"params": [0]}], "not numbers of its parameters"),
    "codes": ({0: {**GOOD, "exp_avg": torch.zeros(4).as_subclass(Packed)}}, [{"params": [0]}], "packed as Packed"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSALS))
def test_what_does_not_fit_is_refused_in_one_line(name: str) -> None:
    entries, groups, message = REFUSALS[name]
    optimizer = ng.AdamW([nn.Parameter(torch.zeros(4))], storage="float32")
    with pytest.raises(DataError, match=message):
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
    optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})  # before a step


def test_a_state_of_another_rule_is_refused_and_leaves_the_weights() -> None:
    theirs = trained("", torch.optim.AdamW)[1]
    own = {"optimizer": ng.Muon, "adjust_lr_fn": "match_rms_adamw"}
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    model, muon = ng.prepare(model, "bfloat16/exact", compile=False, **own)
    stored = muon.stored(model[0].weight)
    with pytest.raises(ng.errors.RecipeError, match="Cannot adopt"):
        muon.load_state_dict(theirs.state_dict())
    assert torch.equal(muon.stored(model[0].weight), stored)


def test_names_in_another_order_are_refused_and_prefixes_are_not() -> None:
    a, b = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    theirs = torch.optim.AdamW([("module.a", a), ("module.b", b)])
    a.grad, b.grad = torch.full((4, 4), 1.0), torch.full((4, 4), 2.0)
    theirs.step()
    with pytest.raises(DataError, match="other names"):
        turned = ng.AdamW([("b", b), ("a", a)], storage="float32", compile=False)
        turned.load_state_dict(theirs.state_dict())
    ours = ng.AdamW([("a", a), ("b", b)], storage="float32", compile=False)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.stored(b, "exp_avg"), theirs.state[b]["exp_avg"])
    unnamed = ng.AdamW([a, b], storage="float32", compile=False)
    unnamed.load_state_dict(theirs.state_dict())
    swapped = ng.AdamW([("b", b), ("a", a)], storage="float32", compile=False)
    with pytest.raises(ng.errors.RecipeError, match="another order"):
        swapped.load_state_dict(ours.state_dict())


def trained(storage: str, kind: Any = ng.AdamW, **options: Any) -> tuple[nn.Module, Any]:
    """Return a model after three steps: a matrix, a vector, and a float32 vector that stays."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    named: Any = model.named_parameters()
    if kind is ng.AdamW:
        options = {
            "storage": storage,
            "compile": False,
            "keep_float32": lambda name, parameter: name == "0.bias",
        }
    optimizer = kind(named, lr=1e-2, betas=(0.9, 0.95), **options)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5 + step)
        optimizer.step()
    return model, optimizer


@pytest.mark.filterwarnings("ignore:Rounded:UserWarning")
def test_load_state_dict_takes_another_librarys_state_with_its_options() -> None:
    """Also through a Trainer, which calls nothing else. A refused one changes nothing."""
    model, theirs = trained("", torch.optim.AdamW)
    optimizer = ng.AdamW(model.named_parameters(), lr=1.0, weight_decay=0.3, storage="exact")
    weights = {p: optimizer.stored(p) for p in model.parameters()}
    state = theirs.state_dict()
    with pytest.raises(DataError):
        optimizer.load_state_dict(
            {**state, "param_groups": [{**state["param_groups"][0], "params": [0, 1]}]}
        )
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (1e-2, (0.9, 0.95), 0.01)
    for p in model.parameters():
        assert torch.equal(optimizer.stored(p), weights[p]) and optimizer.num_steps(p) == 3
        assert torch.allclose(
            optimizer.stored(p, "exp_avg_sq"), theirs.state[p]["exp_avg_sq"], rtol=2**-8
        )


@pytest.mark.filterwarnings("ignore:Rounded:UserWarning")
@pytest.mark.parametrize(
    ("before", "after"),
    [("word", "exact"), ("exact", "compact"), ("float32", "word"), ("word", "float32")],
)
def test_a_state_goes_into_another_storage(before: str, after: str) -> None:
    """A wider one has the values, a narrower one rounds them once.

    The model's full weights are loaded first.
    """
    model, old = trained(before)
    copied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    copied.load_state_dict(ng.full_weights(model, old))
    keep = {"keep_float32": lambda name, parameter: name == "0.bias"}
    new = ng.AdamW(
        copied.named_parameters(), lr=1e-2, betas=(0.9, 0.95), storage=after, compile=False, **keep
    )
    with pytest.raises(ng.errors.RecipeError, match=r"ng\.to_torch_state"):
        new.load_state_dict(old.state_dict())
    new.load_state_dict(ng.to_torch_state(old))
    tolerance = 0 if after in ("exact", "float32") else 0.1
    for p, q in zip(model.parameters(), copied.parameters(), strict=True):
        for name in ("weight", *MOMENTS):
            is_word = (
                name == "exp_avg" and after == "exact"
            )  # whose first moment has bfloat16's 8 bits
            rtol = 2**-8 if is_word else tolerance
            assert torch.allclose(new.stored(q, name), old.stored(p, name), rtol=rtol, atol=0), name
        assert new.num_steps(q) == 3


@pytest.mark.filterwarnings("ignore:Rounded:UserWarning")
def test_torchs_adamw_goes_on_from_full_weights_and_our_state() -> None:
    """In the bits of a float32 optimizer, whatever the storage was; tied names have one weight."""
    model, ours = trained("float32")
    model.register_parameter("tied", model[1].weight)
    weights = ng.full_weights(model, ours)
    assert torch.equal(weights["tied"], weights["1.weight"])
    assert {w.dtype for w in weights.values()} == {torch.float32}
    copied, theirs = trained("", torch.optim.AdamW)
    copied.register_parameter("tied", copied[1].weight)
    copied.load_state_dict(weights)
    theirs.load_state_dict(ng.to_torch_state(ours))
    for p, q in zip(copied.parameters(), model.parameters(), strict=True):
        for name in MOMENTS:
            assert torch.equal(theirs.state[p][name], ours.stored(q, name))
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    theirs.step(), ours.step()
    for p, q in zip(copied.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-6)
    model, ours = trained("exact")
    assert torch.equal(ng.full_weights(model, ours)["0.weight"], ours.stored(model[0].weight))
    with pytest.raises(DataError, match="muon"):
        ng.to_torch_state(trained("word", ng.Muon, adjust_lr_fn="match_rms_adamw")[1])


@pytest.mark.parametrize("maximize", [False, True])
def test_a_state_of_the_other_direction_is_refused(maximize: bool) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    theirs = torch.optim.AdamW([weight], lr=1e-3, maximize=maximize)
    weight.grad = torch.ones(2, 2)
    theirs.step()
    before = weight.detach().clone()
    ours = ng.AdamW([weight], lr=1e-3, storage="float32", maximize=not maximize, compile=False)
    with pytest.raises(ng.errors.DataError, match=f"maximize = {maximize}"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.num_steps(weight) == 0 and torch.equal(weight, before)
    same = ng.AdamW([weight], lr=1e-3, storage="float32", maximize=maximize, compile=False)
    same.load_state_dict(theirs.state_dict())
    assert same.num_steps(weight) == 1
