"""One format, value or recipe in full, for ``narrowgauge show format``, ``show value`` and ``show recipe``.

``detail_*`` functions return plain values for JSON, ``page_*`` functions the same values as tables to print.
"""

from __future__ import annotations

import math
from typing import Any

from narrowgauge.errors import FormatError
from narrowgauge.spec import formats, notation, recipes, storages
from narrowgauge.spec.codes import VISIBLE, Code, low_parts, width_of
from narrowgauge.spec.show import code_text, format_row, native_text, recipe_row
from narrowgauge.spec.storages import Storage
from narrowgauge.spec.tables import Column, Row, Table, cell_text, name_columns, number_columns, text_columns

_EXAMPLE_PARAMETERS = 1_000_000_000
"""A model size at which bytes per parameter are gigabytes."""


def detail_format(name: str) -> Row:
    """All properties of one format.

    Args:
        name: a format's name, alias or PyTorch spelling.
    Returns:
        Its row of ``show.rows("formats")``.
    Raises:
        FormatError: unknown format.
    Example:
        >>> detail_format("e4m3")["max"]
        448.0
    """
    return format_row(formats.get_format(name))


def detail_value(text: str) -> list[Row]:
    """A number, rounded to every format.

    Args:
        text: a decimal (``0.1``, ``1e-8``), a hexadecimal float (``0x1p-3``), ``inf`` or ``nan``.
    Returns:
        The rows of :func:`narrowgauge.spec.formats.describe_value`.
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
        Its row of ``show.rows("recipes")`` and: ``stored`` (a dict per part: what, format, bytes per parameter, rounding),
        ``vectors`` (the storage of norm gains and biases), ``casts`` and ``accumulation`` (by matmul), ``kept_bytes`` (saved
        for backward per element of a layer's input), ``linears_kept`` (patterns that the compute leaves plain), ``dtypes``,
        ``keep``, ``overrides``, ``phases``, ``evaluation``, and ``example_memory_bytes`` at ``example_parameters``.
    Raises:
        RecipeError: unknown recipe.
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
    """:func:`detail_format` as tables."""
    row = detail_format(name)
    figures = [{"what": key.replace("_", " "), "is": value} for key, value in row.items() if value is not None]
    return [Table((Column("format", "what"), Column(str(row["name"]), "is")), figures[1:])]


def page_value(text: str) -> list[Table]:
    """:func:`detail_value` as tables."""
    columns = (
        *name_columns(format="name"),
        *number_columns(code="hex"),
        *name_columns(value=lambda row: repr(row["value"])),
        *number_columns(relative_error=lambda row: _percent(row["relative_error"]), spacing="spacing"),
        *text_columns(note="note"),
    )
    return [Table(columns, detail_value(text), f"{text.strip()} is {_number(text):.20g} in float64; in all formats:")]


def page_recipe(name: str) -> list[Table]:
    """:func:`detail_recipe` as tables."""
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
    """The properties of a recipe, in the order of printing."""
    memory = f"{row['example_memory_bytes'] / 1e9:g} GB at {row['example_parameters'] / 1e9:g} billion parameters"
    facts = {
        "for": row["purpose"],
        "loses": row["loses"],
        "native": native_text(row),
        "source": row["source"],
        "transform": row["transform"],
        "norm gains, biases": f"stored as {row['vectors']['storage']}, {cell_text(row['vectors']['bytes_per_param'])} bytes each",
        "memory": f"{memory}, before activations",
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
    """The rounding mode of a code; empty where all bits of the float32 are stored."""
    return "" if code.bits == 32 else code.rounding


def _stored_parts(storage: Storage) -> list[Row]:
    """What is in memory per parameter of a matrix; the bytes sum to the bytes per parameter."""
    visible_bytes = VISIBLE[storage.visible][0] / 8
    rounded_here = storage.visible != "float32" and not storage.beside
    parts = {
        "master": ("full copy of the weight", "float32", ""),
        "tail": ("tail of the weight", f"{storage.tail_bits} bits", _rounding(storage.weight)),
    }
    for name, words in (("weight", "weight"), ("exp_avg", "first moment"), ("exp_avg_sq", "second moment")):
        code = storage.code(name)
        text = code_text(code).partition(",")[0] if code.parts == 1 else code.name.split(" ")[0]
        parts[name] = (words, text, _rounding(code))
        parts |= {low: (f"low part of the {words}", text, _rounding(code)) for low in low_parts(name, code)}
    seen_rounding = _rounding(storage.weight) if rounded_here else "" if storage.visible == "float32" else "nearest"
    stored = [("weight that the model sees", storage.visible, visible_bytes, seen_rounding)]
    for group in storage.packing:
        unused = width_of(group) - sum(bits for _, bits in group)
        # Unused bits of a word are counted with its first field.
        stored += [(*parts[n][:2], (bits + (unused if n == group[0][0] else 0)) / 8, parts[n][2]) for n, bits in group]
    stored.append(("gradient", storage.visible, visible_bytes, ""))
    return [dict(zip(("what", "format", "bytes", "rounding"), part, strict=True)) for part in stored]


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.3g} %"
