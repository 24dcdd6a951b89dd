"""A training of the board whose optimizer is somebody else's: the trainer's model, batches, schedule and validation around it.

The model is that of ``bfloat16/naive``: every parameter in bfloat16, which is what these optimizers are given. Nothing of ours
steps it; gradients are clipped by ``torch.nn.utils.clip_grad_norm_``, and matrices decay as in the trainer. A run is not resumed:
one that was stopped starts again.

Claim and baseline: none of its own. Run: ``./dev bench board --add "torch AdamW bfloat16"``.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import quality
import torch
from peers import Peer, bytes_held, peer_version
from torch import Tensor, nn

from narrowgauge.assembly.preparation import is_matrix
from narrowgauge.distributed.sharding import fingerprint_whole
from narrowgauge.runs.writer import RunWriter
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import open_data
from narrowgauge.trainer.session import Session, build, describe
from narrowgauge.trainer.step import differentiate, evaluate

TABLE = "peer"
"""The table of ``run.toml`` that names the optimizer."""
MODEL = "bfloat16/naive"


@dataclass(frozen=True)
class PeerJob(quality.Job):
    """One training with a peer; its ``storage`` is the peer's name."""

    @property
    def recipe(self) -> str:
        return MODEL

    @property
    def name(self) -> str:
        return super().name.replace(" ", "-")


def performing(peer: Peer) -> quality.Perform:
    """What trains with a peer, for :func:`quality.train_all`."""
    return partial(_perform, peer)


def _perform(peer: Peer, config: TrainConfig, folder: Path, out: Path, storage: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    quality.share_data(config, folder, out)
    session = build(config.filled(), folder, open_data(folder))
    optimizer = _made(peer, session)
    about = {TABLE: {"name": peer.name, "package": peer.package, "version": peer_version(peer.package)}}
    began = time.perf_counter()
    with RunWriter.create(folder, {**describe(session), **about}, beside=("data",)) as writer:
        while session.step < config.steps:
            writer.step(_step(session, optimizer))
        loss = evaluate(session)
        writer.eval({"step": session.step, "val_loss": loss, "tokens": session.tokens})
        weights = {name: weight.detach() for name, weight in session.named_parameters()}
        writer.summary(
            {
                "recipe": MODEL,
                "model": config.model,
                "val_loss": loss,
                "steps": session.step,
                "tokens": session.tokens,
                "bytes_per_param": bytes_held(optimizer),
                "weights_fingerprint": fingerprint_whole(weights),
                "wall_seconds": time.perf_counter() - began,
            }
        )


def _made(peer: Peer, session: Session) -> torch.optim.Optimizer:
    config = session.config
    decayed: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, weight in session.named_parameters():
        decayed[is_matrix(name, weight)].append(weight)
    groups: list[dict[str, Any]] = [
        {"params": decayed[True], "weight_decay": config.weight_decay},
        {"params": decayed[False], "weight_decay": 0.0},
    ]
    return peer.make(groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)


def _step(session: Session, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    began, config = time.perf_counter(), session.config
    rate = config.learning_rate(session.step + 1)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    loss = float(differentiate(session))
    norm = float(nn.utils.clip_grad_norm_(session.model.parameters(), config.max_grad_norm))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    session.step += 1
    session.tokens += config.tokens_per_step
    seconds = time.perf_counter() - began
    known = {"step": session.step, "loss": loss, "lr": rate, "grad_norm": norm, "tokens": session.tokens}
    return {**known, "seconds": seconds, "skipped": not math.isfinite(norm)}
