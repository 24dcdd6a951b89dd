"""States of a matrix rule beside the weight's: the same codes as any moment, and nothing lost on the way."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics.rounding import step_seed
from narrowgauge.optim.replicated_state import ReplicatedState
from narrowgauge.optim.rules.matrix import MATRIX_RULES, MatrixRule
from narrowgauge.spec.storages import STORAGES, Storage, bytes_alone
from tensors import assert_same_bits, bits, gaussian, parameters_of, take_steps

CPU = torch.device("cpu")
ROWS = {name: row for name, row in STORAGES.items() if row.arithmetic == "float32"}
EVERY = pytest.mark.parametrize("storage", ROWS.values(), ids=ROWS)
ROLES = pytest.mark.parametrize("role", ["exp_avg", "exp_avg_sq"])
SHAPE = (6, 10)


def values_of(role: str, scale: float = 0.01) -> Tensor:
    values = gaussian(*SHAPE, seed=5, scale=scale)
    values[0] = 0.0
    return values.square() if role == "exp_avg_sq" else values


def zeros(role: str | None, storage: Storage, shape: tuple[int, ...] = SHAPE) -> ReplicatedState:
    return ReplicatedState.zeros("basis", shape, role, storage, CPU)


def seed_of(number: int) -> Tensor:
    return torch.tensor(step_seed(0, number), dtype=torch.int32)


@EVERY
@ROLES
def test_values_are_those_of_a_moment_of_the_weights_shape(storage: Storage, role: str) -> None:
    weight = nn.Parameter(torch.zeros(SHAPE, dtype=getattr(torch, storage.visible)))
    optimizer = ng.AdamW([weight], storage=storage, compile=False)
    optimizer.state[weight][role] = values_of(role)
    state = zeros(role, storage)
    state.put(values_of(role))
    assert torch.equal(bits(state.value()), bits(optimizer.state[weight][role]))


@EVERY
@ROLES
def test_what_is_stored_is_stored_again_as_it_is(storage: Storage, role: str) -> None:
    state = zeros(role, storage)
    state.put(values_of(role), seed_of(0))
    first = state.value().clone()
    state.put(first, seed_of(1))
    assert torch.equal(bits(state.value()), bits(first))


@EVERY
def test_bytes_are_those_of_the_code(storage: Storage) -> None:
    for role in ("exp_avg", "exp_avg_sq"):
        kept = zeros(role, storage).tensors.values()
        assert sum(t.numel() * t.element_size() for t in kept) == bytes_alone(storage.code(role), SHAPE)
    assert {t.dtype for t in zeros(None, storage).tensors.values()} == {torch.float32}


STOCHASTIC = [
    (name, role)
    for name in ("word", "compact", "split8")
    for role in ("exp_avg", "exp_avg_sq")
    if STORAGES[name].code(role).rounding == "stochastic"
]


@pytest.mark.parametrize("name, role", STOCHASTIC)
def test_the_mean_over_seeds_is_the_value(name: str, role: str) -> None:
    storage, count = STORAGES[name], 400
    values = 1 + torch.rand(SHAPE, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for number in range(count):
        state = zeros(role, storage)
        state.put(values, seed_of(number))
        total += state.value().double()
    # In [1, 2) neighbours are this far apart, and a rounding's standard deviation is half of it at most.
    spacing = 2.0 ** -storage.code(role).mantissa_bits
    off = (total / count - values).abs() / spacing
    assert float(off.max()) < 5 * 0.5 / math.sqrt(count)
    state.put(values)
    assert float((state.value() - values).abs().max()) / spacing > 0.4  # which is what nearest rounding is off by


@ROLES
def test_equal_values_are_rounded_apart_and_powers_of_two_alike(role: str) -> None:
    storage = STORAGES["states8"]
    values = torch.full((64, 64), 1.03)
    values[:, 0] = 2.0
    one, other = zeros(role, storage, (64, 64)), zeros(role, storage, (64, 64))
    one.put(values, seed_of(0))
    other.put(values * 2.0**-40, seed_of(0))
    assert len(one.value()[:, 1:].unique()) == 2
    assert torch.equal(one.value() * 2.0**-40, other.value())


@EVERY
@ROLES
def test_a_skipped_step_changes_no_bit(storage: Storage, role: str) -> None:
    state = zeros(role, storage)
    state.put(values_of(role), seed_of(0))
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    for bad in (math.nan, math.inf):
        state.put(torch.full(SHAPE, bad), seed_of(1), torch.tensor(True))
        assert_same_bits(before, state.tensors)
    state.put(values_of(role) * 3, seed_of(1), torch.tensor(False))
    assert float(state.value().max()) > 2 * float(values_of(role).max())


def stepped(storage: str, **options: Any) -> ng.Optimizer:
    weight = nn.Parameter(gaussian(12, 20).bfloat16())
    optimizer = ng.optim.GaLore([weight], lr=0.01, rank=3, update_proj_gap=2, storage=storage, compile=False, **options)
    take_steps(optimizer, range(3))
    return optimizer


@pytest.mark.parametrize("proj_type", ["std", "full"])
@pytest.mark.parametrize("storage", ["word", "states8"])
def test_float32_states_of_before_are_taken_over(storage: str, proj_type: str) -> None:
    """Until they had codes of their own, they were saved in float32."""
    optimizer = stepped(storage, proj_type=proj_type)
    (weight,) = parameters_of(optimizer)
    older = copy.deepcopy(optimizer.state_dict())
    entry, names = older["state"][0], list(optimizer._registry.states[weight].extras)
    for name in names:
        value = optimizer.state[weight][name].clone()
        for part in optimizer._registry.states[weight].extras[name].tensors:
            entry.pop(part)
        entry[name] = value
    assert len(names) == (3 if proj_type == "std" else 4)
    assert {entry[name].dtype for name in names} == {torch.float32}
    twin = stepped(storage, proj_type=proj_type)
    take_steps(twin, range(3, 5))
    twin.load_state_dict(older)
    for name in names:
        assert torch.equal(twin.state[parameters_of(twin)[0]][name], entry[name])


@EVERY
@ROLES
def test_integers_are_saved_under_names_of_their_own(storage: Storage, role: str) -> None:
    """A distributed checkpoint is read into the tensors that are there: float32 of the plain name must not end in integers."""
    tensors = zeros(role, storage).tensors
    assert all(name.endswith("_codes") is not tensor.is_floating_point() for name, tensor in tensors.items())


def test_states_without_a_projection_are_of_the_usual_one() -> None:
    older = stepped("word").state_dict()
    assert "proj_type" not in older["param_groups"][0]
    twin = stepped("word", proj_type="full")
    twin.load_state_dict(older)
    assert twin.param_groups[0]["proj_type"] == "std"
    take_steps(twin, range(3, 4))


@pytest.mark.parametrize("rule", MATRIX_RULES.values(), ids=MATRIX_RULES)
def test_a_rule_that_was_pickled_before_it_had_all_fields_is_completed(rule: MatrixRule) -> None:
    older: MatrixRule = object.__new__(MatrixRule)
    older.__setstate__([rule.name, rule.states, rule.update, rule.defaults])  # type: ignore[attr-defined]
    assert older == rule


def test_what_is_written_in_place_is_stored() -> None:
    optimizer = stepped("word")
    (weight,) = parameters_of(optimizer)
    optimizer.state[weight]["projected_exp_avg"].fill_(0.25)
    assert optimizer.state_dict()["state"][0]["projected_exp_avg_codes"].dtype is torch.int16
    assert torch.equal(optimizer.stored(weight, "projected_exp_avg"), torch.full((3, 20), 0.25))


def test_options_that_need_other_states_are_refused() -> None:
    optimizer = stepped("word")
    optimizer.param_groups[0]["proj_type"] = "full"
    with pytest.raises(ng.errors.RecipeError, match="projected_exp_avg"):
        take_steps(optimizer, range(3, 4))
    with pytest.raises(ng.errors.RecipeError, match="proj_type = 'both' was requested; it is one of 'std', 'full'"):
        stepped("word", proj_type="both")
