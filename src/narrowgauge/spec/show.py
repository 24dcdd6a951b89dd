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
from narrowgauge.spec.tables import Row, Table, table_of
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


# ── one recipe ────────────────────────────────────────────────────────────────────────────────────

_FORMULAS = {"output": "y = x · wᵀ", "grad_input": "dx = dy · w", "grad_weight": "dw = dyᵀ · x"}


def page_recipe(name: str) -> tuple[Row, list[Table]]:
    """Return what one recipe stores and computes: a row for JSON, and the tables to print.

    Args:
        name: a full name, or an alias.
    """
    recipe = notation.parse(name)
    storage = recipe.storage
    compute = recipe.compute
    least, most = storage.gradients
    vectors = storages.for_vectors(storage)
    facts = {
        "loses": storage.loses,
        "gradients": "any" if most == math.inf else f"{least:.0e} to {most:.0e}",
        "storage from": storage.source,
        "norm gains, biases": f"stored as {vectors.name}, {vectors.bytes_per_param:g} bytes each",
        "for": compute.purpose,
        "compute from": compute.source,
        "native": compute.native or "nowhere: emulated",
        "saved for backward": f"{compute.kept_bytes:g} bytes per element of a linear layer's input",
        "outside of matmuls": f"{compute.dtype}; norms, softmax and the loss in float32",
    }
    if storage.scaled:
        facts["gradients"] = "any; in a block, down to 8e-06 of its largest"
    if not compute.is_wide:
        facts["linears left plain"] = "layers outside the blocks, routers and adapters"
    if compute.keep_last:
        facts["linears left plain"] += f"; the last {compute.keep_last:.0%} of the blocks"
    stored = _stored_words(storage)
    matmuls = _matmuls(compute)
    row = {**_rows([recipe], _OF_RECIPE)[0], "facts": facts, "stored": stored, "matmuls": matmuls}
    total = {"word": "in all", "codes": "", "bytes": recipe.bytes_per_param}
    rows = [{"recipe": key, recipe.name: value} for key, value in facts.items()]
    return row, [table_of(rows), table_of([*stored, total]), table_of(matmuls)]


def _matmuls(compute: Compute) -> list[Row]:
    """Return a row for each product: its operands [rows, contraction] as they are cast."""
    rows = []
    for place, product in compute.products.items():
        row = {"matmul": _FORMULAS[place]}
        for side in ("left", "right"):
            slot = f"{place}.{side}"
            row[side] = str(compute.casts[slot])
            if compute.cast_slots[slot] != slot:
                row[side] += f", codes of {compute.cast_slots[slot]}"
        rows.append({**row, "accumulation": product.accumulation})
    return rows


def _stored_words(storage: Storage) -> list[Row]:
    """Return what is in memory per parameter of a matrix; the bytes sum to the bytes per parameter."""
    size = VISIBLE[storage.visible][0] / 8
    rounded = "" if storage.beside or storage.weight.rounding == "nearest" else ", stochastic"
    rows: list[Row] = [{"word": "weight", "codes": storage.visible + rounded, "bytes": size}]
    for group in storage.packing:
        codes = []
        for name, _ in group:
            role = name.partition("_low")[0]
            codes.append(str(storage.weight if role in storage.beside else storage.code(role)))
        names = ", ".join(name for name, _ in group)
        rows.append({"word": names, "codes": "; ".join(codes), "bytes": width_of(group) / 8})
    return [*rows, {"word": "gradient", "codes": storage.visible, "bytes": size}]
