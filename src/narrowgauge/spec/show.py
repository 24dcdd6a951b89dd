"""The tables that ``narrowgauge show`` prints, and one recipe in full.

Each table is a list of dicts, derived from the same values that the rest of the package computes
with. ``--json`` prints the same figures as a terminal and the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from narrowgauge.spec import notation, storages
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.formats import FORMATS
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES, VISIBLE, Storage, width_of
from narrowgauge.spec.sums import REDUCTIONS
from narrowgauge.spec.tables import Row, Table, cell_text, table_of
from narrowgauge.spec.update_rules import UPDATE_RULES
from narrowgauge.spec.values import require_number


def table(name: str) -> Table:
    """Return a table of :data:`TABLES`. Its rows are plain values that JSON can hold."""
    _, items, keys = TABLES[name]
    return table_of(_rows(items(), keys), hidden=("source",) if name != "aliases" else ())


def state_table(params: float) -> Table:
    """Return the bytes of weights, gradients and states of ``params`` parameters, by storage."""
    require_number("params", params, 1)
    rows = _rows(STORAGES.values(), "name bytes_per_param")
    for row in rows:
        row["gigabytes"] = row["bytes_per_param"] * params / 1e9
    return table_of(rows)


def _rows(items: Iterable[Any], keys: str) -> list[Row]:
    """Return a row per item: its attributes of these names, codes and products as their text."""
    rows = []
    for item in items:
        row = {}
        for key in keys.split():
            value = attrgetter(key)(item)
            is_plain = isinstance(value, str | int | float | Mapping | None)
            row[key.rpartition(".")[2]] = value if is_plain else str(value)
        rows.append(row)
    return rows


class _Alias(NamedTuple):
    """A name of another library: the recipe that it means, or what is nearest, and why."""

    name: str
    recipe: str
    source: str


def _aliases() -> Iterator[_Alias]:
    for name, row in notation.ALIASES.items():
        yield _Alias(name, **row)
    for name, row in notation.REFUSED.items():
        yield _Alias(name, ", ".join(row["nearest"]), row.get("why", "ambiguous: say which"))


def _recipes() -> Iterator[Recipe]:
    yield from map(notation.parse, notation.representative_names())


_OF_RECIPE = "name bytes_per_param storage.loses compute.purpose"
TABLES: dict[str, tuple[str, Callable[[], Iterable[Any]], str]] = {
    "formats": (
        "Number formats: range and precision.", FORMATS.values,
        "name bits exponent_bits mantissa_bits bias max min smallest_normal smallest_subnormal epsilon infinities nans "
        "purpose source",
    ),
    "recipes": ("Recipes: purpose, bytes, losses.", _recipes, _OF_RECIPE),
    "aliases": ("Names in other libraries, and the recipe that each means.", _aliases, "name recipe source"),
    "computes": (
        "How operands of the three matmuls are cast.", COMPUTES.values,
        "name output grad_input grad_weight kept_bytes native purpose source",
    ),
    "rules": (
        "Update rules: options, usual rates, sources.", UPDATE_RULES.values,
        "name optimizer purpose is_matrix settings options rate source",
    ),
    "storages": (
        "How weights and moments are stored between steps.", STORAGES.values,
        "name visible weight master exp_avg exp_avg_sq bytes_per_param vectors loses source",
    ),
    "reductions": (
        "How and in which format ranks sum gradients.", REDUCTIONS.values, "name wire error order_invariant purpose source",
    ),
    "chips": (
        "Accelerators: memory, bandwidth, peak rates, links.", CHIPS.values,
        "name memory_gb bandwidth_gb_per_second peak_tflops link link_gb_per_second official source",
    ),
    "models": (
        "Preset models: shapes and parameter counts.", MODELS.values,
        "name num_parameters num_layers hidden_size intermediate_size num_heads num_kv_heads vocab_size source",
    ),
}  # fmt: skip
"""By name: a line of help, what the rows are of, and the keys. Only JSON has the sources."""


# ── one recipe, one compute ───────────────────────────────────────────────────────────────────────


def page_recipe(name: str) -> tuple[list[Row], list[Table]]:
    """Return what one recipe stores and computes: a row for JSON, and the tables to print.

    Args:
        name: a full name, or an alias.
    """
    recipe = notation.parse(name)
    storage = recipe.storage
    vectors = storages.for_vectors(storage)
    least, most = storage.gradients
    takes = "any" if most == math.inf else f"{least:.0e} to {most:.0e}"
    facts = {
        "loses": storage.loses,
        "gradients": "any; in a row, down to 8e-06 of its largest" if storage.scaled else takes,
        "storage from": storage.source,
        "norm gains, biases": f"stored as {vectors.name}, {cell_text(vectors.bytes_per_param)} bytes each",
        **_facts(recipe.compute),
    }
    stored = _stored_parts(storage)
    matmuls = _matmuls(recipe.compute)
    row = {**_rows([recipe], _OF_RECIPE)[0], "facts": facts, "stored": stored, "matmuls": matmuls}
    total = {"part": "in all", "format": "", "bytes": recipe.bytes_per_param, "rounding": ""}
    parts = table_of([*stored, total])
    return [row], [_fact_table("recipe", recipe.name, facts), parts, table_of(matmuls)]


def page_compute(name: str) -> tuple[list[Row], list[Table]]:
    """Return the three products of a compute: rows for JSON, and the tables to print.

    Args:
        name: of a compute, here or in another library.
    """
    compute = notation.get_compute(name)
    rows = _matmuls(compute)
    return rows, [_fact_table("compute", compute.name, _facts(compute)), table_of(rows)]


def _fact_table(kind: str, name: str, facts: dict[str, str]) -> Table:
    return table_of([{kind: key, name: value} for key, value in facts.items() if value])


def _facts(compute: Compute) -> dict[str, str]:
    wide_layers = "" if compute.is_wide else "layers outside the blocks, routers and adapters"
    if compute.keep_last:
        wide_layers += f"; the last {compute.keep_last:.0%} of the blocks"
    return {
        "for": compute.purpose,
        "compute from": compute.source,
        "native": compute.native or "nowhere: emulated",
        "transform": compute.transform,
        "saved for backward": f"{compute.kept_bytes:g} bytes per element of a linear layer's input",
        "outside of matmuls": f"{compute.dtype}; norms, softmax and the loss in float32",
        "linears left plain": wide_layers,
    }


_FORMULAS = {
    "output": ("y = x · wᵀ", "[tokens, in] · [in, out]"),
    "grad_input": ("dx = dy · w", "[tokens, out] · [out, in]"),
    "grad_weight": ("dw = dyᵀ · x", "[out, tokens] · [tokens, in]"),
}


def _matmuls(compute: Compute) -> list[Row]:
    """Return a row for each product: its operands [rows, contraction] as they are cast."""
    rows = []
    for place, product in compute.products.items():
        formula, shapes = _FORMULAS[place]
        row = {"matmul": formula, "shapes": shapes}
        for side in ("left", "right"):
            slot = f"{place}.{side}"
            row[side] = str(compute.casts[slot])
            if compute.cast_slots[slot] != slot:
                row[side] += f", codes of {compute.cast_slots[slot]}"
        rows.append({**row, "accumulation": product.accumulation})
    return rows


def _stored_parts(storage: Storage) -> list[Row]:
    """Return what is in memory per parameter of a matrix; the bytes sum to the bytes per parameter."""
    visible = {"format": storage.visible, "bytes": VISIBLE[storage.visible][0] / 8}
    rounding: str = "nearest" if storage.beside else storage.weight.rounding
    rows: list[Row] = [{"part": "weight", **visible, "rounding": rounding}]
    for group in storage.packing:
        # Unused bits of a word are counted with its first field.
        unused = width_of(group) - sum(bits for _, bits in group)
        for name, bits in group:
            role = name.partition("_low")[0]
            code = storage.weight if role in storage.beside else storage.code(role)
            text = f"{bits} bits" if name == "tail" else str(code).partition(",")[0]
            rounding = code.rounding if bits < 32 else ""
            rows.append(
                {"part": name, "format": text, "bytes": (bits + unused) / 8, "rounding": rounding}
            )
            unused = 0
    return [*rows, {"part": "gradient", **visible, "rounding": ""}]
