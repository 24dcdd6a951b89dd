"""What recipes, runs and run folders are called: in the verdict, in compare.json and on the page alike.

A recipe has its full name, and where its table says more, what it is called or else a word on what that is. Runs that
differ in their seed alone share a label; where one recipe was run twice with one seed, the settings that differ become
part of the label, and where nothing else tells two runs apart, their folders do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.runs.record import Run
from narrowgauge.spec.notation import parse, parse_table
from narrowgauge.spec.recipes import Recipe


def run_name(recipe: str, seed: int) -> str:
    """The folder of a run below its comparison's.

    Example:
        >>> run_name("bfloat16/word", 2)
        'bfloat16-word-seed2'
        >>> run_name("bfloat16/word (wide head)", 0)
        'bfloat16-word-wide-head-seed0'
    """
    plain = recipe.removesuffix(")").replace(" (", " ")
    kept = "".join(letter if letter.isalnum() or letter in "-_.+" else "-" for letter in plain)
    return f"{kept.strip('.') or 'recipe'}-seed{seed}"


def recipe_name(recipe: Any) -> str:
    """What a run's recipe is called: its full name, and where a table says more, its own name or what that is.

    Example:
        >>> recipe_name("bf16"), recipe_name({"recipe": "bfloat16/word", "keep": ["lm_head"]}), recipe_name("mine")
        ('bfloat16/word', 'bfloat16/word with keep', 'mine')
        >>> recipe_name({"recipe": "bfloat16/word", "name": "wide head", "keep": ["lm_head"]})
        'bfloat16/word (wide head)'
    """
    try:
        if isinstance(recipe, Mapping):
            asked = parse_table(recipe)
        else:
            asked = recipe if isinstance(recipe, Recipe) else parse(str(recipe))
    except RecipeError:
        return str(recipe)
    more = [key for key in asked.to_dict() if key not in ("name", "compute", "storage", "reduction")]
    if not more:
        return asked.name
    # The full name first: what a recipe computes and stores is read off it, by people and by programs.
    return f"{asked.name} ({asked.label})" if asked.label else f"{asked.name} with {', '.join(more)}"


def seed_of(run: Run) -> int:
    """The seed of a run; 0 where it says none."""
    return int(run.config.get("seed", 0))


def run_labels(runs: Sequence[Run]) -> list[str]:
    """A name per run, the same for runs that differ in their seed alone.

    Law: no two runs of one seed share a label, unless they are one run named twice.

    Args:
        runs: in any order.
    Returns:
        Labels, in the order of the runs.
    Raises:
        RecordError: a run's ``run.toml`` has no settings.
    Example:
        >>> from pathlib import Path
        >>> rates = (1e-3, 1e-4)
        >>> run_labels([Run(Path("a"), {"config": {"recipe": "bf16/word", "lr": lr}}) for lr in rates])
        ['bfloat16/word, lr 0.001', 'bfloat16/word, lr 0.0001']
    """
    labels = [recipe_name(run.config.get("recipe", run.path.name)) for run in runs]
    for tell_apart in (_by_settings, _by_folder):
        for label in sorted(_repeated(labels, runs)):
            places = [place for place, name in enumerate(labels) if name == label]
            for place, words in zip(places, tell_apart([runs[place] for place in places]), strict=True):
                labels[place] = label + words
    return labels


def _repeated(labels: Sequence[str], runs: Sequence[Run]) -> set[str]:
    """Labels that name two runs of one seed."""
    pairs = [(label, seed_of(run)) for label, run in zip(labels, runs, strict=True)]
    return {label for label, seed in pairs if pairs.count((label, seed)) > 1}


def _by_settings(runs: Sequence[Run]) -> list[str]:
    """The settings in which runs differ, a text per run."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in ("recipe", "seed", "out"))
    apart = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]
    return ["".join(f", {key} {run.config.get(key)}" for key in apart) for run in runs]


def _by_folder(runs: Sequence[Run]) -> list[str]:
    """The comparison a run lies in where that tells runs of a seed apart, else its own folder."""
    above = [(run.path.parent.name, seed_of(run)) for run in runs]
    if len(set(above)) == len(runs):
        return [f" ({folder})" for folder, _ in above]
    own = [run.path.name for run in runs]
    return [f" ({name if len(set(own)) == len(runs) else run.path})" for run, name in zip(runs, own, strict=True)]


def listed(parts: Iterable[str]) -> str:
    """Names in a sentence.

    Example:
        >>> listed(["a", "b", "c"])
        'a, b and c'
    """
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def counted(number: int, thing: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "run"), counted(2, "run")
        ('1 run', '2 runs')
    """
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
