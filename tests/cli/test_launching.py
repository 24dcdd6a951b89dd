"""Commands on ranks: which process starts them, which is one, and what is refused before PyTorch is loaded."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from narrowgauge.cli import launching
from narrowgauge.cli.launching import Launch, how_to_resume, is_own_run, starts_ranks
from narrowgauge.cli.main import main
from narrowgauge.errors import RankError, ReportedError
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import resume_checks
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.experiment.definition import ExperimentConfig, make_config

RANK = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
AGENT = {
    **RANK, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "2",
}  # fmt: skip


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), prog_name="narrowgauge")


def stand_among(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """What was asked of a stand-in for the agent."""
    from narrowgauge.distributed.launch import agent

    monkeypatch.chdir(tmp_path)
    found: list[tuple[Any, ...]] = []

    def run_on_ranks(words: list[str], ranks: int, **options: Any) -> None:
        file = Path(os.environ["NARROWGAUGE_SETTINGS"])
        assert os.name == "nt" or stat.S_IMODE(file.stat().st_mode) == 0o600
        found.append((words, ranks, {**options, "file": file, "settings": json.loads(file.read_text())}))

    monkeypatch.setattr(agent, "run_on_ranks", run_on_ranks)
    return found


def test_ranks_get_the_same_words_and_what_they_were_parsed_to(started: list[tuple[Any, ...]], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('recipe = "int8-row/word"\nkeep = ["lm_head"]\n')
    words = ["train", "--steps", "7", "--gradient-accumulation-steps", "4", "--timeout", "50", "--recipe", "mine.toml"]
    words += ["--nproc", "4", "--max-restarts=2"]
    assert call(*words).exit_code == 0
    [(given, ranks, options)] = started
    assert given == ["-m", "narrowgauge", *words]
    assert (ranks, options["max_restarts"]) == (4, 2)
    assert options["how_to_resume"]() == "Start it again."
    config = TrainConfig.from_dict(options["settings"])
    assert (
        config
        == TrainConfig(steps=7, gradient_accumulation_steps=4, recipe=parse("mine.toml"), out=config.out).validated()
    )
    assert config.recipe.title == parse("mine.toml").title
    assert Path(str(config.out)).parts[-2] == "runs", "all ranks, and those that are started anew, have one folder"
    assert "NARROWGAUGE_SETTINGS" not in os.environ and not options["file"].parent.exists()


def test_a_rank_takes_what_the_command_line_was_parsed_to(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe, handed = tmp_path / "mine.toml", tmp_path / "settings.json"
    recipe.write_text('recipe = "int8-row/word"\n')
    words = ["train", "--steps", "7", "--gradient-accumulation-steps", "2", "--recipe", "mine.toml", "--nproc", "2"]
    assert call(*words).exit_code == 0
    handed.write_text(json.dumps(started[0][2]["settings"]))
    recipe.unlink()  # a rank that is started anew does not read it again
    monkeypatch.setenv("NARROWGAUGE_SETTINGS", str(handed))
    trained: list[tuple[TrainConfig, Launch]] = []
    monkeypatch.setattr(launching, "train", lambda config, launch: trained.append((config, launch)))
    assert call(*words).exit_code == 0
    [(config, launch)] = trained
    assert config.to_dict() == started[0][2]["settings"] == launch.settings
    assert len(started) == 1 and "NARROWGAUGE_SETTINGS" not in os.environ, (
        "it starts none, and what it starts is no rank"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--nproc", "0"], "UsageError: Invalid value for '--nproc': 0 is not in the range x>=1."),
        (["--nproc", "3", "--gradient-accumulation-steps", "2"],
         "RankError: 3 ranks were requested, and a step has 2 micro-batches; each rank needs one. Set --gradient-"),
        (["--nproc", "4", "--gradient-accumulation-steps", "4", "--replicas", "3"],
         "RankError: 3 replicas were requested on 4 ranks"),
        (["--max-restarts", "1"], "UsageError: --max-restarts is for ranks that --nproc starts."),
    ],
)  # fmt: skip
def test_what_does_not_fit_costs_one_line(words: list[str], line: str, started: list[tuple[Any, ...]]) -> None:
    result = call("train", *words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(line)
    assert not started


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_among(monkeypatch, RANK)
    assert not starts_ranks(Launch())
    assert not starts_ranks(Launch(nproc=1))
    with pytest.raises(RankError, match="--nproc 2 was requested of rank 1 of 4, which hand has started"):
        starts_ranks(Launch(nproc=2))


def test_one_rank_needs_no_agent_unless_it_may_be_started_anew() -> None:
    assert not starts_ranks(Launch(nproc=1))
    assert starts_ranks(Launch(nproc=1, max_restarts=1))


def test_before_ranks_have_met_one_of_each_host_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgauge.distributed.launch import process_group

    monkeypatch.setattr(process_group, "_has_met", False)
    stand_among(monkeypatch, AGENT)
    refused = call("train", "--steps", "many")
    assert (refused.exit_code, refused.stderr) == (2, "")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert call("train", "--steps", "many").stderr.startswith("UsageError: Invalid value for '--steps'")


COMPARED = ["compare", "--recipes", "bfloat16/word,bfloat16/naive", "--gradient-accumulation-steps", "2"]


def test_ranks_compare_in_one_folder(started: list[tuple[Any, ...]]) -> None:
    assert call(*COMPARED, "--shard", "none", "--nproc", "2", "--max-restarts", "1").exit_code == 0
    [(given, ranks, options)] = started
    assert given == ["-m", "narrowgauge", *COMPARED, "--shard", "none", "--nproc", "2", "--max-restarts", "1"]
    assert options["settings"]["out"] == str(Path("comparisons", "llama-1m-1"))
    definition = ExperimentConfig.from_dict(options["settings"]["definition"])
    assert [recipe.name for recipe in definition.recipes] == ["bfloat16/word", "bfloat16/naive"]
    assert (definition.base.shard, definition.to_dict()) == ("none", options["settings"]["definition"])
    assert (ranks, options["max_restarts"], options["how_to_resume"]()) == (2, 1, "Start it again.")


def test_a_comparison_on_ranks_goes_on_by_its_folder(started: list[tuple[Any, ...]]) -> None:
    recipes = [parse("bfloat16/word"), parse("bfloat16/naive")]
    make_config(recipes, TrainConfig(gradient_accumulation_steps=2)).write(Path("out"))
    assert call("compare", "--out", "out", "--shard", "none", "--nproc", "2").exit_code == 0
    assert started[0][0][2:] == ["compare", "--out", "out", "--shard", "none", "--nproc", "2"]
    assert started[0][2]["settings"]["out"] == "out"
    assert started[0][2]["how_to_resume"]() == "narrowgauge compare --out out goes on."
    refused = call("compare", "--out", "out", "--nproc", "3")
    assert refused.stderr.startswith("RankError: 3 ranks were requested, and a step has 2 micro-batches")


@pytest.mark.parametrize("words", [["--nproc", "3"], ["--nproc", "2", "--replicas", "3"], ["--max-restarts", "1"]])
def test_ranks_that_do_not_fit_a_comparison_cost_one_line(words: list[str], started: list[tuple[Any, ...]]) -> None:
    refused = call(*COMPARED, *words)
    assert (refused.exit_code, refused.stderr.count("\n"), started) == (2, 1, [])
    assert not list(Path().iterdir())


def test_a_resume_on_ranks_may_share_the_run_out_anew(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = {"gradient_accumulation_steps": 4, "replicas": 2}
    monkeypatch.setattr(resume_checks, "require_resumable", lambda folder: Run(folder, {"config": recorded}))
    assert call("resume", "run", "--replicas", "3", "--nproc", "3").exit_code == 0
    assert started[0][0][2:] == ["resume", "run", "--replicas", "3", "--nproc", "3"]
    assert "2 replicas were requested on 3 ranks" in call("resume", "run", "--nproc", "3").stderr
    told = call("resume", "run", "--shard", "none", "--nproc", "2").stderr
    assert told.startswith("NarrowgaugeError: shard = 'none' was requested with replicas = 2")


def test_ranks_share_the_files_of_an_export(started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_checks, "require_trained", lambda folder: None)
    assert call("export", "run", "out", "--max-shard-size", "2GB", "--nproc", "2").exit_code == 0
    assert started[0][:2] == (
        ["-m", "narrowgauge", "export", "run", "out", "--max-shard-size", "2GB", "--nproc", "2"],
        2,
    )


@pytest.mark.parametrize("command", ["sample", "convert"])
def test_a_command_of_one_process_starts_no_ranks(command: str) -> None:
    refused = call(command, "run", "--nproc", "2")
    assert refused.exit_code == 2
    assert refused.stderr == (
        f"UsageError: narrowgauge {command} runs in one process, and has no --nproc. Leave it out: checkpoints of any number of "
        "ranks are read.\n"
    )


@pytest.mark.parametrize("words", [("sample", "run", "x"), ("convert", "c", "--recipe", "bfloat16/word")])
def test_commands_on_files_run_in_one_process(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_among(monkeypatch, RANK)
    result = call(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"RankError: {words[0]} runs in one process, and this is rank 1 of 4.")


def test_how_a_run_goes_on(tmp_path: Path) -> None:
    assert how_to_resume(tmp_path) == "Start it again."
    with RunWriter.create(tmp_path / "run", {"config": {}}):
        assert how_to_resume(tmp_path / "run") == f"narrowgauge resume {tmp_path / 'run'} goes on from step 0."
    for name in ("step-00000040", "step-00000007", ".tmp-step-00000050"):
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    assert how_to_resume(tmp_path / "run").endswith(" goes on from step 40.")


def test_what_was_lost_is_an_event_of_the_run(started: list[tuple[Any, ...]], tmp_path: Path) -> None:
    assert call("train", "--nproc", "2", "--gradient-accumulation-steps", "2", "--out", "run").exit_code == 0
    note_loss = started[0][2]["note_loss"]
    note_loss(4, "rank 1 was lost in step 5.")
    assert not Path("run").exists(), "before there is a run there is nothing to note it in"
    with RunWriter.create("run", {"config": {}}) as writer:
        note_loss(4, "rank 1 was lost in step 5.")
        writer.event(Event("note", 4, "its writer may still be there"))
    assert [(event["kind"], event["message"]) for event in read_run(Path("run")).events] == [
        ("lost", "rank 1 was lost in step 5"),
        ("note", "its writer may still be there"),
    ]
    with (tmp_path / "run" / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"no')
    note_loss(4, "rank 1 was lost in step 5.")
    assert len(read_run(Path("run")).events) == 2, "a row does not follow a torn one, which the next writer cuts off"


def test_a_job_that_was_started_anew_knows_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in ("job7", "job8"):
        RunWriter.create(tmp_path / job, {"config": {}, "machine": {"job": job}}).close()
    assert not is_own_run(tmp_path / "job7"), "of no job"
    stand_among(monkeypatch, AGENT)
    assert is_own_run(tmp_path / "job7")
    assert not is_own_run(tmp_path / "job8"), "of another job"
    assert not is_own_run(tmp_path / "none")
    with pytest.raises(RankError, match="may be started anew, and no --out names its run folder"):
        is_own_run(None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(RankError, match="it has no name"):
        is_own_run(tmp_path / "job7")


def test_a_slurm_job_goes_on_only_when_it_was_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunWriter.create(tmp_path / "run", {"config": {}, "machine": {"job": "slurm-5"}}).close()
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "5"}
    stand_among(monkeypatch, step)
    assert not is_own_run(tmp_path / "run"), "another step of the same job"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert is_own_run(tmp_path / "run")


def test_a_resume_that_is_started_anew_goes_on_unless_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[Path] = []
    monkeypatch.setattr(launching, "resume", lambda folder, *_, **__: resumed.append(folder))
    stand_among(monkeypatch, {**AGENT, "TORCHELASTIC_RESTART_COUNT": "1"})
    for name in ("stopped", "ended"):
        with RunWriter.create(tmp_path / name, {"config": {"gradient_accumulation_steps": 4}}) as writer:
            if name == "ended":
                writer.summary({"steps": 8})
        assert call("resume", str(tmp_path / name)).exit_code == 0
    assert resumed == [tmp_path / "stopped"]


def test_wrong_settings_are_not_told_again_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_among(monkeypatch, {**AGENT, "NARROWGAUGE_AGENT_FOLDER": str(tmp_path)})
    (tmp_path / "reported-0").write_text("2")
    launching.refuse_once()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(ReportedError):
        launching.refuse_once()
