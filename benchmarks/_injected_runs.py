"""Runs of the trainer with a cause in them, and healthy ones: a tiny model, on one process or several, in folders that stay.

The text is this Python's own source, its tokens are made once per seed and lent to each run, and a folder that holds a
finished run is left as it is, so that a benchmark which was stopped goes on where it was.

Claim: none of its own; ``diagnosis.py`` measures. Baseline: the undisturbed run. Run: ``./dev bench diagnosis``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from _forked import group, in_processes
from faults import nothing, struck
from injections import STRUCK_AT, Injection

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import Run, is_run, read_run
from narrowgauge.trainer import loop
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import prepare_data

SHAPE = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
USUAL: dict[str, Any] = {
    "steps": 100, "batch_size": 8, "sequence_length": 32, "eval_every": 0, "eval_batches": 4, "checkpoint_every": 0,
    "keep_checkpoints": 1, "log_every": 1 << 20, "threads": 1, "held_out": 0.05, "seed": 0,
}  # fmt: skip
"""All else is the trainer's own choice, the gauges' period of 20 steps and the audit's of 10 included."""
NUM_MODULES, MODULE_CHARACTERS = 60, 20_000


def prepare(place: Path) -> None:
    """Make the model's shape and the text."""
    (place / "model").mkdir(parents=True, exist_ok=True)
    (place / "model" / "config.json").write_text(json.dumps(SHAPE))
    text = place / "text"
    if not text.exists():
        text.mkdir()
        for source in sorted(Path(os.__file__).parent.glob("*.py"))[:NUM_MODULES]:
            (text / source.name).write_text(source.read_text(encoding="utf-8", errors="ignore")[:MODULE_CHARACTERS])


def _lend_data(place: Path, out: Path, config: TrainConfig) -> None:
    """Put the tokens into a run's folder; they are made once for each seed."""
    made = place / f"data-seed{config.seed}"
    if not (made / "data" / "data.json").is_file():
        size = SHAPE["vocab_size"]
        assert isinstance(size, int)
        prepare_data(config.data, made, vocab_size=size, held_out=config.held_out, seed=config.seed)
    out.mkdir(parents=True)
    shutil.copytree(made / "data", out / "data", copy_function=os.link)


def settings_of(place: Path, out: Path, recipe: str, changes: Mapping[str, Any]) -> TrainConfig:
    """The trainer's settings, with full paths."""
    where = {"model": str(place / "model"), "data": str(place / "text"), "out": str(out), "recipe": recipe}
    return TrainConfig.from_dict({**USUAL, **where, **changes})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without a word on the screen."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def recorded_as(versions: Mapping[str, str]) -> Iterator[None]:
    """Runs that begin within it say that they run with these versions."""
    true_describe = loop.describe

    def describe(session: Any) -> dict[str, Any]:
        found = true_describe(session)
        return {**found, "versions": {**found["versions"], **versions}}

    loop.describe = describe
    try:
        yield
    finally:
        loop.describe = true_describe


def _mark(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.done")


def is_made(folder: Path) -> bool:
    """Whether a folder holds a run that is done."""
    return _mark(folder).exists()


def made_run(folder: Path, make: Any) -> Run:
    """The run in a folder, made where it is not there whole; one that ended with an error of ours is whole too."""
    if not is_made(folder):
        shutil.rmtree(folder, ignore_errors=True)
        make()
        _mark(folder).touch()
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        shutil.rmtree(folder / "data", ignore_errors=True)
    return read_run(folder)


def train_here(
    place: Path, out: Path, recipe: str, changes: Mapping[str, Any], within: AbstractContextManager[None]
) -> None:
    """One run; where it ends with an error of ours, the record says why."""
    config = settings_of(place, out, recipe, changes)
    with quiet(), within, contextlib.suppress(NarrowgaugeError):
        loop.train(config, lent=True)
    if not is_run(out):
        raise RuntimeError(f"{out} was refused: {recipe} {dict(changes)}")


def resumed_run(place: Path, out: Path, injection: Injection, changes: Mapping[str, Any]) -> None:
    """A run that is stopped before the struck step, and goes on with the strike."""
    first = {**changes, "stop_after": injection.at - 1}
    train_here(place, out, injection.recipe, first, recorded_as(injection.older))
    with quiet(), struck(injection.fault, injection.at), contextlib.suppress(NarrowgaugeError):
        loop.resume(out)


def _rank(rank: int, folder: Path, place: Path, out: Path, injection: Injection, changes: Mapping[str, Any]) -> None:
    with group(rank, folder, injection.ranks):
        train_here(place, out, injection.recipe, changes, struck(injection.fault, injection.at))


def injected_run(place: Path, folder: Path, injection: Injection, **changes: Any) -> Run:
    """The run of an injection."""
    given = {**changes, **injection.settings}

    def make() -> None:
        _lend_data(place, folder, settings_of(place, folder, injection.recipe, given))
        if injection.ranks > 1:
            in_processes(_rank, injection.ranks, place, folder, injection, given)
        elif injection.resumed:
            resumed_run(place, folder, injection, given)
        else:
            train_here(place, folder, injection.recipe, given, struck(injection.fault, injection.at))

    return made_run(folder, make)


def undisturbed(injection: Injection) -> Injection:
    """The same run without the cause: neither its strike, its settings nor a resume."""
    kept = (
        injection.settings if injection.ranks > 1 else {"steps"} & injection.settings.keys() if injection.at > 1 else ()
    )
    own = {name: injection.settings[name] for name in kept}
    recipe = injection.recipe if injection.cause != "narrow-all-reduce" else injection.recipe.rpartition("/")[0]
    return Injection("healthy", "twin", recipe, nothing, own, ranks=injection.ranks)


@dataclasses.dataclass(frozen=True)
class Healthy:
    """A run in which nothing is wrong: a recipe and settings that people choose."""

    recipe: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    resumed: bool = False

    @property
    def name(self) -> str:
        """Names its folder."""
        words = [f"{name}-{value}" for name, value in self.settings.items()]
        more = [*words, *(["resumed"] if self.resumed else []), *([f"{self.ranks}-ranks"] if self.ranks > 1 else [])]
        return ".".join(["healthy", self.recipe.replace("/", "-"), *more])

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the recipe was chosen: then it is the undisturbed twin of the injections into that recipe."""
        return not self.settings and not self.resumed and self.ranks == 1

    @property
    def injection(self) -> Injection:
        """It is run as an injection of nothing is; shorter, where it is no twin."""
        given = {**({} if self.is_plain else {"steps": 60}), **self.settings}
        given |= {"gradient_accumulation_steps": 2} if self.ranks > 1 else {}
        return Injection("healthy", "none", self.recipe, nothing, given, STRUCK_AT, self.ranks, self.resumed)


_RECIPES = (
    "bfloat16/word", "bfloat16/compact", "bfloat16/states8", "bfloat16/master", "bfloat16/exact", "bfloat16/split",
    "bfloat16/split8", "bfloat16/stochastic", "bfloat16/kahan", "bfloat16/collage-plus", "bfloat16/float32", "float32/float32",
    "float16/split", "float16/master", "int8-row/word", "float8-row/word", "float8-tensor/word", "float8-delayed/word",
    "float8-block/split", "float8-tensor-e5m2/word", "mxfp8/word", "mxfp4/word", "nvfp4/compact", "unit/word", "scalify/word",
)  # fmt: skip
_VARIED = ("bfloat16/word", "bfloat16/master", "float8-row/word", "float16/split")
_CHOICES: tuple[Mapping[str, Any], ...] = (
    {"seed": 1}, {"seed": 2}, {"schedule": "constant"}, {"schedule": "linear", "min_lr_ratio": 0.0}, {"warmup_steps": 0},
    {"batch_size": 4}, {"sequence_length": 16}, {"lr": 1e-3}, {"gradient_accumulation_steps": 2}, {"gauges_every": 0},
    {"audit_every": 0, "gauges_every": 0}, {"max_grad_norm": 0.1}, {"weight_decay": 0.0}, {"beta2": 0.99}, {"steps": 200},
    {"lr": 6e-3, "warmup_steps": 30},
)  # fmt: skip
HEALTHY: tuple[Healthy, ...] = (
    *(Healthy(recipe) for recipe in _RECIPES),
    Healthy("bfloat16/naive", {"lr": 1e-2, "schedule": "constant"}),
    *(Healthy(recipe, choice) for choice in _CHOICES[:7] for recipe in _VARIED),
    *(Healthy("bfloat16/word", choice) for choice in _CHOICES[7:]),
    *(Healthy(recipe, resumed=True) for recipe in (*_VARIED, "bfloat16/split")),
    *(Healthy(recipe, ranks=2) for recipe in ("bfloat16/word", "bfloat16/master", "bfloat16/word/reproducible")),
)
"""Runs without a cause: recipes, seeds, schedules, warm-ups, sizes, resumes and ranks."""
