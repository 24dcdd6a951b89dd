"""The tables that ``narrowgauge show`` prints, and one recipe in full.

Each table is a list of dicts, derived from the same values that the rest of the package computes
with. ``--json`` prints the same figures as a terminal and the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from narrowgauge.spec import notation
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.formats import FORMATS
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.storages import STORAGES, VISIBLE, Storage, width_of
from narrowgauge.spec.sums import REDUCTIONS
from narrowgauge.spec.tables import Row, Table, table_of
from narrowgauge.spec.update_rules import UPDATE_RULES

TABLES: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "formats": (
        "Number formats: range and precision.", FORMATS,
        "name bits exponent_bits mantissa_bits bias max min smallest_normal smallest_subnormal epsilon infinities nans "
        "purpose source",
    ),
    "recipes": (
        "Recipes: purpose, bytes, losses.", {name: notation.parse(name) for name in notation.representative_names()},
        "name bytes_per_param storage.loses compute.purpose",
    ),
    "aliases": ("Names in other libraries, and the recipe that each means.", notation.ALIASES, ""),
    "computes": (
        "How operands of the three matmuls are cast.", COMPUTES,
        "name output grad_input grad_weight kept_bytes native purpose source",
    ),
    "rules": (
        "Update rules: settings, options, sources.", UPDATE_RULES,
        "name optimizer purpose is_matrix settings options source",
    ),
    "storages": (
        "How weights and moments are stored between steps.", STORAGES,
        "name visible weight master exp_avg exp_avg_sq bytes_per_param vectors loses source",
    ),
    "reductions": (
        "How and in which format ranks sum gradients.", REDUCTIONS, "name wire error order_invariant purpose source",
    ),
    "chips": (
        "Accelerators: memory, bandwidth, peak rates, links.", CHIPS,
        "name memory_gb bandwidth_gb_per_second peak_tflops link link_gb_per_second source",
    ),
    "models": (
        "Preset models: shapes and parameter counts.", MODELS,
        "name num_parameters num_layers hidden_size intermediate_size num_heads num_kv_heads vocab_size source",
    ),
}  # fmt: skip
"""By name: a line of help, the items, and the keys. Only JSON has the sources."""


def table(name: str) -> Table:
    """Return a table of :data:`TABLES`. Its rows are plain values that JSON can hold."""
    if name == "aliases":
        return table_of(_aliases())
    _, items, keys = TABLES[name]
    return table_of(_rows(items.values(), keys), hidden=("source",))


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


def _aliases() -> list[Row]:
    rows: list[Row] = [{"name": name, **row} for name, row in notation.ALIASES.items()]
    for name, row in notation.REFUSED.items():
        why = row.get("why", "ambiguous: say which")
        rows.append({"name": name, "recipe": ", ".join(row["nearest"]), "source": why})
    return rows


def page_recipe(name: str) -> tuple[Row, list[Table]]:
    """Return what one recipe stores and computes: a row for JSON, and the tables to print.

    Args:
        name: a full name, or an alias.
    """
    recipe = notation.parse(name)
    storage = recipe.storage
    compute = recipe.compute
    least, most = storage.gradients
    gradients = "any" if most == math.inf else f"{least:.0e} to {most:.0e}"
    facts = {
        "loses": storage.loses,
        "gradients": _IN_BLOCKS if storage.scaled else gradients,
        "storage from": storage.source,
        "norm gains, biases": storage.vectors or storage.name,
        "for": compute.purpose,
        "compute from": compute.source,
        "native": compute.native or "nowhere: emulated",
        "saved for backward": f"{compute.kept_bytes:g} bytes per element of a linear layer's input",
        "outside of matmuls": f"{compute.dtype}; norms, softmax and the loss in float32",
    }
    if compute.keep_last:
        facts["wide blocks"] = f"the last {compute.keep_last:.0%} of the model's blocks"
    stored = _stored_words(storage)
    matmuls = []
    for formula, product in zip(_FORMULAS, compute.products.values(), strict=True):
        matmuls += [
            {"matmul": formula, **row} for row in _rows([product], "left right accumulation")
        ]
    row = {"name": recipe.name, "bytes_per_param": recipe.bytes_per_param}
    row |= {"facts": facts, "stored": stored, "matmuls": matmuls}
    total = {"word": "in all", "codes": "", "bytes": recipe.bytes_per_param}
    rows = [{"recipe": key, recipe.name: value} for key, value in facts.items()]
    return row, [table_of(rows), table_of([*stored, total]), table_of(matmuls)]


_IN_BLOCKS = "any; in a block of 256, down to 8e-06 of the largest"
_FORMULAS = ("y = x · wᵀ", "dx = dy · w", "dw = dyᵀ · x")


def _stored_words(storage: Storage) -> list[Row]:
    """Return what is in memory per parameter of a matrix; the bytes sum to the bytes per parameter."""
    size = VISIBLE[storage.visible][0] / 8
    rows: list[Row] = [{"word": "weight", "codes": str(storage.weight), "bytes": size}]
    for group in storage.packing:
        names = [name for name, _ in group]
        codes = [str(storage.code(role)) for state, role in storage.states if state in names]
        rows.append(
            {"word": ", ".join(names), "codes": "; ".join(codes), "bytes": width_of(group) / 8}
        )
    return [*rows, {"word": "gradient", "codes": storage.visible, "bytes": size}]
