"""``optimizer.state`` is the state: what hooks and users read there is kept, and what they write is obeyed and saved."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import RecipeError
from optim.pairs import RULES, SOME, Shape, build, everything, parameters
from optim.scenarios import REPRESENTATIVES, row_of
from tensors import assert_same_bits, parameters_of, step_gradients, take_steps

STORED = pytest.mark.parametrize("storage", [s for s in REPRESENTATIVES if row_of(s).arithmetic == "float32"])


def trained(storage: str, steps: int = 2, rule: str = "adamw") -> ng.Optimizer:
    optimizer = build(rule, parameters(storage), storage)
    take_steps(optimizer, range(steps))
    return optimizer


@SOME
def test_entries_have_torchs_names_and_the_parameters_shape(rule: str, storage: str) -> None:
    optimizer = trained(storage, rule=rule)
    assert len(optimizer.state) == 3 and list(optimizer.state) == parameters_of(optimizer)
    for p, entry in optimizer.state.items():
        assert float(entry["step"]) == 2.0 and entry["step"].shape == ()
        for name, value in entry.items():
            assert isinstance(value, Tensor)
            if name not in ("step", "master") and name in dict(optimizer._registry.states[p].storage.states):
                assert value.shape == p.shape and torch.equal(value, optimizer.stored(p, name))
        if "master" in entry:
            assert torch.equal(entry["master"], optimizer.stored(p))


@STORED
def test_what_is_written_is_what_a_state_made_so_holds(storage: str) -> None:
    """By assignment and in place; against the same given to ``adopt``; obeyed by the next step and saved."""
    assigned, in_place, twin = (trained(storage) for _ in range(3))
    halves = {p: assigned.state[p]["exp_avg"] * 0.5 for p in parameters_of(assigned)}
    for p in parameters_of(assigned):
        assigned.state[p]["exp_avg"] = halves[p]
        assigned.state[p]["step"] = torch.tensor(7.0)
    for p in parameters_of(in_place):
        in_place.state[p]["exp_avg"].mul_(0.5)
        in_place.state[p]["step"] += 5
    for p, q in zip(parameters_of(twin), parameters_of(assigned), strict=True):
        twin._registry.states[p].put("exp_avg", halves[q])
        twin._registry.states[p].step = 7
    found = []
    for optimizer in (twin, assigned, in_place):
        saved = copy.deepcopy(optimizer.state_dict())
        assert float(saved["state"][0]["step"]) == 7.0
        take_steps(optimizer, range(2, 4))
        other = build("adamw", [nn.Parameter(p.detach().clone()) for p in parameters_of(trained(storage))], storage)
        other.load_state_dict(saved)
        take_steps(other, range(2, 4))
        found += [everything(optimizer), everything(other)]
    for each in found[1:]:
        assert_same_bits(found[0], each)


@STORED
def test_what_is_read_may_be_written_back(storage: str) -> None:
    """As libraries do that move states: the values are the same, and so is what follows."""
    optimizer, twin = trained(storage), trained(storage)
    for p, entry in optimizer.state.items():
        optimizer.state[p] = {name: value.clone() for name, value in entry.items()}
    for entry in list(optimizer.state.values()):
        for name, value in entry.items():
            entry[name] = value.cpu()
    for p, q in zip(parameters_of(optimizer), parameters_of(twin), strict=True):
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.stored(p, name), twin.stored(q, name))


@STORED
@pytest.mark.parametrize("how", ["clear", "assign", "del", "pop", "entry", "empty"])
def test_clearing_begins_anew(storage: str, how: str) -> None:
    optimizer = trained(storage)
    fresh = build("adamw", [nn.Parameter(p.detach().clone()) for p in parameters_of(optimizer)], storage)
    state = optimizer.state
    if how == "clear":
        state.clear()
    elif how == "assign":
        optimizer.state = defaultdict(dict)
    for p in parameters_of(optimizer):
        if how == "del":
            del state[p]
        elif how == "pop":
            state.pop(p)
        elif how == "entry":
            state[p].clear()
        elif how == "empty":
            state[p] = {}
    assert len(optimizer.state) == 0 and optimizer.state_dict()["state"] == {} and not optimizer.state[p]
    for each in (optimizer, fresh):
        take_steps(each, range(2, 4))
    assert_same_bits(everything(fresh), everything(optimizer))


def test_one_of_a_bucket_may_leave() -> None:
    shapes: list[Shape] = [(5,), (7,), (9,)]
    optimizer, twin = (build("adamw", parameters("word", shapes), "word") for _ in range(2))
    for each in (optimizer, twin):
        take_steps(each, range(2))
    del optimizer.state[parameters_of(optimizer)[1]]
    for each in (optimizer, twin):
        take_steps(each, range(2, 4))
    one, other = everything(optimizer), everything(twin)
    assert_same_bits(*({name: v for name, v in x.items() if name[0] != "1"} for x in (one, other)))
    assert float(one["1 step"]) == 2.0
    assert [len(bucket.members) for bucket in optimizer._registry.buckets] == [2, 1]


def test_states_may_be_given_before_the_first_step() -> None:
    optimizer = build("adamw", parameters("word"), "word")
    p = parameters_of(optimizer)[0]
    assert p not in optimizer.state and dict(optimizer.state[p]) == {} and optimizer.state.get(p) is None
    optimizer.state[p]["exp_avg"] = torch.full(p.shape, 0.25)
    assert p in optimizer.state and torch.equal(optimizer.stored(p, "exp_avg"), torch.full(p.shape, 0.25))


def test_notes_and_other_keys_are_saved_and_loaded() -> None:
    optimizer, other = trained("word"), trained("word")
    p = parameters_of(optimizer)[0]
    optimizer.state[p]["seen"] = torch.arange(3)
    optimizer.state["epoch"] = 4
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.state[parameters_of(other)[0]]["seen"], torch.arange(3)) and other.state["epoch"] == 4
    copied = copy.deepcopy(optimizer)
    assert copied.state["epoch"] == 4 and torch.equal(copied.state[parameters_of(copied)[0]]["seen"], torch.arange(3))
    del optimizer.state[p]["seen"], optimizer.state["epoch"]
    assert "seen" not in optimizer.state[p] and "epoch" not in optimizer.state_dict()["state"]


def test_hooks_write_to_the_state_as_in_torch() -> None:
    """What torch's own tests do in hooks around saving and loading."""
    optimizer, other = trained("word"), trained("word")

    def after(mine: Any, state: dict[str, Any]) -> dict[str, Any]:
        state["ran"] = state["state"].pop("test", None)
        return state

    optimizer.register_state_dict_pre_hook(lambda mine: mine.state.__setitem__("test", 1))
    optimizer.register_state_dict_post_hook(after)
    other.register_load_state_dict_post_hook(lambda mine: mine.state.__setitem__("loaded", True))
    saved = optimizer.state_dict()
    assert saved["ran"] == 1 and "test" not in saved["state"]
    other.load_state_dict(saved)
    assert other.state["loaded"] is True


def test_what_has_another_shape_is_refused() -> None:
    optimizer = trained("word")
    with pytest.raises(RecipeError, match="written to the state of a parameter"):
        optimizer.state[parameters_of(optimizer)[0]]["exp_avg"] = torch.zeros(3)


@pytest.mark.parametrize("storage", ["word", "compact"])
def test_a_group_may_be_taken_away(storage: str) -> None:
    params = parameters(storage)
    optimizer = RULES["adamw"].make([{"params": [p]} for p in params], lr=0.1, storage=storage, audit_every=1)
    take_steps(optimizer, range(2))
    optimizer.param_groups.pop()
    assert list(optimizer.state_dict()["state"]) == [0, 1]
    take_steps(optimizer, range(2, 4))
    assert len(optimizer.state) == 2 and float(optimizer.state[params[0]]["step"]) == 4.0
    optimizer.add_param_group({"params": [params[2]]})
    take_steps(optimizer, range(4, 5))
    assert float(optimizer.state[params[2]]["step"]) == 1.0


def test_a_groups_storage_is_set_before_its_first_step_or_refused() -> None:
    optimizer = build("adamw", parameters("word"), "word")
    optimizer.param_groups[0]["storage"] = "exact"
    take_steps(optimizer, range(1))
    assert optimizer._registry.states[parameters_of(optimizer)[0]].storage.name == "exact"
    optimizer.param_groups[0]["storage"] = "word"
    for p, gradient in zip(parameters_of(optimizer), step_gradients(parameters_of(optimizer), 1), strict=True):
        p.grad = gradient
    with pytest.raises(RecipeError, match="changed to 'word', and its states are stored in 'exact'"):
        optimizer.step()
    optimizer.state.clear()
    optimizer.step()


def test_a_parameter_without_values_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"meta device.*to_empty"):
        ng.AdamW([nn.Parameter(torch.ones(3, 2, device="meta", dtype=torch.bfloat16))], storage="word")


def test_a_state_that_is_put_back_as_it_was_read_stays_as_it_is() -> None:
    """Lightning moves each state to the device it is on: two bfloat16 that float32 cannot hold must not be cut again."""
    weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
    optimizer = ng.AdamW([weight], storage="collage-plus")
    values = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    optimizer.adopt({weight: values})
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before, seen = optimizer.state_dict()["state"][0], weight.detach().clone()
    for entry in optimizer.state.values():
        for name, value in entry.items():
            entry[name] = value
    after = optimizer.state_dict()["state"][0]
    assert torch.equal(seen, weight) and all(torch.equal(before[name], after[name]) for name in before)
