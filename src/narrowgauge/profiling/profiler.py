"""The one question: what does each recipe cost this model, here or on a chip?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.profiling import roofline
from narrowgauge.profiling.costs import RecipeCost, Round, cost_of
from narrowgauge.profiling.layer_plan import Kind, read_model
from narrowgauge.profiling.profile_report import Loss, Profile
from narrowgauge.profiling.settings import ELSEWHERE, Setting, rows_of
from narrowgauge.spec.chips import Chip, get_chip
from narrowgauge.spec.models import Model
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.memory import require_batch


def profile(
    model: str,
    recipes: Sequence[Recipe],
    *,
    chip: str | None = None,
    numerics: bool = False,
    batch_size: int = 8,
    sequence_length: int = 256,
    say: Callable[[str], None] = lambda _: None,
) -> Profile:
    """What each recipe costs a model in time and memory.

    Law: with ``chip`` nothing is measured, and for a preset PyTorch is not loaded.

    Args:
        model: a preset's name, or a folder with a Hugging Face ``config.json``.
        recipes: one that is named twice counts once.
        chip: a name of ``narrowgauge show chips``; ``None`` measures this machine.
        numerics: also train a few steps on text and say what each cast loses.
        batch_size: sequences per step.
        sequence_length: tokens per sequence.
        say: told what is going on, a line at a time, where it takes long.
    Returns:
        The profile.
    Raises:
        NarrowgaugeError: an unknown model, recipe or chip, or a model that does not fit.

    Cost: with a chip, nothing; else the compilation of a training step and of each row's casts, and then some steps.
    """
    if not recipes:
        raise RecipeError("no recipe was named.", "For instance --recipes int8-row/word,float8-row/word.")
    asked = list(dict.fromkeys(recipes))
    target = get_chip(chip) if chip is not None else None
    row, kinds = read_model(model)
    config = TrainConfig(model=model, batch_size=batch_size, sequence_length=sequence_length)
    _require_positions(row, config)
    if target is None:
        return _measured(row, kinds, asked, config, numerics, say)
    if numerics:
        raise NarrowgaugeError(
            f"--numerics was asked for on {target.name}; it casts real batches, which a prediction has not.",
            "Leave --chip out: what casts lose is the same on every machine.",
        )
    return _predicted(row, kinds, asked, config, target)


def _require_positions(row: Model, config: TrainConfig) -> None:
    if config.sequence_length > row.max_positions:
        raise RecipeError(
            f"sequences of {config.sequence_length} tokens were asked of {row.name}, which has {row.max_positions} "
            "positions.",
            f"Take --sequence-length {row.max_positions} or less.",
        )


def _predicted(row: Model, kinds: Sequence[Kind], recipes: list[Recipe], config: TrainConfig, chip: Chip) -> Profile:
    step = roofline.Step(row, config.batch_size, config.sequence_length)
    rounds = [roofline.predict(kinds, recipes, step, chip)]
    return Profile(
        model=row.name,
        where=chip.name,
        is_predicted=True,
        num_sequences=config.batch_size,
        sequence_length=config.sequence_length,
        costs=_costs(kinds, recipes, rounds, config, lambda setting: roofline.weight_bytes(setting, chip)),
        multiplied=tuple(roofline.told(recipe.compute, chip) for recipe in recipes),
        notes=(
            f"a prediction from the figures of {chip.name}; nothing was run. It takes:",
            *roofline.assumptions(recipes, chip),
            roofline.NOT_RUN,
            *_recipe_notes(recipes),
        ),
    )


def _measured(
    row: Model,
    kinds: Sequence[Kind],
    recipes: list[Recipe],
    config: TrainConfig,
    numerics: bool,
    say: Callable[[str], None],
) -> Profile:
    require_batch(config, ELSEWHERE)
    from narrowgauge.profiling import measurement

    measurement.require_memory(row, recipes, config)
    device = measurement.device_here()
    rounds = measurement.measure(kinds, recipes, config, say=say)
    notes, losses = [*measurement.noise_notes(rounds), *_recipe_notes(recipes)], list[tuple[Loss, ...]]()
    if numerics:
        from narrowgauge.profiling import cast_error as reading

        say(f"casting what {reading.NUM_BATCHES} steps on '{config.data}' meet")
        losses = reading.losses(recipes, config)
        notes.append(f"what casts lose was read in the first {reading.NUM_BATCHES} steps on '{config.data}'.")
    return Profile(
        model=row.name,
        where=measurement.where(),
        is_predicted=False,
        num_sequences=config.batch_size,
        sequence_length=config.sequence_length,
        costs=_costs(kinds, recipes, rounds, config, lambda setting: measurement.weight_bytes(setting, device)),
        multiplied=tuple(measurement.told(recipe.compute, device) for recipe in recipes),
        losses=tuple(losses),
        notes=tuple(notes),
    )


def _costs(
    kinds: Sequence[Kind],
    recipes: Sequence[Recipe],
    rounds: Sequence[Round],
    config: TrainConfig,
    weight_bytes: Callable[[Setting], float],
) -> tuple[RecipeCost, ...]:
    settings = {setting for recipe in recipes for setting in rows_of(kinds, recipe).values()}
    of_weights = {setting: weight_bytes(setting) for setting in settings}
    return tuple(cost_of(recipe, kinds, rounds, config.tokens_per_step, of_weights) for recipe in recipes)


def _recipe_notes(recipes: Sequence[Recipe]) -> list[str]:
    """What of a recipe is not counted."""
    transforms = [
        f"{recipe.compute.name} changes the whole model; what its transform costs beside the linear layers is not counted."
        for recipe in recipes
        if recipe.compute.transform
    ]
    phases = [
        f"{recipe.name} has phases; what is told is its last, in {recipe.compute.name}."
        for recipe in recipes
        if recipe.phases
    ]
    return transforms + phases
