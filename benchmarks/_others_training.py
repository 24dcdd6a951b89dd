"""Train with optimizers that are not ours, in the trainer's loop: peers of ``peers.py``, and
published 8-bit states by formula.

A peer steps the parameters of ``bfloat16/naive``. Published states run over ``bfloat16/master``:
after each step, what a formula keeps of weight and moments replaces them, so the next step begins
with the values that the published optimizer would decode. Only matrices are replaced; vectors keep
``master``, as ours do. So do controls, which keep a weight in 8 bits. Formulas: ``benchmarks/_published_states.py``.
"""

from __future__ import annotations

import torch
from _published_states import CONTROLS, PUBLISHED, PublishedStates
from peers import PEERS as ALL_PEERS
from peers import Peer
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.trainer.session import Session, differentiate

PEERS = {peer.name: peer for peer in ALL_PEERS}
FORMULAS = {f"published/{name}": row for name, row in PUBLISHED.items()} | dict(CONTROLS)


def peer_optimizer(peer: Peer, session: Session) -> torch.optim.Optimizer:
    """Build a peer's optimizer over the session's parameters; matrices decay, as in the trainer."""
    settings = session.settings
    matrices = []
    for weight in session.model.parameters():
        if weight.ndim >= 2:
            matrices.append(weight)
    vectors = []
    for weight in session.model.parameters():
        if weight.ndim < 2:
            vectors.append(weight)
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return peer.make(
        groups,
        lr=settings.lr,
        betas=session.optimizer.param_groups[0]["betas"],
        eps=1e-8,
        weight_decay=settings.weight_decay,
    )


def peer_step(session: Session, optimizer: torch.optim.Optimizer) -> None:
    """Take one step of the trainer with a peer's optimizer."""
    schedule = session.schedule or session.settings.learning_rate
    rate = schedule(session.step + 1)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    differentiate(session, session.batch())
    nn.utils.clip_grad_norm_(session.model.parameters(), session.settings.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    session.step += 1


@torch.no_grad()
def cut(formula: PublishedStates, optimizer: ng.AdamW) -> None:
    """Replace the matrices of an optimizer with storage ``master``, and their moments, by what the
    formulas keep of them.
    """
    matrices = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.ndim > 1 and optimizer.num_steps(p):
                matrices.append(p)
    weights = {p: formula.weight.there_and_back(optimizer.stored(p)) for p in matrices}
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for p in matrices:
        first, second = formula.codes(p.numel())
        moments[p] = {
            "exp_avg": first.there_and_back(optimizer.stored(p, "exp_avg")),
            "exp_avg_sq": second.there_and_back(optimizer.stored(p, "exp_avg_sq")),
        }
    optimizer.adopt(weights, moments)


def formula_bytes(formula: PublishedStates, optimizer: ng.AdamW) -> float:
    """Return the bytes per parameter of a model: matrices by the formulas, vectors by ``master``."""
    parameters = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    total = sum(
        p.numel() * (formula.bytes_per_param(*p.shape) if p.ndim > 1 else 16.0) for p in parameters
    )
    return total / sum(p.numel() for p in parameters)
