"""Measure what each recipe costs a model on this machine: its steps, and its layers against its baseline's layers.

A machine's speed drifts. So every ratio is taken within a round, and the median over rounds is reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.planner.roofline import setting_of
from narrowgauge.profiling import cast_error, measurement
from narrowgauge.profiling.cast_error import Loss
from narrowgauge.profiling.layers import Kind, baseline_of, plain_recipe
from narrowgauge.profiling.measurement import Round
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.recipes import Override, Recipe
from narrowgauge.spec.tables import Column, Row, Table
from narrowgauge.trainer.config import TrainConfig

EVEN = 0.02
"""A smaller relative difference is neither a gain nor a loss: repeated measurements differ as much."""
_SHOWN = 12


@dataclass(frozen=True)
class Profile:
    """The cost of each recipe for a model.

    Args:
        rows: an object for each recipe: times in seconds, ratios above 1 if it is faster than its baseline.
        notes: assumptions and warnings.
    """

    title: str
    rows: list[Row]
    notes: tuple[str, ...] = ()

    def tables(self) -> list[Table]:
        """Return one table of all recipes, then each recipe's layers and, if requested, the losses of its casts."""
        tables = [Table(_SUMMARY, self.rows, self.title)]
        for row in self.rows:
            tables.append(Table(_LAYERS, row["layers"], f"{row['recipe']}: one layer of each kind, against bfloat16"))
        for row in self.rows:
            if losses := row["losses"]:
                title = (
                    f"{row['recipe']}: the {min(_SHOWN, len(losses))} worst of {len(losses)} casts (all with --json)"
                )
                tables.append(Table(_LOSSES, losses[:_SHOWN], title))
        return tables

    def text(self) -> str:
        """Return the notes, and the fastest recipe as a file. Layers that are slower when narrow are plain in it."""
        best = max(self.rows, key=lambda row: float(row["step_ratio"]))
        narrow = [layer for layer in best["layers"] if layer["verdict"] != "kept"]
        verdict = f"Fastest: {best['recipe']}, {best['step_ratio']:.2f} × {best['baseline']}."
        if best["step_ratio"] < 1 or (narrow and len(best["overrides"]) == len(narrow)):
            verdict = f"None of these is faster here than {best['baseline']}; {best['recipe']} comes nearest."
        verdict += f" As a recipe file, with {len(best['overrides'])} slower kinds of layers in 16 bits:"
        return "\n".join([verdict, "", _toml(best["fastest"]), *(f"note: {note}" for note in self.notes)])


def profile(
    model: str,
    recipes: Sequence[Recipe],
    *,
    numerics: bool = False,
    batch_size: int = 8,
    sequence_length: int = 256,
    say: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Measure what each recipe costs a model in time.

    Args:
        model: a preset's name, or a folder with a Hugging Face ``config.json``.
        recipes: one that is named twice counts once.
        numerics: also train a few steps on text and report what each cast loses.
        batch_size: sequences per step.
        say: called with a line of progress before each long operation.
    Raises:
        NarrowgaugeError: an unknown model or recipe, or a model that does not fit.

    Cost: the compilation of a training step and of the casts of each recipe, and then some steps.
    """
    if not recipes:
        raise RecipeError("no recipe was named.", "For instance --recipes int8-row/word,float8-row/word.")
    recipes = list(dict.fromkeys(recipes))
    config = TrainConfig(model=model, batch_size=batch_size, sequence_length=sequence_length).validated()
    kinds, rounds = measurement.measure(recipes, config, say=say)
    notes = measurement.noise_notes(rounds)
    losses: list[tuple[Loss, ...]] = [()] * len(recipes)
    if numerics:
        text = f"{cast_error.NUM_BATCHES} steps on '{config.data}'"
        say(f"casting the tensors of {text}")
        losses = cast_error.losses(recipes, config)
        notes.append(f"what casts lose was measured in the first {text}.")
    where = measurement.where()
    shared = {"model": model, "where": where, "num_sequences": batch_size, "sequence_length": sequence_length}
    rows = [
        {
            **cost_row(recipe, kinds, rounds),
            **shared,
            "multiplied": measurement.describe_support(recipe.compute),
            "losses": [asdict(loss) for loss in lost],
            "notes": notes,
        }
        for recipe, lost in zip(recipes, losses, strict=True)
    ]
    title = f"{model}, {batch_size} × {sequence_length} tokens a step, measured on {where}"
    return Profile(title, rows, tuple(notes))


# ── from seconds to costs ─────────────────────────────────────────────────────────────────────────────────────────────────


def cost_row(recipe: Recipe, kinds: Sequence[Kind], rounds: Sequence[Round]) -> Row:
    """Return a recipe's costs. Ratios are its baseline's seconds over its own, medians over rounds."""
    baseline = baseline_of(recipe)

    def over_rounds(figure: Callable[[Round], float]) -> float:
        return statistics.median(map(figure, rounds))

    def linears(r: Round, of: Recipe) -> float:
        return sum(len(kind.names) * r.layers[of, kind.pattern][1] for kind in kinds)

    layers = [_layer_row(recipe, kind, rounds) for kind in kinds]
    slower = [layer["pattern"] for layer in layers if layer["verdict"] == "loses"]
    narrow = [layer["pattern"] for layer in layers if layer["verdict"] != "kept"]
    return {
        "recipe": recipe.name,
        "baseline": baseline.name,
        "step_ratio": over_rounds(lambda r: r.steps[baseline] / r.steps[recipe]),
        "step_seconds": over_rounds(lambda r: r.steps[recipe]),
        "linears_ratio": over_rounds(lambda r: linears(r, baseline) / linears(r, recipe)),
        "linears_share": over_rounds(lambda r: linears(r, baseline) / r.steps[baseline]),
        "overrides": slower,
        "fastest": _fastest(recipe, slower, narrow),
        "layers": layers,
    }


def _layer_row(recipe: Recipe, kind: Kind, rounds: Sequence[Round]) -> Row:
    """Return one kind of layer in one recipe. Seconds are of one layer, medians over rounds."""
    own, wide = ([r.layers[of, kind.pattern] for r in rounds] for of in (recipe, baseline_of(recipe)))
    ratio = statistics.median(base / both for (_, both), (_, base) in zip(own, wide, strict=True))
    setting = setting_of(kind.names[0], recipe)
    verdict = "gains" if ratio > 1 + EVEN else "loses" if ratio < 1 - EVEN else "even"
    return {
        "pattern": kind.pattern,
        "out_features": kind.out_features,
        "in_features": kind.in_features,
        "count": len(kind.names),
        "compute": setting.compute,
        "forward_seconds": statistics.median(forward for forward, _ in own),
        "seconds": statistics.median(both for _, both in own),
        "baseline_seconds": statistics.median(base for _, base in wide),
        "ratio": ratio,
        "verdict": "kept" if setting.is_plain else verdict,
    }


def _fastest(recipe: Recipe, slower: Sequence[str], narrow: Sequence[str]) -> dict[str, Any]:
    """Return the recipe with the slower layers plain, as a table that :func:`narrowgauge.spec.notation.parse` reads."""
    if slower and set(slower) == set(narrow):
        fastest = plain_recipe(recipe)
    else:
        added = tuple(Override(pattern, COMPUTES[recipe.dtype]) for pattern in slower)
        fastest = replace(recipe, overrides=(*recipe.overrides, *added))
    value = fastest.to_value()
    return {"recipe": value} if isinstance(value, str) else value


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _ratio(name: str) -> Any:
    return lambda row: f"{row[name]:.2f} ×"


def _ms(name: str) -> Any:
    return lambda row: f"{1e3 * row[name]:.3g}"


_SUMMARY = (
    Column("recipe", "recipe", code=True),
    Column("step", _ratio("step_ratio"), right=True),
    Column("linears", _ratio("linears_ratio"), right=True),
    Column("their share", lambda row: f"{row['linears_share']:.0%}", right=True),
    Column("baseline", "baseline", code=True),
    Column("multiplied", "multiplied"),
)
_LAYERS = (
    Column("layer", "pattern", code=True),
    Column("count", "count", right=True),
    Column("out × in", lambda row: f"{row['out_features']} × {row['in_features']}", right=True),
    Column("forward ms", _ms("forward_seconds"), right=True),
    Column("and backward", _ms("seconds"), right=True),
    Column("baseline", _ms("baseline_seconds"), right=True),
    Column("speed-up", _ratio("ratio"), right=True),
    Column("", "verdict"),
)
_LOSSES = (
    Column("layer", "layer", code=True),
    Column("tensor", "tensor"),
    Column("SQNR dB", lambda row: f"{row['sqnr_db']:.1f}", right=True),
    Column("overflow", lambda row: f"{row['overflow']:.2%}", right=True),
    Column("underflow", lambda row: f"{row['underflow']:.2%}", right=True),
)


def _toml(table: dict[str, Any]) -> str:
    import tomli_w

    text = tomli_w.dumps({key: value for key, value in table.items() if key != "override"})
    return text + "".join(f"\n[[override]]\n{tomli_w.dumps(entry)}" for entry in table.get("override", []))
