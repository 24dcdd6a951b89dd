"""The six slots: which tensors enter which matmul along which dimension, whose casts serve twice, who shares an input."""

from __future__ import annotations

from narrowgauge.spec.computes import (
    SLOTS,
    TENSORS,
)
from tables import exhaustive


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
