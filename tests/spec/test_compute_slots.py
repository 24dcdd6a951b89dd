"""The six slots: which tensors enter which matmul along which dimension, whose casts serve twice, who shares an input."""

from __future__ import annotations

from covering import exhaustive
from narrowgauge.spec import computes
from narrowgauge.spec.computes import (
    COMPUTES,
    PLACES,
    SLOTS,
    TENSORS,
    Compute,
    casts_made,
    first_of_input,
    slot_of_cast,
    weight_slots,
)

SHAPES = {"input": ("tokens", "in"), "weight": ("out", "in"), "gradient": ("tokens", "out")}
RESULTS = {"output": ("tokens", "out"), "grad_input": ("tokens", "in"), "grad_weight": ("out", "in")}


def test_the_slots_are_the_casts_of_a_compute() -> None:
    assert list(SLOTS) == list(COMPUTES["mxfp8"].casts)


@exhaustive("matmul", PLACES)
def test_both_operands_contract_the_same_side_and_leave_those_of_the_result(matmul: str) -> None:
    left, right = SLOTS[f"{matmul}.left"], SLOTS[f"{matmul}.right"]
    assert left.tensor != right.tensor
    assert SHAPES[left.tensor][left.dim] == SHAPES[right.tensor][right.dim]
    assert (SHAPES[left.tensor][1 - left.dim], SHAPES[right.tensor][1 - right.dim]) == RESULTS[matmul]


@exhaustive("tensor", TENSORS)
def test_each_tensor_enters_two_matmuls_which_contract_different_dimensions(tensor: str) -> None:
    own = [slot for slot in SLOTS.values() if slot.tensor == tensor]
    assert sorted(slot.dim for slot in own) == [0, 1]
    assert {slot.history_index for slot in own} == {TENSORS.index(tensor)}
    first, second = own
    assert (first.reuses, second.reuses) == ("", first.name)


def test_random_bits_differ_between_tensors_and_between_the_two_casts_of_the_gradient() -> None:
    keys = {slot.name: slot.random_key for slot in SLOTS.values()}
    # These numbers are part of the stored results of stochastic computes.
    assert keys == {
        "output.left": 0, "output.right": 1, "grad_input.left": 3, "grad_input.right": 1, "grad_weight.left": 2,
        "grad_weight.right": 0,
    }  # fmt: skip


@exhaustive("compute", [*COMPUTES.values(), *map(computes.named, computes.names())])
def test_a_cast_is_made_where_no_other_serves_it(compute: Compute) -> None:
    for name, slot in SLOTS.items():
        made = slot_of_cast(compute, name)
        assert made in (name, slot.reuses)
        assert made == name or compute.casts[made].serves(compute.casts[name])
        assert (name in casts_made(compute)) == (made == name and not compute.casts[name].is_wide)


@exhaustive("compute", [row for row in COMPUTES.values() if not row.is_wide])
def test_the_slots_share_what_the_compute_reports(compute: Compute) -> None:
    shared = [
        slot_of_cast(compute, name) != name for name in ("grad_weight.right", "grad_input.right", "grad_weight.left")
    ]
    assert shared == [compute.keeps_codes, compute.reuses_weight, compute.reuses_grad]
    assert weight_slots(compute) == ["output.right", "grad_input.right"][: 1 if compute.reuses_weight else 2]


def test_layers_that_get_one_input_share_the_cast_of_the_first() -> None:
    names = ("a.q_proj", "a.k_proj", "v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "lm_head")
    found = dict(zip(names, map(first_of_input, names), strict=True))
    assert found == {
        "a.q_proj": "a.q_proj", "a.k_proj": "a.q_proj", "v_proj": "q_proj", "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.gate_proj", "mlp.down_proj": "mlp.down_proj", "lm_head": "lm_head",
    }  # fmt: skip
