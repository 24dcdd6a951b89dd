"""The tables that ``narrowgauge show`` prints, and one recipe in full.

Each table is a list of dicts, derived from the same values that the rest of the package computes
with. ``--json`` prints the same figures as a terminal and the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter, itemgetter
from typing import Any

from narrowgauge.spec import notation, storages
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.formats import FORMATS
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import ALIASES, REFUSED
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES, VISIBLE, Code, Storage, width_of
from narrowgauge.spec.sums import REDUCTIONS, Reduction
from narrowgauge.spec.tables import Column, Row, Table, cell_text
from narrowgauge.spec.update_rules import UPDATE_RULES, UpdateRule
from narrowgauge.spec.values import option_text, require_number


def table(name: str) -> Table:
    """Return a table of :data:`TABLES`. Its rows are plain values that JSON can hold."""
    _, make, hidden = TABLES[name]
    return _table(make(), hidden)


def _table(rows: list[Row], hidden: str = "") -> Table:
    """Return a table of all keys but the ``hidden`` ones, which only JSON has."""
    columns = []
    for key in rows[0]:
        if key in hidden.split():
            continue
        kinds = {type(row[key]) for row in rows}
        is_number = kinds <= {int, float, type(None)}
        columns.append(Column(key.replace("_", " "), key, code=key == "name", right=is_number))
    return Table(tuple(columns), rows)


def state_table(params: float) -> Table:
    """Return the bytes of weights, gradients and states of ``params`` parameters, by storage."""
    require_number("params", params, 1)
    rows = []
    for storage in STORAGES.values():
        per = storage.bytes_per_param
        gigabytes = per * params / 1e9
        rows.append({"name": storage.name, "bytes_per_param": per, "gigabytes": gigabytes})
    return _table(rows)


_NOWHERE = "nowhere: emulated"

# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


def _rows(objects: Iterable[Any], keys: str, **computed: Callable[[Any], Any]) -> list[Row]:
    """Return a row per object.

    A value is the attribute of that name, or what the function of that name computes.
    """
    rows = []
    for item in objects:
        row = {}
        for key in keys.split():
            read = computed.get(key, attrgetter(key))
            row[key] = read(item)
        rows.append(row)
    return rows


def _recipe_rows(recipes: Iterable[Recipe]) -> list[Row]:
    keys = "name bytes_per_param loses purpose"
    return _rows(
        recipes,
        keys,
        loses=lambda recipe: recipe.storage.loses,
        purpose=lambda recipe: recipe.compute.purpose,
    )


def _operands(*slots: str) -> Callable[[Compute], str]:
    def text(compute: Compute) -> str:
        return " × ".join(dict.fromkeys(str(compute.casts[slot]) for slot in slots))

    return text


def _native(compute: Compute) -> str:
    return compute.native or _NOWHERE


def _code_text(code: Code) -> str:
    """Write a code: ``e6m5 (12 bits), stochastic``."""
    text = code.name
    if code.is_window:
        text += f" ({code.bits} bits)"
    if code.rounding == "stochastic":
        text += ", stochastic"
    return text


def _range_text(storage: Storage) -> str:
    """Write which gradients a storage takes: ``3e-11 to 2e+07``."""
    least, most = storage.gradients
    if storage.scaled:
        return "any; in a row, down to 8e-06 of its largest"
    return "any" if most == math.inf else f"{least:.0e} to {most:.0e}"


def _weight_text(storage: Storage) -> str:
    if storage.master:
        return f"{storage.visible} + {storage.weight.name} master"
    return _code_text(storage.weight)


def _rate_text(rule: UpdateRule) -> str:
    return "none" if rule.rate is None else f"{rule.rate:.2g} × AdamW's"


def _alias_rows() -> list[Row]:
    rows = [{"name": name, **alias} for name, alias in ALIASES.items()]
    for name, row in REFUSED.items():
        source = row.get("why", "ambiguous: say which")
        rows.append({"name": name, "recipe": row["nearest"], "source": source})
    return rows


def _options(rule: UpdateRule) -> dict[str, str]:
    return {name: option_text(value) for name, value in rule.options.items()}


def _sent_bytes(reduction: Reduction) -> dict[str, float]:
    return {name: reduction.bytes_per_element(name) for name in ("float32", "bfloat16")}


TABLES: dict[str, tuple[str, Callable[[], list[Row]], str]] = {
    "formats": ("Number formats: range and precision.", lambda: _rows(
        FORMATS.values(),
        "name bits exponent_bits mantissa_bits bias max min smallest_normal smallest_subnormal "
        "epsilon infinities nans "
        "purpose source",
    ), "source"),
    "recipes": ("Recipes: purpose, bytes, losses.",
                lambda: _recipe_rows(map(notation.parse, notation.representative_names())), ""),
    "aliases": ("Names in other libraries, and the recipe that each means.", _alias_rows, ""),
    "computes": ("How operands of the three matmuls are cast.", lambda: _rows(
        COMPUTES.values(), "name storage forward gradients saved_bytes native purpose source",
        storage=lambda compute: compute.default_storage,
        forward=_operands("output.left", "output.right"), gradients=_operands("grad_input.left", "grad_weight.left"),
        saved_bytes=lambda compute: compute.kept_bytes, native=_native,
    ), "storage source"),
    "rules": ("Update rules: options, usual rates, sources.", lambda: _rows(
        UPDATE_RULES.values(), "name optimizer purpose steps settings options rate source",
        steps=lambda rule: "matrices; AdamW the rest" if rule.is_matrix else "everything",
        settings=lambda rule: dict(rule.settings),
        options=_options, rate=_rate_text,
    ), ""),
    "storages": ("How weights and moments are stored between steps.", lambda: _rows(
        STORAGES.values(), "name weight exp_avg exp_avg_sq bytes_per_param vectors loses source", weight=_weight_text,
        exp_avg=lambda storage: _code_text(storage.exp_avg), exp_avg_sq=lambda storage: _code_text(storage.exp_avg_sq),
        vectors=lambda storage: storages.for_vectors(storage).name,
    ), "source"),
    "reductions": ("How and in which format ranks sum gradients.", lambda: _rows(
        REDUCTIONS.values(), "name sent_as sent_bytes error order_invariant purpose source",
        sent_as=lambda reduction: reduction.wire or "the gradient's own format",
        sent_bytes=_sent_bytes,
    ), "source"),
    "chips": ("Accelerators: memory, bandwidth, peak rates, links.", lambda: _rows(
        CHIPS.values(), "name memory_gb bandwidth_gb_per_second peak_tflops link link_gb_per_second official source",
    ), "source"),
    "models": ("Preset models: shapes and parameter counts.", lambda: _rows(
        MODELS.values(),
        "name num_parameters num_layers hidden_size intermediate_size num_heads num_kv_heads "
        "vocab_size max_positions "
        "tie_embeddings source",
    ), "max_positions tie_embeddings"),
}  # fmt: skip
"""By name: a line of help, what makes the rows, and the keys that only JSON has."""


# ── one recipe, one compute ───────────────────────────────────────────────────────────────────────


def page_recipe(name: str) -> tuple[list[Row], list[Table]]:
    """Return what one recipe stores and computes: a row for JSON, and the tables to print.

    Args:
        name: a full name, or an alias.
    """
    recipe = notation.parse(name)
    storage = recipe.storage
    vectors = storages.for_vectors(storage)
    facts = {
        "loses": storage.loses,
        "gradients": _range_text(storage),
        "storage from": storage.source,
        "norm gains, biases": f"stored as {vectors.name}, {cell_text(vectors.bytes_per_param)} bytes each",
        **_facts(recipe.compute),
    }
    stored = _stored_parts(storage)
    matmuls = _matmuls(recipe.compute)
    row = {**_recipe_rows([recipe])[0], "facts": facts, "stored": stored, "matmuls": matmuls}
    total = {"part": "in all", "format": "", "bytes": recipe.bytes_per_param, "rounding": ""}
    tables = [_fact_table("recipe", recipe.name, facts), _table([*stored, total]), _table(matmuls)]
    return [row], tables


def page_compute(name: str) -> tuple[list[Row], list[Table]]:
    """Return the three products of a compute: rows for JSON, and the tables to print.

    Args:
        name: of a compute, here or in another library.
    """
    compute = notation.get_compute(name)
    rows = _matmuls(compute)
    return rows, [_fact_table("compute", compute.name, _facts(compute)), _table(rows)]


def _fact_table(kind: str, name: str, facts: dict[str, str]) -> Table:
    columns = (Column(kind, itemgetter(0)), Column(name, itemgetter(1)))
    return Table(columns, list(filter(itemgetter(1), facts.items())))


def _facts(compute: Compute) -> dict[str, str]:
    wide_layers = "" if compute.is_wide else "layers outside the blocks, routers and adapters"
    if compute.keep_last:
        wide_layers += f"; the last {compute.keep_last:.0%} of the blocks"
    return {
        "for": compute.purpose,
        "compute from": compute.source,
        "native": _native(compute),
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
            text = f"{bits} bits" if name == "tail" else _code_text(code).partition(",")[0]
            rounding = code.rounding if bits < 32 else ""
            rows.append(
                {"part": name, "format": text, "bytes": (bits + unused) / 8, "rounding": rounding}
            )
            unused = 0
    return [*rows, {"part": "gradient", **visible, "rounding": ""}]
