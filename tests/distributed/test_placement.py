"""Where a process stands: torchrun's variables, Slurm's, and what is refused in one line."""

from __future__ import annotations

import pytest

from narrowgauge.distributed.launch.placement import Placement, first_host, read_placement, tasks_per_node
from narrowgauge.errors import RankError

HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
AGENT = {
    **HAND, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "1234", "SLURM_STEP_ID": "1", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_NTASKS": "9",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}  # fmt: skip


def test_without_variables_there_is_one_rank() -> None:
    assert read_placement({}) == Placement() == Placement(size=1, launcher="none")
    assert read_placement({"RANK": "0", "WORLD_SIZE": "1"}).size == 1, "one rank needs no address"


def test_torchrun() -> None:
    assert read_placement(AGENT) == Placement(1, 4, 1, 2, "10.0.0.1", 29500, "torchrun", "job7", 2, 3)
    assert read_placement({**AGENT, "TORCHELASTIC_RUN_ID": "none"}).job is None, "torchrun's default names no job"


def test_by_hand_the_local_rank_is_open() -> None:
    assert read_placement(HAND) == Placement(1, 4, None, None, "10.0.0.1", 29500, "hand")


def test_slurm_meets_at_the_first_host_of_the_step() -> None:
    found = read_placement(SLURM)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 7, 1, 3)
    assert (found.address, found.launcher, found.job, found.attempt) == ("gpu03", "slurm", "slurm-1234", 0)
    assert found.port is not None and 20_000 <= found.port < 32_000
    other_step = read_placement({**SLURM, "SLURM_STEP_ID": "2"})
    assert other_step.port != found.port, "two steps of a job may run on one host"


def test_slurm_follows_what_is_said_by_hand() -> None:
    found = read_placement({**SLURM, "MASTER_ADDR": "here", "MASTER_PORT": "2222", "SLURM_RESTART_COUNT": "1"})
    assert (found.address, found.port, found.attempt) == ("here", 2222, 1)
    without_hosts = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert read_placement(without_hosts).address == "10.0.0.9"
    assert read_placement({**SLURM, **HAND}).launcher == "hand", "torchrun inside a step"


def test_the_one_process_of_a_batch_script_is_no_step() -> None:
    assert (
        read_placement({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"}).size == 1
    )


def test_variables_are_those_of_torchrun() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert read_placement(AGENT).variables() == {name: AGENT[name] for name in names}
    assert read_placement({**SLURM}).variables()["RANK"] == "5"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": None}, "RANK is set, and WORLD_SIZE is not. Start it with torchrun, or set RANK"),
        ({"RANK": None}, "WORLD_SIZE is set, and RANK is not."),
        ({"MASTER_ADDR": None}, "RANK is set, and MASTER_ADDR is not."),
        ({"MASTER_PORT": ""}, "RANK is set, and MASTER_PORT is not."),
        ({"RANK": "one"}, "RANK = 'one' is no number from 0."),
        ({"RANK": "-1"}, "RANK = '-1' is no number from 0."),
        ({"RANK": "²"}, "RANK = '²' is no number from 0."),
        ({"RANK": "4"}, "rank 4 of 4 was requested; ranks count from 0."),
        ({"WORLD_SIZE": "0"}, "rank 1 of 0 was requested"),
        (
            {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "local rank 2 of 2 on this host was requested, in a run of 4 ranks.",
        ),
        ({"LOCAL_WORLD_SIZE": "5"}, "of 5 on this host was requested"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT = 70000 is no port."),
    ],
)
def test_contradictions_are_refused(changes: dict[str, str | None], words: str) -> None:
    given = {name: text for name, text in {**HAND, **changes}.items() if text is not None}
    with pytest.raises(RankError) as refused:
        read_placement(given)
    assert words in str(refused.value)


def test_slurm_without_a_host_is_refused() -> None:
    given = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    with pytest.raises(RankError, match="name no host to meet at"):
        read_placement(given)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-4]", "n1"), ("n[007,9-10],m1", "n007"), ("r[1-2]n[03-04]-x,z", "r1n03-x")],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_tasks_per_node() -> None:
    assert tasks_per_node("2(x3), 1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="no list of counts"):
        tasks_per_node("2x3")
