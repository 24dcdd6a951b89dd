"""A comparison on two ranks: the page, the bits of one process (order-invariant reductions), stops, continuations, refusals."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.cli import launching
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.report import runs_page as report_render
from narrowgauge.runs.record import read_run
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import loop
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.experiment.definition import ExperimentConfig, make_config, read_existing
from narrowgauge.trainer.experiment.shared_training import Lead, follow
from narrowgauge.trainer.experiment.training import run_experiment
from ranks import run_ranks
from trainer.tiny_runs import lasting, settings

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPES = [parse("bfloat16/word/reproducible"), parse("bfloat16/naive/reproducible")]
NAMES = ["bfloat16-word-reproducible-seed0", "bfloat16-naive-reproducible-seed0"]


@pytest.fixture(scope="module")
def config(place: Path) -> ExperimentConfig:
    base = settings(place, Path("nowhere"), steps=3, gradient_accumulation_steps=4, eval_every=2, checkpoint_every=1)
    return make_config(RECIPES, replace(base, gauges_every=0))


def compare_here(rank: int, config: ExperimentConfig, out: Path, stop_after: int = 0) -> str:
    """One rank of a comparison, whose second run is stopped as by Ctrl-C; what it printed, or how it ended."""
    true_train = loop.train

    def stopped(given: TrainConfig, **more: Any) -> Path:
        folder = true_train(replace(given, stop_after=stop_after), **more)
        raise KeyboardInterrupt(folder.name)

    def train(given: TrainConfig, **more: Any) -> Path:
        is_second = given.recipe == RECIPES[1]
        return stopped(given, **more) if is_second and stop_after else true_train(given, **more)

    loop.train, stream = train, io.StringIO()
    report_render.render = lambda found, title: title  # the page has tests of its own
    try:
        if rank:
            follow()
        else:
            with Lead() as lead:
                run_experiment(config, out, stream, lead.train)
    except (NarrowgaugeError, KeyboardInterrupt) as error:
        stream.write(f"{type(error).__name__}: {error}")
    finally:
        loop.train = true_train
    return stream.getvalue()


@pytest.fixture(scope="module")
def alone(config: ExperimentConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "out"
    run_experiment(config, out, io.StringIO())
    return out


def bits(out: Path) -> list[Any]:
    """Everything that must not depend on the number of ranks: losses, norms, validations and weights of each run."""
    found = []
    for name in NAMES:
        run = read_run(out / name)
        assert run.summary is not None
        steps = [{key: lasting(row)[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")} for row in run.steps]
        found.append([steps, [lasting(row) for row in run.evals], run.summary["weights_fingerprint"]])
    return found


def rows_of(out: Path) -> list[dict[str, Any]]:
    """The comparison's rows, but for what depends on the machine's load and on what a rank holds."""
    held = ("bytes_per_param", "state_bytes", "activation_bytes", "peak_tensor_bytes")
    spared = (*held, "edq", "noise", "lost_fraction")
    rows = json.loads((out / "compare.json").read_text())
    return [{name: value for name, value in lasting(row).items() if name not in spared} for row in rows]


def test_ranks_compare_with_the_bits_and_the_page_of_one_process(
    config: ExperimentConfig, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    said = run_ranks(compare_here, 2, tmp_path / "ranks", config, out)
    assert bits(out) == bits(alone) and rows_of(out) == rows_of(alone)
    assert {path.name for path in out.iterdir()} == {path.name for path in alone.iterdir()}
    assert [read_run(out / name).run["machine"]["ranks"] for name in NAMES] == [2, 2]
    assert said[0].count("validation loss") == 2 and said[1] == "", "one rank speaks"


def test_a_stopped_comparison_goes_on_on_other_ranks_with_the_same_bits(
    config: ExperimentConfig, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    said = run_ranks(compare_here, 2, tmp_path / "ranks", config, out, 2)
    assert said[0].endswith(f"KeyboardInterrupt: 1 of 2 runs are done. Go on with: narrowgauge compare --out {out}")
    assert said[1] == f"KeyboardInterrupt: {NAMES[1]}"
    present = read_existing(out)
    whole = replace(present, base=replace(present.base, shard="none"))
    assert run_ranks(compare_here, 3, tmp_path / "ranks", whole, out)[0].count("earlier") == 1
    run_experiment(read_existing(out), out, io.StringIO())
    assert bits(out) == bits(alone)
    run = read_run(out / NAMES[1])
    assert (run.config["shard"], run.run["machine"]["ranks"], read_existing(out).base.shard) == ("none", 3, "none")
    notes = [
        event["message"] for event in run.events if event["kind"] == "note" and "from there on" in event["message"]
    ]
    assert notes == [
        "shard was 'full' up to step 2 and is 'none' from there on",
        "the number of ranks was 2 up to step 2 and is 3 from there on",
    ]  # fmt: skip


def test_an_error_between_two_trainings_is_one_of_all_ranks(config: ExperimentConfig, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("")
    said = run_ranks(compare_here, 2, tmp_path / "ranks", config, tmp_path / "out")
    assert said[0].startswith("RecordError: Cannot compare in") and said[1] == said[0]


def test_an_error_of_a_training_is_one_of_all_ranks(config: ExperimentConfig, tmp_path: Path) -> None:
    few = replace(config, base=replace(config.base, gradient_accumulation_steps=1))
    said = run_ranks(compare_here, 2, tmp_path / "ranks", few, tmp_path / "out")
    assert all(line.rpartition("\n")[2].startswith(f"RankError: {NAMES[0]}: 2 ranks were requested") for line in said)
    assert not (tmp_path / "out").exists()


def fail_alone(rank: int, kind: type[BaseException]) -> str:
    try:
        if rank:
            follow()
        else:
            with Lead():
                raise kind("the page cannot be written.")
    except (NarrowgaugeError, KeyboardInterrupt) as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize(("kind", "others"), [(RecordError, "RecordError"), (KeyboardInterrupt, "ReportedError")])
def test_whoever_follows_learns_that_the_first_rank_has_failed(
    kind: type[BaseException], others: str, tmp_path: Path
) -> None:
    assert run_ranks(fail_alone, 2, tmp_path, kind) == [kind.__name__, others]


def test_one_process_compares_with_the_threads_of_each_recipe(
    config: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(loop, "train", lambda given, **_: found.append((given.recipe.title, torch.get_num_threads())))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        from narrowgauge.gauges.recording.run_reporter import NullScreen
        from narrowgauge.trainer.experiment.shared_training import train

        for name, threads in (("bfloat16/word/reproducible", None), ("bfloat16/word", None), ("bfloat16/word", 2)):
            given = replace(config.base, recipe=parse(name), threads=threads, out=str(tmp_path))
            train(given, False, NullScreen())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert found == [("bfloat16/word/reproducible", 1), ("bfloat16/word", 3), ("bfloat16/word", 2)]


def test_a_job_that_may_be_started_anew_names_its_folder(
    monkeypatch: pytest.MonkeyPatch, config: ExperimentConfig
) -> None:
    agent = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0",
             "TORCHELASTIC_MAX_RESTARTS": "2"}  # fmt: skip
    for name, text in agent.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(NarrowgaugeError, match="no --out names its comparison's folder"):
        launching.compare(config, None, launching.Launch(), io.StringIO())
