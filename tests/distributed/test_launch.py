"""How ranks become one run and how they end: started by the agent, by hand or by Slurm; killed, hanging, stopped."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import narrowgauge
from covering import whole
from narrowgauge.distributed.launch import failure_reporting, process_group
from narrowgauge.distributed.launch.agent import run_on_ranks
from narrowgauge.distributed.launch.placement import Placement
from narrowgauge.errors import RankError, ReportedError

LAUNCHED = str(Path(__file__).with_name("launched.py"))
SOURCE = str(Path(narrowgauge.__file__).parents[1])
CLEAN = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM_", "MASTER_", "TORCHELASTIC_"))}
ENVIRONMENT = {**CLEAN, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
LIMIT_SECONDS = 120

linux = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG and /proc are Linux's")


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a case of launched.py on two ranks under the agent."""
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, ENVIRONMENT[name])

    def run(case: str, **options: Any) -> None:
        run_on_ranks([LAUNCHED, case, str(tmp_path)], 2, how_to_resume=lambda: "Resume it.", **options)

    return run


def started(case: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, LAUNCHED, case, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**ENVIRONMENT, **environment},
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# ── under the agent ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_killed_rank_is_named_with_its_step(agent: Any, capfd: pytest.CaptureFixture[str]) -> None:
    noted: list[tuple[int, str]] = []
    with pytest.raises(
        RankError, match=r"^rank 1 was killed by signal 9 \(SIGKILL.*\) in step 5\. Resume it\.$"
    ) as lost:
        agent("killed", note_loss=lambda *told: noted.append(told))
    assert lost.value.status == 1
    assert noted == [(4, lost.value.message)]
    assert capfd.readouterr() == ("", ""), "the agent's error is the only word"


@whole
def test_ranks_start_anew_after_one_was_killed(agent: Any, tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    agent("killed once", max_restarts=1)
    assert [(tmp_path / f"done-{rank}").read_text() for rank in (0, 1)] == ["0 2 0 1", "1 2 1 1"]
    assert signal.getsignal(signal.SIGTERM) is handler


@whole
def test_a_rank_that_does_not_answer_is_named(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDS_WITHOUT_PROGRESS", "2")
    with pytest.raises(
        RankError, match=r"^rank 1 did not arrive within 2 s in step 5; --timeout allows more\. Resume it"
    ):
        agent("stopped")


def test_a_rank_at_work_while_others_wait_is_named_with_its_line(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDS_WITHOUT_PROGRESS", "2")
    with pytest.raises(RankError, match=r"^rank 1 \(at launched\.py:\d+\) did not arrive within 2 s in step 5"):
        agent("hanging")


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("failing", "RecordError: the disk is full. Free some space.\n"),
        ("different", "RankError: rank 1 has lr = 1.1, and rank 0 has 0.1. Start every rank with the same command, version and "
                      "environment.\n"),
    ],
)  # fmt: skip
def test_an_error_is_printed_once(case: str, line: str, agent: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ReportedError) as reported:
        agent(case)
    assert reported.value.status == 2
    assert capfd.readouterr() == ("", line)


def test_a_reader_that_has_left_ends_all_ranks_quietly(agent: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ReportedError) as reported:
        agent("unread")
    assert reported.value.status == 1
    assert capfd.readouterr() == ("", "")


AGENT = (
    "import sys; from narrowgauge.cli.exit_status import CommandGroup\n"
    "from narrowgauge.distributed.launch.agent import run_on_ranks\n"
    "group = CommandGroup('agent'); group.command('run')(lambda: run_on_ranks(sys.argv[1:], 2)); group.main(['run'])"
)


def agent_process(case: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The agent in a process of its own; this returns when nobody holds its output any more, so when the ranks have ended."""
    return subprocess.run(
        [sys.executable, "-c", AGENT, LAUNCHED, case, str(folder)],
        capture_output=True, text=True, check=False, env={**ENVIRONMENT, **environment}, timeout=LIMIT_SECONDS,
    )  # fmt: skip


def test_sigterm_to_the_agent_stops_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    ended = agent_process("terminated", tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "", "Interrupted: the command was stopped.\n")
    stopped = [(tmp_path / f"stopped-{rank}").read_text() for rank in (0, 1)]
    assert stopped[0] == stopped[1]
    assert stopped[0].endswith(f" {int(signal.SIGTERM)}")


@linux
def test_no_rank_outlives_its_agent(tmp_path: Path) -> None:
    for name in ("agents", "ranks"):
        (tmp_path / name).mkdir()
    ended = agent_process("orphaned", tmp_path / "ranks", TMPDIR=str(tmp_path / "agents"))
    assert ended.returncode == -signal.SIGKILL
    said = "the process that started the ranks was killed in step 5."
    assert (ended.stdout, ended.stderr) == ("", f"RankError: {said} Resume it.\n")
    assert [(file.name, file.read_text()) for file in (tmp_path / "ranks").iterdir()] == [("lost", f"4 {said}")]
    assert not list((tmp_path / "agents").glob("narrowgauge-*"))


# ── by hand and under Slurm ─────────────────────────────────────────────────────────────────────────────────────────


def test_slurm_steps_meet(tmp_path: Path) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7",
            "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": str(free_port())}  # fmt: skip
    ranks = [started("fine", tmp_path, **step, SLURM_PROCID=str(k), SLURM_LOCALID=str(k)) for k in (0, 1)]
    assert [rank.communicate(timeout=LIMIT_SECONDS)[0] for rank in ranks] == ["", ""]
    assert [(tmp_path / f"done-{rank}").read_text() for rank in (0, 1)] == ["0 2 0 0", "1 2 1 0"]


@whole
def test_without_an_agent_a_survivor_names_the_lost_rank(tmp_path: Path) -> None:
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [started("killed", tmp_path, **meeting, RANK=str(k)) for k in (0, 1)]
    said = [rank.communicate(timeout=LIMIT_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL]
    assert said == ["RankError: rank 1 was lost in step 5. Resume it.\n", ""]
    assert (tmp_path / "lost").read_text() == "4 rank 1 was lost in step 5."


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        here = Placement(0, 2, 0, 2, "127.0.0.1", port)
        words = rf"^Port {port} of 127\.0\.0\.1 is in use, .* Set MASTER_PORT"
        with pytest.raises(RankError, match=words), process_group.process_group(here, join_seconds=5):
            pass
    assert not process_group.is_open()


def test_ranks_that_never_come_are_waited_for_in_vain_for_a_bounded_time() -> None:
    for rank, words in ((0, r"^Rank 1 of 2 did not come to 127\.0\.0\.1"), (1, "^Rank 1 cannot reach rank 0")):
        here = Placement(rank, 2, 0, 1, "127.0.0.1", free_port())
        with pytest.raises(RankError, match=words), process_group.process_group(here, join_seconds=0.2):
            pass


# ── one process ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_rank_has_no_group_and_raises_what_it_raises() -> None:
    with pytest.raises(ZeroDivisionError), process_group.process_group(Placement()) as here:
        assert here.size == 1
        process_group.beat(3)
        raise ZeroDivisionError
    assert not process_group.is_open()


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    four = Placement(0, 4, 0, 4, "h", 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(10)), raising=False)
    assert process_group.choose_threads(four, None, False) == 2
    assert process_group.choose_threads(four, None, True) == 1
    assert process_group.choose_threads(four, 3, True) == 3
    assert process_group.choose_threads(Placement(), None, False) is None
    assert process_group.choose_threads(Placement(), None, True) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert process_group.choose_threads(four, None, False) is None


def test_errors_of_collectives_are_told_from_own_ones() -> None:
    broken = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    assert failure_reporting.is_broken(RuntimeError(broken))
    assert not failure_reporting.is_broken(RuntimeError("The size of tensor a (2) must match"))
    assert not failure_reporting.is_broken(RankError("connection closed"))
    assert re.match(r"a rank did not arrive within 3 s", failure_reporting.describe_lost({}, 1, "3 s"))
    assert failure_reporting.describe_lost({1: "", 2: ""}, 0) == "ranks 1, 2 were lost in step 1."
