"""A comparison of tiny trainings: repeated, interrupted and resumed, extended, and refused in every way."""

from __future__ import annotations

import errno
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.comparison.made_runs import close
from narrowgauge.analysis.comparison.comparison import Comparison
from narrowgauge.errors import ChipError, DataError, NarrowgaugeError, RecipeError, RecordError, Terminated
from narrowgauge.gauges.recording.run_reporter import NullScreen
from narrowgauge.optim import compilation
from narrowgauge.report import runs_page as report_render
from narrowgauge.runs.atomic_io import held_folder
from narrowgauge.runs.record import Run, read_run
from narrowgauge.spec.notation import parse, parse_names
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer import loop
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.experiment import time_left, training
from narrowgauge.trainer.experiment.definition import (
    ExperimentConfig,
    config_of_flags,
    make_config,
    read_existing,
    read_settings,
)
from narrowgauge.trainer.experiment.progress import Progress
from narrowgauge.trainer.experiment.training import run_experiment
from narrowgauge.trainer.session import Session
from trainer.tiny_runs import call, lasting, settings

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPES = (parse("bfloat16/word"), parse("bfloat16/naive"))
NAMES = [f"bfloat16-{name}-seed{seed}" for seed in (0, 1) for name in ("word", "naive")]


@pytest.fixture(autouse=True)
def page_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has tests of its own; here its text is enough."""

    def render(found: Comparison, title: str) -> str:
        return "\n".join([title, *map(str, found.folders), *(row["recipe"] for row in found.rows), *found.verdict])

    monkeypatch.setattr(report_render, "render", render)


@pytest.fixture(scope="module")
def base(place: Path) -> TrainConfig:
    return replace(settings(place, Path("nowhere")), steps=4, eval_every=2, checkpoint_every=1, gauges_every=0)


def done(base: TrainConfig, out: Path, /, stream: io.StringIO | None = None, **more: Any) -> str:
    """Compare, or resume where the recipes are ``None``; the printed text."""
    stream = io.StringIO() if stream is None else stream
    given = {"recipes": RECIPES, "base": base, "seeds": 2, **more}
    run_experiment(read_existing(out) if given["recipes"] is None else make_config(**given), out, stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def first(base: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A comparison, and the printed text; tests that change it take a copy."""
    out = tmp_path_factory.mktemp("first") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_render, "render", lambda found, title: "\n".join([title, *found.verdict]))
        return out, done(base, out)


def metrics_of(out: Path, names: Sequence[str] = NAMES) -> list[Any]:
    """Everything but times."""
    runs = [read_run(out / name) for name in names]
    return [
        [[lasting(row) for row in run.steps] for run in runs],
        [[lasting(row) for row in run.evals] for run in runs],
        [lasting(run.summary) for run in runs if run.summary is not None],
    ]


# ── what it does ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_holds_the_definition_the_runs_the_rows_and_the_page(first: tuple[Path, str]) -> None:
    out, printed = first
    assert {path.name for path in out.iterdir()} == {"compare.toml", "compare.json", "report.html", *NAMES}
    assert (out / "report.html").read_text().startswith("model in bfloat16/word and bfloat16/naive\n")
    assert [row["recipe"] for row in json.loads((out / "compare.json").read_text())] == [
        recipe.title for recipe in RECIPES
    ]
    lines = printed.splitlines()
    assert re.fullmatch(r"about [\dmins ]+ for 4 runs \(a step takes [\d.to ]+ s here\)", lines[1])
    assert [bool(re.search(r"  about [\dmins ]+ left$", line)) for line in lines[2:]] == [True, True, True, False]
    heads = [line.split("  ")[:2] for line in lines[2:]]
    assert heads == [
        [f"{n}/4", f"{recipe}, seed {seed}"]
        for n, (recipe, seed) in enumerate(((recipe.title, seed) for seed in (0, 1) for recipe in RECIPES), 1)
    ]
    assert "\x1b" not in printed and "\r" not in printed


def test_runs_of_a_seed_share_weights_and_tokens(first: tuple[Path, str]) -> None:
    runs = {name: read_run(first[0] / name) for name in NAMES}
    word, naive, other, _ = (runs[name] for name in NAMES)
    # The same weights on the same batch, before the first update.
    assert word.steps[0]["loss"] == pytest.approx(naive.steps[0]["loss"], rel=1e-4)
    assert word.steps[0]["loss"] != pytest.approx(other.steps[0]["loss"], rel=1e-4)
    assert word.data_fingerprint == naive.data_fingerprint != other.data_fingerprint
    places = [(first[0] / name / "data" / "train.bin").stat() for name in NAMES]
    assert places[0].st_ino == places[1].st_ino and places[2].st_ino == places[3].st_ino != places[0].st_ino


def test_twice_the_same_but_for_times(first: tuple[Path, str], base: TrainConfig, tmp_path: Path) -> None:
    done(base, tmp_path / "again")
    assert metrics_of(tmp_path / "again") == metrics_of(first[0])
    rows = [json.loads((out / "compare.json").read_text()) for out in (first[0], tmp_path / "again")]
    assert [lasting(row) for row in rows[0]] == [lasting(row) for row in rows[1]]


def test_finished_runs_are_not_trained_again(
    first: tuple[Path, str], base: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "train", lambda config: pytest.fail("trained"))
    monkeypatch.setattr(loop, "resume", lambda folder: pytest.fail("resumed"))
    before = metrics_of(first[0])
    assert done(base, first[0]).count("earlier") == 4
    assert done(base, first[0], recipes=None, base=None, seeds=7).count("earlier") == 4
    assert metrics_of(first[0]) == before


def stop_at(
    monkeypatch: pytest.MonkeyPatch, run: int, step: int, stop: type[KeyboardInterrupt] = KeyboardInterrupt
) -> None:
    """The ``run``-th training is interrupted after a step, as Ctrl-C would, or SIGTERM."""
    true, count = loop.train, 0

    def train(config: TrainConfig, **more: Any) -> Path:
        nonlocal count
        count += 1
        if count < run:
            return true(config, **more)
        true(replace(config, stop_after=step), **more)
        raise stop()

    monkeypatch.setattr(loop, "train", train)


def test_an_interrupted_comparison_says_how_to_resume_and_resumes_with_the_same_bits(
    first: tuple[Path, str], base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, run=2, step=3, stop=Terminated)
        with pytest.raises(Terminated, match=rf"1 of 2 runs are done\. Go on with: narrowgauge compare --out {out}"):
            done(base, out, seeds=1)
    assert not (out / "compare.json").exists() and len(read_run(out / NAMES[1]).steps) == 3
    printed = done(base, out, recipes=None)
    assert printed.count("earlier") == 1
    assert any(event["kind"] == "resume" for event in read_run(out / NAMES[1]).events)
    assert metrics_of(out, NAMES[:2]) == metrics_of(first[0], NAMES[:2])


def test_files_of_a_run_killed_before_its_first_step_are_replaced(
    first: tuple[Path, str], base: TrainConfig, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make_config(RECIPES[:1], base).write(out)
    (out / NAMES[0] / ".tmp-data").mkdir(parents=True)
    (out / NAMES[0] / ".tmp-data" / "train.bin").write_bytes(b"half")
    done(base, out, recipes=None)
    assert metrics_of(out, NAMES[:1]) == metrics_of(first[0], NAMES[:1]) and not (out / NAMES[0] / ".tmp-data").exists()


def test_recipes_and_seeds_may_be_added(base: TrainConfig, tmp_path: Path) -> None:
    short = replace(base, steps=1)
    done(short, tmp_path, recipes=RECIPES[:1], seeds=1)
    printed = done(short, tmp_path, recipes=RECIPES, seeds=2)
    assert printed.count("earlier") == 1
    assert [row["num_seeds"] for row in json.loads((tmp_path / "compare.json").read_text())] == [2, 2]
    assert ExperimentConfig.read(tmp_path).seeds == (0, 1)


def test_a_run_that_diverges_is_a_result(base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = loop.train

    def train(config: TrainConfig, **more: Any) -> Path:
        folder = true(config, **more)
        if config.recipe.title == "bfloat16/naive":
            file = folder / "summary.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "val_loss": "nan"}))
        return folder

    monkeypatch.setattr(loop, "train", train)
    assert "bfloat16/naive, seed 0  diverged (its validation loss is nan)" in done(base, tmp_path, seeds=1)
    rows = json.loads((tmp_path / "compare.json").read_text())
    assert [row["diverged"] for row in rows] == [False, True] and rows[1]["val_loss"] is None


def test_a_run_that_fails_stops_with_its_line(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config: TrainConfig, **more: Any) -> Path:
        raise ChipError("this machine cannot.", "Take another.")

    monkeypatch.setattr(loop, "train", train)
    with pytest.raises(ChipError, match=r"^bfloat16-word-seed0: this machine cannot\. Take another\.$"):
        done(base, tmp_path)


def test_a_run_that_stops_where_it_diverges_stops_nothing_else(base: TrainConfig, tmp_path: Path) -> None:
    printed = done(replace(base, lr=1e38, on_spike="stop"), tmp_path, seeds=1)
    assert [line.split("  ")[2][:18] for line in printed.splitlines() if line[1:3] == "/2"] == [
        "diverged (at step "
    ] * 2
    assert [row["diverged"] for row in json.loads((tmp_path / "compare.json").read_text())] == [True, True]
    # They are done: nothing is trained again.
    assert done(replace(base, lr=1e38, on_spike="stop"), tmp_path, seeds=1).count("earlier") == 2


def test_borrowed_tokens_are_no_event(first: tuple[Path, str]) -> None:
    messages = [str(event["message"]) for name in NAMES for event in read_run(first[0] / name).events]
    assert messages and not [message for message in messages if "prepared by an earlier command" in message]


def test_two_processes_do_not_compare_in_one_folder(first: tuple[Path, str], base: TrainConfig) -> None:
    with held_folder(first[0]) as held:
        assert held
        with pytest.raises(RecordError, match="another process is doing that"):
            done(base, first[0])
    assert done(base, first[0]).count("earlier") == 4


class Full(io.StringIO):
    """A stream that fails after some lines."""

    def __init__(self, room: int, error: OSError) -> None:
        super().__init__()
        self.room, self.error = room, error

    def write(self, text: str) -> int:
        if self.room <= 0:
            raise self.error
        self.room -= text.count("\n")
        return super().write(text)


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), OSError(errno.ENOSPC, "No space left")])
def test_output_that_cannot_be_printed_stops_with_how_to_resume(
    base: TrainConfig, tmp_path: Path, error: OSError
) -> None:
    short = replace(base, steps=1, eval_every=0)
    with pytest.raises(
        RecordError, match=rf"could not be printed \({error.strerror}\): 1 of 2 runs .* --out {tmp_path}"
    ):
        done(short, tmp_path, stream=Full(2, error), seeds=1)
    assert "earlier" in done(short, tmp_path, recipes=None)


def test_runs_that_were_done_before_count_as_done(first: tuple[Path, str], base: TrainConfig) -> None:
    with pytest.raises(RecordError, match=r"\(Broken pipe\): 4 of 4 runs are done\."):
        done(base, first[0], stream=Full(2, BrokenPipeError(errno.EPIPE, "Broken pipe")))


@pytest.mark.parametrize("inside", [True, False], ids=["a run", "the folder"])
def test_a_folder_that_may_not_be_looked_into_costs_one_line(
    inside: bool, first: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = first[0] / NAMES[0] if inside else first[0]
    close(monkeypatch, closed)
    result = call("compare", "--out", str(first[0]))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.exception
    assert f"RecordError: Cannot use {closed}" in result.stderr and "Permission denied" in result.stderr


def test_no_time_is_estimated_for_finished_runs(
    first: tuple[Path, str], base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "estimate_runs", lambda configs, screen: pytest.fail("measured for nothing"))
    assert " left" not in done(base, first[0]) and "about" not in done(base, first[0])


def test_a_model_that_cannot_be_built_is_reported_by_its_run(base: TrainConfig, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "unheard of"}')
    assert time_left.estimate_runs([replace(base, model=str(broken))], NullScreen()) == {}
    with pytest.raises(DataError, match="bfloat16-word-seed0"):
        done(replace(base, model=str(broken)), tmp_path / "out")


def test_each_recipe_is_measured_until_the_time_is_up(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [replace(base, recipe=recipe, gradient_accumulation_steps=2) for recipe in RECIPES]
    found = time_left.estimate_runs(configs, NullScreen())
    assert list(found) == [recipe.title for recipe in RECIPES]
    assert all(one.step_seconds > 0 and one.once_seconds > 0 for one in found.values())
    monkeypatch.setattr(time_left, "MAX_SECONDS", 0.0)
    assert time_left.estimate_runs(configs, NullScreen()) == {}


def test_an_estimate_is_of_a_usual_step_and_counts_what_else_a_run_does(
    base: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a process may take a hundred times as long on a busy machine, and was once taken for every step."""
    seconds = iter([100.0, 4.0, 1.0, 1.5, 2.0])  # a later step may compile, too
    sizes: list[int] = []

    def step(session: Session) -> float:
        sizes.append(session.config.batch_size)
        return next(seconds)

    monkeypatch.setattr(time_left, "_step_seconds", step)
    config = replace(base, batch_size=6, steps=10, eval_every=3, eval_batches=2, gradient_accumulation_steps=2)
    found, took = time_left.estimate_run(config)
    # Two batches of validation, each a third of half a step, after steps 3, 6 and 9; and once more at the end.
    assert sizes == [1, 6, 6, 6, 6] and found.step_seconds == pytest.approx(1 + 3 * (2 / 6) / 10)
    assert found.once_seconds == pytest.approx(took - 8.5 + 2 / 6) and found.compile_seconds == 0
    seconds = iter([100.0, 12.0])
    compiled, _ = time_left.estimate_run(replace(config, compile=True))
    assert compiled.compile_seconds > 0 and compiled.step_seconds == pytest.approx(12 * 1.1)


def test_the_kernels_that_a_measured_step_compiles_are_shown(
    base: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, int]] = []
    screen = NullScreen()
    monkeypatch.setattr(screen, "compiling", lambda *what: shown.append(what), raising=False)

    def compiles(config: TrainConfig) -> Any:
        for tell in compilation.announce:
            tell()
        torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2, dtype=torch.float32))
        return time_left.RunEstimate(1.0), 1.0

    monkeypatch.setattr(time_left, "estimate_run", compiles)
    before = list(compilation.announce)
    time_left.estimate_runs([base], screen)
    assert shown == [("kernel", 1), ("graph", 1)] and compilation.announce == before


def test_a_batch_that_does_not_fit_is_reported_by_its_run(base: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: TrainConfig) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(time_left, "estimate_run", full)
    assert time_left.estimate_runs([base], NullScreen()) == {}


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def recipe_file(place: Path, name: str, text: str) -> Recipe:
    (place / name).write_text(f'recipe = "bfloat16/word"\n{text}\n')
    return parse(place / name)


def test_recipe_files_of_one_base_are_labelled_by_their_names(base: TrainConfig, tmp_path: Path) -> None:
    files = [
        recipe_file(tmp_path, "a.toml", 'evaluation = "bfloat16"'),
        recipe_file(tmp_path, "b.toml", 'name = "own phases"\nphase = [{ until = 0.5, compute = "bfloat16" }]'),
    ]
    done(replace(base, steps=1), tmp_path / "out", recipes=files, seeds=1)
    rows = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["recipe"] for row in rows] == ["bfloat16/word (a)", "bfloat16/word (own phases)"]
    assert {path.name for path in (tmp_path / "out").glob("*-seed0")} == {
        "bfloat16-word-a-seed0",
        "bfloat16-word-own-phases-seed0",
    }
    # The file by another name is the recipe that was run.
    (tmp_path / "a.toml").rename(tmp_path / "c.toml")
    again = done(replace(base, steps=1), tmp_path / "out", recipes=[parse(tmp_path / "c.toml"), files[1]], seeds=1)
    assert again.count("earlier") == 2 and "bfloat16/word (a)" in again


def test_one_recipe_twice_and_two_of_one_name_are_refused(base: TrainConfig, tmp_path: Path) -> None:
    one, same = (recipe_file(tmp_path, name, 'keep = ["lm_head"]') for name in ("a.toml", "b.toml"))
    with pytest.raises(RecipeError, match="two of the recipes are identical"):
        make_config([one, same], base)
    other = recipe_file(tmp_path, "c.toml", 'name = "A"\nkeep = ["*"]')
    with pytest.raises(RecipeError, match=r"two of the recipes are called bfloat16/word \(A\)\. Give each a name"):
        make_config([one, other], base)
    plain = recipe_file(tmp_path, "d.toml", "")
    with pytest.raises(RecipeError, match="two of the recipes are identical, bfloat16/word"):
        make_config([parse("bfloat16/word"), plain], base)


# ── a mistake corrected, and a comparison extended ──────────────────────────────────────────────────────────────────


def test_a_comparison_that_fails_before_its_first_run_leaves_nothing(base: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("too short")
    with pytest.raises(DataError):
        done(replace(base, data=str(tmp_path / "text")), tmp_path / "deep" / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"text"}


def test_a_definition_without_a_run_may_be_replaced_and_its_tokens_are_removed(
    first: tuple[Path, str], base: TrainConfig, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make_config(RECIPES, replace(base, sequence_length=8), 2).write(out)
    (out / NAMES[0] / "data").mkdir(parents=True)
    (out / NAMES[0] / "data" / "data.json").write_text("of another text")
    done(base, out)
    assert metrics_of(out) == metrics_of(first[0])


def test_flags_that_are_not_given_are_as_in_the_folder(base: TrainConfig, tmp_path: Path) -> None:
    before = make_config(RECIPES, base, 2, num_evals=10)
    before.write(tmp_path)
    assert config_of_flags(None, {}, out=tmp_path) == before
    assert config_of_flags(None, {}, seeds=3, out=tmp_path) == replace(before, seeds=(0, 1, 2))
    grown = config_of_flags([*RECIPES, parse("bfloat16/split")], {"lr": base.lr}, out=tmp_path)
    assert (grown.seeds, grown.base, len(grown.recipes)) == (before.seeds, before.base, 3)
    assert grown.extend(before, tmp_path) == grown
    for given, says in (
        ({"steps": 9}, "--steps 4, and --steps 9"),
        ({"eval_every": 3}, "no --eval-every, and --eval-every 3"),
    ):
        with pytest.raises(RecordError, match=says):
            config_of_flags(None, given, out=tmp_path).extend(before, tmp_path)
    with pytest.raises(RecordError, match=r"it has no compare\.toml"):
        config_of_flags(None, {}, seeds=3, out=tmp_path / "new")


def test_seconds_that_are_not_given_are_as_in_the_folder_unless_another_length_is(
    base: TrainConfig, tmp_path: Path
) -> None:
    before = replace(make_config(RECIPES, base, seconds=2.0), measured={RECIPES[0].title: (7, True)})
    before.write(tmp_path)
    more = config_of_flags(None, {}, seeds=2, out=tmp_path)
    assert more.seconds == 2.0 and more.extend(before, tmp_path).measured == before.measured
    for words in ({"given": {"steps": base.steps}}, {"given": {}, "tokens": 640}):
        with pytest.raises(RecordError, match="with --seconds 2, and --steps"):
            config_of_flags(None, **words, out=tmp_path).extend(before, tmp_path)


@pytest.mark.parametrize("line", ['recipe = "bfloat16/word"', "seed = 3", 'out = "there"', "stop_after = 3"])
def test_a_file_may_not_set_what_differs_between_runs(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f"steps = 9\n{line}\n")
    with pytest.raises(NarrowgaugeError, match=f"a.toml has {line.split()[0]} = .* do not share"):
        read_settings({}, tmp_path / "a.toml")


# ── how long ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_seconds_become_steps_of_each_recipe_once(
    base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_read, seconds = training.read_run, {"bfloat16/word": 0.5, "bfloat16/naive": 0.25}

    def read(folder: Path) -> Run:
        run = true_read(folder)
        if "calibration" in str(folder):
            for row in run.steps:
                row["seconds"] = 60.0 if row["step"] < 4 else seconds[run.config["recipe"]]
        return run

    monkeypatch.setattr(training, "read_run", read)
    monkeypatch.setattr(loop, "train", counted(loop.train, trained := []))
    printed = done(base, tmp_path, seconds=1.6, num_evals=2, seeds=1)
    # Two of each recipe that only measure, the first to warm up.
    assert trained == [12, 12, 12, 12, 3, 6]
    assert "bfloat16/word: 0.5 s per step, so 3 steps for 1.6 s of training" in printed
    found = {
        name: (len(run.steps), run.config["eval_every"]) for name in NAMES[:2] if (run := read_run(tmp_path / name))
    }
    assert found == {NAMES[0]: (3, 1), NAMES[1]: (6, 3)}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    # The machine may be slower by now: what was measured stays.
    seconds |= {"bfloat16/word": 9.0, "bfloat16/naive": 9.0}
    assert done(base, tmp_path, seconds=1.6, num_evals=2, seeds=1).count("earlier") == 2


def counted(true: Callable[..., Path], steps: list[int]) -> Callable[..., Path]:
    """A training that notes how many steps it was requested."""

    def train(config: TrainConfig, **more: Any) -> Path:
        steps.append(config.steps)
        return true(config, **more)

    return train


@pytest.mark.parametrize(("seconds", "rough", "asked"), [(10.0, 0.01, 100), (1e4, 0.02, 200), (50.0, 2.0, 12)])
def test_steps_are_measured_for_a_tenth_of_the_seconds_after_a_warm_up(
    seconds: float, rough: float, asked: int, base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    performed: list[TrainConfig] = []

    def read(folder: Path) -> Run:
        # The first run is slow; in the second each tenth step is audited, one compiles, and the first three do not count.
        slow = len(performed) == 1
        times = [99.0] * 3 + [rough if slow else (1.5 if k % 10 else 3.0) for k in range(30)] + [60.0] * (not slow)
        return Run(folder, {"config": {"compile": True}}, [{"step": k, "seconds": s} for k, s in enumerate(times, 1)])

    monkeypatch.setattr(training, "read_run", read)

    def train(given: TrainConfig, goes_on: bool, screen: Any) -> None:
        performed.append(given)

    config = make_config(RECIPES, replace(base, on_spike="stop"), seconds=seconds)
    progress = Progress(config.plan(tmp_path), tmp_path, io.StringIO())
    found, compiled = training._step_seconds(config, config.recipes[0], tmp_path, progress, train)
    assert found == pytest.approx((27 * 1.5 + 3 * 3.0 + 1.5) / 31) and compiled
    assert [config.steps for config in performed] == [12, asked]
    assert {config.on_spike for config in performed} == {"report"} and len({config.out for config in performed}) == 2


def test_tokens_become_steps(base: TrainConfig) -> None:
    assert make_config(RECIPES, base, tokens=64 * 5 + 63).base.steps == 5


def test_validations_are_spread_over_the_run(base: TrainConfig) -> None:
    config = make_config(RECIPES, replace(base, steps=45), num_evals=10)
    assert config.of_run(config.recipes[0], 0, Path("out")).eval_every == 4


@pytest.mark.parametrize(
    ("recipes", "rates"),
    [
        ("bfloat16/word,unit/word", [3e-3, None]),
        ("unit/word", [3e-3]),
    ],
)
def test_unit_scaled_recipes_among_others_take_their_own_rate(
    recipes: str, rates: list[float | None], base: TrainConfig
) -> None:
    config = make_config(parse_names(recipes), base)
    assert [config.of_run(recipe, 0, Path("out")).lr for recipe in config.recipes] == rates


def test_validations_are_spread_over_the_run_unless_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("eval_every = 7\nkeep_checkpoints = 3\nsteps = 9\n")
    assert read_settings({"steps": 5}, None) == (TrainConfig(steps=5, keep_checkpoints=1), 10)
    assert read_settings({"eval_every": 100}, None)[1] is None
    assert read_settings({"steps": 5}, tmp_path / "a.toml") == (
        TrainConfig(eval_every=7, keep_checkpoints=3, steps=5),
        None,
    )
    (tmp_path / "b.toml").write_text("eval_every = 100\n")
    assert read_settings({}, tmp_path / "b.toml") == (TrainConfig(eval_every=100, keep_checkpoints=1), None)


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ({"recipes": ()}, RecipeError, "no recipe was named"),
        (
            {"recipes": [parse("bf16/word"), parse("bfloat16/word")]},
            RecipeError,
            "two of the recipes are identical, bfloat16/word",
        ),
        ({"seeds": 0}, NarrowgaugeError, "seeds = 0"),
        ({"seeds": (1, 1)}, NarrowgaugeError, "none twice"),
        ({"seconds": 1.0, "tokens": 100}, NarrowgaugeError, "both --seconds and --tokens"),
        ({"seconds": 0.0}, NarrowgaugeError, "must be above 0"),
        ({"seconds": float("inf")}, NarrowgaugeError, "must be above 0 and finite"),
        ({"tokens": 63}, NarrowgaugeError, "63 tokens were requested, and one step takes 64"),
        ({"base": TrainConfig(model="llama-1m", sequence_length=10**6)}, RecipeError, "positions"),
        ({"base": TrainConfig(data="/nowhere")}, DataError, "nowhere"),
        ({"recipes": None}, RecordError, r"it has no compare\.toml"),
    ],
)
def test_a_contradiction_is_refused_before_anything_is_created(
    more: dict[str, Any], error: type[NarrowgaugeError], says: str, base: TrainConfig, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        done(base, tmp_path / "new" / "out", **more)
    assert not any(tmp_path.iterdir())


def test_a_folder_of_something_else_is_refused(base: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RecordError, match=r"not empty \(it holds thesis\.tex\)"):
        done(base, tmp_path)
    with pytest.raises(RecordError, match="it is a file"):
        done(base, tmp_path / "thesis.tex")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda base: {"base": replace(base, steps=5)}, "with --steps 4, and --steps 5 was requested"),
        (lambda base: {"base": replace(base, lr=1e-3)}, "with --lr 0.003, and --lr 0.001 was requested"),
        (lambda base: {"seconds": 2.0}, "with --steps 4, and --seconds 2 was requested"),
        (lambda base: {"seeds": 1}, "with seeds 0,1, and 0 was requested"),
        (lambda base: {"recipes": RECIPES[:1]}, "To add a recipe, name all"),
        (lambda base: {"num_evals": 10}, "with --eval-every 2, and no --eval-every was requested"),
        (lambda base: {"base": replace(base, compile=True)}, "with no --compile, and --compile was requested"),
    ],
)
def test_another_definition_is_refused_and_changes_nothing(
    change: Callable[[TrainConfig], dict[str, Any]], says: str, first: tuple[Path, str], base: TrainConfig
) -> None:
    out = first[0]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(RecordError, match=says):
        done(base, out, **change(base))
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_run_with_other_settings_is_refused(base: TrainConfig, tmp_path: Path) -> None:
    loop.train(replace(base, recipe=RECIPES[0], out=str(tmp_path / NAMES[0]), weight_decay=0.0, steps=1))
    make_config(RECIPES, base, 2).write(tmp_path)
    with pytest.raises(RecordError, match=f"{NAMES[0]} holds a run with steps = 1, and this comparison takes 4"):
        done(base, tmp_path)


@pytest.mark.parametrize("text", ["", "schema_version = 1\n", "schema_version = 1\nrecipes = 3\n", "a = [", "\xff"])
def test_a_damaged_definition_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "compare.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(RecordError, match=r"compare\.toml is damaged"):
        done(TrainConfig(), tmp_path, recipes=None)


def test_a_definition_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "compare.toml").write_text("schema_version = 99\n")
    with pytest.raises(RecordError, match="has schema 99; this version reads up to 1"):
        ExperimentConfig.read(tmp_path)


def test_a_definition_is_read_as_it_was_written(base: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('recipe = "bfloat16/word"\nkeep = ["lm_head"]\n')
    config = make_config([parse("bfloat16/word"), parse(tmp_path / "own.toml")], base, (3, 1), seconds=2.0, num_evals=4)
    config = replace(config, measured={"bfloat16/word": (7, True)})
    config.write(tmp_path)
    assert ExperimentConfig.read(tmp_path) == config
    config = config.of_run(config.recipes[0], 3, tmp_path)
    assert (config.steps, config.compile, config.seed) == (7, True, 3)


def test_the_first_free_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "comparisons" / "llama-1m-1").mkdir(parents=True)
    assert training.free_folder("llama-1m") == Path("comparisons/llama-1m-2")
