"""Causes put into a loop of one's own: ``narrowgauge.prepare``, a plain PyTorch loop, and ``narrowgauge.RunRecorder``.

The diagnosis reads what such a loop records: no column that only the trainer writes. Each row is a fault as users make it.

Claim: none of its own; ``diagnosis.py`` measures. Baseline: the loop without a fault.
Run: ``./dev bench diagnosis --parts loops``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _injected_runs import SHAPE, USUAL, made_run, quiet
from _injections_strikes import MLP
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.assembly.preparation import is_matrix
from narrowgauge.runs.record import Run
from narrowgauge.trainer.data.dataset import Dataset, prepare_data

STEPS, STRUCK_AT, WARMUP = 100, 31, 10
# What ``narrowgauge train`` takes by default.
OF_LANGUAGE_MODELS: dict[str, Any] = {
    "betas": (0.9, 0.95), "weight_decay": 0.1, "decays": is_matrix, "max_grad_norm": 1.0
}  # fmt: skip
Batches = Callable[[int], Tensor]


@dataclass(frozen=True)
class Loop:
    """A loop with a fault in it.

    Args:
        cause: that a diagnosis should name; ``healthy`` for none.
        recipe: of :func:`narrowgauge.prepare`.
        lr: its peak learning rate.
        at: the first step that is spoiled; 1 where a setting is the cause.
        module: changes the model from that step on.
        batches: changes the data from that step on.
        loss_factor: what the loss is multiplied by from that step on, as by a mean taken twice.
        options: of ``prepare``.
    """

    cause: str
    recipe: str = "bfloat16/word"
    lr: float = 3e-3
    at: int = STRUCK_AT
    module: Callable[[nn.Module], object] = lambda model: None
    batches: Callable[[Batches], Batches] = lambda batches: batches
    loss_factor: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Names its folder."""
        return f"loop.{self.cause}.{self.recipe.replace('/', '-')}"


def _silent(module: str, model: nn.Module) -> None:
    model.get_submodule(module).register_forward_hook(lambda _, args, output: output * 0.0)


def _nonsense(batches: Batches) -> Batches:
    def batch(step: int) -> Tensor:
        tokens = batches(step)
        draw = torch.Generator().manual_seed(step)
        return (
            torch.randint(int(SHAPE["vocab_size"]), tokens.shape, generator=draw) if step == STRUCK_AT + 9 else tokens
        )  # type: ignore[call-overload]

    return batch


LOOPS: tuple[Loop, ...] = (
    Loop("healthy"),
    Loop("lost-updates", "bfloat16/naive", lr=3e-5, at=1),
    Loop("gradient-underflow", "float16/split", loss_factor=2.0**-26),
    Loop("dead-layer", module=partial(_silent, MLP)),
    Loop("bad-data", batches=_nonsense),
    Loop("learning-rate-too-high", lr=0.1, at=1),
    Loop("repeated-data", batches=lambda batches: lambda step: batches(1 + step % 4)),
)  # fmt: skip


def loop_run(place: Path, folder: Path, loop: Loop) -> Run:
    """The record of a loop."""

    def make() -> None:
        data = prepare_data(
            str(place / "text"), folder.with_name("data"), vocab_size=int(SHAPE["vocab_size"]), held_out=0.05, seed=0
        )  # type: ignore[call-overload]
        with quiet():
            _train(folder, loop, data)

    return made_run(folder, make)


def _train(folder: Path, loop: Loop, data: Dataset) -> None:
    torch.manual_seed(0)
    scaler = {"loss_scaler": ng.LossScaler()} if loop.recipe.startswith("float16") else {}
    options = {**OF_LANGUAGE_MODELS, **scaler, **loop.options}
    model, optimizer = ng.prepare(LlamaForCausalLM(LlamaConfig(**SHAPE)), loop.recipe, lr=loop.lr, **options)

    def batches(step: int) -> Tensor:
        return torch.from_numpy(data.batch(step - 1, USUAL["batch_size"], USUAL["sequence_length"], 0))

    spoiled = loop.batches(batches)
    with ng.RunRecorder(
        folder, model, optimizer, settings={"lr": loop.lr, "steps": STEPS, "eps": 1e-8}, gauges_every=20
    ) as recorder:
        for step in range(1, STEPS + 1):
            if step == loop.at:
                loop.module(model)
            for group in optimizer.param_groups:
                group["lr"] = loop.lr * min(1.0, step / WARMUP) * (1 - 0.9 * max(0, step - WARMUP) / STEPS)
            tokens = (spoiled if step >= loop.at else batches)(step)
            logits = model(input_ids=tokens[:, :-1]).logits.float()
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            scaled = loss * (loop.loss_factor if step >= loop.at else 1.0)
            (optimizer.loss_scaler.scale(scaled) if scaler else scaled).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss, tokens=tokens[:, 1:].numel(), batch=tokens)
