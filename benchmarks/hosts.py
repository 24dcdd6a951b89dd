"""Two hosts whose cable is cut for some seconds: the run waits, goes on, and has the bits of one that was never cut.

Two network namespaces with a cable (veth) between them, a rank in each, started by torchrun. After the third step the cable drops
every packet for ``SECONDS``. Needs root and iproute2; run it by hand: ``python benchmarks/hosts.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

SECONDS = 5.0
STEPS, CUT_AFTER = 40, 3
HOSTS, ADDRESSES = ("narrowgauge-left", "narrowgauge-right"), ("192.0.2.5", "192.0.2.6")
SHAPE = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "LOGLEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def words(place: Path, out: Path) -> list[str]:
    """The training, the same in both runs."""
    return [
        "-m", "narrowgauge", "train", "--model", str(place / "model"), "--data", str(place / "text.txt"), "--out", str(out),
        "--recipe", "bfloat16/word/reproducible", "--steps", str(STEPS), "--batch-size", "4", "--sequence-length", "16",
        "--gradient-accumulation-steps", "4", "--lr", "3e-3", "--held-out", "0.2", "--eval-batches", "2",
        "--audit-every", "0", "--gauges-every", "0", "--threads", "1",
    ]  # fmt: skip


def train(place: Path, name: str, cut: bool) -> tuple[list[tuple[float, float]], float]:
    """Train on both hosts; returns losses and gradient norms, and the longest step in seconds."""
    out, port = place / name, "29500"
    agents = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
             "--nproc-per-node", "1", "--node-rank", str(k), "--master-addr", ADDRESSES[0], "--master-port", port,
             "--local-addr", ADDRESSES[k], *words(place, out)],
            env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "cable"}, stdout=subprocess.DEVNULL,
        )
        for k, host in enumerate(HOSTS)
    ]  # fmt: skip
    steps = out / "steps.jsonl"
    while cut and all(agent.poll() is None for agent in agents):
        if steps.exists() and len(steps.read_text().splitlines()) >= CUT_AFTER:
            ip("-n", HOSTS[1], "link", "set", "cable", "down")
            time.sleep(SECONDS)
            ip("-n", HOSTS[1], "link", "set", "cable", "up")
            break
        time.sleep(0.02)
    if any(agent.wait() for agent in agents):
        raise SystemExit(f"{name}: the ranks ended with {[agent.returncode for agent in agents]}")
    rows = [json.loads(line) for line in steps.read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows], max(row["seconds"] for row in rows)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder)
        (place / "model").mkdir()
        (place / "model" / "config.json").write_text(json.dumps(SHAPE))
        (place / "text.txt").write_text(
            " ".join(f"def line_{k} return the quick brown fox {k * k}" for k in range(2000))
        )
        for host in HOSTS:
            ip("netns", "add", host)
            stack.callback(ip, "netns", "delete", host)
        ip("link", "add", "cable", "netns", HOSTS[0], "type", "veth", "peer", "name", "cable", "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            ip("-n", host, "address", "add", f"{address}/30", "dev", "cable")
            ip("-n", host, "link", "set", "cable", "up")
            ip("-n", host, "link", "set", "lo", "up")
        whole, longest = train(place, "whole", cut=False)
        cut, longest_cut = train(place, "cut", cut=True)
    print(f"{len(whole)} steps; longest step {longest:.2f} s; with the cable cut for {SECONDS:g} s {longest_cut:.2f} s")
    print("the same losses and norms, bit for bit" if whole == cut else "OTHER LOSSES OR NORMS")
    raise SystemExit(whole != cut)


if __name__ == "__main__":
    main()
