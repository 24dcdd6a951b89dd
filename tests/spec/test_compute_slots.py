"""The six slots: which tensors enter which matmul along which dimension, whose casts serve twice, who shares an input."""

from __future__ import annotations

from narrowgauge.spec import computes
from narrowgauge.spec.computes import (
    COMPUTES,
    PLACES,
    SLOTS,
    TENSORS,
    Compute,
    casts_made,
)
from tables import exhaustive

SHAPES = {"input": ("tokens", "in"), "weight": ("out", "in"), "gradient": ("tokens", "out")}
RESULTS = {"output": ("tokens", "out"), "grad_input": ("tokens", "in"), "grad_weight": ("out", "in")}


@exhaustive("matmul", PLACES)
def test_both_operands_contract_the_same_side_and_leave_those_of_the_result(matmul: str) -> None:
    left, right = SLOTS[f"{matmul}.left"], SLOTS[f"{matmul}.right"]
    assert left.tensor != right.tensor
    assert SHAPES[left.tensor][left.dim] == SHAPES[right.tensor][right.dim]
    assert (SHAPES[left.tensor][1 - left.dim], SHAPES[right.tensor][1 - right.dim]) == RESULTS[matmul]


@exhaustive("tensor", TENSORS)
def test_each_tensor_enters_two_matmuls_which_contract_different_dimensions(tensor: str) -> None:
    slots = [slot for slot in SLOTS.values() if slot.tensor == tensor]
    assert sorted(slot.dim for slot in slots) == [0, 1]
    assert {slot.history_index for slot in slots} == {TENSORS.index(tensor)}
    first, second = slots
    assert (first.reuses, second.reuses) == ("", first.name)


def test_random_bits_differ_between_tensors_and_between_the_two_casts_of_the_gradient() -> None:
    keys = {slot.name: slot.random_key for slot in SLOTS.values()}
    # These numbers are part of the stored results of stochastic computes.
    assert keys == {
        "output.left": 0, "output.right": 1, "grad_input.left": 3, "grad_input.right": 1, "grad_weight.left": 2,
        "grad_weight.right": 0,
    }  # fmt: skip


@exhaustive("compute", [*COMPUTES.values(), *computes.VARIANTS.values()])
def test_a_cast_is_made_where_no_other_serves_it(compute: Compute) -> None:
    for name, slot in SLOTS.items():
        source = compute.cast_slots[name]
        assert source in (name, slot.reuses)
        assert source == name or compute.casts[source].serves(compute.casts[name])
        assert (name in casts_made(compute)) == (source == name and not compute.casts[name].is_wide)
