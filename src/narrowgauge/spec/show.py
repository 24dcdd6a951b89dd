"""The tables that ``narrowgauge show`` prints, and one recipe in full.

Each table is a list of dicts, derived from the same values that the rest of the package computes
with. ``--json`` prints the same figures as a terminal and the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from narrowgauge.spec import notation, storages
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.formats import FORMATS
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import ALIASES, AMBIGUOUS
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES, VISIBLE, Code, Storage, low_parts, width_of
from narrowgauge.spec.sums import REDUCTIONS
from narrowgauge.spec.tables import Column, Row, Table, cell_text
from narrowgauge.spec.update_rules import UPDATE_RULES, UpdateRule, option_text


def table(name: str) -> Table:
    """Return a table of :data:`TABLES`. Its rows are plain values that JSON can hold."""
    _, make, hidden = TABLES[name]
    return _table(make(), hidden)


def _table(rows: list[Row], hidden: str = "") -> Table:
    """Return a table of all keys but the ``hidden`` ones, which only JSON has."""
    return Table(tuple(_column(key, rows) for key in rows[0] if key not in hidden.split()), rows)


def _column(key: str, rows: list[Row]) -> Column:
    values = [row[key] for row in rows if row[key] is not None]
    is_number = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )
    return Column(key.replace("_", " "), key, code=key == "name", right=is_number)


_NOWHERE = "nowhere: emulated"

# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


def _rows(objects: Iterable[Any], keys: str, **computed: Callable[[Any], Any]) -> list[Row]:
    """Return a row per object.

    A value is the attribute of that name, or what the function of that name computes.
    """
    return [
        {k: computed[k](item) if k in computed else getattr(item, k) for k in keys.split()}
        for item in objects
    ]


def _recipe_rows(recipes: Iterable[Recipe]) -> list[Row]:
    keys = "name bytes_per_param loses purpose"
    return _rows(
        recipes,
        keys,
        loses=lambda recipe: recipe.storage.loses,
        purpose=lambda recipe: recipe.compute.purpose,
    )


def _operands(*slots: str) -> Callable[[Compute], str]:
    return lambda compute: " × ".join(dict.fromkeys(str(compute.casts[slot]) for slot in slots))


def _native(compute: Compute) -> str:
    return compute.native or _NOWHERE


def _code_text(code: Code) -> str:
    """Write a code: ``e6m5 (12 bits), stochastic``."""
    bits = f" ({code.bits} bits)" if code.is_window else ""
    return f"{code.name}{bits}{', stochastic' if code.rounding == 'stochastic' else ''}"


def _weight_text(storage: Storage) -> str:
    return (
        f"{storage.visible} + {storage.weight.name} master"
        if storage.master
        else _code_text(storage.weight)
    )


def _rate_text(rule: UpdateRule) -> str:
    return "none" if rule.rate is None else f"{rule.rate:.2g} × AdamW's"


def _alias_rows() -> list[Row]:
    aliases = [{"name": name, **alias} for name, alias in ALIASES.items()]
    return aliases + [
        {
            "name": n,
            "recipe": list(few),
            "source": "ambiguous: say which" if few else "stores frozen weights",
        }
        for n, few in AMBIGUOUS.items()
    ]


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
        options=lambda rule: {option.name: option_text(option.in_training) for option in rule.options}, rate=_rate_text,
    ), ""),
    "storages": ("How weights and moments are stored between steps.", lambda: _rows(
        STORAGES.values(), "name weight exp_avg exp_avg_sq bytes_per_param vectors loses source", weight=_weight_text,
        exp_avg=lambda storage: _code_text(storage.exp_avg), exp_avg_sq=lambda storage: _code_text(storage.exp_avg_sq),
        vectors=lambda storage: storages.for_vectors(storage).name,
    ), "source"),
    "reductions": ("How and in which format ranks sum gradients.", lambda: _rows(
        REDUCTIONS.values(), "name sent_as sent_bytes error order_invariant purpose source",
        sent_as=lambda reduction: reduction.wire or "the gradient's own format",
        sent_bytes=lambda reduction: {name: reduction.bytes_per_element(name) for name in ("float32", "bfloat16")},
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


# ── one recipe in full ────────────────────────────────────────────────────────────────────────────


def page_recipe(name: str) -> tuple[list[Row], list[Table]]:
    """Return what one recipe stores and computes: a row for JSON, and the tables to print.

    Args:
        name: a full name, an alias, or a ``.toml`` file.
    """
    recipe = notation.parse(name)
    facts = _facts(recipe)
    stored = _stored_parts(recipe.storage)
    matmuls = [
        {
            "matmul": place,
            "left": str(product.left),
            "right": str(product.right),
            "accumulation": product.accumulation,
        }
        for place, product in recipe.compute.products.items()
    ]
    row = {**_recipe_rows([recipe])[0], "facts": facts, "stored": stored, "matmuls": matmuls}
    in_all = {"part": "in all", "format": "", "bytes": recipe.bytes_per_param, "rounding": ""}
    return [row], [
        Table(
            (Column("recipe", "name"), Column(recipe.name, "text")),
            [{"name": n, "text": t} for n, t in facts.items()],
        ),
        _table([*stored, in_all]),
        _table(matmuls),
    ]


def _facts(recipe: Recipe) -> dict[str, str]:
    compute = recipe.compute
    vectors = storages.for_vectors(recipe.storage)
    facts = {
        "for": compute.purpose,
        "loses": recipe.storage.loses,
        "native": _native(compute),
        "compute from": compute.source,
        "storage from": recipe.storage.source,
        "transform": compute.transform,
        "norm gains, biases": f"stored as {vectors.name}, {cell_text(vectors.bytes_per_param)} bytes each",
        "saved for backward": f"{compute.kept_bytes:g} bytes per element of a linear layer's input",
        "outside of matmuls": f"{recipe.dtype}; norms, softmax and the loss in float32",
        "linears left plain": _kept(compute),
        "computed otherwise": ", ".join(
            f"{o.pattern} in {o.compute.name}" for o in recipe.overrides
        ),
    }
    return {label: text for label, text in facts.items() if text}


def _kept(compute: Compute) -> str:
    if not compute.keep:
        return ""
    kept = "heads, routers and adapters"
    return f"{kept}; the last {compute.keep_last:.0%} of the blocks" if compute.keep_last else kept


def _stored_parts(storage: Storage) -> list[Row]:
    """Return what is in memory per parameter of a matrix; the bytes sum to the bytes per parameter."""

    def rounding(code: Code) -> str:
        return "" if code.bits >= 32 else code.rounding

    parts = {
        "master": ("full copy of the weight", storage.weight.name, ""),
        "tail": ("tail of the weight", f"{storage.tail_bits} bits", rounding(storage.weight)),
    }
    for name, words in (
        ("weight", "weight"),
        ("exp_avg", "first moment"),
        ("exp_avg_sq", "second moment"),
    ):
        code = storage.code(name)
        text = _code_text(code).partition(",")[0] if code.parts == 1 else code.name.split(" ")[0]
        parts[name] = (words, text, rounding(code))
        parts |= {
            low: (f"low part of the {words}", text, rounding(code)) for low in low_parts(name, code)
        }
    visible_bytes = VISIBLE[storage.visible][0] / 8
    seen = "nearest" if storage.beside else rounding(storage.weight)
    visible = (
        f"{parts['weight'][1]}, in {storage.visible}" if storage.weight.scaled else storage.visible
    )
    stored = [("weight that the model sees", visible, visible_bytes, seen)]
    for group in storage.packing:
        # Unused bits of a word are counted with its first field.
        unused = width_of(group) - sum(bits for _, bits in group)
        stored += [
            (*parts[n][:2], (bits + (unused if n == group[0][0] else 0)) / 8, parts[n][2])
            for n, bits in group
        ]
    stored.append(("gradient", storage.visible, visible_bytes, ""))
    return [
        dict(zip(("part", "format", "bytes", "rounding"), part, strict=True)) for part in stored
    ]
