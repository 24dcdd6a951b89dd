"""States of a matrix rule beside the weight's: the same codes as any moment, and nothing lost on the way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.optim.kernel import MatrixKernel
from narrowgauge.optim.rules.matrix import GALORE
from narrowgauge.optim.state import ParameterState
from narrowgauge.spec.storages import STORAGES, Storage
from tensors import assert_same_bits, bits, bytes_alone, gaussian, take_steps

ROWS = {name: row for name, row in STORAGES.items() if row.arithmetic == "float32"}
EVERY = pytest.mark.parametrize("storage", ROWS.values(), ids=ROWS)
ROLES = pytest.mark.parametrize("role", ["exp_avg", "exp_avg_sq"])
SHAPE = (6, 10)


def values_of(role: str, scale: float = 0.01) -> Tensor:
    values = gaussian(*SHAPE, seed=5, scale=scale)
    values[0] = 0.0
    return values.square() if role == "exp_avg_sq" else values


class Basis(ParameterState):
    """A state that has one tensor of its own."""

    def __init__(self, role: str | None, storage: Storage, shape: tuple[int, ...] = SHAPE) -> None:
        kernel = MatrixKernel(GALORE, storage.keeping(()), compile=False)
        super().__init__(torch.zeros(1), storage.keeping(()), kernel, extras={"basis": (shape, role)})

    def value(self) -> Tensor:
        return self.extra("basis")

    def store(self, values: Tensor, seed: Tensor | None = None, skip: Tensor | None = None) -> None:
        self.put_extra("basis", values, seed, skip)

    def parts(self) -> dict[str, Tensor]:
        return self.extras["basis"]


zeros = Basis


def seed_of(number: int) -> Tensor:
    return torch.tensor(step_seed(0, number), dtype=torch.int32)


@EVERY
@ROLES
def test_what_is_stored_is_stored_again_as_it_is(storage: Storage, role: str) -> None:
    state = zeros(role, storage)
    state.store(values_of(role), seed_of(0))
    first = state.value().clone()
    state.store(first, seed_of(1))
    assert torch.equal(bits(state.value()), bits(first))


@EVERY
def test_bytes_are_those_of_the_code(storage: Storage) -> None:
    for role in ("exp_avg", "exp_avg_sq"):
        kept = zeros(role, storage).parts().values()
        assert sum(t.numel() * t.element_size() for t in kept) == bytes_alone(storage.code(role), SHAPE)
    assert {t.dtype for t in zeros(None, storage).parts().values()} == {torch.float32}


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
        state.store(values, seed_of(number))
        total += state.value().double()
    # In [1, 2) neighbours are this far apart, and a rounding's standard deviation is half of it at most.
    spacing = 2.0 ** -storage.code(role).mantissa_bits
    off = (total / count - values).abs() / spacing
    assert float(off.max()) < 5 * 0.5 / math.sqrt(count)
    state.store(values)
    assert float((state.value() - values).abs().max()) / spacing > 0.4  # which is what nearest rounding is off by


@EVERY
@ROLES
def test_a_skipped_step_changes_no_bit(storage: Storage, role: str) -> None:
    state = zeros(role, storage)
    state.store(values_of(role), seed_of(0))
    before = {name: tensor.clone() for name, tensor in state.parts().items()}
    for bad in (math.nan, math.inf):
        state.store(torch.full(SHAPE, bad), seed_of(1), torch.tensor(True))
        assert_same_bits(before, state.parts())
    state.store(values_of(role) * 3, seed_of(1), torch.tensor(False))
    assert float(state.value().max()) > 2 * float(values_of(role).max())


def stepped(storage: str, **options: Any) -> ng.Optimizer:
    weight = nn.Parameter(gaussian(12, 20).bfloat16())
    optimizer = ng.optim.GaLore([weight], lr=0.01, rank=3, update_proj_gap=2, storage=storage, compile=False, **options)
    take_steps(optimizer, range(3))
    return optimizer


def test_options_that_need_other_states_are_refused() -> None:
    optimizer = stepped("word")
    optimizer.param_groups[0]["proj_type"] = "full"
    with pytest.raises(ng.errors.RecipeError, match="projected_exp_avg"):
        take_steps(optimizer, range(3, 4))
    with pytest.raises(ng.errors.RecipeError, match="proj_type = 'both' was requested; it is one of std, full"):
        stepped("word", proj_type="both")
