"""One table of rule × storage, and the contracts that every pair keeps; all of it eager, on small shapes.

A rule's text and a storage's codes meet in one place, ``decode -> rule -> encode``, so most contracts could fail for any
pair and are asked of all: learning, going on from a copy, odd shapes and gradients. What a contract asks is in few tests, each
of which checks several things on one optimizer: building and warming up two hundred pairs is what costs.

- ``EVERY``: all pairs that are legal.
- ``MOST``: in the two float8 rows, where the arithmetic of expansions takes 30 ms a step, only rules that differ from the
  others in more than their text; without a second moment the two rows are one.
- ``SOME``: every rule in a flat and a row-wise storage, every storage under one elementwise rule: for what neither a
  rule nor a storage has any part in alone, such as signs of gradients and groups.

What belongs to :class:`narrowgauge.optim.optimizer.Optimizer` alone is asked of a few pairs, named at the test.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import math
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import narrowgauge as ng
from narrowgauge.optim.checks import check_rule
from narrowgauge.storages import STORAGES

Shape = tuple[int, ...]
SHAPES: list[Shape] = [(12, 10), (7, 9), (5,)]


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────


def example(name: str) -> ModuleType:
    """An example as a module, which others can name: a rule is pickled by the names of its functions."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def own(params: Any, *, lr: float, betas: tuple[float, ...], alpha: float, **options: Any) -> ng.Optimizer:
    """The rule of the example; as a user's own, it is given its options by hand."""
    return ng.Optimizer(params, OWN.ADEMAMIX, {"lr": lr, "betas": betas, "alpha": alpha}, **options)


OWN = example("own_rule")


@dataclass(frozen=True)
class Row:
    """One rule of the table.

    Args:
        make: what builds its optimizer.
        options: with which it learns fast.
        share: what 24 steps leave of the loss in float32; every storage may leave a quarter more.
        looser: storages that may leave more than that, and how many times as much as float32.
        matrix: whether it looks at whole matrices.
    """

    make: Callable[..., ng.Optimizer]
    options: dict[str, Any]
    share: float
    looser: dict[str, float] = field(default_factory=dict)
    matrix: bool = False


NAIVE, FLOAT8 = ("naive", "no-master"), ("float8/collage-light", "float8/collage-plus")
SUBSPACE = {"lr": 0.4, "rank": 4, "update_proj_gap": 3, "scale": 1.0}
RULES = {
    "adamw": Row(ng.AdamW, {"lr": 0.3}, 0.026),
    "adam": Row(ng.Adam, {"lr": 0.3, "weight_decay": 1e-3}, 0.029),
    "sgd": Row(ng.SGD, {"lr": 0.2, "momentum": 0.8}, 3.4e-3),
    "nesterov": Row(ng.SGD, {"lr": 0.2, "momentum": 0.8, "nesterov": True}, 3.1e-4, dict.fromkeys(FLOAT8, 4.5)),
    "plain sgd": Row(ng.SGD, {"lr": 0.5}, 4.8e-4, dict.fromkeys(NAIVE, 1.5) | dict.fromkeys(FLOAT8, 2.3)),
    "lion": Row(ng.Lion, {"lr": 0.2}, 0.03),
    "own": Row(own, {"lr": 0.1, "betas": (0.9, 0.999, 0.99), "alpha": 2.0}, 0.14),
    "muon": Row(ng.Muon, {"lr": 0.5, "weight_decay": 0.0}, 0.113, matrix=True),
    "adafactor": Row(ng.Adafactor, {"lr": 0.3, "beta1": 0.9}, 0.029, matrix=True),
    "galore": Row(ng.GaLore, SUBSPACE, 0.052, matrix=True),
    "gradnorm_lorp": Row(ng.GradNormLoRP, SUBSPACE, 0.083, matrix=True),
}


def is_legal(rule: str, storage: str) -> bool:
    return not (RULES[rule].matrix and STORAGES[storage].arithmetic == "expansion")


PAIRS = [(rule, storage) for rule in RULES for storage in STORAGES if is_legal(rule, storage)]
COSTLY = [(rule, FLOAT8[0]) for rule in ("adam", "nesterov", "lion")] + [
    (rule, FLOAT8[1]) for rule in ("adam", "sgd", "nesterov", "plain sgd", "lion")
]
MOST_PAIRS = [pair for pair in PAIRS if pair not in COSTLY]
SOME_PAIRS = [pair for pair in PAIRS if pair[1] in ("word", "compact") or pair[0] == "adamw"]


def over(pairs: Sequence[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("rule", "storage"), pairs, ids=["-".join(pair) for pair in pairs])


EVERY, MOST, SOME = over(PAIRS), over(MOST_PAIRS), over(SOME_PAIRS)
ELEMENTWISE = over([pair for pair in MOST_PAIRS if not RULES[pair[0]].matrix])


def build(rule: str, params: Any, storage: str, **options: Any) -> ng.Optimizer:
    row = RULES[rule]
    return row.make(params, storage=storage, compile=False, **{**row.options, **options})


def parameters(storage: str, shapes: Sequence[Shape] = SHAPES, scale: float = 0.5) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) * scale for shape in shapes]
    return [nn.Parameter(value.to(getattr(torch, STORAGES[storage].visible))) for value in values]


def members(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients(params: Sequence[Tensor], step: int) -> list[Tensor]:
    """Gaussian gradients of one step, in the parameters' format."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype) for p in params]


def take_steps(optimizer: ng.Optimizer, steps: range) -> None:
    params = members(optimizer)
    for step in steps:
        for p, gradient in zip(params, gradients(params, step), strict=True):
            p.grad = gradient
        optimizer.step()


def everything(optimizer: ng.Optimizer) -> dict[str, Tensor]:
    """Visible weights and all that is kept, copied, in the parameters' order."""
    result = {f"{k} visible": p.detach().clone() for k, p in enumerate(members(optimizer))}
    for k, entry in optimizer.state_dict()["state"].items():
        result |= {f"{k} {name}": value.clone() for name, value in entry.items()}
    return result


def bits(value: Tensor) -> Tensor:
    # A single element may be called contiguous with any stride, and is then no row of bytes.
    return torch.cat([value.reshape(-1)]).view(torch.uint8)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Equal names, shapes, dtypes and bits."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(bits(value), bits(other[name])), name


# ── what every pair does ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rule", RULES)
def test_what_a_rule_cannot_use_is_refused_with_the_reason(rule: str) -> None:
    for name, row in STORAGES.items():
        if is_legal(rule, name):
            check_rule(build(rule, parameters(name), name).rule, row)
            continue
        with pytest.raises(ng.RecipeError, match="arithmetic of expansions a matrix product is not defined") as refused:
            build(rule, parameters(name), name)
        assert f"Take '{row.cure}', or an elementwise rule." in str(refused.value)


def left_over(rule: str, storage: str, steps: int = 24) -> list[float]:
    """What share of its loss is left of a linear regression (a matrix) and of a parabola (a vector)."""
    params = parameters(storage, [(7, 9), (5,)])
    generator = torch.Generator().manual_seed(7)
    targets = [torch.randn(p.shape, generator=generator) for p in params]
    inputs = torch.randn(32, 7, generator=generator)
    # Of the loss ½ ⟨error, curvature · error⟩.
    curvatures = [inputs.T @ inputs / 32, torch.eye(5)]
    optimizer = build(rule, params, storage)
    lr, losses = optimizer.param_groups[0]["lr"], []
    for step in range(steps + 1):
        errors = [p.detach().float() - target for p, target in zip(params, targets, strict=True)]
        slopes = [curvature @ error for curvature, error in zip(curvatures, errors, strict=True)]
        losses.append([float((error * slope).sum()) for error, slope in zip(errors, slopes, strict=True)])
        for p, slope in zip(params, slopes, strict=True):
            p.grad = slope.to(p.dtype)
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.step()
    return [last / first for first, last in zip(losses[0], losses[-1], strict=True)]


@EVERY
def test_it_learns_a_regression_and_a_parabola(rule: str, storage: str) -> None:
    row = RULES[rule]
    assert max(left_over(rule, storage)) < row.share * row.looser.get(storage, 1.25)


def through_torch(optimizer: ng.Optimizer, twin: ng.Optimizer, _: Path) -> None:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))


def through_safetensors(optimizer: ng.Optimizer, twin: ng.Optimizer, _: Path) -> None:
    state = optimizer.state_dict()
    flat = {f"{k}/{name}": value for k, entry in state["state"].items() for name, value in entry.items()}
    entries: dict[int, dict[str, Tensor]] = {k: {} for k in state["state"]}
    for name, value in load(save(flat)).items():
        number, key = name.split("/")
        entries[int(number)][key] = value
    twin.load_state_dict({"state": entries, "param_groups": state["param_groups"]})


def through_distributed_checkpoint(optimizer: ng.Optimizer, twin: ng.Optimizer, place: Path) -> None:
    """As a distributed trainer does: the twin takes a step of no length to have states, and they are filled in place."""
    saved = get_optimizer_state_dict(nn.ParameterList(members(optimizer)), optimizer)
    dcp.save(saved, checkpoint_id=place, no_dist=True)
    model = nn.ParameterList(members(twin))
    state = get_optimizer_state_dict(model, twin)
    dcp.load(state, checkpoint_id=place, no_dist=True)
    set_optimizer_state_dict(model, twin, state)


WAYS = (through_torch, through_safetensors, through_distributed_checkpoint)


@MOST
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_goes_on_from_every_copy_bit_for_bit(rule: str, storage: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_grad_norm": 2.0, "audit_every": 2, "seed": 3, "lr": 0.01}
    first = build(rule, parameters(storage), storage, **options)
    take_steps(first, range(3))
    twins = {"deepcopy": copy.deepcopy(first), "pickle": pickle.loads(pickle.dumps(first))}
    for way in WAYS:
        copies = [nn.Parameter(p.detach().clone()) for p in members(first)]
        twin = twins[way.__name__] = build(rule, copies, storage, **{**options, "seed": 0, "lr": 1.0})
        way(first, twin, tmp_path)
    before = everything(first)
    for twin in twins.values():
        take_steps(twin, range(3, 5))
    assert_same(before, everything(first))  # a copy goes its own way
    take_steps(first, range(3, 5))
    for twin in twins.values():
        assert_same(everything(first), everything(twin))
        assert twin.param_groups[0]["seed"] == 3 and twin.num_skipped == 0


@ELEMENTWISE
def test_a_matrix_cut_by_rows_has_the_same_bits(rule: str, storage: str) -> None:
    whole = build(rule, parameters(storage), storage, max_grad_norm=2.0)
    cuts = {0: (1, 4, 7), 1: (2, 5), 2: (5,)}
    pieces = [nn.Parameter(part.clone()) for k, p in enumerate(members(whole)) for part in p.detach().split(cuts[k])]
    parts = build(rule, pieces, storage, max_grad_norm=2.0)
    for step in range(4):
        slopes = gradients(members(whole), step)
        for p, slope in zip(members(whole), slopes, strict=True):
            p.grad = slope
        for p, slope in zip(pieces, [s for k, g in enumerate(slopes) for s in g.split(cuts[k])], strict=True):
            p.grad = slope.clone()
        whole.step()
        parts.step()
    found, first = everything(parts), 0
    for k, rows in cuts.items():
        mine = range(first, first + len(rows))
        for name, value in everything(whole).items():
            number, what = name.split()
            if number == str(k) and what != "step":
                assert torch.equal(bits(value), bits(torch.cat([found[f"{i} {what}"] for i in mine]))), name
        first += len(rows)


@MOST
def test_gradients_that_are_absent_zero_or_not_finite(rule: str, storage: str) -> None:
    decay = {"weight_decay": 0.0} if rule != "own" else {}
    optimizer, twin = (build(rule, parameters(storage), storage, max_grad_norm=2.0, **decay) for _ in range(2))
    params, start = members(optimizer), [p.detach().float() for p in members(optimizer)]
    for each in (optimizer, twin):
        for p in members(each):
            p.grad = torch.zeros_like(p)
        each.step()
    for p, before in zip(params, start, strict=True):
        # Weights that are kept as float8 are first cut to what three of its words hold.
        near = 2.0**-10 if STORAGES[storage].weight.scaled else 0.0
        assert torch.allclose(optimizer.stored(p), before, rtol=0.0, atol=near)
    for each in (optimizer, twin):
        take_steps(each, range(1))
    kept = everything(optimizer)
    for bad, place in ((math.inf, 0), (-math.inf, 1), (math.nan, 2)):
        for p, gradient in zip(params, gradients(params, 9), strict=True):
            p.grad = gradient
        params[place].grad.view(-1)[3] = bad  # type: ignore[union-attr]
        optimizer.step()
        assert optimizer.last_overflow == [f"param {place}"]
        assert_same(kept, everything(optimizer))
    assert optimizer.num_skipped == 3
    for each in (optimizer, twin):
        take_steps(each, range(1, 2))
    assert_same(everything(optimizer), everything(twin))
    before = everything(optimizer)
    params[0].grad = None
    for p in params[1:]:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    after = everything(optimizer)
    assert_same(*({n: v for n, v in found.items() if n.startswith("0 ")} for found in (before, after)))
    assert [float(after[f"{k} step"]) for k in range(3)] == [3.0, 4.0, 4.0]
    assert all(optimizer.stored(p).isfinite().all() for p in params)


ODD: list[Shape] = [(), (0,), (0, 4), (1, 1), (3, 5, 2), (7, 9), (4, 3, 2, 2)]


def strided(values: Tensor) -> Tensor:
    """The same values, at other places in memory."""
    if values.ndim == 4:
        return values.contiguous(memory_format=torch.channels_last)
    backwards = tuple(range(values.ndim))[::-1]
    wide = torch.zeros((*values.shape[::-1], 2), dtype=values.dtype)
    wide[..., 1] = values.permute(backwards)
    return wide[..., 1].permute(backwards)


@MOST
def test_odd_shapes_and_strides_have_the_same_bits(rule: str, storage: str) -> None:
    plain = build(rule, parameters(storage, ODD), storage, max_grad_norm=2.0)
    odd = build(rule, [nn.Parameter(strided(p.detach())) for p in members(plain)], storage, max_grad_norm=2.0)
    places = [(p.data_ptr(), p.stride()) for p in members(odd)]
    before = [plain.stored(p) for p in members(plain)]
    for step in range(3):
        for p, q, gradient in zip(members(plain), members(odd), gradients(members(plain), step), strict=True):
            # The strides of a gradient are its own: of one parameter it lies as in memory, of the other it does not.
            p.grad, q.grad = (gradient, strided(gradient)) if step != 1 else (strided(gradient), gradient.clone())
        plain.step()
        odd.step()
    assert_same(everything(plain), everything(odd))
    assert places == [(p.data_ptr(), p.stride()) for p in members(odd)]
    for p, value in zip(members(plain), before, strict=True):
        assert p.numel() < 2 or not torch.equal(plain.stored(p), value)


@SOME
def test_to_maximise_is_to_descend_along_the_negative(rule: str, storage: str) -> None:
    up, down = build(rule, parameters(storage), storage, maximize=True), build(rule, parameters(storage), storage)
    for step in range(3):
        for p, q, gradient in zip(members(up), members(down), gradients(members(up), step), strict=True):
            p.grad, q.grad = gradient, -gradient
        up.step()
        down.step()
    assert_same(everything(up), everything(down))


# ── weights: tied, frozen, late, in groups ──────────────────────────────────────────────────────────────────────────

FEW = over([("adamw", "word"), ("sgd", "compact"), ("own", "split8"), ("muon", "kahan"), ("lion", "float16/split")])


class Tied(nn.Module):
    """An embedding whose weight is also the output's."""

    def __init__(self, storage: str) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(12, 10), nn.Linear(10, 12, bias=False)
        self.embedding.weight = self.output.weight = parameters(storage, [(12, 10)])[0]

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.output(self.embedding(tokens))
        return output.float().square().mean()


@FEW
def test_tied_weights_are_one(rule: str, storage: str) -> None:
    model, plain = Tied(storage), parameters(storage, [(12, 10)])
    optimizer, twin = build(rule, model.named_parameters(), storage), build(rule, plain, storage)
    with pytest.warns(UserWarning, match="duplicate"):  # torch's own
        doubled = build(rule, list(Tied(storage).named_parameters(remove_duplicate=False)), storage, max_grad_norm=2.0)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.arange(4) + step).backward()
        plain[0].grad = members(optimizer)[0].grad.clone()  # type: ignore[union-attr]
        for p in members(doubled):
            p.grad = plain[0].grad.clone()
        for each in (optimizer, twin, doubled):
            each.step()
    assert model.embedding.weight is model.output.weight
    assert_same(everything(optimizer), everything(twin))
    assert float(doubled.state_dict()["state"][0]["step"]) == 3.0
    clipped = build(rule, parameters(storage, [(12, 10)]), storage, max_grad_norm=2.0)
    members(clipped)[0].grad = plain[0].grad
    clipped.step()
    assert clipped.grad_norm == doubled.grad_norm


@FEW
def test_frozen_weights_stay_and_may_thaw(rule: str, storage: str) -> None:
    optimizer = build(rule, parameters(storage), storage)
    first, *rest = members(optimizer)
    first.requires_grad_(False)
    before = first.detach().clone()
    for step in range(2):
        for p, gradient in zip(rest, gradients(rest, step), strict=True):
            p.grad = gradient
        optimizer.step()
    assert torch.equal(first, before) and 0 not in optimizer.state_dict()["state"]
    first.requires_grad_(True)
    take_steps(optimizer, range(2, 3))
    assert [float(optimizer.state_dict()["state"][k]["step"]) for k in range(3)] == [1.0, 3.0, 3.0]
    assert not torch.equal(optimizer.stored(first), before.float())


@FEW
def test_parameters_added_later_are_as_if_there_from_the_start(rule: str, storage: str) -> None:
    late = {"lr": 0.05, "storage": "exact"} if storage != "float16/split" else {"lr": 0.05}
    grown, whole = build(rule, parameters(storage)[:2], storage), build(rule, parameters(storage)[:2], storage)
    whole.add_param_group({"params": parameters(storage)[2:], **late})
    take_steps(grown, range(2))
    for step in range(2):
        for p, gradient in zip(members(whole), gradients(members(grown), step), strict=False):
            p.grad = gradient
        whole.step()
    grown.add_param_group({"params": parameters(storage)[2:], **late})
    for optimizer in (grown, whole):
        take_steps(optimizer, range(2, 4))
    assert_same(everything(grown), everything(whole))


@FEW
def test_groups_are_optimizers_of_their_own(rule: str, storage: str) -> None:
    options = [{"lr": 0.3}, {"lr": 0.01, "maximize": True}, {"lr": 0.0, "seed": 5}]
    together = build(
        rule, [{"params": [p], **mine} for p, mine in zip(parameters(storage), options, strict=True)], storage
    )
    apart = [build(rule, [p], storage, **mine) for p, mine in zip(parameters(storage), options, strict=True)]
    for step in range(3):
        slopes = gradients(members(together), step)
        for p, gradient in zip(members(together), slopes, strict=True):
            p.grad = gradient
        together.step()
        for optimizer, gradient in zip(apart, slopes, strict=True):
            members(optimizer)[0].grad = gradient
            optimizer.step()
    whole = everything(together)
    for k, optimizer in enumerate(apart):
        mine = {name.replace("0 ", f"{k} ", 1): value for name, value in everything(optimizer).items()}
        assert_same(mine, {name: value for name, value in whole.items() if name.startswith(f"{k} ")})


# ── torch's own optimizer ───────────────────────────────────────────────────────────────────────────────────────────


@FEW
def test_a_tensor_rate_and_a_schedule(rule: str, storage: str) -> None:
    """A rate is read at each step; a schedule changes a tensor in place."""
    plain = build(rule, parameters(storage), storage, lr=0.25)
    moved = build(rule, parameters(storage), storage, lr=torch.tensor(0.25))
    for optimizer in (plain, moved):
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            take_steps(optimizer, range(step, step + 1))
            schedule.step()
    rates = [optimizer.param_groups[0]["lr"] for optimizer in (plain, moved)]
    assert rates == [2.0**-5, 2.0**-5] and isinstance(rates[1], Tensor)
    assert_same(everything(plain), everything(moved))


@FEW
def test_before_the_first_step_there_is_no_state(rule: str, storage: str) -> None:
    optimizer = build(rule, parameters(storage), storage)
    assert optimizer.defaults.items() >= {**RULES[rule].options, "storage": storage, "maximize": False}.items()
    assert optimizer.param_groups[0].items() >= optimizer.defaults.items()
    assert not optimizer.state and optimizer.state_dict()["state"] == {}
    assert ng.audit(optimizer) == {} and optimizer.num_skipped == 0
    assert all(torch.equal(optimizer.stored(p), p.detach().float()) for p in members(optimizer))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()  # no gradients at all
    optimizer.zero_grad()
    assert not optimizer.state


def test_states_are_numbered_in_the_order_of_the_parameters() -> None:
    """However steps join them: large and small ones, odd ones and vectors take turns here."""
    shapes: list[Shape] = [(3,), (80, 64), (3, 3), (), (64, 80), (5,)]
    optimizer = build("adamw", parameters("word", shapes), "word")
    for p in members(optimizer)[::-1]:  # states come to be in another order
        p.grad = torch.ones_like(p)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    assert [float(state[k]["step"]) for k in range(6)] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    for k, shape in enumerate(shapes):
        assert {tuple(value.shape) for name, value in state[k].items() if name != "step"} == {shape}


def test_hooks_around_a_step_are_called() -> None:
    optimizer, called = build("adamw", parameters("word"), "word"), []
    before = optimizer.register_step_pre_hook(lambda mine, args, kwargs: called.append(("pre", mine, args, kwargs)))
    optimizer.register_step_post_hook(lambda mine, args, kwargs: called.append(("post", mine, args, kwargs)))
    take_steps(optimizer, range(1))
    assert called == [("pre", optimizer, (optimizer,), {}), ("post", optimizer, (optimizer,), {})]
    before.remove()
    take_steps(optimizer, range(1))
    assert [name for name, *_ in called] == ["pre", "post", "post"]


@FEW
def test_hooks_around_a_state_see_and_change_all_of_it(rule: str, storage: str) -> None:
    optimizer = build(rule, parameters(storage), storage)
    take_steps(optimizer, range(2))
    plain, seen = optimizer.state_dict(), []

    def renamed(mine: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {str(k): entry for k, entry in state["state"].items()}}

    def undone(mine: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {int(k): entry for k, entry in state["state"].items()}}

    twin = build(rule, [nn.Parameter(p.detach().clone()) for p in members(optimizer)], storage)
    optimizer.register_state_dict_pre_hook(lambda mine: seen.append("before"))
    optimizer.register_state_dict_post_hook(renamed)
    twin.register_load_state_dict_pre_hook(undone)
    twin.register_load_state_dict_post_hook(lambda mine: seen.append(mine.state_dict()["state"].keys()))
    saved = optimizer.state_dict()
    assert list(saved["state"]) == ["0", "1", "2"]
    for k, entry in plain["state"].items():
        assert_same(entry, saved["state"][str(k)])
    twin.load_state_dict(saved)
    assert seen == ["before", plain["state"].keys()]


# ── a scaled loss ───────────────────────────────────────────────────────────────────────────────────────────────────

FLOAT16 = over([("adamw", "float16/split"), ("adamw", "float16/master"), ("lion", "float16/split")])


def slopes_of(p: nn.Parameter, wanted: Tensor, scale: Callable[[Tensor], Tensor]) -> None:
    """A backward pass whose gradient is ``wanted``, times the scale of the loss."""
    scale((p * wanted.to(p.dtype)).float().sum()).backward()


@FLOAT16
@pytest.mark.parametrize("scaler", ["ours", "torch"])
def test_an_overflow_is_a_step_attempted_and_not_taken(rule: str, storage: str, scaler: str) -> None:
    """The same bits as without a scale, with a schedule that counts all four steps and a rule that counts three."""
    ours = ng.LossScaler(2.0**6, hysteresis=1) if scaler == "ours" else None
    theirs = None if ours else torch.amp.GradScaler("cpu", init_scale=2.0**6)
    scaled = build(rule, parameters(storage), storage, loss_scaler=ours)
    plain = build(rule, parameters(storage), storage, max_grad_norm=math.inf)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (scaled, plain)]
    for step in range(4):
        for optimizer in (scaled, plain):
            optimizer.zero_grad()
        for k, p in enumerate(members(scaled)):
            wanted = gradients(members(scaled), step)[k].float()
            if step == 1 and k == 2:
                wanted = wanted * 2.0**15
            slopes_of(p, wanted, ours.scale if ours is not None else theirs.scale)  # type: ignore[union-attr]
        for p, gradient in zip(members(plain), gradients(members(plain), step), strict=True):
            p.grad = gradient if step != 1 else torch.full_like(p, math.inf)
        if theirs is None:
            scaled.step()
        else:
            if "before" in scaler:
                for p in members(scaled):  # torch unscales float32 only
                    p.grad = p.grad.float() if p.grad is not None else None
            theirs.step(scaled)
            theirs.update()
        plain.step()
        for schedule in schedules:
            schedule.step()
    assert scaled.last_overflow == ["param 2"] and scaled.num_skipped == 1
    assert [schedule.last_epoch for schedule in schedules] == [4, 4]
    assert float(scaled.state_dict()["state"][0]["step"]) == 3.0
    assert (ours.scale_tensor.item() if ours is not None else theirs.get_scale()) == 2.0**5  # type: ignore[union-attr]
    assert_same(everything(scaled), everything(plain))


def test_the_example_of_an_own_rule_fits_its_promise() -> None:
    """Fifteen lines for the rule, under eighty for all."""
    text = (Path(__file__).parents[2] / "examples" / "own_rule.py").read_text()
    rule = [line for line in text[text.index("def scalars") : text.index("OPTIONS")].splitlines() if line.strip()]
    assert len(rule) <= 15 and len(text.splitlines()) < 80
