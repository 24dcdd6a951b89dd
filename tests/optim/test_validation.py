"""Every option of every rule is read from its group at every step, and what a group may not say is
refused.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim import GaLore
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.optim.validation import check_one_device
from optim.pairs import RULES, build, everything, parameters
from tables import exhaustive
from tensors import assert_same_bits, parameters_of, take_steps

ADAM = {"lr": 0.07, "betas": (0.5, 0.6), "eps": 0.3, "weight_decay": 0.4, "seed": 9}
LOW_RANK = {**ADAM, "scale": 0.1, "update_proj_gap": 1}
LATER: dict[str, dict[str, Any]] = {
    "adamw": ADAM,
    "adam": ADAM,
    "sgd": {"lr": 0.07, "momentum": 0.3, "dampening": 0.4, "weight_decay": 0.4, "nesterov": True},
    "plain sgd": {"lr": 0.07, "weight_decay": 0.4},
    "lion": {"lr": 0.07, "betas": (0.5, 0.0), "weight_decay": 0.4},
    "own": {"lr": 0.07, "betas": (0.5, 0.6, 0.7), "alpha": 9.0},
    "muon": {**ADAM, "momentum": 0.3, "nesterov": False, "ns_steps": 2, "ns_dtype": "float32", "adjust_lr_fn": "original"},
    "galore": LOW_RANK,
}  # fmt: skip


@functools.cache
def after_four_steps(rule: str, **options: Any) -> dict[str, Tensor]:
    optimizer = build(rule, parameters("word"), "word", **options)
    take_steps(optimizer, range(4))
    return everything(optimizer)


@exhaustive(
    ("rule", "option"), [(rule, option) for rule, options in LATER.items() for option in options]
)
def test_an_option_set_later_is_that_of_a_new_optimizer_with_the_same_state(
    rule: str, option: str
) -> None:
    """And makes a difference, so that the comparison says something."""
    moved = build(rule, parameters("word"), "word")
    take_steps(moved, range(2))
    fresh = build(rule, [nn.Parameter(p.detach().clone()) for p in parameters_of(moved)], "word")
    fresh.load_state_dict(moved.state_dict())
    for optimizer in (moved, fresh):
        for group in optimizer.param_groups:
            group[option] = LATER[rule][option]
    for optimizer in (moved, fresh):
        take_steps(optimizer, range(2, 4))
    assert_same_bits(everything(moved), everything(fresh))
    with pytest.raises(AssertionError):
        assert_same_bits(everything(moved), after_four_steps(rule))


@pytest.mark.parametrize(
    ("rule", "option", "value", "words"),
    [("galore", "rank", 2, "projector"), ("plain sgd", "momentum", 0.9, "no 'momentum_buffer_bits'")],
)  # fmt: skip
def test_options_that_need_other_states_are_refused(
    rule: str, option: str, value: object, words: str
) -> None:
    optimizer = build(rule, parameters("word"), "word")
    take_steps(optimizer, range(1))
    optimizer.param_groups[0][option] = value
    with pytest.raises(ng.errors.RecipeError, match=words):
        take_steps(optimizer, range(1, 2))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon"])
def test_flags_and_defaults_are_torchs(name: str) -> None:
    """Flags are tolerated where they are off, or ask for what is done."""
    off = {
        "fused": True,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "amsgrad": False,
    }
    ours = getattr(ng, name)(parameters("float32", [(6, 4)]), storage="float32", **off)
    ours.add_param_group({"params": parameters("float32", [(6, 4)]), **off})
    take_steps(ours, range(1))
    with pytest.raises(ng.errors.RecipeError, match="amsgrad = True"):
        getattr(ng, name)(parameters("word"), amsgrad=True)
    theirs = (
        getattr(torch.optim, name)(parameters("float32")[:1]).defaults
        if hasattr(torch.optim, name)
        else {}
    )
    for option in ours.defaults.keys() & theirs.keys() - {"eps", "foreach", "fused"}:
        assert ours.defaults[option] == theirs[option], option


def test_no_step_is_taken_in_a_cuda_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = ng.AdamW([torch.nn.Parameter(torch.ones(2, 2))], storage="float32").step
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ng.errors.RecipeError, match=r"graph .* would repeat .* random bits"):
        step()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"betas": (0.9,)}, "two numbers"), ({"lr": "1"}, "one number"), ({"seed": "x"}, "one integer"),
     ({"audit_every": 1.5}, "one integer"), ({"storage": "bfloat16/word"}, "the storage is 'word'"),
     ({"storage": "float32"}, "'word', 'exact' and others take it")],
)  # fmt: skip
def test_wrong_options_are_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ng.errors.RecipeError, match=words):
        ng.AdamW(parameters("word"), **options)


def test_values_of_another_shape_or_tensor_are_not_adopted_and_change_nothing() -> None:
    first, weight = params = [
        nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16)) for _ in range(2)
    ]
    optimizer = ng.AdamW(params)
    for weights, states, words in (
        ({weight: torch.ones(3, 2)}, {}, "of shape"),
        ({torch.ones(2): torch.ones(2)}, {}, "does not step"),
        ({}, {weight: {}}, "states and no weight"),
        ({weight: torch.ones(2, 3)}, {weight: {"exp_avg": torch.ones(3, 2)}}, "'exp_avg' of shape"),
        (
            {weight: torch.ones(2, 3)},
            {weight: {"momentum": torch.ones(2, 3)}},
            "has exp_avg, exp_avg_sq",
        ),
    ):
        with pytest.raises(ng.errors.RecipeError, match=words):
            optimizer.adopt({first: torch.zeros(2, 3), **weights}, states)
        assert first.all() and weight.all() and not optimizer.state
    optimizer = GaLore(params, rank=1)
    with pytest.raises(ng.errors.RecipeError, match="'projector' of shape"):
        optimizer.adopt({first: torch.zeros(2, 3)}, {first: {"projector": torch.ones(3, 1)}})
    assert first.all()
    optimizer.adopt({first: torch.zeros(2, 3)}, {first: {"projector": torch.ones(2, 1)}})
    assert torch.equal(optimizer.stored(first, "projector"), torch.ones(2, 1))


@pytest.mark.parametrize("rule", RULES)
def test_one_cycle_cycles_the_momentum_that_the_rule_reads(rule: str) -> None:
    optimizer = build(rule, parameters("word"), "word")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    take_steps(optimizer, range(1))
    schedule.step()
    (group,) = optimizer.param_groups
    if "momentum" in group:
        assert 0.85 < group["momentum"] < 0.95
        assert "betas" not in group or group["betas"] == (0.9, 0.999)
    else:
        assert 0.85 < group["betas"][0] < 0.95
    if "momentum" in group:
        optimizer.stored(group["params"][0], "momentum_buffer")  # no KeyError


def test_a_group_that_comes_later_has_all_options() -> None:
    optimizer = ng.Muon(parameters("word"), betas=(0.5, 0.6), adjust_lr_fn="match_rms_adamw")
    optimizer.add_param_group({"params": parameters("word", [(5,)])})
    assert optimizer.param_groups[0].keys() == optimizer.param_groups[1].keys()
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)


def test_plain_sgd_under_one_cycle_is_torchs() -> None:
    ours = ng.SGD(parameters("float32"), lr=0.1, storage="float32", compile=False)
    theirs = torch.optim.SGD(parameters("float32"), lr=0.1)
    schedules = []
    for optimizer in (ours, theirs):
        schedules.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6))
    for step in range(5):
        for optimizer, schedule in zip((ours, theirs), schedules, strict=True):
            take_steps(optimizer, range(step, step + 1))
            schedule.step()
    for p, q in zip(parameters_of(ours), parameters_of(theirs), strict=True):
        torch.testing.assert_close(p, q)


def test_parameters_that_share_memory_are_refused() -> None:
    memory = torch.zeros(8, 8, dtype=torch.bfloat16)
    views = {True: (memory, memory[2:6]), False: (memory[:, ::2], memory[:, 1::2])}
    for is_shared, pair in views.items():
        params = [nn.Parameter(view) for view in pair]
        optimizer = ng.AdamW(params)
        if is_shared:
            with pytest.raises(ng.errors.RecipeError, match="because they share their memory"):
                take_steps(optimizer, range(1))
            assert not optimizer.state and not memory.any()
        else:
            take_steps(optimizer, range(1))
            assert memory.all()


def test_a_rule_that_is_not_monotone_takes_no_scale_by_row() -> None:
    rule = dataclasses.replace(ADAMW, name="own", monotone=False)
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    for storage in ("compact", "states8", "float32-states8"):
        with pytest.raises(ng.errors.RecipeError, match="does not say that it is monotone"):
            ng.Optimizer(parameters(storage), rule, options, storage=storage)
    take_steps(ng.Optimizer(parameters("word"), rule, options, storage="word"), range(1))


def test_several_devices_in_one_optimizer_are_refused() -> None:
    tensors = [torch.zeros(1), torch.zeros(1, device="meta")]
    with pytest.raises(ng.errors.RecipeError, match="on cpu and meta together"):
        check_one_device(tensors)
    assert check_one_device(tensors[:1]) == torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float64])
def test_a_frozen_parameter_of_another_format_is_left_alone(dtype: torch.dtype) -> None:
    """As the base of a quantized model. It is refused when it has a gradient."""
    (weight,) = parameters("word", [(4, 4)])
    frozen = nn.Parameter(torch.ones(4, 4, dtype=dtype), requires_grad=False)
    optimizer = ng.AdamW([weight, frozen], compile=False)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert frozen.dtype is dtype and frozen not in optimizer.state
    if dtype is torch.float64:
        frozen.requires_grad_()
        frozen.grad = torch.ones_like(frozen)
        with pytest.raises(ng.errors.RecipeError, match="storage 'word' holds bfloat16"):
            optimizer.step()


def test_notes_of_other_code_stay_beside_a_state() -> None:
    (weight,) = parameters("word", [(4, 4)])
    optimizer = ng.AdamW([weight], compile=False)
    optimizer.state[weight]["old_p"] = weight.detach().clone()
    take_steps(optimizer, range(1))
    optimizer.state[weight]["slow"] = torch.zeros(4, 4)
    saved = optimizer.state_dict()
    take_steps(optimizer, range(1, 2))
    optimizer.load_state_dict(saved)
    state = optimizer.state[weight]
    assert "fast" not in state and not state["slow"].any() and state["old_p"].shape == (4, 4)
    state["exp_avg"] = torch.zeros(4, 4)
    with pytest.raises(ng.errors.RecipeError, match="'exp_avg' is packed"):
        take_steps(optimizer, range(1, 2))


@pytest.mark.parametrize("rule", ["adamw", "adam"])
@pytest.mark.parametrize("storage", ["float32", "exact", "kahan", "word", "states8"])
def test_a_gradient_whose_square_is_infinite_freezes_its_weight_as_in_torch(
    rule: str, storage: str
) -> None:
    (weight,) = parameters(storage, [(4, 4)])
    optimizer = build(rule, [weight], storage, lr=1e-3, weight_decay=0.0)
    for gradient in (1.0, 3e38, 1.0, 1.0):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    assert weight.isfinite().all()
    if storage in ("float32", "exact", "kahan"):  # others keep moments in a window, which ends
        assert torch.equal(weight.detach(), before)


def test_muon_refuses_vectors_at_its_own_rate() -> None:
    matrix, vector = parameters("word", [(4, 6), (5,)])
    with pytest.raises(ng.errors.RecipeError, match=r"no matrix.*'rule': 'adamw'"):
        ng.Muon([matrix, vector], lr=0.02)
    optimizer = ng.Muon([matrix], lr=0.02)
    with pytest.raises(ng.errors.RecipeError, match="no matrix"):
        optimizer.add_param_group({"params": [vector]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [vector], "rule": "adamw", "lr": 3e-4})
    ng.Muon([matrix, vector], lr=3e-4, adjust_lr_fn="match_rms_adamw")


def test_maximize_is_the_optimizers_and_no_groups() -> None:
    (weight,) = parameters("word", [(4, 6)])
    group = {"params": [weight], "maximize": True}
    with pytest.raises(ng.errors.RecipeError, match="applies to all groups"):
        ng.AdamW([group])
    ng.AdamW([{**group, "maximize": False}])
