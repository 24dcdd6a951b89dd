"""What each recipe costs a model, on this machine or on a chip."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.planner.time import roofline
from narrowgauge.planner.time.roofline import Setting
from narrowgauge.profiling import prediction
from narrowgauge.profiling.costs import RecipeCost, Round, cost_of
from narrowgauge.profiling.layer_plan import ELSEWHERE, Kind, read_model, settings_of
from narrowgauge.profiling.profile_report import Loss, Profile
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

    With ``chip`` nothing is measured, and for a preset PyTorch is not loaded.

    Args:
        model: a preset's name, or a folder with a Hugging Face ``config.json``.
        recipes: one that is named twice counts once.
        chip: a name of ``narrowgauge show chips``; ``None`` measures this machine.
        numerics: also train a few steps on text and report what each cast loses.
        batch_size: sequences per step.
        say: called with a line of progress before each long operation.
    Raises:
        NarrowgaugeError: an unknown model, recipe or chip, or a model that does not fit.

    Cost: with a chip, nothing; else the compilation of a training step and of each compute's casts, and then some steps.
    """
    if not recipes:
        raise RecipeError("no recipe was named.", "For instance --recipes int8-row/word,float8-row/word.")
    distinct = list(dict.fromkeys(recipes))
    target = get_chip(chip) if chip is not None else None
    described, kinds = read_model(model)
    config = TrainConfig(model=model, batch_size=batch_size, sequence_length=sequence_length)
    _require_positions(described, config)
    if target is None:
        return _measured(described, kinds, distinct, config, numerics, say)
    if numerics:
        raise NarrowgaugeError(
            f"--numerics was requested with --chip {target.name}; it casts real batches, and a prediction has none.",
            "Omit --chip: casts lose the same on every machine.",
        )
    return _predicted(described, kinds, distinct, config, target)


def _require_positions(model: Model, config: TrainConfig) -> None:
    if config.sequence_length > model.max_positions:
        raise RecipeError(
            f"sequences of {config.sequence_length} tokens were requested of {model.name}, which has "
            f"{model.max_positions} positions.",
            f"Use --sequence-length {model.max_positions} or less.",
        )


def _predicted(model: Model, kinds: Sequence[Kind], recipes: list[Recipe], config: TrainConfig, chip: Chip) -> Profile:
    step = prediction.Step(model, config.batch_size, config.sequence_length)
    rounds = [prediction.predict(kinds, recipes, step, chip)]
    return Profile(
        model=model.name,
        where=chip.name,
        is_predicted=True,
        num_sequences=config.batch_size,
        sequence_length=config.sequence_length,
        costs=_costs(kinds, recipes, rounds, config, lambda setting: roofline.weight_bytes(setting, chip)),
        multiplied=tuple(roofline.describe_support(recipe.compute, chip) for recipe in recipes),
        notes=(
            f"a prediction from the data sheet of {chip.name}; nothing was run. It assumes:",
            *prediction.assumptions(recipes, chip),
            prediction.NOT_RUN,
            *_recipe_notes(recipes),
        ),
    )


def _measured(
    model: Model,
    kinds: Sequence[Kind],
    recipes: list[Recipe],
    config: TrainConfig,
    numerics: bool,
    say: Callable[[str], None],
) -> Profile:
    require_batch(config, ELSEWHERE)
    from narrowgauge.profiling import measurement

    measurement.require_memory(model, recipes, config)
    device = measurement.device_here()
    rounds = measurement.measure(kinds, recipes, config, say=say)
    notes, losses = [*measurement.noise_notes(rounds), *_recipe_notes(recipes)], list[tuple[Loss, ...]]()
    if numerics:
        from narrowgauge.profiling import cast_error

        say(f"casting the tensors of {cast_error.NUM_BATCHES} steps on '{config.data}'")
        losses = cast_error.losses(recipes, config)
        notes.append(f"what casts lose was measured in the first {cast_error.NUM_BATCHES} steps on '{config.data}'.")
    return Profile(
        model=model.name,
        where=measurement.where(),
        is_predicted=False,
        num_sequences=config.batch_size,
        sequence_length=config.sequence_length,
        costs=_costs(kinds, recipes, rounds, config, lambda setting: measurement.weight_bytes(setting, device)),
        multiplied=tuple(measurement.describe_support(recipe.compute, device) for recipe in recipes),
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
    settings = {setting for recipe in recipes for setting in settings_of(kinds, recipe).values()}
    of_weights = {setting: weight_bytes(setting) for setting in settings}
    return tuple(cost_of(recipe, kinds, rounds, config.tokens_per_step, of_weights) for recipe in recipes)


def _recipe_notes(recipes: Sequence[Recipe]) -> list[str]:
    """Notes on what is not counted."""
    transforms = [
        f"{recipe.compute.name} changes the whole model; the cost of its transform outside the linear layers is not counted."
        for recipe in recipes
        if recipe.compute.transform
    ]
    phases = [
        f"{recipe.name} has phases; reported is the last one, in {recipe.compute.name}."
        for recipe in recipes
        if recipe.phases
    ]
    return transforms + phases
