"""The step that ``narrowgauge profile`` expects, against the step that is trained.

Claim: the ratio of a bfloat16 step to one in a narrow row is expected within 10 % of what the trainer then takes, in at least
four pairs of a row and a model. The profile times casts, matmuls, one decoder block in each row and a whole step in bfloat16;
the trainer trains whole steps in every row. Both are compiled, both take batches of 8 × 256 random tokens.

Baseline: the trainer's step in ``bfloat16/word``, in the same rounds. ``expected`` and ``trained`` are how many times faster
a row's step is than that; ``error`` is expected over trained, less 1. ``by parts`` is what would be expected without the
block: from casts and matmuls alone.

Run: ``./dev bench profile_accuracy [--quick] [--large]``; ``--large`` adds llama-125m.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from timing import Contender, Report, Row, Timing, measure, parser

from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.profiling import measurement
from narrowgauge.profiling.costs import RecipeCost, Round, cost_of
from narrowgauge.profiling.layer_plan import Kind, baseline_of, read_model
from narrowgauge.profiling.measurement import many_versions, training_session
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.step import train_step

CASES = {
    "llama-8m": ["int8-row/word", "float8-row/word"],
    "llama-35m": ["int8-row/word", "float8-tensor/word", "mxfp8/word"],
}
LARGE = {"llama-125m": ["int8-row/word", "mxfp8/word"]}
QUICK = {"llama-1m": ["int8-row/word"]}
PROMISED = 0.1


def costs(kinds: Sequence[Kind], recipes: Sequence[Recipe], rounds: Sequence[Round], tokens: int) -> list[RecipeCost]:
    """What the profile says of each recipe; of memory nothing."""
    no_bytes = {setting: 0.0 for _, setting in rounds[0].table}
    return [cost_of(recipe, kinds, rounds, tokens, no_bytes) for recipe in recipes]


def trained(config: TrainConfig, recipes: Sequence[Recipe], rounds: int) -> list[Timing]:
    """Whole steps of the trainer in each recipe, timed beside each other; the first is the baseline."""
    steps: dict[str, Callable[[], object]] = {
        recipe.name: partial(train_step, training_session(replace(config, recipe=recipe))) for recipe in recipes
    }
    contenders = [Contender(name, step) for name, step in steps.items()]
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    with many_versions():
        return measure(contenders, baseline=recipes[0].name, rounds=rounds, wait=wait)


def case_rows(model: str, names: Sequence[str], config: TrainConfig, rounds: int) -> list[Row]:
    """A model's rows: expected, trained, and how far they are apart."""
    # Each model has the compiler to itself: after another one's shapes it would compile for any.
    torch.compiler.reset()
    recipes = [parse(name) for name in names]
    _, kinds = read_model(model)
    found = measurement.measure(kinds, recipes, config, rounds)
    expected = costs(kinds, recipes, found, config.tokens_per_step)
    by_parts = costs(kinds, recipes, [replace(r, blocks={}) for r in found], config.tokens_per_step)
    gc.collect()
    baseline = baseline_of(recipes[0])
    first, *others = trained(config, [baseline, *recipes], rounds)
    return [
        {
            "model": model,
            "recipe": timing.name,
            "expected": cost.step_ratio,
            "trained": 1 / timing.ratio,
            "error": f"{cost.step_ratio * timing.ratio - 1:+.1%}",
            "within 10 %": "yes" if abs(cost.step_ratio * timing.ratio - 1) <= PROMISED else "no",
            "by parts": parts.step_ratio,
            "linears": cost.linears_ratio,
            "their share": f"{cost.linears_share:.0%}",
            "bfloat16 ms": 1e3 * first.median,
            "ms": 1e3 * timing.median,
            "quartiles of trained": f"{1 / timing.quartiles[1]:.3f}–{1 / timing.quartiles[0]:.3f}",
        }
        for cost, parts, timing in zip(expected, by_parts, others, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=9)
    flags.add_argument("--large", action="store_true", help="llama-125m too")
    options = flags.parse_args(arguments)
    report = Report("accuracy of profile", options)
    warnings.simplefilter("ignore", EmulationNotice)
    cases = QUICK if options.quick else CASES | (LARGE if options.large else {})
    rows: list[Row] = []
    for model, names in cases.items():
        sequences, length = (2, 64) if options.quick else (8, 256)
        config = TrainConfig(model=model, batch_size=sequences, sequence_length=length)
        rows += case_rows(model, names, config, 2 if options.quick else options.rounds)
    report.add("expected and trained steps, as times of bfloat16/word", rows)
    within = sum(row["within 10 %"] == "yes" for row in rows)
    report.note(f"{within} of {len(rows)} cases are within {PROMISED:.0%}")
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
