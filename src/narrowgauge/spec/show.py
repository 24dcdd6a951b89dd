"""The tables of formats, recipes, aliases, computes, gathers, scales, storages, reductions, chips, models and frameworks.

Each table is a list of dicts, derived from the same values that the rest of the package computes with. ``--json`` prints all of
a dict; a terminal and the documentation print selected columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from narrowgauge.errors import NarrowgaugeError, suggestion
from narrowgauge.spec import formats, gathering, notation, propagation, recipes, reductions, storages, variants
from narrowgauge.spec.aliases import ALIASES, Alias
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.codes import Code
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.frameworks import FRAMEWORKS
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import Storage
from narrowgauge.spec.tables import Column, Row, Table, name_columns, number_columns, text_columns


def rows(name: str) -> list[Row]:
    """One table, as plain values that JSON can hold.

    Args:
        name: formats, recipes, aliases, computes, gathers, scales, storages, reductions, chips, models or frameworks.
    Returns:
        A dict per row, each with ``name``. ``recipes`` lists each compute with its default storage, and each storage with
        its default compute (:func:`narrowgauge.spec.notation.representative_names`).
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
    aliases = [alias for alias, name in formats.ALIASES.items() if name == row.name]
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
        "stochastic": compute.is_stochastic,
        "delayed": compute.is_delayed,
        "scales_loss": compute.scales_loss,
        "transform": compute.transform,
        "keep": list(compute.keep),
        "native": compute.native,
        "purpose": compute.purpose,
        "source": compute.source,
    }


def _operands(*places: str) -> Callable[[Row], str]:
    """The casts at these places, equal ones once."""
    return lambda row: " × ".join(dict.fromkeys(row["casts"][place]["text"] for place in places))


def _storage_row(storage: Storage) -> Row:
    return {
        "name": storage.name,
        "visible": storage.visible,
        "weight": f"{storage.visible} + float32 master" if storage.master else code_text(storage.weight),
        "exp_avg": code_text(storage.exp_avg),
        "exp_avg_sq": code_text(storage.exp_avg_sq),
        "state_bits": dict(storage.fields),
        "bytes_per_param": storage.bytes_per_param,
        "vectors": storages.for_vectors(storage).name,
        "bytes_per_row": storage.bytes_per_row,
        "arithmetic": storage.arithmetic,
        "stochastic": storage.is_stochastic,
        "loses": storage.loses,
        "cure": storage.cure,
        "source": storage.source,
    }


def _gather_row(compute: Compute) -> Row:
    row = gathering.gathering_of(compute)
    return {"name": compute.name, **_fields(row), "codes": compute.casts[row.forward].format if row.is_narrow else ""}


def _reduction_row(reduction: reductions.Reduction) -> Row:
    wire = {gradient: reduction.bytes_per_element(gradient) for gradient in ("float32", "bfloat16")}
    return {**_fields(reduction), "wire_bytes": wire}


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


def _maker(name: str) -> Callable[[], list[Row]]:
    if name not in _MAKERS:
        raise NarrowgaugeError(
            f"no table is named '{name}'.", suggestion(name, _MAKERS) or f"Known: {', '.join(_MAKERS)}."
        )
    return _MAKERS[name]


@lru_cache
def _first_rows(part: str) -> dict[str, str]:
    """The first recipe of the table with each compute or storage."""
    first: dict[str, str] = {}
    for name in notation.representative_names():
        first.setdefault(getattr(notation.parse(name), part).name, name)
    return first


def _first_or_reference(key: str, part: str) -> Callable[[Row], str]:
    """The text about a recipe's compute or storage in its first row, and the name of that row in all others."""

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
    "computes": lambda: [_compute_row(variants.named(name)) for name in variants.names()],
    "gathers": lambda: [_gather_row(row) for row in COMPUTES.values()],
    "scales": lambda: [{**_fields(row), "measures": list(row.measures)} for row in propagation.RULES.values()],
    "storages": lambda: [_storage_row(row) for row in storages.STORAGES.values()],
    "reductions": lambda: [_reduction_row(row) for row in reductions.REDUCTIONS.values()],
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
    "reductions": (
        *name_columns(reduction="name"), Column("travels as", lambda row: row["wire"] or "the gradient's own format"),
        Column("B sent: float32", lambda row: row["wire_bytes"]["float32"], right=True),
        Column("bfloat16", lambda row: row["wire_bytes"]["bfloat16"], right=True),
        *text_columns(error="error", keeps="keeps", any_order=lambda row: "same bits" if row["order_free"] else "other bits"),
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
