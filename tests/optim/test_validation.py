"""Every option of every rule is read from its group at every step, and what a group may not say is
refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.optim.validation import device_of_step
from optim.pairs import PAIRS, RULES, build, everything, narrow, parameters, refused
from tables import exhaustive
from tensors import assert_same_bits, parameters_of, take_steps

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
        ("galore", "rank", 2, "projector"),
        ("plain sgd", "momentum", 0.9, "no 'momentum_buffer_bits': .*before the first step"),
        ("adamw", "storage", "exact", "no 'tail': .* in storage 'exact' needs int16"),
    ],
)
def test_options_that_need_other_states_are_refused(rule, option, value, words):
    optimizer = build(rule, parameters("word"), "word")
    take_steps(optimizer, range(1))
    optimizer.param_groups[0][option] = value
    with refused(optimizer, words):
        take_steps(optimizer, range(1, 2))


@pytest.mark.parametrize("make", [ng.AdamW, ng.Lion, ng.SGD])
def test_what_torch_has_besides_is_ignored_or_refused_in_one_line(make):
    """As an argument and in a group."""
    for name in ("fused", "foreach", "capturable", "differentiable"):
        make([narrow(4, 6)], **{name: True})
        make([{"params": [narrow(4, 6)], name: True}])
    for name in ("maximize", "amsgrad", "max_grad_norm"):
        with pytest.raises(ng.errors.RecipeError, match=f"Cannot obey {name} = True"):
            make([{"params": [narrow(4, 6)], name: True}])
    for name in ("maximize", "amsgrad"):
        make([narrow(4, 6)], **{name: False})
        with pytest.raises(ng.errors.RecipeError, match=f"Cannot obey {name} = True"):
            make([narrow(4, 6)], **{name: True})
    with pytest.raises(ng.errors.RecipeError, match=f"{make.__name__} has.*mean 'storage'"):
        make([narrow(4, 6)], storge="word")
    with pytest.raises(ng.errors.RecipeError, match="compile = 'yes'"):
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
    with refused(optimizer, option.rstrip("s")):
        take_steps(optimizer, range(1, 2))
    group.clear()
    group.update(options, initial_lr=1.0, note=torch.ones(2), no_weight_decay=True)
    take_steps(optimizer, range(1, 2))


@exhaustive(("rule", "storage"), PAIRS)
def test_a_parameter_whose_elements_share_memory_is_refused(rule, storage):
    """When the optimizer is made, and later before a state moves."""
    shared = parameters(storage, [(1, 10)])[0].data.expand(12, 10)
    with pytest.raises(ng.errors.RecipeError, match="share memory"):
        build(rule, [nn.Parameter(shared)], storage)
    optimizer = build(rule, parameters(storage)[:2], storage)
    take_steps(optimizer, range(1))
    last = parameters_of(optimizer)[1]
    last.data = last.data.as_strided(last.shape, (1, 1))
    with refused(optimizer, "share memory"):
        take_steps(optimizer, range(1, 2))


def made(**options: Any) -> Callable[[], Any]:
    return lambda: ng.AdamW([narrow(4, 6)], **options)


def with_own_rule() -> ng.Optimizer:
    rule = dataclasses.replace(ADAMW, name="own", monotone=False)
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    return ng.Optimizer([narrow(4, 6)], rule, options, storage="compact")


def on_one_memory() -> ng.AdamW:
    memory = torch.ones(8, 8)
    return ng.AdamW([nn.Parameter(memory), nn.Parameter(memory[:6])])


def given_twice() -> ng.AdamW:
    """As lists of tied modules' parameters are."""
    tied = narrow(2, 3)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        return ng.AdamW([tied, tied])


def adopting(name: str, *shape: int, has_weight: bool = True) -> Callable[[], Any]:
    """A state of a name and shape."""

    def adopt() -> None:
        parameter = narrow(2, 3)
        weights = {parameter: torch.ones(2, 3)} if has_weight else {}
        ng.AdamW([parameter]).adopt(weights, {parameter: {name: torch.ones(shape)}})

    return adopt


def later_original() -> None:
    optimizer = build("muon", parameters("word"), "word")
    optimizer.param_groups[0]["adjust_lr_fn"] = "original"
    take_steps(optimizer, range(1))


def appended() -> None:
    optimizer = ng.AdamW([narrow(2, 3)])
    optimizer.param_groups.append({"params": [narrow(3)], "lr": 1e-3})
    optimizer.step()


class Holder(Tensor):
    """A tensor that holds others, as torchao's quantized weights do, and has no memory."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Holder:
        make = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, shape, dtype=torch.bfloat16)  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].shape)  # detached


ones = torch.ones(2, 3)
MUON = "no matrix.*'rule': 'adamw'"
REFUSED = [
    ("two numbers", made(betas=(0.9,))),
    ("one finite number", made(lr="1")),
    ("one integer", made(audit_every=1.5)),
    ("is a compute and a storage", made(storage="bfloat16/word")),
    ("'word', 'exact' and others take bfloat16", made(storage="float32")),
    ("clip_grad_norm_", lambda: ng.AdamW([{"params": [narrow(4, 6)], "max_grad_norm": 1.0}])),
    (MUON, later_original),
    (r"group 1 because it has no '\w+'.*add_", appended),
    (MUON, lambda: ng.Muon([narrow(4, 6), narrow(5)], lr=0.02)),
    ("does not say that it is monotone", with_own_rule),
    ("momentum = 0.0", lambda: ng.SGD([narrow(4, 6)], nesterov=True)),
    ("dampening = 0.1", lambda: ng.SGD([narrow(4, 6)], momentum=0.9, dampening=0.1, nesterov=True)),
    ("cpu and meta", lambda: device_of_step([torch.ones(1), torch.ones(1, device="meta")])),
    ("another parameter has its memory", on_one_memory),
    ("it is passed twice", given_twice),
    ("on the meta device", lambda: ng.AdamW(nn.Linear(4, 4, device="meta"))),
    ("Holder that has no memory", lambda: ng.AdamW([nn.Parameter(Holder((2, 3)))])),
    ("without the weights", adopting("exp_avg", 2, 3, has_weight=False)),
    ("'weight' of shape", adopting("weight", 3, 2)),
    ("'exp_avg' of shape", adopting("exp_avg", 3, 2)),
    ("has weight, exp_avg, exp_avg_sq", adopting("momentum", 2, 3)),
]


@pytest.mark.parametrize(("words", "make"), REFUSED)
def test_what_cannot_be_obeyed_is_refused_in_one_line(words, make):
    with pytest.raises(ng.errors.RecipeError, match=words):
        make()


def test_what_is_refused_changes_nothing():
    first, second = narrow(2, 3), narrow(2, 3)
    optimizer = ng.AdamW([first, second])
    with pytest.raises(ng.errors.RecipeError, match="of shape"):
        optimizer.adopt({first: 2 * ones, second: torch.ones(3, 2)})
    wide = parameters("float32")
    unfit = nn.Parameter(torch.ones(2, dtype=torch.float64))
    for group in ({"params": [*wide, unfit]}, {"params": [narrow(3)], "storage": "exakt"}):
        with pytest.raises(ng.errors.RecipeError):
            optimizer.add_param_group(group)
    assert torch.equal(first.float(), ones) and not optimizer.state
    assert len(optimizer.param_groups) == 1 and {p.dtype for p in wide} == {torch.float32}
    take_steps(optimizer, range(1))


def test_muon_takes_vectors_at_a_rate_of_adamws():
    optimizer = ng.Muon([narrow(4, 6)], lr=0.02)
    optimizer.add_param_group({"params": [narrow(5)], "rule": "adamw", "lr": 3e-4})
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4]
    take_steps(optimizer, range(1))  # with the betas of the first group
    alike = ng.Muon([narrow(4, 6), narrow(5)], lr=3e-4, adjust_lr_fn="match_rms_adamw")
    assert len(alike.param_groups[0]["params"]) == 2


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
    with pytest.raises(ng.errors.RecipeError, match=r"graph .* would repeat .* random bits"):
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
        with pytest.raises(ng.errors.RecipeError, match="storage 'word' holds bfloat16"):
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
    with pytest.raises(ng.errors.RecipeError, match="'exp_avg' is packed"):
        take_steps(optimizer, range(1, 2))
