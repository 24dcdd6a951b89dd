"""The tables that ``narrowgauge show`` prints, and one recipe in full.

Each table is a list of dicts, derived from the same values that the rest of the package computes
with. ``--json`` prints the same figures as a terminal and the documentation.
"""

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from narrowgauge.spec import parse
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.formats import FORMATS
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.reductions import REDUCTIONS
from narrowgauge.spec.storages import STORAGES, VISIBLE, width_of
from narrowgauge.spec.tables import Row, Table, table_of
from narrowgauge.spec.update_rules import UPDATE_RULES

TABLES: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "formats": (
        "Number formats: range and precision.", FORMATS,
        "name bits exponent_bits mantissa_bits bias max min smallest_normal smallest_subnormal epsilon infinities nans "
        "purpose source",
    ),
    "recipes": (
        "Recipes: purpose, bytes, losses.", {name: parse.parse(name) for name in parse.representative_names()},
        "name bytes_per_param storage.loses compute.purpose",
    ),
    "aliases": ("Names in other libraries, and the recipe that each means.", parse.ALIASES, ""),
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
    rows = [{"name": name, **row} for name, row in parse.ALIASES.items()]
    for name, row in parse.REFUSED.items():
        why = row.get("why", "ambiguous: say which")
        rows.append({"name": name, "recipe": ", ".join(row["nearest"]), "source": why})
    return rows


def recipe_facts(name: str) -> Row:
    """Return what one recipe stores, casts and loses, for each parameter of a matrix.

    Args:
        name: a full name, or an alias.
    """
    recipe = parse.parse(name)
    storage = recipe.storage
    compute = recipe.compute
    least, most = storage.gradients
    gradients = "any" if most == math.inf else f"{least:.0e} to {most:.0e}"
    if storage.scaled:
        gradients = "any; in a block of 256, down to 8e-06 of the largest"
    size = VISIBLE[storage.visible][0] / 8
    facts = {
        "recipe": recipe.name,
        "bytes per parameter": recipe.bytes_per_param,
        "loses": storage.loses,
        "weight": f"{storage.weight}: {size:g} bytes",
    }
    for group in storage.packing:
        names = [name for name, _ in group]
        codes = [str(storage.code(role)) for state, role in storage.states if state in names]
        words = f"{width_of(group) / 8:g} bytes"
        facts[", ".join(names)] = f"{'; '.join(codes)}: {words}" if codes else words
    facts |= {
        "gradient": f"{storage.visible}: {size:g} bytes",
        "gradients": gradients,
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
    for formula, product in zip(_FORMULAS, compute.products.values(), strict=True):
        facts[formula] = f"{product}, summed in {product.accumulation}"
    return facts


_FORMULAS = ("y = x · wᵀ", "dx = dy · w", "dw = dyᵀ · x")
