"""Parameters and groups that are removed, moved or added after the optimizer was made: as in torch, the others notice nothing.

A removed parameter is not stepped; the state of those that stay is kept bit for bit. The twin keeps all of its parameters, and
those that were removed get no gradients.
"""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from tensors import assert_same_bits, step_gradients

STORAGES = ("word", "compact", "split", "master", "collage-plus", "float32", "states8")
# Two that are stepped alone, and a bucket of small ones; two of one shape, so that the next moves up into a removed one's place.
SHAPES = {"large": (80, 64), "wide": (80, 64), "small": (12, 10), "like": (12, 10), "gain": (6,), "bias": (6,)}
GROUPS = (("large", "small", "gain"), ("wide", "like", "bias"))
Named = dict[str, nn.Parameter]


def made(storage: str, kind: str = "named") -> tuple[ng.AdamW, Named]:
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, ng.spec.STORAGES[storage].visible)
    named = {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}
    groups = [
        {"params": [(name, named[name]) if kind == "named" else named[name] for name in members]} for members in GROUPS
    ]
    return ng.AdamW(groups, lr=1e-2, storage=storage, audit_every=2, max_grad_norm=3.0), named


def step(optimizer: ng.AdamW, named: Named, seed: int, without: tuple[str, ...] = ()) -> None:
    gradients = dict(zip(named, step_gradients(list(named.values()), seed), strict=True))
    for name, p in named.items():
        p.grad = None if name in without else gradients[name]
    optimizer.step()


def bits_of(optimizer: ng.AdamW, named: Named, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    return {
        f"{name} {what}": optimizer.stored(p, what)
        for name, p in named.items()
        if name not in without
        for what in ("weight", "exp_avg", "exp_avg_sq")
    }


def remove(optimizer: ng.AdamW, group: int, place: int) -> None:
    del optimizer.param_groups[group]["params"][place]


def move(optimizer: ng.AdamW) -> None:
    moved = optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[1]["params"].insert(0, moved)


def empty(optimizer: ng.AdamW) -> None:
    optimizer.param_groups[0]["params"] = []


CHANGES: dict[str, tuple[Callable[[ng.AdamW], object], tuple[str, ...]]] = {
    "first group": (lambda o: o.param_groups.pop(0), GROUPS[0]),
    "last group": (lambda o: o.param_groups.pop(), GROUPS[1]),
    "a group's members": (empty, GROUPS[0]),
    "first parameter": (lambda o: remove(o, 0, 0), ("large",)),
    "middle parameter": (lambda o: remove(o, 0, 1), ("small",)),
    "last parameter": (lambda o: remove(o, 1, 2), ("bias",)),
    "two": (lambda o: (remove(o, 0, 0), remove(o, 1, 1)), ("large", "like")),
    "order of groups": (lambda o: o.param_groups.reverse(), ()),
    "order of parameters": (lambda o: o.param_groups[0]["params"].reverse(), ()),
    "group of one": (move, ()),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_stays_is_stepped_as_before(storage: str, change: str) -> None:
    act, gone = CHANGES[change]
    (one, mine), (twin, theirs) = made(storage), made(storage)
    for seed in range(3):
        step(one, mine, seed)
        step(twin, theirs, seed)
    before = {name: mine[name].detach().clone() for name in gone}
    act(one)
    assert_same_bits(bits_of(one, mine, gone), bits_of(twin, theirs, gone))
    for seed in range(3, 6):
        step(one, mine, seed, gone)
        step(twin, theirs, seed, gone)
        assert one.grad_norm is not None and torch.equal(one.grad_norm, twin.grad_norm)
    assert_same_bits(bits_of(one, mine, gone), bits_of(twin, theirs, gone))
    assert all(torch.equal(mine[name], value) for name, value in before.items())
    # Names, the audit and a saved state are those of what is there.
    assert one.parameter_names() == {p: name for name, p in mine.items() if name not in gone}
    assert set(ng.audit(one)) == {"", *SHAPES} - set(gone)
    state = one.state_dict()
    assert len(state["state"]) == len(SHAPES) - len(gone)
    assert all(len(group["param_names"]) == len(group["params"]) for group in state["param_groups"])


@pytest.mark.parametrize("kind", ["named", "unnamed"])
@pytest.mark.parametrize("change", CHANGES)
def test_it_is_saved_and_loaded(kind: str, change: str) -> None:
    act, gone = CHANGES[change]
    (one, mine), (other, theirs) = made("word", kind), made("word", kind)
    for seed in range(2):
        step(one, mine, seed)
    act(one)
    act(other)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for name, p in theirs.items():
            p.copy_(mine[name])
    step(one, mine, 2, gone)
    step(other, theirs, 2, gone)
    assert_same_bits(bits_of(other, theirs, gone), bits_of(one, mine, gone))


@pytest.mark.parametrize("frozen", [False, True])
def test_one_without_a_state_that_moves_up_is_no_replacement(frozen: bool) -> None:
    """The next of the same shape has taken no step yet; it is new to the place and not to the groups."""
    optimizer, named = made("word")
    optimizer.param_groups[0]["params"] = [named["large"], named["wide"], named["small"]]
    optimizer.param_groups[0]["param_names"] = ["large", "wide", "small"]
    del optimizer.param_groups[1]
    for seed in range(2):
        step(optimizer, named, seed, ("wide",))
    del optimizer.param_groups[0]["params"][0]
    step(optimizer, named, 2, ("large", "wide") if frozen else ("large",))  # a warning would fail this test
    assert optimizer.num_steps(named["wide"]) == int(not frozen)
    assert optimizer.parameter_names() == {named["wide"]: "wide", named["small"]: "small"}


def test_a_removed_one_that_returns_starts_afresh_and_a_new_one_joins() -> None:
    optimizer, named = made("word")
    step(optimizer, named, 0)
    group = optimizer.param_groups.pop(0)
    step(optimizer, named, 1, GROUPS[0])
    optimizer.add_param_group({"params": [(name, named[name]) for name in GROUPS[0]]})
    step(optimizer, named, 2)
    assert [optimizer.num_steps(named[name]) for name in GROUPS[0]] == [1, 1, 1]
    assert [optimizer.num_steps(named[name]) for name in GROUPS[1]] == [3, 3, 3]
    assert group["params"] == optimizer.param_groups[-1]["params"]


def test_one_of_another_shape_starts_afresh_and_the_others_stay() -> None:
    (one, mine), (twin, theirs) = made("word"), made("word")
    for seed in range(2):
        step(one, mine, seed)
        step(twin, theirs, seed)
    one.param_groups[0]["params"][1] = mine["small"] = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))
    for optimizer, named in ((one, mine), (twin, theirs)):
        for name, p in named.items():
            p.grad = torch.ones_like(p) if name != "small" or optimizer is one else None
        optimizer.max_grad_norm = None
        optimizer.step()
    assert one.num_steps(mine["small"]) == 1 and one.parameter_names()[mine["small"]] == "small"
    assert_same_bits(bits_of(one, mine, ("small",)), bits_of(twin, theirs, ("small",)))


def test_gradients_are_released_by_what_is_there() -> None:
    weights = [nn.Parameter(torch.ones(128, 64, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = ng.AdamW([{"params": [w], "lr": 0.1 * k} for k, w in enumerate(weights, 1)], storage="word")
    handle = ng.optim.release_gradients(optimizer)

    def backward() -> None:
        sum(w.float().sum() for w in weights).backward()
        optimizer.step()

    backward()
    optimizer.param_groups.pop(0)
    before = [w.detach().clone() for w in weights]
    backward()
    assert torch.equal(weights[0], before[0]) and weights[0].grad is not None
    moved = [
        float((now.detach().float() - then.float()).abs().amax()) for now, then in zip(weights, before, strict=True)
    ]
    assert 0 < moved[1] < moved[2] and [optimizer.num_steps(w) for w in weights] == [0, 2, 2]
    handle.remove()


def test_bits_that_a_weight_cuts_pass_on_before_gradients_are_released() -> None:
    model = nn.Linear(128, 96, bias=False)
    model, optimizer = ng.prepare(model, compile=False, lr=0.0, weight_decay=0.0)
    stored, old = optimizer.stored(model.weight), model.weight
    model.weight = optimizer.param_groups[0]["params"][0] = nn.Parameter(old.detach().clone())
    handle = ng.optim.release_gradients(optimizer)
    model(torch.ones(4, 128, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    handle.remove()
    assert float((optimizer.stored(model.weight) - stored).abs().max()) < 1e-5
    assert not torch.equal(stored, model.weight.float())


@pytest.mark.usefixtures("native_formats")  # layers that are swapped stay in their NarrowLayers
def test_replaced_and_removed_parameters_are_freed() -> None:
    """Frozen ones too: sharding a model after it was prepared must not keep the whole one in memory."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8))
    model[1].weight.requires_grad_(False)
    model, optimizer = ng.prepare(model, compile=False)
    before = {name: weakref.ref(p) for name, p in model.named_parameters()}
    names = list(optimizer.parameter_names().values())
    for module in model:
        for name, old in list(module._parameters.items()):
            module._parameters[name] = new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
            for group in optimizer.param_groups:
                group["params"] = [new if p is old else p for p in group["params"]]
    before |= {f"new {name}": weakref.ref(p) for name, p in model[2].named_parameters()}
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    model(x).sum().backward()
    optimizer.step()
    assert list(optimizer.parameter_names().values()) == names
    first = optimizer.param_groups[0]["params"].pop(0)
    model(x).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["params"].insert(0, first)
    optimizer.step()
    assert list(optimizer.parameter_names().values()) == names
    del optimizer.param_groups[0]["params"][-2:], model[2], module, old, new
    model(x).sum().backward()
    optimizer.step()
    gc.collect()
    assert [name for name, parameter in before.items() if parameter() is not None] == []


def test_names_that_a_user_sets_stay() -> None:
    optimizer, named = made("word")
    optimizer.param_groups[0]["param_names"] = ["a", "b", "c"]
    step(optimizer, named, 0)
    del optimizer.param_groups[0]["params"][1]
    assert list(optimizer.parameter_names().values()) == ["a", "c", "wide", "like", "bias"]
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)))
    assert len(set(optimizer.parameter_names().values())) == 6
