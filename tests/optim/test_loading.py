"""States of torch.optim, in and out."""

from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from optim.pairs import narrow, step_along, unchanged
from tensors import parameters_of
from text.refusals import refused

MOMENTS = ("exp_avg", "exp_avg_sq")
GOOD = {"step": 3, "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
REFUSED = [
    ({0: {**GOOD, "max_exp_avg_sq": torch.zeros(4)}}, "more than torch's names"),
    # As fused optimizers keep it, whose moments may be divided by the bias correction.
    ({0: {name: GOOD[name] for name in MOMENTS}}, "no step"),
    ({"weight": GOOD}, "no numbers of parameters"),
    ({0: {**GOOD, "exp_avg": torch.zeros(5)}}, "a state of another shape"),
]


def vector() -> ng.AdamW:
    return ng.AdamW([nn.Parameter(torch.zeros(4))], storage="float32", lr=0.5)


@pytest.mark.parametrize(("entries", "name"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(entries, name):
    optimizer = vector()
    groups = [{"params": [0]}]
    with refused(name):
        optimizer.load_state_dict({"state": entries, "param_groups": groups})
    optimizer.load_state_dict({"state": {}, "param_groups": groups})  # before a step


def test_a_state_of_another_rule_is_refused_and_leaves_the_weights():
    theirs = trained("", torch.optim.AdamW)[1]
    muon = ng.Muon([narrow(8, 8), narrow(8), narrow(8, 8)], adjust_lr_fn="match_rms_adamw")
    with unchanged(muon), refused("a state of another rule"):
        muon.load_state_dict(theirs.state_dict())


def network() -> nn.Sequential:
    """Return two matrices and a vector."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))


def trained(storage: str, kind: Any = ng.AdamW, **options: Any):
    """Return a model after three steps."""
    model = network()
    if kind is ng.AdamW:
        options = {"storage": storage, "compile": False}
    named = model.named_parameters()
    optimizer = kind(named, lr=1e-2, betas=(0.9, 0.95), **options)
    for step in range(3):
        step_along(optimizer, 0.5 + step)
    return model, optimizer


@pytest.mark.filterwarnings("ignore:Rounded:UserWarning")
def test_load_state_dict_takes_another_librarys_state_with_its_options():
    """Also through a Trainer, which calls nothing else. A refused one changes nothing."""
    model, theirs = trained("", torch.optim.AdamW)
    optimizer = ng.AdamW(model.named_parameters(), lr=1.0, weight_decay=0.3, storage="exact")
    weights = {p: optimizer.stored(p) for p in model.parameters()}
    state = theirs.state_dict()
    (group,) = state["param_groups"]
    for groups in ([{**group, "params": [0, 1]}], [group, group]):
        with pytest.raises(ValueError):
            optimizer.load_state_dict({**state, "param_groups": groups})
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (1e-2, (0.9, 0.95), 0.01)
    for p in model.parameters():
        assert torch.equal(optimizer.stored(p), weights[p]) and optimizer.state[p]["step"] == 3
        assert torch.allclose(
            optimizer.stored(p, "exp_avg_sq"), theirs.state[p]["exp_avg_sq"], rtol=2**-8
        )


@pytest.mark.filterwarnings("ignore:Rounded:UserWarning")
@pytest.mark.parametrize(
    ("before", "after"),
    [("word", "exact"), ("exact", "compact"), ("float32", "word"), ("word", "float32")],
)
def test_a_state_goes_into_another_storage(before, after):
    """A wider one has the values, a narrower one rounds them once.

    The model's full weights are loaded first.
    """
    model, old = trained(before)
    copied = network()
    copied.load_state_dict(ng.full_weights(model, old))
    new = ng.AdamW(copied.named_parameters(), storage=after, compile=False)
    with refused("a state of another storage", before=before, after=after):
        new.load_state_dict(old.state_dict())
    new.load_state_dict(ng.to_torch_state(old))
    tolerances = dict.fromkeys(("weight", *MOMENTS), 0.0 if after in ("exact", "float32") else 0.1)
    if after == "exact":
        tolerances["exp_avg"] = 2**-8  # of bfloat16
    for p, q in zip(model.parameters(), copied.parameters(), strict=True):
        for name, rtol in tolerances.items():
            assert torch.allclose(new.stored(q, name), old.stored(p, name), rtol=rtol, atol=0), name
        assert new.state[q]["step"] == 3


@pytest.mark.filterwarnings("ignore:Rounded:UserWarning")
def test_torchs_adamw_goes_on_from_full_weights_and_our_state():
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
    for optimizer in (theirs, ours):
        step_along(optimizer, 1.0)
    for p, q in zip(copied.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-6)
    model, ours = trained("exact")
    assert torch.equal(ng.full_weights(model, ours)["0.weight"], ours.stored(model[0].weight))
    with refused("a state that has no equal in torch"):
        ng.to_torch_state(trained("word", ng.Muon, adjust_lr_fn="match_rms_adamw")[1])


def torch_state(make: Any, **options: Any) -> dict[str, Any]:
    """Return a state of an optimizer of torch's after one step."""
    optimizer = make([nn.Parameter(torch.zeros(4))], lr=1e-2, **options)
    step_along(optimizer, 1.0)
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("ours", "theirs", "options", "words"),
    [
        (ng.AdamW, torch.optim.AdamW, {"maximize": True}, "maximize"),
        (ng.AdamW, torch.optim.AdamW, {"amsgrad": True}, "amsgrad"),
        (ng.AdamW, torch.optim.Adam, {"weight_decay": 0.1}, "an L2 penalty"),
        (ng.Adam, torch.optim.AdamW, {"weight_decay": 0.1}, "is decoupled"),
        (ng.AdamW, torch.optim.SGD, {}, "momentum"),
    ],
)
def test_a_state_whose_options_cannot_be_obeyed_is_refused(ours, theirs, options, words):
    optimizer = ours([nn.Parameter(torch.zeros(4))], storage="float32", lr=0.5)
    with unchanged(optimizer), refused("an option", name=words):
        optimizer.load_state_dict(torch_state(theirs, **options))
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5


def test_options_that_can_be_obeyed_are_taken():
    rate = {"lr": 1e-2, "weight_decay": 0.0}
    for ours, theirs, options, taken in (
        (ng.Adam, torch.optim.Adam, {"fused": False, "foreach": True}, rate),
        (ng.SGD, torch.optim.SGD, {}, {**rate, "momentum": 0}),
    ):
        optimizer = ours([nn.Parameter(torch.zeros(4))], storage="float32", weight_decay=0.1)
        optimizer.load_state_dict(torch_state(theirs, **options))
        assert taken.items() <= optimizer.param_groups[0].items()


@pytest.mark.parametrize("is_torchs", [False, True])
def test_load_hooks_run_as_in_torch(is_torchs):
    """A pre hook sees the states, and may mend an old one; a post hook runs for any state."""
    state = torch_state(torch.optim.AdamW)
    if not is_torchs:
        before = vector()
        step_along(before, 1.0)
        state = before.state_dict()
        (old,) = state["param_groups"]
        old["storage"] = "an old name"
        del old["seed"], old["low_bits"]
    calls = []

    def mend(optimizer, state):
        calls.append(sorted(state["state"]))
        (group,) = state["param_groups"]
        if not is_torchs:
            group = {**group, "storage": "float32"}
        entry = {**state["state"][0], "exp_avg": torch.zeros(4)}
        return {"state": {0: entry}, "param_groups": [group]}

    after = vector()
    after.register_load_state_dict_pre_hook(mend)
    after.register_load_state_dict_post_hook(lambda optimizer: calls.append("post"))
    after.load_state_dict(state)
    assert calls == [[0], "post"]
    (weight,) = parameters_of(after)
    assert after.state[weight]["step"] == 1 and not after.stored(weight, "exp_avg").any()
    step_along(after, 1.0)  # the seed that the state lacks is the default
    assert after.param_groups[0]["seed"] == 0
