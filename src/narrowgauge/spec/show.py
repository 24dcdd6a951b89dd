"""The tables that ``narrowgauge show`` prints, and one format, value or recipe in full.

Each table is a list of dicts, derived from the same values that the rest of the package computes with. ``--json`` prints all of
a dict; a terminal and the documentation print selected columns. ``detail_*`` functions return one format, value or recipe in
full as plain values for JSON, ``page_*`` functions the same values as tables to print.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from narrowgauge.errors import FormatError, NarrowgaugeError, suggestion
from narrowgauge.spec import computes, formats, notation, propagation, recipes, storages, sums
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.frameworks import FRAMEWORKS
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import ALIASES, Alias
from narrowgauge.spec.recipe_sets import RECIPE_SETS, RecipeSet
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import VISIBLE, WIDE, Code, Storage, low_parts, width_of
from narrowgauge.spec.tables import Column, Row, Table, cell_text, name_columns, number_columns, text_columns
from narrowgauge.spec.update_rules import UPDATE_RULES, UpdateRule, option_text


def rows(name: str) -> list[Row]:
    """The rows of one table, as plain values that JSON can hold.

    ``recipes`` lists each compute with its default storage, and each storage with its default compute
    (:func:`narrowgauge.spec.notation.representative_names`).

    Raises:
        NarrowgaugeError: unknown table.
    Example:
        >>> [row["bytes_per_param"] for row in rows("storages") if row["name"] == "word"]
        [8.0]
    """
    return _maker(name)()


def table(name: str) -> Table:
    """The table of that name (as in :func:`rows`), with the columns to print.

    Example:
        >>> print(table("storages").plain().split()[0])
        storage
    """
    return Table(_COLUMNS[name], _maker(name)())


def markdown(name: str) -> str:
    """The table of that name (as in :func:`rows`) as GitHub markdown.

    Example:
        >>> markdown("models").splitlines()[2].split("|")[1].strip()
        '`llama-1m`'
    """
    return table(name).markdown()


def native_text(row: Row) -> str:
    return row["native"] or "nowhere: emulated"


def format_row(row: formats.Format) -> Row:
    aliases = [alias for alias, name in formats.FORMAT_ALIASES.items() if name == row.name]
    return {**row.describe(), "aliases": aliases}


def recipe_row(recipe: Recipe) -> Row:
    own = recipes.own_name(recipe.storage)
    is_short = notation.default_storage(recipe.compute.name) == own and recipe.compute.name not in ALIASES
    short = [recipe.compute.name] if is_short else []
    known = [row.name for row in ALIASES.values() if row.is_taken and row.recipe in (recipe.name, *short)]
    storage = _storage_row(recipe.storage)
    return {
        "name": recipe.name,
        "aliases": [*known, *short],
        "compute": recipe.compute.name,
        "storage": recipe.storage.name,
        "reduction": recipe.reduction.name,
        "bytes_per_param": recipe.bytes_per_param,
        **{part: storage[part] for part in ("weight", "exp_avg", "exp_avg_sq")},
        "purpose": recipe.compute.purpose,
        "loses": recipe.storage.loses,
        "native": recipe.compute.native,
        "source": recipe.compute.source,
    }


def _compute_row(compute: Compute) -> Row:
    usual = notation.parse(f"{compute.name}/{notation.default_storage(compute.name)}")
    return {
        "name": compute.name,
        "storage": usual.storage.name,
        "dtype": compute.dtype,
        "casts": {
            place: {"text": str(cast), **_fields(cast), "bits": cast.bits} for place, cast in compute.casts.items()
        },
        "accumulation": {place: product.accumulation for place, product in compute.products.items()},
        "kept_bytes": compute.kept_bytes,
        "inference_bytes": _inference_bytes(compute),
        "stochastic": compute.is_stochastic,
        "delayed": compute.is_delayed,
        "scales_loss": compute.scales_loss,
        "transform": compute.transform,
        "keep": list(compute.keep),
        "native": compute.native,
        "purpose": compute.purpose,
        "source": compute.source,
    }


_SIDE = 4096


def _inference_bytes(compute: Compute) -> dict[str, float] | None:
    """Bytes of a weight that is stored as codes, in a matrix of 4,096 × 4,096: of each, and of one kept in 16 bits beside it."""
    if not computes.stores_codes(compute):
        return None
    beside = 2 if computes.keeps_outlier_weights(compute) else 0
    return {"weight": computes.stored_bytes(compute, _SIDE, _SIDE) / _SIDE**2, "outlier_weight": beside}


def _inference_text(found: dict[str, float] | None) -> str:
    if found is None:
        return ""
    beside = "; 2 more for each weight of a column that may hold outliers" if found["outlier_weight"] else ""
    return f"{found['weight']:.4g} bytes a weight as codes ({_SIDE:,} × {_SIDE:,}){beside}"


def _operands(*places: str) -> Callable[[Row], str]:
    return lambda row: " × ".join(dict.fromkeys(row["casts"][place]["text"] for place in places))


def _storage_row(storage: Storage) -> Row:
    return {
        "name": storage.name,
        "visible": storage.visible,
        "weight": f"{storage.visible} + {storage.weight.name} master" if storage.master else code_text(storage.weight),
        "exp_avg": code_text(storage.exp_avg),
        "exp_avg_sq": code_text(storage.exp_avg_sq),
        "state_bits": dict(storage.fields),
        "bytes_per_param": storage.bytes_per_param,
        "vectors": storages.for_vectors(storage).name,
        "bytes_per_row": storage.bytes_per_row,
        "arithmetic": storage.arithmetic,
        "stochastic": storage.is_stochastic,
        "loses": storage.loses,
        "fallback": storage.fallback,
        "cure": storage.fallback,  # its earlier name
        "source": storage.source,
    }


def _rule_row(rule: UpdateRule) -> Row:
    plain = {name: value for name, value in _fields(rule).items() if name != "options"}
    defaults, trained = ({o.name: getattr(o, how) for o in rule.options} for how in ("default", "in_training"))
    laws = {option.name: str(option.law) for option in rule.options}
    return {**plain, "options": defaults, "trained": trained, "must_be": laws}


def _assigned(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={option_text(value)}" for name, value in options.items())


def _gather_row(compute: Compute) -> Row:
    row = computes.gathering_of(compute)
    return {"name": compute.name, **_fields(row), "codes": compute.casts[row.forward].format if row.is_narrow else ""}


def _reduction_row(reduction: sums.Reduction) -> Row:
    wire = {gradient: reduction.bytes_per_element(gradient) for gradient in ("float32", "bfloat16")}
    # The second name is the earlier one.
    return {**_fields(reduction), "order_free": reduction.order_invariant, "wire_bytes": wire}


def code_text(code: Code) -> str:
    """``e6m5 (12 bits), stochastic``."""
    bits = f" ({code.bits} bits)" if code.is_window else ""
    return f"{code.name}{bits}{', stochastic' if code.rounding == 'stochastic' else ''}"


def _chip_rows() -> list[Row]:
    derived = ("memory_bytes", "bandwidth_bytes_per_second")
    return [{**_fields(chip), **{name: getattr(chip, name) for name in derived}} for chip in CHIPS.values()]


def _model_rows() -> list[Row]:
    derived = ("head_dim", "num_parameters")
    return [{**_fields(model), **{name: getattr(model, name) for name in derived}} for model in MODELS.values()]


def _fields(row: Any) -> Row:
    return {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}


def _alias_row(alias: Alias) -> Row:
    return {**_fields(alias), "taken": alias.is_taken}


def _set_row(row: RecipeSet) -> Row:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in _fields(row).items()}


def _maker(name: str) -> Callable[[], list[Row]]:
    if name not in _MAKERS:
        raise NarrowgaugeError(
            f"no table is named '{name}'.", suggestion(name, _MAKERS) or f"Known: {', '.join(_MAKERS)}."
        )
    return _MAKERS[name]


@lru_cache
def _first_rows(part: str) -> dict[str, str]:
    first: dict[str, str] = {}
    for name in notation.representative_names():
        first.setdefault(getattr(notation.parse(name), part).name, name)
    return first


def _first_or_reference(key: str, part: str) -> Callable[[Row], str]:
    """The text about a recipe's compute or storage in its first row; in all others the name of that row."""

    def text(row: Row) -> str:
        first = _first_rows(part)[row[part]]
        return str(row[key]) if first == row["name"] else f"as {first}"

    return text


def _peak(*names: str) -> Callable[[Row], float | None]:
    return lambda row: next((row["peak_tflops"][name] for name in names if name in row["peak_tflops"]), None)


_MAKERS: dict[str, Callable[[], list[Row]]] = {
    "formats": lambda: [format_row(row) for row in formats.FORMATS.values()],
    "recipes": lambda: [recipe_row(notation.parse(name)) for name in notation.representative_names()],
    "aliases": lambda: [_alias_row(row) for row in ALIASES.values()],
    "sets": lambda: [_set_row(row) for row in RECIPE_SETS.values()],
    "computes": lambda: [_compute_row(computes.named(name)) for name in computes.names()],
    "gathers": lambda: [_gather_row(row) for row in COMPUTES.values()],
    "scales": lambda: [{**_fields(row), "measures": list(row.measures)} for row in propagation.RULES.values()],
    "rules": lambda: [_rule_row(row) for row in UPDATE_RULES.values()],
    "storages": lambda: [_storage_row(row) for row in storages.STORAGES.values()],
    "reductions": lambda: [_reduction_row(row) for row in sums.REDUCTIONS.values()],
    "chips": _chip_rows,
    "models": _model_rows,
    "frameworks": lambda: [_fields(row) for row in FRAMEWORKS.values()],
}

_BYTES = Column("B/param", "bytes_per_param", right=True)

_COLUMNS: dict[str, tuple[Column, ...]] = {
    "formats": (
        *name_columns(format="name"),
        *number_columns(
            bits="bits", exponent="exponent_bits", mantissa="mantissa_bits", bias="bias", max="max",
            smallest_normal="smallest_normal", smallest_subnormal="smallest_subnormal", epsilon="epsilon",
        ),
        *text_columns(inf="infinities", NaN="nans", purpose="purpose"),
    ),
    "recipes": (
        *name_columns(recipe="name"), *text_columns(also_called="aliases"), _BYTES,
        Column("for", _first_or_reference("purpose", "compute")),
        *text_columns(loses=_first_or_reference("loses", "storage"), native=native_text),
    ),
    "aliases": (
        *name_columns(name="name", recipe="recipe"),
        *text_columns(taken="taken", known_from="source", differs="differs"),
        Column("or", lambda row: ", ".join(f"{recipe} ({what})" for recipe, what in row["others"])),
    ),
    "sets": (
        *name_columns(set="name"), Column("recipes", lambda row: ", ".join(row["recipes"])),
        Column("only where native", lambda row: ", ".join(row["where_native"])),
        *text_columns(answers="question", source="source"),
    ),
    "scales": (
        *name_columns(operation="name"), *text_columns(scale_of_the_result="scale", of_the_gradient="gradient"),
        Column("measured", lambda row: ", ".join(row["measures"])),
    ),
    "computes": (
        *name_columns(compute="name"), *text_columns(forward=_operands("output.left", "output.right")),
        *text_columns(gradients=_operands("grad_input.left", "grad_weight.left")), Column("B saved", "kept_bytes", right=True),
        *text_columns(native=native_text),
    ),
    "gathers": (
        *name_columns(compute="name"), Column("gathered as", lambda row: f"{row['codes']} codes" if row["codes"] else "weights"),
        Column("for", lambda row: " and ".join(dict.fromkeys(filter(None, (row["forward"], row["backward"]))))),
        *text_columns(because="reason"),
    ),
    "storages": (
        *name_columns(storage="name"), *text_columns(weight="weight", first_moment="exp_avg", second_moment="exp_avg_sq"), _BYTES,
        *text_columns(vectors="vectors", loses="loses"),
    ),
    "rules": (
        *name_columns(rule="name", optimizer="optimizer"), *text_columns(steps_by="purpose"),
        Column("steps", lambda row: "matrices; AdamW the rest" if row["is_matrix"] else "everything"),
        Column("settings in training", lambda row: _assigned(row["settings"])),
        Column("own options", lambda row: _assigned(row["trained"])),
        Column("usual rate", lambda row: "none: set --lr" if row["rate"] is None else f"{row['rate']:.2g} × AdamW's"),
        *text_columns(because="rate_because", source="source"),
    ),
    "reductions": (
        *name_columns(reduction="name"), Column("travels as", lambda row: row["wire"] or "the gradient's own format"),
        Column("B sent: float32", lambda row: row["wire_bytes"]["float32"], right=True),
        Column("bfloat16", lambda row: row["wire_bytes"]["bfloat16"], right=True),
        *text_columns(error="error", keeps="keeps"),
        Column("any order", lambda row: "same bits" if row["order_invariant"] else "other bits"),
        *text_columns(purpose="purpose"),
    ),
    "chips": (
        *name_columns(chip="name"), *number_columns(memory_GB="memory_gb"), Column("GB/s", "bandwidth_gb_per_second", right=True),
        Column("TFLOP/s: bfloat16", _peak("bfloat16"), right=True),
        *number_columns(float8=_peak("float8_e4m3fn", "float8_e4m3fnuz"), float4=_peak("float4_e2m1fn"), int8=_peak("int8")),
        *text_columns(link="link"), Column("link GB/s", "link_gb_per_second", right=True), *number_columns(W="watts"),
        *text_columns(evidence="evidence"),
    ),
    "models": (
        *name_columns(model="name"),
        *number_columns(
            parameters="num_parameters", layers="num_layers", hidden="hidden_size", MLP="intermediate_size",
            heads="num_heads", kv_heads="num_kv_heads", vocabulary="vocab_size", positions="max_positions",
        ),
        *text_columns(tied="tie_embeddings", source="source"),
    ),
    "frameworks": (
        *name_columns(checkpoints_of="name"),
        *text_columns(version="version", read="reads", written="writes", rounded="exact", refused="refused", checked="checked"),
    ),
}  # fmt: skip


# ── one format, value or recipe in full ────────────────────────────────────────────────────────────────────────────────


_EXAMPLE_PARAMETERS = 1_000_000_000
"""A model size at which bytes per parameter are gigabytes."""


def detail_format(name: str) -> Row:
    """The row of one format in ``rows("formats")``, found by its name, alias or PyTorch spelling.

    Example:
        >>> detail_format("e4m3")["max"]
        448.0
    """
    return format_row(formats.get_format(name))


def detail_value(text: str) -> list[Row]:
    """A number, rounded to every format (:func:`narrowgauge.spec.formats.describe_value`).

    Args:
        text: a decimal (``0.1``, ``1e-8``), a hexadecimal float (``0x1p-3``), ``inf`` or ``nan``.
    Raises:
        FormatError: the text is not a number, or one beyond float64.
    Example:
        >>> {row["name"]: row["value"] for row in detail_value("0x1p-3")}["bfloat16"]
        0.125
    """
    return formats.describe_value(_number(text))


def detail_recipe(name: str) -> Row:
    """All parts of one recipe.

    Args:
        name: a full name, an alias, or a ``.toml`` file.
    Returns:
        Its row of ``rows("recipes")`` and: ``stored`` (a dict per part: what, format, bytes per parameter, rounding),
        ``vectors`` (the storage of norm gains and biases), ``casts`` and ``accumulation`` (by matmul), ``kept_bytes`` (saved
        for backward per element of a layer's input), ``inference_bytes`` (by
        :func:`narrowgauge.quantize_for_inference`), ``linears_kept`` (patterns that the compute leaves plain), ``dtypes``,
        ``keep``, ``overrides``, ``phases``, ``evaluation``, and ``example_memory_bytes`` at ``example_parameters``.
    Example:
        >>> [part["bytes"] for part in detail_recipe("bfloat16/word")["stored"]]
        [2.0, 1.0, 1.5, 1.5, 2.0]
        >>> detail_recipe("int8-row/word")["casts"]["grad_weight.left"]
        'int8, per row, stochastic'
    """
    recipe = notation.parse(name)
    compute, vectors = recipe.compute, storages.for_vectors(recipe.storage)
    return {
        **recipe_row(recipe),
        "stored": _stored_parts(recipe.storage),
        "vectors": {"storage": vectors.name, "bytes_per_param": vectors.bytes_per_param},
        "casts": {place: str(cast) for place, cast in compute.casts.items()},
        "accumulation": {place: product.accumulation for place, product in compute.products.items()},
        "kept_bytes": compute.kept_bytes,
        "inference_bytes": _inference_bytes(compute),
        "transform": compute.transform,
        "linears_kept": list(compute.keep),
        "dtypes": recipe.dtypes,
        "keep": list(recipe.keep),
        "overrides": [_override_row(override) for override in recipe.overrides],
        "phases": [{"until": phase.until, "compute": phase.compute.name} for phase in recipe.phases],
        "evaluation": recipe.evaluation.name if recipe.evaluation else None,
        "example_parameters": _EXAMPLE_PARAMETERS,
        "example_memory_bytes": round(recipe.bytes_per_param * _EXAMPLE_PARAMETERS),
    }


def page_format(name: str) -> list[Table]:
    row = detail_format(name)
    figures = [{"what": key.replace("_", " "), "is": value} for key, value in row.items() if value is not None]
    return [Table((Column("format", "what"), Column(str(row["name"]), "is")), figures[1:])]


def page_value(text: str) -> list[Table]:
    columns = (
        *name_columns(format="name"),
        *number_columns(code="hex"),
        *name_columns(value=lambda row: repr(row["value"])),
        *number_columns(relative_error=lambda row: _percent(row["relative_error"]), spacing="spacing"),
        *text_columns(note="note"),
    )
    return [Table(columns, detail_value(text), f"{text.strip()} is {_number(text):.20g} in float64; in all formats:")]


def page_recipe(name: str) -> list[Table]:
    row = detail_recipe(name)
    in_all = {"what": "in all", "format": "", "bytes": row["bytes_per_param"], "rounding": ""}
    stored = (
        *text_columns(stored_of_each_parameter="what", format="format"),
        *number_columns(bytes="bytes"),
        *text_columns(rounding="rounding"),
    )
    matmuls = [
        {"matmul": place, "left": row["casts"][f"{place}.left"], "right": row["casts"][f"{place}.right"], "in": sums}
        for place, sums in row["accumulation"].items()
    ]
    return [
        _pairs(("recipe", str(row["name"])), _facts(row)),
        Table(stored, [*row["stored"], in_all]),
        Table(text_columns(matmul="matmul", left="left", right="right", accumulated_in="in"), matmuls),
        _pairs(("computed", "in"), row["dtypes"]),
    ]


def _facts(row: Row) -> dict[str, str]:
    memory = f"{row['example_memory_bytes'] / 1e9:g} GB at {row['example_parameters'] / 1e9:g} billion parameters"
    facts = {
        "for": row["purpose"],
        "loses": row["loses"],
        "native": native_text(row),
        "source": row["source"],
        "transform": row["transform"],
        "norm gains, biases": f"stored as {row['vectors']['storage']}, {cell_text(row['vectors']['bytes_per_param'])} bytes each",
        "memory": f"{memory}, before activations",
        "quantized": _inference_text(row["inference_bytes"]),
        "linears left plain": ", ".join(row["linears_kept"]),
        "kept in float32": ", ".join(row["keep"]),
        "stored otherwise": ", ".join(f"{o['pattern']} as {o['storage']}" for o in row["overrides"] if o["storage"]),
        "computed otherwise": ", ".join(f"{o['pattern']} in {o['compute']}" for o in row["overrides"] if o["compute"]),
        "phases": ", ".join(f"{p['compute']} until {p['until']:g}" for p in row["phases"]),
        "evaluated in": row["evaluation"] or "",
    }
    if facts["phases"]:
        facts["phases"] += f", then {row['compute']}"
    return {what: text for what, text in facts.items() if text}


def _pairs(heads: tuple[str, str], entries: dict[str, Any]) -> Table:
    columns = (Column(heads[0], "what"), Column(heads[1], "is"))
    return Table(columns, [{"what": what, "is": value} for what, value in entries.items()])


def _number(text: str) -> float:
    word = text.strip().lower()
    try:
        value = float.fromhex(word) if "0x" in word else float(word)
    except (ValueError, OverflowError):
        value = None
    if value is None:
        raise FormatError(f"{text!r} is not a number.", "Write it like 0.1, 1e-8, 0x1p-3, inf or nan.")
    if math.isinf(value) and "inf" not in word:
        raise FormatError(f"{text} is outside the range of float64.", "Write inf for infinity.")
    return value


def _override_row(override: recipes.Override) -> Row:
    rows = {"storage": override.storage, "compute": override.compute}
    return {"pattern": override.pattern, **{part: row.name if row else None for part, row in rows.items()}}


def _rounding(code: Code) -> str:
    """The rounding mode of a code; empty where all bits of the float32 or float64 are stored."""
    return "" if code.bits >= 32 else code.rounding


def _stored_parts(storage: Storage) -> list[Row]:
    """What is in memory per parameter of a matrix; the bytes sum to the bytes per parameter."""
    visible_bytes = VISIBLE[storage.visible][0] / 8
    rounded_here = storage.visible not in WIDE and not storage.beside
    parts = {
        "master": ("full copy of the weight", storage.weight.name, ""),
        "tail": ("tail of the weight", f"{storage.tail_bits} bits", _rounding(storage.weight)),
    }
    for name, words in (("weight", "weight"), ("exp_avg", "first moment"), ("exp_avg_sq", "second moment")):
        code = storage.code(name)
        text = code_text(code).partition(",")[0] if code.parts == 1 else code.name.split(" ")[0]
        parts[name] = (words, text, _rounding(code))
        parts |= {low: (f"low part of the {words}", text, _rounding(code)) for low in low_parts(name, code)}
    seen_rounding = _rounding(storage.weight) if rounded_here else "" if storage.visible in WIDE else "nearest"
    stored = [("weight that the model sees", storage.visible, visible_bytes, seen_rounding)]
    for group in storage.packing:
        unused = width_of(group) - sum(bits for _, bits in group)
        # Unused bits of a word are counted with its first field.
        stored += [(*parts[n][:2], (bits + (unused if n == group[0][0] else 0)) / 8, parts[n][2]) for n, bits in group]
    stored.append(("gradient", storage.visible, visible_bytes, ""))
    return [dict(zip(("what", "format", "bytes", "rounding"), part, strict=True)) for part in stored]


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.3g} %"
