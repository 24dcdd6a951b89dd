"""Commands on the ranks of torchrun: as real processes, and what is refused before they start."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import pytest
import torch
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from narrowgauge.distributed.job import require_same, threads_of
from narrowgauge.errors import RankError
from narrowgauge.runs.record import Run
from narrowgauge.trainer import resume_checks
from narrowgauge.trainer.data.tokens import Document, load_tokenizer, write_tokens
from ranks import run_ranks
from trainer.tiny_runs import call


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that torchrun was asked to run on how many ranks."""
    monkeypatch.chdir(tmp_path)
    write_tokens([Document("a", "text")], *load_tokenizer(None), Path("tokens"))
    commands: list[list[str]] = []
    monkeypatch.setattr(logging, "disable", lambda: None)
    monkeypatch.setattr(
        run,
        "run",
        lambda a: commands.append([a.nproc_per_node, a.training_script, *a.training_script_args]),
    )
    for name in ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    return commands


def test_nproc_is_a_call_of_torchrun_with_the_same_words(started: list[list[str]]) -> None:
    words = ["train", "--data", "tokens", "--nproc", "2", "--gradient-accumulation-steps", "4"]
    assert call(*words, "--out", "here").exit_code == 0 and call(*words).exit_code == 0
    named, chosen = started
    assert named == ["2", "narrowgauge", *words, "--out", "here"]
    assert chosen[-2] == "--out" and Path(chosen[-1]).parts[-2] == "runs", (
        "the ranks have one folder"
    )
    for wrong, line in (
        ("--recipe bfloat16/wrod", "RecipeError: "),
        ("--nproc 5", "RankError: Cannot train: each of 5 ranks needs"),
    ):
        refused = call(*words, *wrong.split())
        assert (refused.exit_code, refused.stderr.count("\n"), len(started)) == (2, 1, 2)
        assert refused.stderr.startswith(line)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (ChildFailedError("", {1: ProcessFailure(1, 0, 2, "")}), 2),
        (ChildFailedError("", {0: ProcessFailure(0, 0, -signal.SIGKILL, "")}), 137),
        (SignalException("", signal.SIGTERM), 143),
    ],
)
def test_ranks_exit_status(
    end: Exception, status: int, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: object) -> None:
        raise end

    monkeypatch.setattr(run, "run", fail)
    result = call("train", "--data", "tokens", "--nproc", "2")
    assert (result.exit_code, result.output) == (status, "")


def test_a_resume_starts_ranks_too(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"gradient_accumulation_steps": 4}
    monkeypatch.setattr(
        resume_checks, "unfinished_run", lambda folder: Run(folder, {"config": config})
    )
    words = ["resume", "run", "--nproc", "3"]
    assert call(*words).exit_code == 0 and started[-1][-len(words) :] == words
    assert (
        "needs one of a step" in call("resume", "run", "--nproc", "5").stderr and len(started) == 1
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("train", "--nproc", "2"), "RankError: Cannot start 2 ranks in one of torchrun's 4."),
        (
            ("compare", "--recipes", "bfloat16/word"),
            "RankError: Cannot run narrowgauge compare on 4 ranks.",
        ),
    ],
)
def test_rank_0_prints_the_error(
    words: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank, expected in (("0", line), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        result = call(*words)
        assert result.exit_code == 2
        assert result.stderr.startswith(expected) and result.stderr.count("\n") == bool(expected)


def other_settings(rank: int) -> list[str]:
    require_same({"lr": 0.1})
    said = []
    for settings in ({"lr": 0.1 + rank}, {"seed": 1} if rank else {}):
        with pytest.raises(RankError) as refused:
            require_same(settings)
        said.append(refused.value.message)
    return said


def test_ranks_with_other_settings_are_refused_on_all(tmp_path: Path) -> None:
    for number, seed in run_ranks(other_settings, 2, tmp_path):
        assert number == "Cannot train: rank 1 has lr = 1.1, and rank 0 has 0.1."
        assert seed == "Cannot train: rank 1 has seed = 1, and rank 0 has None."


def test_an_order_invariant_run_takes_one_thread() -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    for number, is_order_invariant in ((None, True), (3, True), (None, False)):
        with threads_of(number, is_order_invariant):
            seen.append(torch.get_num_threads())
    assert seen == [1, 3, 2] and torch.get_num_threads() == 2
    torch.set_num_threads(before)
