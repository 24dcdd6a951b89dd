"""The words, shown: one set of rows, and every reader of them.

Each table (formats, recipes, aliases, computes, storages, chips, models) is a list of plain dicts worked out from the rows that
the rest of the program computes with. ``--json`` prints those dicts; a terminal, a pipe and the documentation print a
few of their columns, as a rich table, as aligned text or as GitHub markdown. No figure is typed twice, and nothing here
needs PyTorch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from narrowgauge.errors import FormatError, NarrowgaugeError, suggestion
from narrowgauge.spec import formats, notation, propagation, recipes, storages, variants
from narrowgauge.spec.aliases import ALIASES, Alias
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import Code, Storage, low_parts
from narrowgauge.spec.tables import Column, Key, Row, Table, said

# A size at which bytes per parameter become gigabytes one can picture.
_EXAMPLE_PARAMETERS = 1_000_000_000


def rows(name: str) -> list[Row]:
    """One table of the words, as plain values that JSON can hold.

    Args:
        name: formats, recipes, aliases, computes, scales, storages, chips or models.
    Returns:
        A dict per row, each with ``name``; ``recipes`` has each compute with its usual storage, and each storage with
        its usual compute (:func:`narrowgauge.spec.notation.representative_names`).
    Raises:
        NarrowgaugeError: there is no such table.
    Example:
        >>> [row["bytes_per_param"] for row in rows("storages") if row["name"] == "word"]
        [8.0]
    """
    return _maker(name)()


def table(name: str) -> Table:
    """The table of that name (as in :func:`rows`), with the columns a person wants.

    Example:
        >>> print(table("storages").plain().split()[0])
        storage
    """
    return Table(_COLUMNS[name], _maker(name)())


def markdown(name: str) -> str:
    """The table of that name (as in :func:`rows`) as GitHub markdown, for the README and the documentation.

    Example:
        >>> markdown("models").splitlines()[2].split("|")[1].strip()
        '`llama-1m`'
    """
    return table(name).markdown()


def detail_format(name: str) -> Row:
    """Every figure of one format.

    Args:
        name: a format's name, alias or PyTorch spelling.
    Returns:
        Its row of ``rows("formats")``.
    Raises:
        FormatError: no format has that name.
    Example:
        >>> detail_format("e4m3")["max"]
        448.0
    """
    return _format_row(formats.get_format(name))


def detail_value(text: str) -> list[Row]:
    """What a number becomes in every format.

    Args:
        text: a decimal (``0.1``, ``1e-8``), a hexadecimal float (``0x1p-3``), ``inf`` or ``nan``.
    Returns:
        The rows of :func:`narrowgauge.spec.formats.describe_value`.
    Raises:
        FormatError: the text is no number, or one beyond float64.
    Example:
        >>> {row["name"]: row["value"] for row in detail_value("0x1p-3")}["bfloat16"]
        0.125
    """
    return formats.describe_value(_number(text))


def detail_recipe(name: str) -> Row:
    """What one recipe stores and computes, part by part.

    Args:
        name: a full name, an alias, or a ``.toml`` file.
    Returns:
        Its row of ``rows("recipes")`` and: ``stored`` (a dict per part: what, format, bytes per parameter, rounding),
        ``vectors`` (the storage of norm gains and biases), ``casts`` and ``accumulation`` (by place), ``kept_bytes`` (of
        each element of a layer's input), ``linears_kept`` (patterns that the compute leaves plain), ``dtypes`` (by place),
        ``keep``, ``overrides``, ``phases``, ``evaluation``, and ``example_memory_bytes`` at ``example_parameters``.
    Raises:
        RecipeError: no recipe has that name.
    Example:
        >>> [part["bytes"] for part in detail_recipe("bfloat16/word")["stored"]]
        [2.0, 1.0, 1.5, 1.5, 2.0]
        >>> detail_recipe("int8-row/word")["casts"]["grad_weight.left"]
        'int8, per row, stochastic'
    """
    recipe = notation.parse(name)
    compute, vectors = recipe.compute, storages.for_vectors(recipe.storage)
    return {
        **_recipe_row(recipe),
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


def _override_row(override: recipes.Override) -> Row:
    rows = {"storage": override.storage, "compute": override.compute}
    return {"pattern": override.pattern, **{part: row.name if row else None for part, row in rows.items()}}


def page_format(name: str) -> list[Table]:
    """:func:`detail_format` for a person."""
    row = detail_format(name)
    figures = [{"what": key.replace("_", " "), "is": value} for key, value in row.items() if value is not None]
    return [Table((Column("format", "what"), Column(str(row["name"]), "is")), figures[1:])]


def page_value(text: str) -> list[Table]:
    """:func:`detail_value` for a person."""
    columns = (
        *_names(format="name"),
        *_right(code="hex"),
        *_names(value=lambda row: repr(row["value"])),
        *_right(relative_error=lambda row: _percent(row["relative_error"]), spacing="spacing"),
        *_left(note="note"),
    )
    return [Table(columns, detail_value(text), f"{text.strip()} is {_number(text):.20g} in float64, and elsewhere:")]


def page_recipe(name: str) -> list[Table]:
    """:func:`detail_recipe` for a person."""
    row = detail_recipe(name)
    in_all = {"what": "in all", "format": "", "bytes": row["bytes_per_param"], "rounding": ""}
    stored = (
        *_left(stored_of_each_parameter="what", format="format"),
        *_right(bytes="bytes"),
        *_left(rounding="rounding"),
    )
    matmuls = [
        {"matmul": place, "left": row["casts"][f"{place}.left"], "right": row["casts"][f"{place}.right"], "in": sums}
        for place, sums in row["accumulation"].items()
    ]
    return [
        _pairs(("recipe", str(row["name"])), _facts(row)),
        Table(stored, [*row["stored"], in_all]),
        Table(_left(matmul="matmul", left="left", right="right", added_up_in="in"), matmuls),
        _pairs(("computed", "in"), row["dtypes"]),
    ]


def _facts(row: Row) -> dict[str, str]:
    """What there is to say of a recipe beside its tables, in the order of reading."""
    memory = f"{row['example_memory_bytes'] / 1e9:g} GB at {row['example_parameters'] / 1e9:g} billion parameters"
    facts = {
        "for": row["purpose"],
        "loses": row["loses"],
        "native": _native(row),
        "source": row["source"],
        "transform": row["transform"],
        "norm gains, biases": f"stored as {row['vectors']['storage']}, {said(row['vectors']['bytes_per_param'])} bytes each",
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


def _native(row: Row) -> str:
    return row["native"] or "nowhere: emulated"


def _pairs(heads: tuple[str, str], entries: dict[str, Any]) -> Table:
    columns = (Column(heads[0], "what"), Column(heads[1], "is"))
    return Table(columns, [{"what": what, "is": said} for what, said in entries.items()])


def _number(text: str) -> float:
    word = text.strip().lower()
    try:
        value = float.fromhex(word) if "0x" in word else float(word)
    except (ValueError, OverflowError):
        value = None
    if value is None:
        raise FormatError(f"{text!r} is no number.", "Write it like 0.1, 1e-8, 0x1p-3, inf or nan.")
    if math.isinf(value) and "inf" not in word:
        raise FormatError(f"{text} is beyond float64, in which values are read.", "Write inf if infinity is meant.")
    return value


def _format_row(row: formats.Format) -> Row:
    aliases = [alias for alias, name in formats.ALIASES.items() if name == row.name]
    return {**row.describe(), "aliases": aliases}


def _recipe_row(recipe: Recipe) -> Row:
    own = recipes.own_name(recipe.storage)
    short = [recipe.compute.name] if notation.default_storage(recipe.compute.name) == own else []
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
    usual = notation.parse(compute.name)
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
    """The casts at these places, the equal ones once."""
    return lambda row: " × ".join(dict.fromkeys(row["casts"][place]["text"] for place in places))


def _storage_row(storage: Storage) -> Row:
    return {
        "name": storage.name,
        "visible": storage.visible,
        "weight": f"{storage.visible} + float32 master" if storage.master else _code_text(storage.weight),
        "exp_avg": _code_text(storage.exp_avg),
        "exp_avg_sq": _code_text(storage.exp_avg_sq),
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


def _code_text(code: Code) -> str:
    """``e6m5 (12 bits), stochastic``."""
    bits = f" ({code.bits} bits)" if code.is_window else ""
    return f"{code.name}{bits}{', stochastic' if code.rounding == 'stochastic' else ''}"


def _rounding(code: Code) -> str:
    """How the code rounds; nothing where nothing of the float32 is cut."""
    return "" if code.bits == 32 else code.rounding


def _stored_parts(storage: Storage) -> list[Row]:
    """What lies in memory of each parameter of a matrix; the bytes sum to the row's bytes per parameter."""
    visible_bytes = storages.VISIBLE[storage.visible][0] / 8
    cut_here = storage.visible != "float32" and not storage.beside
    parts = {
        "master": ("full copy of the weight", "float32", ""),
        "tail": ("tail of the weight", f"{storage.tail_bits} bits", _rounding(storage.weight)),
    }
    for name, words in (("weight", "weight"), ("exp_avg", "first moment"), ("exp_avg_sq", "second moment")):
        code = storage.code(name)
        text = _code_text(code).partition(",")[0] if code.parts == 1 else code.name.split(" ")[0]
        parts[name] = (words, text, _rounding(code))
        parts |= {low: (f"low part of the {words}", text, _rounding(code)) for low in low_parts(name, code)}
    seen_rounding = _rounding(storage.weight) if cut_here else "" if storage.visible == "float32" else "nearest"
    stored = [("weight that the model sees", storage.visible, visible_bytes, seen_rounding)]
    for group in storage.packing:
        unused = storages.width_of(group) - sum(bits for _, bits in group)
        # What a word has left over is counted with its first field.
        stored += [(*parts[n][:2], (bits + (unused if n == group[0][0] else 0)) / 8, parts[n][2]) for n, bits in group]
    stored.append(("gradient", storage.visible, visible_bytes, ""))
    return [dict(zip(("what", "format", "bytes", "rounding"), part, strict=True)) for part in stored]


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
    """The first row of ``recipes`` with each compute or storage."""
    first: dict[str, str] = {}
    for name in notation.representative_names():
        first.setdefault(getattr(notation.parse(name), part).name, name)
    return first


def _told_once(key: str, part: str) -> Callable[[Row], str]:
    """The text about a row's compute or storage where it comes first, and the name of that row elsewhere."""

    def text(row: Row) -> str:
        first = _first_rows(part)[row[part]]
        return str(row[key]) if first == row["name"] else f"as {first}"

    return text


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.3g} %"


def _peak(*names: str) -> Callable[[Row], float | None]:
    return lambda row: next((row["peak_tflops"][name] for name in names if name in row["peak_tflops"]), None)


def _left(**keys: Key) -> tuple[Column, ...]:
    """Columns by title, in which an underscore stands for a space."""
    return tuple(Column(title.replace("_", " "), key) for title, key in keys.items())


def _right(**keys: Key) -> tuple[Column, ...]:
    return tuple(dataclasses.replace(column, right=True) for column in _left(**keys))


def _names(**keys: Key) -> tuple[Column, ...]:
    return tuple(dataclasses.replace(column, code=True) for column in _left(**keys))


_MAKERS: dict[str, Callable[[], list[Row]]] = {
    "formats": lambda: [_format_row(row) for row in formats.FORMATS.values()],
    "recipes": lambda: [_recipe_row(notation.parse(name)) for name in notation.representative_names()],
    "aliases": lambda: [_alias_row(row) for row in ALIASES.values()],
    "computes": lambda: [_compute_row(variants.named(name)) for name in variants.names()],
    "scales": lambda: [{**_fields(row), "measures": list(row.measures)} for row in propagation.RULES.values()],
    "storages": lambda: [_storage_row(row) for row in storages.STORAGES.values()],
    "chips": _chip_rows,
    "models": _model_rows,
}

_BYTES = Column("B/param", "bytes_per_param", right=True)

_COLUMNS: dict[str, tuple[Column, ...]] = {
    "formats": (
        *_names(format="name"),
        *_right(
            bits="bits", exponent="exponent_bits", mantissa="mantissa_bits", bias="bias", max="max",
            smallest_normal="smallest_normal", smallest_subnormal="smallest_subnormal", epsilon="epsilon",
        ),
        *_left(inf="infinities", NaN="nans", purpose="purpose"),
    ),
    "recipes": (
        *_names(recipe="name"), *_left(also_called="aliases"), _BYTES, Column("for", _told_once("purpose", "compute")),
        *_left(loses=_told_once("loses", "storage"), native=_native),
    ),
    "aliases": (
        *_names(name="name", recipe="recipe"),
        *_left(taken="taken", known_from="source", differs="differs"),
    ),
    "scales": (
        *_names(operation="name"), *_left(scale_of_the_result="scale", of_the_gradient="gradient"),
        Column("measured", lambda row: ", ".join(row["measures"])),
    ),
    "computes": (
        *_names(compute="name"), *_left(forward=_operands("output.left", "output.right")),
        *_left(gradients=_operands("grad_input.left", "grad_weight.left")), Column("B kept", "kept_bytes", right=True),
        *_left(native=_native),
    ),
    "storages": (
        *_names(storage="name"), *_left(weight="weight", first_moment="exp_avg", second_moment="exp_avg_sq"), _BYTES,
        *_left(vectors="vectors", loses="loses"),
    ),
    "chips": (
        *_names(chip="name"), *_right(memory_GB="memory_gb"), Column("GB/s", "bandwidth_gb_per_second", right=True),
        Column("TFLOP/s: bfloat16", _peak("bfloat16"), right=True),
        *_right(float8=_peak("float8_e4m3fn", "float8_e4m3fnuz"), float4=_peak("float4_e2m1fn"), int8=_peak("int8")),
        *_left(link="link"), Column("link GB/s", "link_gb_per_second", right=True), *_left(evidence="evidence"),
    ),
    "models": (
        *_names(model="name"),
        *_right(
            parameters="num_parameters", layers="num_layers", hidden="hidden_size", MLP="intermediate_size",
            heads="num_heads", kv_heads="num_kv_heads", vocabulary="vocab_size", positions="max_positions",
        ),
        *_left(tied="tie_embeddings", source="source"),
    ),
}  # fmt: skip
