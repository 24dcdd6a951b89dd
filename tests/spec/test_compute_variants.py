"""Variants of computes: names, what they change of their row, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from narrowgauge.spec import computes
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.notation import parse

OF_FOUR_BITS = {
    "mxfp4+deterministic": {
        slot: {"rounding": "nearest", "rotation": "hadamard-plain"} for slot in ("grad_weight.left", "grad_weight.right")
    },
    "mxfp4+two-scales": {
        slot: {"fit": "least-error"} for slot in ("output.left", "output.right", "grad_input.right", "grad_weight.right")
    },
}  # fmt: skip
OF_FOUR_BITS["nvfp4+four-over-six"] = OF_FOUR_BITS["mxfp4+two-scales"]
OF_FOUR_BITS["nvfp4+eden"] = {
    slot: {"rounding": "eden", "rotation": "hadamard-drawn"}
    for slot in ("grad_input.left", "grad_input.right", "grad_weight.left", "grad_weight.right")
}
OF_FOUR_BITS["nvfp4+four-over-six+eden"] = {
    **OF_FOUR_BITS["nvfp4+eden"],
    **{slot: {"fit": "least-error"} for slot in ("output.left", "output.right")},
}
OF_FOUR_BITS["nvfp4+uniform"] = {slot: {"format": "int4", "rotation": "hadamard"} for slot in COMPUTES["nvfp4"].casts}


@pytest.mark.parametrize("name", OF_FOUR_BITS)
def test_a_form_of_four_bits_changes_the_casts_of_its_table_and_no_other(name: str) -> None:
    base = COMPUTES[name.partition("+")[0]]
    row, changed = computes.VARIANTS[name], OF_FOUR_BITS[name]
    assert row.casts == {slot: replace(cast, **changed.get(slot, {})) for slot, cast in base.casts.items()}  # type: ignore[arg-type]
    assert row.products["output"].accumulation == base.output.accumulation
    same = replace(
        base, name=row.name, purpose=row.purpose, source=row.source, native=row.native,
        output=row.output, grad_input=row.grad_input, grad_weight=row.grad_weight,
    )  # fmt: skip
    assert same == row and row.is_stochastic and row.purpose != base.purpose and base.source in row.source
    recipe = parse(name)
    assert recipe.name == f"{name}/word" and parse(recipe.to_value()) == recipe == parse(recipe.name)
    assert len({str(cast) for cast in (*row.casts.values(), *base.casts.values())}) == len(
        {*row.casts.values(), *base.casts.values()}
    )
