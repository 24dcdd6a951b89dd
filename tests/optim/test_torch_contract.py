"""What torch asks of its own optimizers, asked of ours, over torch's own inputs.

The inputs are those of ``torch.testing._internal.common_optimizers``, which torch's ``TestOptimRenewed`` runs through; the
claims are its claims, in tests of our own. Where an input is an option that no rule here has, the claim is that it is refused
in a sentence.
"""

from __future__ import annotations

import copy
import io
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

import narrowgauge as ng
from optim.pairs import everything

if "expecttest" not in sys.modules:
    # torch's helpers import it for tests that rewrite themselves; the inputs need none of it.
    try:
        import expecttest  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in

from torch.testing._internal.common_optimizers import OptimizerErrorEnum, OptimizerInput, optim_db

from tensors import assert_same_bits

NAMES = ("AdamW", "Adam", "SGD", "Muon", "Adafactor")
INFOS = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in NAMES}
# torch's names for options of ours; an option that is no rule's here and means nothing where it is torch's default.
RENAMED = {"d": "clip_threshold"}
REFUSED = {"amsgrad", "capturable", "fused", "foreach", "differentiable"}


def options_of(given: OptimizerInput) -> dict[str, Any]:
    return {RENAMED.get(name, name): value for name, value in given.kwargs.items()}


def inputs(name: str) -> list[dict[str, Any]]:
    return [options_of(given) for given in INFOS[name].optim_inputs_func(device="cpu")]


CASES = [
    (name, options)
    for name in NAMES
    for options in inputs(name)
    if not any(options.get(flag) for flag in REFUSED) and not options.keys() & {"ns_coefficients"}
]
IDS = [f"{name}-{'-'.join(options) or 'default'}" for name, options in CASES]
EACH = pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
DEFAULT = pytest.mark.parametrize("name", NAMES)


def weights(storage: str = "float32", *, contiguous: bool = True) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if storage == "word" else torch.float32
    whole = [torch.randn(*shape, 2, generator=generator).to(dtype) for shape in ((10, 5), (10,))]
    return [nn.Parameter(x[..., 0].contiguous() if contiguous else x[..., 0]) for x in whole]


def make(name: str, params: Any, options: dict[str, Any], storage: str = "float32") -> ng.Optimizer:
    optimizer: ng.Optimizer = getattr(ng, name)(params, storage=storage, compile=False, **copy.deepcopy(options))
    return optimizer


def closure_of(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> Callable[[], Tensor]:
    """A loss that goes down along the gradient, as a function that differentiates it."""
    entry = torch.randn(5, generator=torch.Generator().manual_seed(1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (params[0].float().mv(entry) + params[1].float()).pow(2).sum()
        loss.backward()
        return loss

    return closure


def stepped(name: str, options: dict[str, Any], storage: str = "float32", steps: int = 3) -> ng.Optimizer:
    params = weights(storage)
    optimizer = make(name, params, options, storage)
    for _ in range(steps):
        optimizer.step(closure_of(optimizer, params))
    return optimizer


# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("storage", ["float32", "word"])
@EACH
def test_steps_go_the_right_way(name: str, options: dict[str, Any], storage: str) -> None:
    """Contiguous or not; up where that was asked for; a closure's loss comes back."""
    for contiguous in (True, False):
        params = weights(storage, contiguous=contiguous)
        optimizer = make(name, params, options, storage)
        closure = closure_of(optimizer, params)
        first = closure().item()
        losses = [optimizer.step(closure) for _ in range(20)]
        last = closure().item()
        assert last > first if options.get("maximize") else last < first
        assert losses[0].item() == first


SCHEDULED = [(name, place) for name in NAMES for place in range(len(INFOS[name].scheduler_inputs))]


@pytest.mark.parametrize(("name", "place"), SCHEDULED)
def test_schedulers_move_its_rates(name: str, place: int) -> None:
    params = weights()
    optimizer = make(name, params, {})
    schedules = [build(optimizer) for build in INFOS[name].scheduler_inputs[place]]
    closure, rates = closure_of(optimizer, params), []
    first = closure()
    for _ in range(20):
        loss = optimizer.step(closure)
        for schedule in schedules:
            if isinstance(schedule, ReduceLROnPlateau):
                schedule.step(loss)
            else:
                assert isinstance(schedule, LRScheduler)
                schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    assert len(set(rates)) > 1 or all(isinstance(s, ReduceLROnPlateau) for s in schedules)
    assert closure() < first


@EACH
def test_it_takes_torchs_own_steps(name: str, options: dict[str, Any]) -> None:
    """Of matrices alone where torch's takes no others; Adafactor's vectors are AdamW's here."""
    kept = slice(0, 1) if name in ("Muon", "Adafactor") else slice(None)
    ours, theirs = weights()[kept], weights()[kept]
    original = {old: options[new] for old, new in RENAMED.items() if new in options}
    asked = {key: value for key, value in options.items() if key not in RENAMED.values()}
    mine, twin = make(name, ours, options), INFOS[name].optim_cls(theirs, **asked, **original)
    for step in range(5):
        generator = torch.Generator().manual_seed(100 + step)
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        mine.step()
        twin.step()
    scale = max((q.detach() - w).abs().max().item() for q, w in zip(theirs, weights()[kept], strict=True))
    for p, q in zip(ours, theirs, strict=True):
        # Muon's products have bfloat16 operands in both, rounded in other places.
        torch.testing.assert_close(p, q, rtol=1e-6, atol=(0.06 if name == "Muon" else 1e-4) * scale)


@EACH
def test_without_gradients_a_step_does_nothing(name: str, options: dict[str, Any]) -> None:
    params = weights()
    optimizer = make(name, params, options)
    optimizer.step()
    assert not optimizer.state_dict()["state"]
    assert all(torch.equal(p, q) for p, q in zip(params, weights(), strict=True))


@EACH
def test_with_gradients_of_zero_it_only_decays(name: str, options: dict[str, Any]) -> None:
    params = weights()
    optimizer = make(name, params, options)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    still = not optimizer.param_groups[0]["weight_decay"]
    assert all(torch.equal(p, q) == still for p, q in zip(params, weights(), strict=True))


@DEFAULT
@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_groups_have_rates_and_decays_of_their_own(name: str, option: str) -> None:
    first, second = weights()
    optimizer = make(name, [{"params": [first]}, {"params": [second], option: 0.0}], {option: 0.1})
    assert [group[option] for group in optimizer.param_groups] == [0.1, 0.0]
    for p in (first, second):
        p.grad = torch.ones_like(p) if option == "lr" else torch.zeros_like(p)
    optimizer.step()
    assert not torch.equal(first, weights()[0]) and torch.equal(second, weights()[1])


@DEFAULT
def test_a_tensor_rate_is_a_rate(name: str) -> None:
    one, other = stepped(name, {"lr": 0.0625}), stepped(name, {"lr": torch.tensor(0.0625)})
    assert_same_bits(everything(one), everything(other))


# ── states ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("storage", ["float32", "word"])
@EACH
def test_a_state_is_the_same_after_saving_copying_and_pickling(
    name: str, options: dict[str, Any], storage: str
) -> None:
    """By ``torch.save`` read with ``weights_only``, by ``deepcopy``, with plain numbers for steps; and goes on alike."""
    optimizer = stepped(name, options, storage)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for entry in loaded["state"].values():
        entry["step"] = int(entry["step"])
    twin = make(
        name, [nn.Parameter(p.detach().clone()) for g in optimizer.param_groups for p in g["params"]], options, storage
    )
    twin.load_state_dict(loaded)
    copied = copy.deepcopy(optimizer)
    for each in (optimizer, twin, copied):
        params = [p for group in each.param_groups for p in group["params"]]
        each.step(closure_of(each, params))
    assert_same_bits(everything(optimizer), everything(twin))
    assert_same_bits(everything(optimizer), everything(copied))


@DEFAULT
def test_it_can_be_printed(name: str) -> None:
    optimizer = stepped(name, {})
    assert repr(optimizer).startswith(f"{name} (") and "Parameter Group 0" in repr(optimizer)
    assert repr(optimizer).count(" lr: ") == 1


@DEFAULT
@pytest.mark.parametrize("named", [False, True])
def test_a_state_goes_from_named_parameters_to_unnamed_ones_and_back(name: str, named: bool) -> None:
    params, others = weights(), weights()
    pairs = [(f"p{place}", p) for place, p in enumerate(params)], [(f"p{place}", p) for place, p in enumerate(others)]
    optimizer = make(name, pairs[0] if named else params, {})
    optimizer.step(closure_of(optimizer, params))
    twin = make(name, others if named else pairs[1], {})
    twin.load_state_dict(optimizer.state_dict())
    assert [float(entry["step"]) for entry in twin.state_dict()["state"].values()] == [1.0, 1.0]


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────────


@DEFAULT
def test_what_torch_refuses_is_refused(name: str) -> None:
    """With an error of the same kind; a complex parameter, a wrong option, parameters that are none."""
    info, count = INFOS[name], 0
    for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = error.optimizer_error_input
        options = options_of(given)
        if isinstance(given.params, list) and name == "Muon" and "2D" in error.error_regex:
            continue  # ours takes what is no matrix by AdamW
        if any(isinstance(beta, Tensor) for beta in options.get("betas", ())):
            continue  # ours reads a rate where it lies
        params = given.params if given.params is not None else weights()
        if issubclass(error.error_type, Warning):
            with pytest.warns(error.error_type):
                make(name, params, options)
        else:
            on_step = error.error_on is OptimizerErrorEnum.STEP_ERROR
            with pytest.raises((error.error_type, ng.errors.RecipeError) if on_step else error.error_type):
                make(name, params, options).step()
        count += 1
    assert count >= 5


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_options_that_no_rule_here_has_are_refused_in_a_sentence(name: str) -> None:
    for options in inputs(name):
        if flags := [flag for flag in REFUSED if options.get(flag)]:
            with pytest.raises(ng.errors.RecipeError, match=f"({'|'.join(flags)}) = True was requested"):
                make(name, weights(), options)
    with pytest.raises(ng.errors.RecipeError, match="foreach = True"):
        make(name, weights(), {"foreach": True})
