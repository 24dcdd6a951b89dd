"""Every option of every rule is read from its group at every step, and what a group may not say is
refused.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from optim.pairs import PAIRS, RULES, build, everything, narrow, parameters, unchanged
from tables import exhaustive
from tensors import assert_same_bits, parameters_of, take_steps
from text.refusals import refused

ADAM = {"lr": 0.07, "betas": (0.5, 0.6), "eps": 0.3, "weight_decay": 0.4, "seed": 9}
LATER = {
    "adamw": ADAM,
    "adam": ADAM,
    "sgd": {"lr": 0.07, "momentum": 0.3, "dampening": 0.4, "weight_decay": 0.4, "nesterov": True},
    "plain sgd": {"lr": 0.07, "weight_decay": 0.4},
    "lion": {"lr": 0.07, "betas": (0.5, 0.0), "weight_decay": 0.4},
    "own": {"lr": 0.07, "betas": (0.5, 0.6, 0.7), "alpha": 9.0},
    "muon": {**ADAM, "momentum": 0.3, "nesterov": False, "ns_steps": 2, "adjust_lr_fn": "original"},
    "galore": {**ADAM, "scale": 0.1, "update_proj_gap": 1},
}  # fmt: skip


@exhaustive(
    ("rule", "option"), [(rule, option) for rule, options in LATER.items() for option in options]
)
def test_an_option_set_later_is_that_of_a_new_optimizer_with_the_same_state(rule, option):
    """And makes a difference, so that the comparison says something."""
    count = 2 if option == "adjust_lr_fn" else 3  # vectors take no rate of Muon's own
    same, moved = [build(rule, parameters("word")[:count], "word") for _ in range(2)]
    take_steps(same, range(4))
    take_steps(moved, range(2))
    fresh = build(rule, [nn.Parameter(p.detach().clone()) for p in parameters_of(moved)], "word")
    fresh.load_state_dict(moved.state_dict())
    for optimizer in (moved, fresh):
        optimizer.param_groups[0][option] = LATER[rule][option]
        take_steps(optimizer, range(2, 4))
    assert_same_bits(everything(moved), everything(fresh))
    with pytest.raises(AssertionError):
        assert_same_bits(everything(moved), everything(same))


@pytest.mark.parametrize(
    ("rule", "option", "value", "words"),
    [
        ("galore", "rank", 2, "a rank that changed"),
        ("plain sgd", "momentum", 0.9, "a momentum that came later"),
        ("adamw", "storage", "exact", "another storage"),
    ],
)
def test_options_that_need_other_states_are_refused(rule, option, value, words):
    optimizer = build(rule, parameters("word"), "word")
    take_steps(optimizer, range(1))
    optimizer.param_groups[0][option] = value
    with unchanged(optimizer), refused(words):
        take_steps(optimizer, range(1, 2))


@pytest.mark.parametrize("make", [ng.AdamW, ng.Lion, ng.SGD])
def test_what_torch_has_besides_is_ignored_or_refused_in_one_line(make):
    """As an argument and in a group."""
    for name in ("fused", "foreach", "capturable", "differentiable"):
        make([narrow(4, 6)], **{name: True})
        make([{"params": [narrow(4, 6)], name: True}])
    for name in ("maximize", "amsgrad", "max_grad_norm"):
        with refused("an option of torch", name=name):
            make([{"params": [narrow(4, 6)], name: True}])
    for name in ("maximize", "amsgrad"):
        make([narrow(4, 6)], **{name: False})
        with refused("an option of torch", name=name):
            make([narrow(4, 6)], **{name: True})
    with refused("no option", name=make.__name__):
        make([narrow(4, 6)], storge="word")
    with refused("compile"):
        make([narrow(4, 6)], compile="yes")


WRONG = {
    "lr": math.nan, "seed": 0.5, "storage": "exakt", "low_bits": "one", "rule": "signs", "maximize": True,
}  # fmt: skip
OF_OURS = {
    "betas": (0.9, 1.5), "weight_decay": -1.0, "momentum": math.nan, "ns_steps": 0, "nesterov": 2, "weight_deacy": 0.1,
}  # fmt: skip
"""A user's rule checks its own options."""


@exhaustive(
    ("rule", "option"),
    [(rule, option) for rule in RULES for option in (WRONG if rule == "own" else WRONG | OF_OURS)],
)
def test_a_step_refuses_an_option_set_to_what_it_cannot_obey(rule, option):
    """Before a state of any group moves. The optimizer goes on with the old option."""
    optimizer = build(rule, [{"params": [p]} for p in parameters("word")[:2]], "word")
    take_steps(optimizer, range(1))
    group = optimizer.param_groups[1]
    options = dict(group)
    group[option] = (WRONG | OF_OURS)[option]
    with unchanged(optimizer), refused("an option", name=option.rstrip("s")):
        take_steps(optimizer, range(1, 2))
    group.clear()
    group.update(options, initial_lr=1.0, note=torch.ones(2), no_weight_decay=True)
    take_steps(optimizer, range(1, 2))


@exhaustive(("rule", "storage"), PAIRS)
def test_a_parameter_whose_elements_share_memory_is_refused(rule, storage):
    """When the optimizer is made, and later before a state moves."""
    shared = parameters(storage, [(1, 10)])[0].data.expand(12, 10)
    with refused("elements that share memory"):
        build(rule, [nn.Parameter(shared)], storage)
    optimizer = build(rule, parameters(storage)[:2], storage)
    take_steps(optimizer, range(1))
    last = parameters_of(optimizer)[1]
    last.data = last.data.as_strided(last.shape, (1, 1))
    with unchanged(optimizer), refused("elements that share memory"):
        take_steps(optimizer, range(1, 2))


class Holder(Tensor):
    """A tensor that holds others, as torchao's quantized weights do, and has no memory."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Holder:
        make = Tensor._make_wrapper_subclass
        return make(cls, shape, dtype=torch.bfloat16)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].shape)  # detached


def test_a_parameter_without_memory_or_given_twice_is_refused():
    """As lists of tied modules' parameters have it."""
    with refused("no memory"):
        ng.AdamW([nn.Parameter(Holder((2, 3)))])
    tied = narrow(2, 3)
    with pytest.warns(UserWarning), refused("a parameter that is passed twice"):
        ng.AdamW([tied, tied])


def test_what_is_refused_changes_nothing():
    first, second = narrow(2, 3), narrow(2, 3)
    optimizer = ng.AdamW([first, second])
    with refused("a shape"):
        optimizer.adopt({first: torch.ones(2, 3) * 2, second: torch.ones(3, 2)})
    wide = parameters("float32")
    unfit = nn.Parameter(torch.ones(2, dtype=torch.float64))
    for group in ({"params": [*wide, unfit]}, {"params": [narrow(3)], "storage": "exakt"}):
        with pytest.raises(ng.errors.RecipeError):
            optimizer.add_param_group(group)
    assert torch.equal(first, torch.ones_like(first)) and not optimizer.state
    assert len(optimizer.param_groups) == 1 and {p.dtype for p in wide} == {torch.float32}
    take_steps(optimizer, range(1))


def test_muon_takes_vectors_at_a_rate_of_adamws():
    optimizer = ng.Muon([narrow(4, 6)], lr=0.02)
    optimizer.add_param_group({"params": [narrow(5)], "rule": "adamw", "lr": 3e-4})
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4]
    take_steps(optimizer, range(1))  # with the betas of the first group
    alike = ng.Muon([narrow(4, 6), narrow(5)], lr=3e-4, adjust_lr_fn="match_rms_adamw")
    assert len(alike.param_groups[0]["params"]) == 2
    vectors = ng.Muon([narrow(5)], lr=3e-4, adjust_lr_fn="match_rms_adamw")
    take_steps(vectors, range(3))  # the last one with the checks of the second
    vectors.param_groups[0]["adjust_lr_fn"] = "original"
    with pytest.raises(ng.errors.RecipeError):
        take_steps(vectors, range(3, 4))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
def test_defaults_are_torchs(name):
    ours = getattr(ng, name)(parameters("float32", [(6, 4)]), storage="float32")
    theirs = getattr(torch.optim, name)(parameters("float32")[:1]).defaults
    for option in ours.defaults.keys() & theirs.keys() - {"eps"}:
        assert ours.defaults[option] == theirs[option], option


def test_no_step_is_taken_in_a_cuda_graph(monkeypatch):
    optimizer = ng.AdamW([narrow(2, 2)])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with refused("a graph"):
        take_steps(optimizer, range(1))


@pytest.mark.parametrize("rule", RULES)
def test_one_cycle_cycles_the_momentum_that_the_rule_reads(rule):
    optimizer = build(rule, parameters("word"), "word")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    take_steps(optimizer, range(1))
    schedule.step()
    (group,) = optimizer.param_groups
    momentum = group["momentum"] if "momentum" in group else group["betas"][0]
    assert 0.85 < momentum < 0.95
    if "momentum" in group:
        optimizer.stored(group["params"][0], "momentum_buffer")  # no KeyError


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.float64, Holder])
def test_a_frozen_parameter_of_another_format_is_left_alone(kind):
    """As the base of a quantized model. It is refused when it has a gradient."""
    weight = narrow(4, 4)
    frozen = []
    for _ in range(2):
        values = Holder((4, 4)) if kind is Holder else torch.ones(4, 4, dtype=kind)
        frozen.append(nn.Parameter(values, requires_grad=False))
    optimizer = ng.AdamW([weight, *frozen], compile=False)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert list(optimizer.state) == [weight]
    if kind is torch.float64:
        frozen[0].requires_grad_()
        frozen[0].grad = torch.ones_like(frozen[0])
        with refused("a format"):
            optimizer.step()


def test_notes_of_other_code_stay_beside_a_state():
    weight = narrow(4, 4)
    optimizer = ng.AdamW([weight], compile=False)
    optimizer.state[weight]["old_p"] = weight.detach().clone()
    take_steps(optimizer, range(1))
    optimizer.state[weight]["slow"] = torch.zeros(4, 4)
    saved = optimizer.state_dict()
    saved["state"]["of all"] = 7
    take_steps(optimizer, range(1, 2))
    optimizer.load_state_dict(saved)
    other = "of all"
    state = optimizer.state[weight]
    assert optimizer.state[other] == 7
    assert not state["slow"].any() and state["old_p"].shape == (4, 4)
    state["exp_avg"] = torch.zeros(4, 4)
    with refused("a packed state"):
        take_steps(optimizer, range(1, 2))
