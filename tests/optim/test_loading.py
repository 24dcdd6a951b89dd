"""States of torch.optim, in and out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import DataError, RecipeError

MOMENTS = ("exp_avg", "exp_avg_sq")


GOOD = {"step": 3, "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
REFUSALS: dict[str, tuple[dict[Any, Any], type[Exception], str]] = {
    "amsgrad": ({0: {**GOOD, "max_exp_avg_sq": torch.zeros(4)}}, DataError, ", max_exp_avg_sq, step"),
    # As fused optimizers keep it, whose moments may be divided by the bias correction.
    "no step": ({0: {name: GOOD[name] for name in MOMENTS}}, DataError, "of exp_avg, exp_avg_sq[.]"),
    "names": ({"weight": GOOD}, DataError, "keys are not numbers"),
    "another shape": ({0: {**GOOD, "exp_avg": torch.zeros(5)}}, RecipeError, "'exp_avg' of shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSALS))
def test_what_does_not_fit_is_refused_in_one_line(name: str) -> None:
    entries, kind, message = REFUSALS[name]
    optimizer = ng.AdamW([nn.Parameter(torch.zeros(4))], storage="float32")
    groups = [{"params": [0]}]
    with pytest.raises(kind, match=message):
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
    optimizer.load_state_dict({"state": {}, "param_groups": groups})  # before a step


def test_a_state_of_another_rule_is_refused_and_leaves_the_weights() -> None:
    theirs = trained("", torch.optim.AdamW)[1]
    own = {"optimizer": ng.Muon, "adjust_lr_fn": "match_rms_adamw"}
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    model, muon = ng.prepare(model, "bfloat16/exact", compile=False, **own)
    stored = muon.stored(model[0].weight)
    with pytest.raises(ng.errors.RecipeError, match="Cannot adopt"):
        muon.load_state_dict(theirs.state_dict())
    assert torch.equal(muon.stored(model[0].weight), stored)


def trained(storage: str, kind: Any = ng.AdamW, **options: Any) -> tuple[nn.Module, Any]:
    """Return a model after three steps: two matrices and a vector."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    named: Any = model.named_parameters()
    if kind is ng.AdamW:
        options = {"storage": storage, "compile": False}
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
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(
            {**state, "param_groups": [{**state["param_groups"][0], "params": [0, 1]}]}
        )
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"] * 2})
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
    new = ng.AdamW(
        copied.named_parameters(), lr=1e-2, betas=(0.9, 0.95), storage=after, compile=False
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


def torch_state(make: Any, **options: Any) -> dict[str, Any]:
    """Return a state of an optimizer of torch's after one step."""
    weight = nn.Parameter(torch.ones(8, 8))
    optimizer = make([weight], lr=1e-2, **options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer.state_dict()  # type: ignore[no-any-return]


OTHERS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "maximize": (ng.AdamW, torch.optim.AdamW, {"maximize": True}, "maximize"),
    "amsgrad": (ng.AdamW, torch.optim.AdamW, {"amsgrad": True}, "amsgrad"),
    "an L2 penalty": (ng.AdamW, torch.optim.Adam, {"weight_decay": 0.1}, "an L2 penalty"),
    "a decoupled decay": (ng.Adam, torch.optim.AdamW, {"weight_decay": 0.1}, "is decoupled"),
    "another rule": (ng.AdamW, torch.optim.SGD, {}, "momentum"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_whose_options_cannot_be_obeyed_is_refused(name: str) -> None:
    ours, theirs, options, words = OTHERS[name]
    optimizer = ours([nn.Parameter(torch.ones(8, 8))], storage="float32", lr=0.5)
    with pytest.raises(RecipeError, match=words):
        optimizer.load_state_dict(torch_state(theirs, **options))
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5
    rate = {"lr": 1e-2, "weight_decay": 0.0}
    ng.Adam([nn.Parameter(torch.ones(8, 8))], storage="float32").load_state_dict(
        torch_state(torch.optim.Adam, fused=False, foreach=True)
    )
    plain = ng.SGD([nn.Parameter(torch.ones(8, 8))], storage="float32", momentum=0.9)
    plain.load_state_dict(torch_state(torch.optim.SGD))
    assert {key: plain.param_groups[0][key] for key in (*rate, "momentum")} == {
        **rate,
        "momentum": 0,
    }


@pytest.mark.parametrize("storage", ["float32", "exact", "torch"])
def test_load_hooks_run_as_in_torch(storage: str) -> None:
    """A pre hook sees the states, and may mend an old one; a post hook runs for any state."""
    dtype = torch.bfloat16 if storage == "exact" else torch.float32
    kept = "float32" if storage == "torch" else storage

    def make() -> ng.AdamW:
        return ng.AdamW([nn.Parameter(torch.ones(8, 8, dtype=dtype))], storage=kept)

    before = make()
    for p in before.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    before.step()
    state = torch_state(torch.optim.AdamW) if storage == "torch" else before.state_dict()
    calls: list[Any] = []

    def mend(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append(sorted(state["state"]))
        group = state["param_groups"][0]
        entry = {**state["state"][0], "exp_avg": state["state"][0]["exp_avg"] * 0}
        if storage != "torch":
            group = {**group, "storage": kept}
        return {"state": {0: entry}, "param_groups": [group]}

    after = make()
    after.register_load_state_dict_pre_hook(mend)
    after.register_load_state_dict_post_hook(lambda optimizer: calls.append("post"))
    old = {**state["param_groups"][0]}
    if storage != "torch":
        old["storage"] = "an old name"
        del old["seed"], old["low_bits"]
    after.load_state_dict({**state, "param_groups": [old]})
    assert calls == [[0], "post"]
    (weight,) = after.param_groups[0]["params"]
    assert after.num_steps(weight) == 1 and not after.stored(weight, "exp_avg").any()
    weight.grad = torch.ones_like(weight)
    after.step()  # the seed that the state lacks is the default
    assert after.param_groups[0]["seed"] == 0
