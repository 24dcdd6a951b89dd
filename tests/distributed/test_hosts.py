"""Several agents, as on several machines: one is killed and the rest go on; two hosts that only a cable connects.

Each agent is a torchrun of its own. All runs must have the bits of the same training in one process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

import narrowgauge
from covering import whole
from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer import loop
from narrowgauge.trainer.config import TrainConfig
from trainer import fixtures
from trainer.tiny_runs import settings, words_of

place = fixtures.place

SOURCE = str(Path(narrowgauge.__file__).parents[1])
KILLED_RUN = str(Path(__file__).with_name("killed_run.py"))
CLEAN = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM_", "MASTER_", "TORCHELASTIC_"))}
ENVIRONMENT = {
    **CLEAN,
    "PYTHONPATH": SOURCE,
    "OMP_NUM_THREADS": "1",
    "LOGLEVEL": "CRITICAL",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
LIMIT_SECONDS = 280


def configured(place: Path, out: Path) -> TrainConfig:
    return settings(
        place, out, recipe="bfloat16/word/reproducible", gradient_accumulation_steps=4, audit_every=0, gauges_every=0,
        eval_every=0, threads=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training in one process."""
    return read_run(loop.train(configured(place, tmp_path_factory.mktemp("alone") / "run")))


def losses(run: Run) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in run.steps]


def fingerprint(run: Run) -> Any:
    state = sorted(run.path.glob("checkpoints/step-*/state.json"))[-1]
    return json.loads(state.read_text())["fingerprint"]


def assert_same_bits(one: Run, other: Run) -> None:
    assert losses(one) == losses(other)
    assert fingerprint(one) == fingerprint(other)
    assert one.summary is not None and other.summary is not None
    assert one.summary["val_loss"] == other.summary["val_loss"]


def torchrun(
    *options: str, words: list[str], before: tuple[str, ...] = (), **environment: str
) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-m", "torch.distributed.run", *options, *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**ENVIRONMENT, **environment}
    )


def ended(agents: list[subprocess.Popen[str]]) -> list[str]:
    """What each agent printed, once nobody can print more."""
    with ExitStack() as stack:
        for agent in agents:
            stack.callback(agent.wait)
            stack.callback(agent.kill)
        return [agent.communicate(timeout=LIMIT_SECONDS)[0] for agent in agents]


@whole
def test_four_hosts_of_which_one_is_killed_go_on_as_three(place: Path, alone: Run, tmp_path: Path) -> None:
    # A store of the test's own: the agent that had it could be the one that is killed.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    config = configured(place, tmp_path / "run")
    agents = [
        torchrun(
            "--nnodes", "3:4", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", "elastic", "--local-addr", "127.0.0.1",
            "--rdzv-conf", "is_host=false,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
            words=[KILLED_RUN, "3", "5", "agent-SIGKILL", *words_of(config)], GLOO_SOCKET_IFNAME="lo",
        )
        for _ in range(4)
    ]  # fmt: skip
    said = "".join(ended(agents))
    assert sorted(agent.returncode for agent in agents) == [-9, 0, 0, 0], said
    assert said.count("RankError: rank 3 was lost in step 6. narrowgauge resume") == 1
    assert "note: the ranks were started anew" in said
    run = read_run(tmp_path / "run")
    assert [event["step"] for event in run.events if event["kind"] == "resume"] == [4]
    assert_same_bits(run, alone)


HOSTS = ("narrowgauge-a", "narrowgauge-b")
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # of documentation, so of nobody


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces are made with iproute2's `ip`, which is not installed")

    def ip(*words: str) -> None:
        made = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {made.stderr.strip()}")

    with ExitStack() as stack:
        for host in HOSTS:
            ip("netns", "add", host)
            stack.callback(subprocess.run, ["ip", "netns", "delete", host], check=False)
        ip("link", "add", "cable", "netns", HOSTS[0], "type", "veth", "peer", "name", "cable", "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            ip("-n", host, "address", "add", f"{address}/30", "dev", "cable")
            ip("-n", host, "link", "set", "cable", "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield HOSTS


@whole
def test_two_hosts(place: Path, alone: Run, tmp_path: Path, hosts: tuple[str, str]) -> None:
    config = configured(place, tmp_path / "run")
    agents = [
        torchrun(
            "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(k), "--master-addr", ADDRESSES[0],
            "--master-port", "29500", "--local-addr", ADDRESSES[k],
            words=["-m", "narrowgauge", *words_of(config)], before=("ip", "netns", "exec", host),
            GLOO_SOCKET_IFNAME="cable",
        )
        for k, host in enumerate(hosts)
    ]  # fmt: skip
    said = ended(agents)
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert said[1] == "", "the console speaks on one host"
    assert_same_bits(read_run(tmp_path / "run"), alone)
