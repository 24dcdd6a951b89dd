"""The labels of recipes, runs and run folders: the same in the verdict, in ``compare.json`` and on the page.

A recipe's label is its full name, followed by its own name or by what its table overrides, and by the update rule where that is
not AdamW. Runs that differ only in their seed share a label. Where one recipe was run twice with one seed, the settings that
differ become part of the label; where none differs, the folder does. A label is for people: nothing parses it back to a recipe
or a seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import Run
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.update_rules import rule_title

MOST_SETTINGS = 4
"""Most settings in a label; runs that differ in more are told apart by their folders."""


def run_name(recipe: str, seed: int) -> str:
    """Return the folder of a run below its comparison's.

    Example:
        >>> run_name("bfloat16/word", 2)
        'bfloat16-word-seed2'
        >>> run_name("bfloat16/word (wide head)", 0)
        'bfloat16-word-wide-head-seed0'
    """
    plain = recipe.removesuffix(")").replace(" (", " ")
    kept = "".join(letter if letter.isalnum() or letter in "-_.+" else "-" for letter in plain)
    return f"{kept.strip('.') or 'recipe'}-seed{seed}"


def parsed_recipe(recipe: Any) -> Recipe | None:
    """Return a recipe from its name, its table or itself; ``None`` where the name is no recipe's."""
    try:
        return parse(recipe)
    except NarrowgaugeError:
        return None


def recipe_name(recipe: Any) -> str:
    """Return the label of a recipe: its title, or the given name where no recipe has it.

    Example:
        >>> recipe_name("bf16/word"), recipe_name({"recipe": "bfloat16/word", "keep": ["lm_head"]}), recipe_name("mine")
        ('bfloat16/word', 'bfloat16/word with keep', 'mine')
    """
    parsed = parsed_recipe(recipe)
    return str(recipe) if parsed is None else parsed.title


def seed_of(run: Run) -> int:
    """Return the seed of a run; 0 where none is recorded."""
    return int(run.config.get("seed", 0))


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return a label per run, in their order; the same for runs that differ only in their seed.

    Invariant: no two runs of one seed share a label, unless they are one run named twice.

    Example:
        >>> from pathlib import Path
        >>> rates = (1e-3, 1e-4)
        >>> run_labels([Run(Path("a"), {"config": {"recipe": "bf16/word", "lr": lr}}) for lr in rates])
        ['bfloat16/word, lr 0.001', 'bfloat16/word, lr 0.0001']
    """
    # A folder may have the name of a recipe that it does not hold.
    labels = [
        rule_title(recipe_name(run.config["recipe"]), str(run.config.get("rule", "adamw")))
        if "recipe" in run.config
        else run.path.name
        for run in runs
    ]
    for distinguish in (_by_settings, _by_folder):
        for label in sorted(_repeated(labels, runs)):
            places = [place for place, name in enumerate(labels) if name == label]
            for place, suffix in zip(places, distinguish([runs[place] for place in places]), strict=True):
                labels[place] = label + suffix
    return labels


def _repeated(labels: Sequence[str], runs: Sequence[Run]) -> set[str]:
    """Return labels that name two runs of one seed."""
    pairs = [(label, seed_of(run)) for label, run in zip(labels, runs, strict=True)]
    return {label for label, seed in pairs if pairs.count((label, seed)) > 1}


def _by_settings(runs: Sequence[Run]) -> list[str]:
    """Return the settings in which the runs differ, a text per run; empty ones where they differ in too many.

    Settings that all of them record come first: your own loop records few of those of the trainer.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in ("recipe", "seed", "out"))
    differing = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]
    shared = [key for key in differing if all(key in run.config for run in runs)]
    named = (shared or differing) if len(shared or differing) <= MOST_SETTINGS else []
    return ["".join(f", {key} {run.config[key]}" for key in named if key in run.config) for run in runs]


def _by_folder(runs: Sequence[Run]) -> list[str]:
    """Return the folder of the comparison where that distinguishes runs of one seed, else the run's own folder."""
    above = [(run.path.parent.name, seed_of(run)) for run in runs]
    if len(set(above)) == len(runs):
        return [f" ({folder})" for folder, _ in above]
    names = [run.path.name for run in runs]
    return [f" ({name if len(set(names)) == len(runs) else run.path})" for run, name in zip(runs, names, strict=True)]


def listed(parts: Iterable[str]) -> str:
    """Return names as a sentence lists them.

    Example:
        >>> listed(["a", "b", "c"])
        'a, b and c'
    """
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
