"""The tables that ``narrowgauge show`` prints, and one recipe in full.

Each table is a list of dicts, derived from the same values that the rest of the package computes with. ``--json`` prints the
same figures as a terminal and the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from narrowgauge.spec import notation, storages
from narrowgauge.spec.chips import CHIPS, Chip
from narrowgauge.spec.computes import COMPUTES, VARIANTS, Compute
from narrowgauge.spec.formats import FORMATS
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import ALIASES, AMBIGUOUS
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES, VISIBLE, WIDE, Code, Storage, low_parts, width_of
from narrowgauge.spec.sums import REDUCTIONS, Reduction
from narrowgauge.spec.tables import Column, Row, Table, cell_text, name_columns, number_columns, text_columns
from narrowgauge.spec.update_rules import UPDATE_RULES, UpdateRule, option_text


def rows(name: str) -> list[Row]:
    """Return the rows of one table, as plain values that JSON can hold.

    Example:
        >>> [row["bytes_per_param"] for row in rows("storages") if row["name"] == "word"]
        [8.0]
    """
    return table(name).rows


def table(name: str) -> Table:
    """Return a table of :data:`TABLES`, with the columns to print.

    Example:
        >>> print(table("storages").plain().split()[0])
        storage
    """
    _, make, columns = TABLES[name]
    return Table(columns, make())


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _attributes(objects: Iterable[Any], *names: str) -> list[Row]:
    return [{name: getattr(item, name) for name in names} for item in objects]


def _recipe_row(recipe: Recipe) -> Row:
    compute, storage = recipe.compute, recipe.storage
    is_short = compute.default_storage == storage.short_name and compute.name not in AMBIGUOUS
    short = [compute.name] if is_short else []
    return {
        "name": recipe.name,
        "aliases": [*(name for name, row in ALIASES.items() if row["recipe"] in (recipe.name, *short)), *short],
        "bytes_per_param": recipe.bytes_per_param,
        "loses": storage.loses,
        "purpose": compute.purpose,
    }


def _compute_row(compute: Compute) -> Row:
    def operands(*places: str) -> str:
        return " × ".join(dict.fromkeys(str(compute.casts[place]) for place in places))

    return {
        "name": compute.name,
        "storage": compute.default_storage,
        "forward": operands("output.left", "output.right"),
        "gradients": operands("grad_input.left", "grad_weight.left"),
        "kept_bytes": compute.kept_bytes,
        "native": _native_text(compute),
        "purpose": compute.purpose,
        "source": compute.source,
    }


def _native_text(compute: Compute) -> str:
    return compute.native or "nowhere: emulated"


def _storage_row(storage: Storage) -> Row:
    return {
        "name": storage.name,
        "weight": f"{storage.visible} + {storage.weight.name} master" if storage.master else _code_text(storage.weight),
        "exp_avg": _code_text(storage.exp_avg),
        "exp_avg_sq": _code_text(storage.exp_avg_sq),
        "bytes_per_param": storage.bytes_per_param,
        "vectors": storages.for_vectors(storage).name,
        "loses": storage.loses,
        "source": storage.source,
    }


def _code_text(code: Code) -> str:
    """Write a code: ``e6m5 (12 bits), stochastic``."""
    bits = f" ({code.bits} bits)" if code.is_window else ""
    return f"{code.name}{bits}{', stochastic' if code.rounding == 'stochastic' else ''}"


def _rule_row(rule: UpdateRule) -> Row:
    return {
        "name": rule.name,
        "optimizer": rule.optimizer,
        "purpose": rule.purpose,
        "is_matrix": rule.is_matrix,
        "settings": dict(rule.settings),
        "trained": {option.name: option.in_training for option in rule.options},
        "must_be": {option.name: str(option.law) for option in rule.options},
        "rate": rule.rate,
        "source": rule.source,
    }


def _reduction_row(reduction: Reduction) -> Row:
    return {
        "name": reduction.name,
        "wire": reduction.wire or "the gradient's own format",
        "wire_bytes": {gradient: reduction.bytes_per_element(gradient) for gradient in ("float32", "bfloat16")},
        "error": reduction.error,
        "order_invariant": reduction.order_invariant,
        "purpose": reduction.purpose,
    }


def _chip_row(chip: Chip) -> Row:
    columns = ("memory_gb", "bandwidth_gb_per_second", "link", "link_gb_per_second", "source")
    return {
        "name": chip.name,
        "peak_tflops": dict(chip.peak_tflops),
        "figures": "vendor's" if chip.official else "unofficial",
        **{name: getattr(chip, name) for name in columns},
    }


def _alias_rows() -> list[Row]:
    aliases = [{"name": name, **alias, "one_of": []} for name, alias in ALIASES.items()]
    return aliases + [{"name": n, "recipe": "", "source": "", "one_of": list(few)} for n, few in AMBIGUOUS.items()]


# ── columns ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _assigned(key: str) -> Callable[[Row], str]:
    return lambda row: ", ".join(f"{name}={option_text(value)}" for name, value in row[key].items())


def _peak(*names: str) -> Callable[[Row], float | None]:
    return lambda row: next((row["peak_tflops"][name] for name in names if name in row["peak_tflops"]), None)


_BYTES = Column("B/param", "bytes_per_param", right=True)
TABLES: dict[str, tuple[str, Callable[[], list[Row]], tuple[Column, ...]]] = {
    "formats": (
        "Number formats: range and precision.",
        lambda: _attributes(
            FORMATS.values(), "name", "bits", "exponent_bits", "mantissa_bits", "bias", "max", "min", "smallest_normal",
            "smallest_subnormal", "epsilon", "infinities", "nans", "purpose", "source",
        ),
        (
            *name_columns(format="name"),
            *number_columns(
                bits="bits", exponent="exponent_bits", mantissa="mantissa_bits", bias="bias", max="max",
                smallest_normal="smallest_normal", smallest_subnormal="smallest_subnormal", epsilon="epsilon",
            ),
            *text_columns(inf="infinities", NaN="nans", purpose="purpose"),
        ),
    ),
    "recipes": (
        "Recipes: purpose, bytes, losses.",
        lambda: [_recipe_row(notation.parse(name)) for name in notation.representative_names()],
        (
            *name_columns(recipe="name"), *text_columns(also_called="aliases"), _BYTES,
            *text_columns(loses="loses"), Column("for", "purpose"),
        ),
    ),
    "aliases": (
        "Names in other libraries, and the recipe that each means.",
        _alias_rows,
        (
            *name_columns(name="name", recipe="recipe"), *text_columns(known_from="source"),
            Column("ambiguous: one of", lambda row: ", ".join(row["one_of"])),
        ),
    ),
    "computes": (
        "How operands of the three matmuls are cast.",
        lambda: [_compute_row(row) for row in (*COMPUTES.values(), *VARIANTS.values())],
        (
            *name_columns(compute="name"), *text_columns(forward="forward", gradients="gradients"),
            Column("B saved", "kept_bytes", right=True), *text_columns(native="native", purpose="purpose"),
        ),
    ),
    "rules": (
        "Update rules: options, usual rates, sources.",
        lambda: [_rule_row(row) for row in UPDATE_RULES.values()],
        (
            *name_columns(rule="name", optimizer="optimizer"), *text_columns(steps_by="purpose"),
            Column("steps", lambda row: "matrices; AdamW the rest" if row["is_matrix"] else "everything"),
            Column("settings in training", _assigned("settings")),
            Column("own options", _assigned("trained")),
            Column("usual rate", lambda row: "none: set --lr" if row["rate"] is None else f"{row['rate']:.2g} × AdamW's"),
            *text_columns(source="source"),
        ),
    ),
    "storages": (
        "How weights and moments are stored between steps.",
        lambda: [_storage_row(row) for row in STORAGES.values()],
        (
            *name_columns(storage="name"),
            *text_columns(weight="weight", first_moment="exp_avg", second_moment="exp_avg_sq"), _BYTES,
            *text_columns(vectors="vectors", loses="loses"),
        ),
    ),
    "reductions": (
        "How and in which format ranks sum gradients.",
        lambda: [_reduction_row(row) for row in REDUCTIONS.values()],
        (
            *name_columns(reduction="name"), Column("travels as", "wire"),
            Column("B sent: float32", lambda row: row["wire_bytes"]["float32"], right=True),
            Column("bfloat16", lambda row: row["wire_bytes"]["bfloat16"], right=True),
            *text_columns(error="error"),
            Column("any order", lambda row: "same bits" if row["order_invariant"] else "other bits"),
            *text_columns(purpose="purpose"),
        ),
    ),
    "chips": (
        "Accelerators: memory, bandwidth, peak rates, links.",
        lambda: [_chip_row(chip) for chip in CHIPS.values()],
        (
            *name_columns(chip="name"), *number_columns(memory_GB="memory_gb"),
            Column("GB/s", "bandwidth_gb_per_second", right=True),
            Column("TFLOP/s: bfloat16", _peak("bfloat16"), right=True),
            *number_columns(
                float8=_peak("float8_e4m3fn", "float8_e4m3fnuz"), float4=_peak("float4_e2m1fn"), int8=_peak("int8")
            ),
            *text_columns(link="link"), Column("link GB/s", "link_gb_per_second", right=True),
            Column("figures", "figures"),
        ),
    ),
    "models": (
        "Preset models: shapes and parameter counts.",
        lambda: _attributes(
            MODELS.values(), "name", "num_parameters", "num_layers", "hidden_size", "intermediate_size", "num_heads",
            "num_kv_heads", "vocab_size", "max_positions", "tie_embeddings", "source",
        ),
        (
            *name_columns(model="name"),
            *number_columns(
                parameters="num_parameters", layers="num_layers", hidden="hidden_size", MLP="intermediate_size",
                heads="num_heads", kv_heads="num_kv_heads", vocabulary="vocab_size", positions="max_positions",
            ),
            *text_columns(tied="tie_embeddings", source="source"),
        ),
    ),
}  # fmt: skip
"""By name: a line of help, what makes the rows, and the printed columns."""


# ── one recipe in full ──────────────────────────────────────────────────────────────────────────────────────────────────────


def page_recipe(name: str) -> tuple[list[Row], list[Table]]:
    """Return what one recipe stores and computes: a row for JSON, and the tables to print.

    Args:
        name: a full name, an alias, or a ``.toml`` file.
    Example:
        >>> [part["bytes"] for part in page_recipe("bfloat16/word")[0][0]["stored"]]
        [2.0, 1.0, 1.5, 1.5, 2.0]
    """
    recipe = notation.parse(name)
    facts, stored = _facts(recipe), _stored_parts(recipe.storage)
    matmuls = [
        {"matmul": place, "left": str(product.left), "right": str(product.right), "in": product.accumulation}
        for place, product in recipe.compute.products.items()
    ]
    row = {**_recipe_row(recipe), "facts": facts, "stored": stored, "matmuls": matmuls}
    in_all = {"what": "in all", "format": "", "bytes": recipe.bytes_per_param, "rounding": ""}
    columns = (
        *text_columns(stored_of_each_parameter="what", format="format"), *number_columns(bytes="bytes"),
        *text_columns(rounding="rounding"),
    )  # fmt: skip
    return [row], [
        _pairs("recipe", recipe.name, facts),
        Table(columns, [*stored, in_all]),
        Table(text_columns(matmul="matmul", left="left", right="right", accumulated_in="in"), matmuls),
    ]


def _facts(recipe: Recipe) -> dict[str, str]:
    compute, vectors = recipe.compute, storages.for_vectors(recipe.storage)
    inside = "float64" if recipe.dtype == "float64" else "float32"
    facts = {
        "for": compute.purpose,
        "loses": recipe.storage.loses,
        "native": _native_text(compute),
        "source": compute.source,
        "transform": compute.transform,
        "norm gains, biases": f"stored as {vectors.name}, {cell_text(vectors.bytes_per_param)} bytes each",
        "saved for backward": f"{compute.kept_bytes:g} bytes per element of a linear layer's input",
        "outside of matmuls": f"{recipe.dtype}; norms, softmax and the loss in {inside}",
        "linears left plain": ", ".join(compute.keep),
        "stored otherwise": ", ".join(f"{o.pattern} as {o.storage.name}" for o in recipe.overrides if o.storage),
        "computed otherwise": ", ".join(f"{o.pattern} in {o.compute.name}" for o in recipe.overrides if o.compute),
    }
    return {label: text for label, text in facts.items() if text}


def _pairs(title: str, heading: str, entries: Mapping[str, Any]) -> Table:
    columns = Column(title, lambda entry: entry[0]), Column(heading, lambda entry: entry[1])
    return Table(columns, list(entries.items()))


def _stored_parts(storage: Storage) -> list[Row]:
    """Return what is in memory per parameter of a matrix; the bytes sum to the bytes per parameter."""

    def rounding(code: Code) -> str:
        return "" if code.bits >= 32 else code.rounding

    parts = {
        "master": ("full copy of the weight", storage.weight.name, ""),
        "tail": ("tail of the weight", f"{storage.tail_bits} bits", rounding(storage.weight)),
    }
    for name, words in (("weight", "weight"), ("exp_avg", "first moment"), ("exp_avg_sq", "second moment")):
        code = storage.code(name)
        text = _code_text(code).partition(",")[0] if code.parts == 1 else code.name.split(" ")[0]
        parts[name] = (words, text, rounding(code))
        parts |= {low: (f"low part of the {words}", text, rounding(code)) for low in low_parts(name, code)}
    visible_bytes, is_wide = VISIBLE[storage.visible][0] / 8, storage.visible in WIDE
    seen = "" if is_wide else "nearest" if storage.beside else rounding(storage.weight)
    stored = [("weight that the model sees", storage.visible, visible_bytes, seen)]
    for group in storage.packing:
        # Unused bits of a word are counted with its first field.
        unused = width_of(group) - sum(bits for _, bits in group)
        stored += [(*parts[n][:2], (bits + (unused if n == group[0][0] else 0)) / 8, parts[n][2]) for n, bits in group]
    stored.append(("gradient", storage.visible, visible_bytes, ""))
    return [dict(zip(("what", "format", "bytes", "rounding"), part, strict=True)) for part in stored]
