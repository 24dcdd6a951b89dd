"""The definition of a comparison: recipes, seeds and the settings that all its runs share, checked before anything is created.

It is stored in the comparison's folder (``compare.toml``) before the first step, so that the folder alone determines what is left
to do. Recipes and seeds may be added to it later, and its runs distributed over ranks in another way; other changes are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from narrowgauge.analysis.comparison.comparison import require_resolvable
from narrowgauge.analysis.comparison.labels import run_name
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.runs.atomic_io import AGAIN, disk_errors, write_whole
from narrowgauge.runs.record import DEFINITION_FILE
from narrowgauge.spec.notation import parse_value
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.toml import load_toml
from narrowgauge.trainer.config import (
    CHANGEABLE_ON_RESUME,
    KEPT_CHECKPOINTS,
    NUM_EVALS,
    OF_A_RUN,
    TrainConfig,
    load_settings,
)
from narrowgauge.trainer.experiment.planned_runs import PlannedRun, plan_runs, require_distinct, seed_numbers
from narrowgauge.trainer.memory import require_batch

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ExperimentConfig:
    """The definition of a comparison; no recipe and no seed is in it twice.

    Args:
        base: the settings of every run but its recipe, seed and folder.
        seconds: of training steps per run, instead of ``base.steps``.
        num_evals: validations per run, instead of ``base.eval_every``.
        measured: with ``seconds``, by recipe: the number of steps, and whether they are compiled.
        resolve: the difference of losses that the verdict is asked to resolve; no run depends on it.
    """

    recipes: tuple[Recipe, ...]
    seeds: tuple[int, ...]
    base: TrainConfig
    seconds: float | None = None
    num_evals: int | None = None
    measured: Mapping[str, tuple[int, bool]] = field(default_factory=dict)
    resolve: float | None = None

    def of_run(self, recipe: Recipe, seed: int, out: Path) -> TrainConfig:
        """The settings of one run of the comparison in ``out``."""
        folder = out / run_name(recipe.title, seed)
        made = replace(self.base, recipe=recipe, seed=seed, out=str(folder), lr=self.lr(recipe))
        if self.seconds is not None and recipe.title in self.measured:
            steps, compile = self.measured[recipe.title]
            made = replace(made, steps=steps, compile=compile)
        return made if self.num_evals is None else replace(made, eval_every=max(1, made.steps // self.num_evals))

    def of_runs(self, out: Path) -> list[TrainConfig]:
        """The settings of every run, seed by seed."""
        return [self.of_run(recipe, seed, out) for seed in self.seeds for recipe in self.recipes]

    def plan(self, out: Path) -> list[PlannedRun]:
        """The runs, in the order of :meth:`of_runs`."""
        return plan_runs([recipe.title for recipe in self.recipes], self.seeds, out)

    def lr(self, recipe: Recipe) -> float | None:
        """The peak learning rate; ``None`` for a unit-scaled model among others, whose own default is in other units."""
        units = {one.compute.transform == "unit" for one in self.recipes}
        return None if recipe.compute.transform == "unit" and len(units) > 1 else self.base.lr

    def to_dict(self) -> dict[str, Any]:
        """A TOML table."""
        base = {key: value for key, value in self.base.to_dict().items() if key not in OF_A_RUN}
        table = {
            "schema_version": SCHEMA_VERSION,
            "recipes": [recipe.to_value() for recipe in self.recipes],
            "seeds": list(self.seeds),
            "seconds": self.seconds,
            "num_evals": self.num_evals,
            "resolve": self.resolve,
            "settings": base,
            "measured": {name: {"steps": n, "compile": compile} for name, (n, compile) in self.measured.items()},
        }
        return {key: value for key, value in table.items() if value is not None}

    @classmethod
    def read(cls, out: Path) -> ExperimentConfig:
        """Read the definition in the folder of a comparison."""
        file = out / DEFINITION_FILE
        try:
            with disk_errors(file):
                table = load_toml(file.read_bytes().decode())
            if table["schema_version"] > SCHEMA_VERSION:
                raise RecordError(
                    f"The comparison {out} has schema {table['schema_version']}; this version reads up to {SCHEMA_VERSION}.",
                    "Upgrade with pip install --upgrade narrowgauge.",
                )
            return cls.from_dict(table, str(file))
        except NarrowgaugeError:
            raise  # it has a better message
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RecordError(f"{file} is damaged: {error}.", "Restore the file from a copy.") from error

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str = "the definition") -> ExperimentConfig:
        """Read a table from :meth:`to_dict`; ``where`` names it in error messages."""
        return cls(
            tuple(parse_value(recipe, where) for recipe in table["recipes"]),
            tuple(table["seeds"]),
            TrainConfig.from_dict(table["settings"], where),
            table.get("seconds"),
            table.get("num_evals"),
            {name: (row["steps"], row["compile"]) for name, row in table["measured"].items()},
            table.get("resolve"),
        )

    def write(self, out: Path) -> None:
        """Write ``compare.toml``."""
        with disk_errors(out, AGAIN):
            out.mkdir(parents=True, exist_ok=True)
        write_whole(out / DEFINITION_FILE, tomli_w.dumps(self.to_dict()).encode(), AGAIN)

    def extend(self, before: ExperimentConfig, out: Path) -> ExperimentConfig:
        """This definition with what was measured for ``before``; refused unless it only adds recipes or seeds to that.

        A recipe that is in both keeps the label it has there.
        """
        go_on = f"Choose another --out, or go on with that one: narrowgauge compare --out {out}"
        for found, wanted in before._differences(self):
            raise RecordError(f"{out} holds a comparison with {found}, and {wanted} was requested.", go_on)
        if any(recipe not in self.recipes for recipe in before.recipes):
            found, wanted = (",".join(recipe.title for recipe in one.recipes) for one in (before, self))
            raise RecordError(
                f"{out} holds a comparison of --recipes {found}, and {wanted} was requested.",
                "To add a recipe, name all; to compare others, choose another --out.",
            )
        if not set(before.seeds) <= set(self.seeds):
            found, wanted = (",".join(map(str, one.seeds)) for one in (before, self))
            raise RecordError(f"{out} holds a comparison with seeds {found}, and {wanted} was requested.", go_on)
        recipes = tuple(next((one for one in before.recipes if one == recipe), recipe) for recipe in self.recipes)
        return replace(self, recipes=recipes, measured=before.measured)

    def _differences(self, other: ExperimentConfig) -> Iterator[tuple[str, str]]:
        """The length and settings in which two definitions differ, as flags."""
        if (self.seconds, other.seconds) != (None, None) and self.seconds != other.seconds:
            yield self._length(), other._length()
        if self.num_evals != other.num_evals:
            yield self._validations(), other._validations()
        # Filled in: what a rule settles was spelled out before rules had names.
        bases = [one.base.filled() for one in (self, other)]
        for setting in fields(TrainConfig):
            found, wanted = (getattr(base, setting.name) for base in bases)
            spread = setting.name == "eval_every" and self.num_evals is not None
            if found != wanted and not spread and setting.name not in (*OF_A_RUN, *CHANGEABLE_ON_RESUME):
                yield _flag(setting.name, found), _flag(setting.name, wanted)

    def _length(self) -> str:
        return _flag("steps", self.base.steps) if self.seconds is None else f"--seconds {self.seconds:g}"

    def _validations(self) -> str:
        if self.num_evals is None:
            return _flag("eval_every", self.base.eval_every)
        return "no --eval-every" if self.num_evals == NUM_EVALS else f"{self.num_evals} validations per run"


def _flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"no --{flag}" if value is None else f"--{flag} {value}"


def read_settings(
    given: Mapping[str, Any], file: Path | None, before: ExperimentConfig | None = None
) -> tuple[TrainConfig, int | None]:
    """The settings of every run from flags, over those of a file, over those of ``before``; and the validations per run.

    ``before`` is the definition in the folder; without one, a run keeps one checkpoint by default. The second result is
    ``num_evals`` of :func:`make_config`, and ``None`` where ``eval_every`` is given.
    """
    start, num_evals = (
        (TrainConfig(keep_checkpoints=KEPT_CHECKPOINTS), NUM_EVALS)
        if before is None
        else (before.base, before.num_evals)
    )
    settings: dict[str, Any] = {}
    if file is not None:
        table = load_settings(file)
        from_file = TrainConfig.from_dict(table, str(file))
        settings = {name: getattr(from_file, name) for name in table}
        for name in OF_A_RUN:
            if name in settings:
                raise NarrowgaugeError(
                    f"{file} has {name} = {settings[name]!r}, which the runs of a comparison do not share.",
                    "Leave it out there; use --recipes, --seeds and --out.",
                )
    settings |= given
    return replace(start, **settings), None if "eval_every" in settings else num_evals


def config_of_flags(
    recipes: Sequence[Recipe] | None,
    given: Mapping[str, Any],
    *,
    file: Path | None = None,
    seeds: int | None = None,
    seconds: float | None = None,
    tokens: int | None = None,
    resolve: float | None = None,
    out: Path | None = None,
) -> ExperimentConfig:
    """The definition from a command line; flags that are not given (``None``) are as in the folder."""
    before = read_existing(out) if out is not None and (recipes is None or is_comparison(out)) else None
    if before is not None and (recipes, file, seeds, seconds, tokens) == (None,) * 5 and not given:
        return before if resolve is None else replace(before, resolve=_resolvable(resolve, before.seeds))
    base, num_evals = read_settings(given, file, before)
    has_length = "steps" in given or (seconds, tokens) != (None, None)
    if before is not None and not has_length and base.steps == before.base.steps:
        seconds = before.seconds
    return make_config(
        before.recipes if recipes is None and before is not None else recipes or (),
        base,
        seeds or (1 if before is None else before.seeds),
        seconds=seconds,
        tokens=tokens,
        num_evals=num_evals,
        resolve=before.resolve if resolve is None and before is not None else resolve,
    )


def is_comparison(out: Path) -> bool:
    """Whether a folder is a comparison's."""
    with disk_errors(out):
        return (out / DEFINITION_FILE).is_file()


def read_existing(out: Path) -> ExperimentConfig:
    """The definition of the comparison in a folder, which must hold one."""
    if not is_comparison(out):
        raise RecordError(f"No comparison in {out}: it has no {DEFINITION_FILE}.", "Name recipes with --recipes.")
    return ExperimentConfig.read(out)


def _resolvable(resolve: float | None, seeds: Sequence[int]) -> float | None:
    """A difference to be resolved; refused where it is none, or where a single seed gives no interval."""
    require_resolvable(resolve)
    if resolve is not None and len(seeds) < 2:
        raise NarrowgaugeError(
            f"--resolve {resolve:g} was requested of one seed, which gives no interval.", "Add --seeds 3."
        )
    return resolve


def make_config(
    recipes: Sequence[Recipe],
    base: TrainConfig,
    seeds: int | Sequence[int] = 1,
    *,
    seconds: float | None = None,
    tokens: int | None = None,
    num_evals: int | None = None,
    resolve: float | None = None,
) -> ExperimentConfig:
    """Check a definition and the settings of its runs before anything is created.

    Args:
        base: the settings of every run; its recipe, seed, out and stop_after do not count.
        seeds: how many, from 0 on, or which ones.
        seconds, num_evals, resolve: those of :class:`ExperimentConfig`.
        tokens: per run, instead of ``base.steps``.
    """
    require_distinct(recipes)
    numbers = seed_numbers(seeds)
    if seconds is not None and tokens is not None:
        raise NarrowgaugeError("both --seconds and --tokens were given.", "A run has one length: give one of them.")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise NarrowgaugeError(
            f"seconds = {seconds} was requested, and it must be above 0 and finite.", "Change --seconds."
        )
    if tokens is not None:
        if tokens < base.tokens_per_step:
            raise NarrowgaugeError(
                f"{tokens} tokens were requested, and one step takes {base.tokens_per_step}.", "Raise --tokens."
            )
        base = replace(base, steps=tokens // base.tokens_per_step)
    base = replace(base, out=None, stop_after=None, recipe=TrainConfig().recipe, seed=0)
    base = replace(base, model=base.validated().model).located()
    require_batch(base)
    config = ExperimentConfig(tuple(recipes), numbers, base, seconds, num_evals, resolve=_resolvable(resolve, numbers))
    for recipe in recipes:
        replace(config.of_run(recipe, numbers[0], Path()), out=None).validated()
    return config
