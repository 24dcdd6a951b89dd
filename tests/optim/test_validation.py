"""Every option of every rule is read from its group at every step, and what a group may not say is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim.kernel import Kernel
from narrowgauge.optim.validation import check_one_device, refuse_capture
from narrowgauge.spec.storages import STORAGES
from optim.pairs import RULES, build, everything, parameters
from tensors import assert_same_bits, parameters_of, step_gradients, take_steps

# ── read at every step ──────────────────────────────────────────────────────────────────────────────────────────────

ADAM = {"lr": 0.07, "betas": (0.5, 0.6), "eps": 0.3, "weight_decay": 0.4, "maximize": True, "seed": 9}
LOW_RANK = {**ADAM, "scale": 0.1, "update_proj_gap": 1}
LATER: dict[str, dict[str, Any]] = {
    "adamw": ADAM,
    "adam": ADAM,
    "sgd": {"lr": 0.07, "momentum": 0.3, "dampening": 0.4, "weight_decay": 0.4, "nesterov": True, "maximize": True},
    "plain sgd": {"lr": 0.07, "momentum": 0.3, "weight_decay": 0.4, "maximize": True},
    "lion": {"lr": 0.07, "betas": (0.5, 0.0), "weight_decay": 0.4, "maximize": True},
    "own": {"lr": 0.07, "betas": (0.5, 0.6, 0.7), "alpha": 9.0},
    "muon": {**ADAM, "momentum": 0.3, "nesterov": False, "ns_steps": 2, "ns_dtype": "float32", "adjust_lr_fn": "original"},
    "adafactor": {**ADAM, "beta1": 0.2, "beta2_decay": -0.3, "clip_threshold": 0.1, "eps": (0.5, 1e-3),
                  "adam_eps": 0.3, "scale_parameter": True, "relative_step": True},
    "galore": LOW_RANK,
    "gradnorm_lorp": LOW_RANK,
}  # fmt: skip
# What shows only in the steps of vectors, or beside another option.
BESIDE = {"adafactor": {"relative_step": {"lr": 2.0}}}
CASES = [(rule, option) for rule, options in LATER.items() for option in options]


@pytest.mark.parametrize(("rule", "option"), CASES, ids=["-".join(case) for case in CASES])
def test_an_option_set_later_is_that_of_a_new_optimizer_with_the_same_state(rule: str, option: str) -> None:
    """And makes a difference, so that the comparison says something."""
    beside = BESIDE.get(rule, {}).get(option, {})
    moved, kept = (build(rule, parameters("word"), "word", **beside) for _ in range(2))
    for optimizer in (moved, kept):
        take_steps(optimizer, range(2))
    fresh = build(rule, [nn.Parameter(p.detach().clone()) for p in parameters_of(moved)], "word", **beside)
    fresh.load_state_dict(moved.state_dict())
    for optimizer in (moved, fresh):
        for group in optimizer.param_groups:
            group[option] = LATER[rule][option]
    for optimizer in (moved, kept, fresh):
        take_steps(optimizer, range(2, 4))
    assert_same_bits(everything(moved), everything(fresh))
    with pytest.raises(AssertionError):
        assert_same_bits(everything(moved), everything(kept))


MOMENTA = (0.0, 0.0, 0.9, 0.8, 0.0, 0.0, 0.7, 0.6)


def slide(optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Steps whose momentum comes, goes and comes back."""
    for step, momentum in enumerate(MOMENTA):
        optimizer.param_groups[0]["momentum"] = momentum
        for p, gradient in zip(parameters_of(optimizer), step_gradients(parameters_of(optimizer), step), strict=True):
            p.grad = gradient.to(dtype)
        optimizer.step()
    return [p.detach().double() for p in parameters_of(optimizer)]


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_that_comes_and_goes_is_torchs(nesterov: bool) -> None:
    """A buffer is made with the first gradient that meets a momentum, and waits while there is none."""
    options = {"lr": 0.1, "dampening": 0.0 if nesterov else 0.3, "weight_decay": 0.1}
    theirs = torch.optim.SGD([nn.Parameter(p.detach().double()) for p in parameters("float32")], **options)
    ours = ng.SGD(parameters("float32"), storage="float32", compile=False, **options)
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["nesterov"] = nesterov
    for p, q in zip(slide(ours), slide(theirs, torch.float64), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_buffer_that_comes_late_changes_no_bit_of_the_weight(storage: str) -> None:
    """Tails, masters and low parts move to the words of the rule with a buffer; the buffer begins as the gradient does."""
    optimizer, never = (ng.SGD(parameters(storage), lr=0.1, storage=storage, compile=False) for _ in range(2))
    for each in (optimizer, never):
        take_steps(each, range(3))
    before = [optimizer.stored(p) for p in parameters_of(optimizer)]
    optimizer.param_groups[0].update(momentum=0.9, lr=0.0)
    never.param_groups[0]["lr"] = 0.0
    for each in (optimizer, never):
        take_steps(each, range(3, 4))
    for p, q, weight in zip(parameters_of(optimizer), parameters_of(never), before, strict=True):
        if not STORAGES[storage].is_stochastic:
            assert torch.equal(optimizer.stored(p), weight)
        assert torch.equal(optimizer.stored(p), never.stored(q))
        buffer = optimizer.stored(p, "momentum_buffer")
        assert p.grad is not None
        torch.testing.assert_close(buffer, p.grad.to(buffer.dtype), rtol=0.2, atol=0.02)
    assert [float(entry["step"]) for entry in optimizer.state_dict()["state"].values()] == [4.0] * 3


@pytest.mark.parametrize("storage", ["float32", "word", "compact", "float16/split", "collage-plus"])
def test_a_buffer_waits_bit_for_bit_while_there_is_no_momentum(storage: str) -> None:
    optimizer = ng.SGD(parameters(storage), lr=0.1, momentum=0.9, storage=storage, compile=False)
    take_steps(optimizer, range(3))
    before = [optimizer.stored(p, "momentum_buffer") for p in parameters_of(optimizer)]
    optimizer.param_groups[0]["momentum"] = 0.0
    take_steps(optimizer, range(3, 6))
    for p, buffer in zip(parameters_of(optimizer), before, strict=True):
        assert torch.equal(optimizer.stored(p, "momentum_buffer"), buffer) and buffer.any()


def test_momentum_is_a_groups_own() -> None:
    first, second = parameters("word", [(12, 10), (12, 10)])
    optimizer = ng.SGD([{"params": [first], "momentum": 0.9}, {"params": [second]}], lr=0.1, compile=False)
    take_steps(optimizer, range(2))
    assert set(optimizer.state_dict()["state"][0]) == {"step", "tail", "momentum_buffer"}
    assert set(optimizer.state_dict()["state"][1]) == {"step", "tail"}
    assert optimizer.stored(first, "momentum_buffer").any() and not optimizer.stored(second, "momentum_buffer").any()


def test_a_cycle_of_momentum_is_obeyed() -> None:
    """OneCycleLR sets a momentum that the constructor was not given."""
    ends = []
    for make, options in ((torch.optim.SGD, {}), (ng.SGD, {"storage": "float32", "compile": False})):
        weight = nn.Parameter(torch.zeros(4, 4))
        optimizer: torch.optim.Optimizer = make([weight], lr=0.01, **options)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        for _ in range(9):
            weight.grad = torch.ones(4, 4)
            optimizer.step()
            schedule.step()
        ends.append(weight[0, 0].item())
    assert ends[0] == pytest.approx(ends[1], rel=1e-5) and ends[0] < -0.9  # −0.39 without momentum


def test_no_value_of_an_option_needs_a_kernel_of_its_own() -> None:
    optimizer = build("sgd", parameters("word"), "word")
    take_steps(optimizer, range(2))
    kernels: list[Kernel] = list(optimizer._registry.kernels.values())
    for step, momentum in enumerate(MOMENTA):
        optimizer.param_groups[0].update(momentum=momentum, lr=0.1 / (step + 1), weight_decay=0.01 * step)
        take_steps(optimizer, range(step + 2, step + 3))
    assert list(optimizer._registry.kernels.values()) == kernels


def test_a_first_moment_asked_for_late_begins_then_and_may_go_again() -> None:
    """Adafactor's: made as zeros, and left as it is when it is no longer asked for."""
    optimizer = build("adafactor", parameters("word"), "word", beta1=None)
    matrix = parameters_of(optimizer)[0]
    take_steps(optimizer, range(2))
    optimizer.param_groups[0]["beta1"] = 0.75
    factors = optimizer.stored(matrix, "exp_avg_sq_row")
    take_steps(optimizer, range(2, 4))
    moment = optimizer.stored(matrix, "exp_avg")
    assert moment.any() and not torch.equal(optimizer.stored(matrix, "exp_avg_sq_row"), factors)
    optimizer.param_groups[0]["beta1"] = None
    take_steps(optimizer, range(4, 6))
    assert torch.equal(optimizer.stored(matrix, "exp_avg"), moment)
    assert optimizer.num_steps(matrix) == 6


@pytest.mark.parametrize("rule", ["galore", "gradnorm_lorp"])
def test_another_rank_is_refused_once_there_are_states(rule: str) -> None:
    optimizer = build(rule, parameters("word"), "word")
    take_steps(optimizer, range(1))
    before = everything(optimizer)
    optimizer.param_groups[0]["rank"] = 2
    with pytest.raises(ng.errors.RecipeError, match=r"has the shape .* made with .* Set it before the first step"):
        take_steps(optimizer, range(1, 2))
    assert_same_bits(before, everything(optimizer))


# ── what a group may not say ────────────────────────────────────────────────────────────────────────────────────────

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("muon", {"rule": "AdamW"}, r"rule = 'AdamW' .* 'muon'; it may be 'muon' or 'adamw'\. Did you mean 'adamw'\?"),
    ("muon", {"rule": "adam"}, r"it may be 'muon' or 'adamw'\. Did you mean 'adamw'"),
    ("adamw", {"rule": "lion"}, r"it may be 'adamw'\. Build another optimizer"),
    ("sgd", {"rule": "muon"}, r"it may be 'sgd'"),
    ("adamw", {"amsgrad": True}, r"amsgrad = True .* No rule here stores the largest second moment"),
    ("adam", {"fused": True}, "fused = True .* one fused kernel"),
    ("lion", {"foreach": True}, "foreach = True .* one fused kernel"),
    ("sgd", {"capturable": True}, "capturable = True .* cannot be captured"),
    ("adamw", {"differentiable": True}, "differentiable = True .* cannot be differentiated"),
    ("adamw", {"max_grad_norm": 1.0}, "a param group sets max_grad_norm = 1.0. Pass it to the optimizer"),
    ("adamw", {"betas": (1.0, 0.9)}, "beta1 = 1.0 was requested; it must be at least 0 and below 1"),
    ("adam", {"betas": (0.9, float("nan"))}, "beta2 = nan"),
    ("lion", {"betas": (0.9, -0.1)}, "beta2 = -0.1"),
    ("adamw", {"eps": -1e-8}, "eps = -1e-08"),
    ("adamw", {"lr": -1.0}, "lr = -1.0 was requested; it must be at least 0 and finite"),
    ("adamw", {"lr": None}, "lr = None was requested; it must be one number"),
    ("sgd", {"momentum": -0.5}, "momentum = -0.5"),
    ("muon", {"momentum": 1.0}, "momentum = 1.0 was"),
    ("muon", {"adjust_lr_fn": "match_rms"}, "'original', 'match_rms_adamw'. Did you mean 'match_rms_adamw'"),
    ("adafactor", {"eps": (-1e-30, 1e-3)}, "eps1 = -1e-30"),
    ("adafactor", {"beta2_decay": 0.8}, "beta2_decay = 0.8 was requested; it must be below 0"),
    ("galore", {"rank": 0}, "rank = 0 was requested; it must be at least 1"),
    ("adam", {"decoupled_weight_decay": True}, "Take ng.AdamW"),
]


@pytest.mark.parametrize(("rule", "said", "answer"), REFUSED, ids=[f"{rule}-{next(iter(s))}" for rule, s, _ in REFUSED])
def test_what_a_group_may_not_say_is_refused_in_a_sentence(rule: str, said: dict[str, Any], answer: str) -> None:
    """When it is added, when it is loaded, and, whatever sets it in between, at the next step, which changes nothing."""
    optimizer = build(rule, parameters("word"), "word")
    with pytest.raises(ValueError, match=answer):  # which a RecipeError is, as in torch
        optimizer.add_param_group({"params": parameters("word"), **said})
    assert len(optimizer.param_groups) == 1
    take_steps(optimizer, range(1))
    before, saved = everything(optimizer), optimizer.state_dict()
    if not said.keys() & {"fused", "foreach", "capturable", "differentiable"}:  # how torch made a state says nothing
        saved["param_groups"][0].update(said)
        with pytest.raises(ng.errors.RecipeError, match=answer):
            optimizer.load_state_dict(saved)
    if not said.keys() & {"lr", "max_grad_norm"}:
        optimizer.param_groups[0].update(said)
        with pytest.raises(ng.errors.RecipeError, match=answer):
            take_steps(optimizer, range(1, 2))
    assert_same_bits(before, everything(optimizer))


def test_a_rate_below_zero_or_none_at_all_at_a_step() -> None:
    """A schedule may end a rounding below zero; NaN is nobody's intention."""
    optimizer = build("adamw", parameters("word"), "word")
    optimizer.param_groups[0]["lr"] = -1e-22
    take_steps(optimizer, range(1))
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ng.errors.RecipeError, match="lr = nan"):
        take_steps(optimizer, range(1, 2))


@pytest.mark.parametrize("make", [ng.AdamW, ng.Adam, ng.SGD, ng.Lion, ng.Muon, ng.Adafactor, ng.optim.GaLore])
def test_flags_of_torch_are_tolerated_where_they_are_off(make: Any) -> None:
    off = {"fused": False, "foreach": None, "capturable": False, "differentiable": False, "amsgrad": False}
    optimizer = make(parameters("word"), **off)
    optimizer.add_param_group({"params": parameters("word"), **off})
    take_steps(optimizer, range(1))
    with pytest.raises(ng.errors.RecipeError, match="foreach = True"):
        make(parameters("word"), foreach=True)


TORCHS = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Muon, torch.optim.Adafactor]


@pytest.mark.parametrize("theirs", TORCHS)
def test_defaults_are_torchs(theirs: type[torch.optim.Optimizer]) -> None:
    ours = getattr(ng, theirs.__name__)(parameters("float32"), storage="float32").defaults
    said = theirs(parameters("float32")[:1]).defaults
    for name in ours.keys() & said.keys() - {"eps"}:
        assert ours[name] == said[name], name


def test_every_rule_is_here() -> None:
    assert LATER.keys() | {"nesterov", "galore full"} == RULES.keys()


def test_a_step_that_a_cuda_graph_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_capture(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    refuse_capture(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ng.errors.RecipeError, match=r"graph .* would repeat .* random bits"):
        refuse_capture(torch.device("cuda"))


def test_parameters_on_several_devices_are_refused() -> None:
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    assert check_one_device([here, here]) == torch.device("cpu")
    with pytest.raises(ng.errors.RecipeError, match="parameters on cpu and meta"):
        check_one_device([here, there])
