"""Bugs that others had, each from a public thread, put into a plain PyTorch loop: no rule of the diagnosis was written for them.

Each row does the same thing as the bug in the thread that it cites, to a tiny Llama of ``transformers``, torch's AdamW and
:class:`narrowgauge.RunRecorder`. What the record of one run can show of it was said beside it before anything was diagnosed: most
of these bugs leave rows like any others.

Claim: none of its own; ``public_bugs.py`` measures. Baseline: the loop without a bug. Run: ``./dev bench public_bugs``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _injected_runs import SHAPE, USUAL, made_run, quiet
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.runs.record import Run
from narrowgauge.trainer.data.dataset import Dataset

STEPS, AT, WARMUP, LR, MICRO, CLIP = 80, 31, 8, 3e-3, 4, 1.0
Batch = Callable[[int], Tensor]


@dataclass(frozen=True)
class Bug:
    """A bug and how to have it.

    Args:
        source: the public thread.
        causes: names of the diagnosis' table that are right words for it; empty where no row of one run shows it.
        model: changes the model before the first step.
        loss: the loss of logits and tokens, of one micro-batch.
        batches: changes the data.
        rate: the factor of the scheduled rate at a step.
        backward: the factor of each micro-batch's loss; 1 / MICRO is right.
        groups: the optimizer's groups.
        at: called before the step, with model and optimizer.
        clip_factor: what gradients are multiplied by while they are clipped, as by a loss scale.
    """

    name: str
    source: str
    causes: tuple[str, ...] = ()
    model: Callable[[nn.Module], object] = lambda model: None
    loss: Callable[[Tensor, Tensor], Tensor] = lambda logits, tokens: next_token_loss(logits, tokens)
    batches: Callable[[Batch], Batch] = lambda batches: batches
    rate: Callable[[int], float] = lambda step: scheduled(step)
    backward: float = 1 / MICRO
    groups: Callable[[nn.Module], list[dict[str, Any]]] = lambda model: usual_groups(model)
    at: Mapping[int, Callable[[nn.Module, Any], object]] = field(default_factory=dict)
    clip_factor: float = 1.0


def scheduled(step: int) -> float:
    """The usual rate: a warm-up, then a line down to a tenth."""
    return min(1.0, step / WARMUP) * (1 - 0.9 * max(0, step - WARMUP) / STEPS)


def next_token_loss(logits: Tensor, tokens: Tensor, shift: int = 1) -> Tensor:
    return functional.cross_entropy(logits[:, :-shift].float().flatten(0, 1), tokens[:, shift:].flatten())


def usual_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with decay, vectors without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _without(prefix: str) -> Callable[[nn.Module], list[dict[str, Any]]]:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        gone = {id(p) for name, p in model.named_parameters() if name.startswith(prefix)}
        return [{**group, "params": [p for p in group["params"] if id(p) not in gone]} for group in usual_groups(model)]

    return groups


def _see_the_future(model: nn.Module) -> None:
    """Attention without its causal mask."""
    attention = functional.scaled_dot_product_attention

    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, *_: Any, **__: Any) -> tuple[Tensor, None]:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (each(hidden_states).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        mixed = attention(q, k, v).transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
        return self.o_proj(mixed), None

    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.forward = forward.__get__(layer.self_attn)


def _padded(batches: Batch) -> Batch:
    """Half of each sequence is padding with a token that occurs in the text."""

    def batch(step: int) -> Tensor:
        tokens = batches(step).clone()
        tokens[:, tokens.shape[1] // 2 :] = 0
        return tokens

    return batch


def _from_the_start_again(batches: Batch) -> Batch:
    return lambda step: batches(step if step < AT else step - AT + 1)


def _forget(model: nn.Module, optimizer: Any) -> None:
    """A resume that loads the weights and not the optimizer's states."""
    optimizer.state.clear()


BUGS: tuple[Bug, ...] = (
    Bug("none", "the loop without a bug", ("healthy",)),
    Bug("sum-of-micro-batches", "https://github.com/karpathy/nanoGPT/issues/206", backward=1.0),
    Bug(
        "next-next-token", "https://github.com/huggingface/transformers/pull/37830",
        loss=lambda logits, tokens: next_token_loss(logits, tokens, shift=2),
    ),
    Bug(
        "labels-not-shifted", "https://github.com/huggingface/transformers/issues/27517",
        loss=lambda logits, tokens: functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()),
    ),
    Bug("sees-the-future", "https://github.com/huggingface/transformers/issues/48745", model=_see_the_future),
    Bug("padding-in-the-loss", "https://github.com/01-ai/Yi/issues/110", batches=_padded),
    Bug(
        "schedule-runs-four-times", "https://github.com/huggingface/accelerate/issues/2926",
        rate=lambda step: max(0.0, min(1.0, 4 * step / WARMUP) * (1 - 4 * max(0, 4 * step - WARMUP) / (4 * STEPS))),
    ),
    Bug(
        "rate-stays-in-warm-up", "https://github.com/huggingface/accelerate/issues/2318", ("learning-rate-too-low",),
        rate=lambda step: 0.004,
    ),
    Bug("clipped-before-unscaled", "https://github.com/Lightning-AI/pytorch-lightning/issues/9599", clip_factor=65536.0),
    Bug(
        "states-lost-at-resume", "https://github.com/EvolvingLMMs-Lab/OneVision-Encoder/pull/65",
        ("resume-changed", "recovering-spike"), at={AT: _forget},
    ),
    Bug(
        "reader-begins-anew", "https://github.com/kyutai-labs/pocket-tts/pull/287", ("repeated-data",),
        batches=_from_the_start_again,
    ),
    Bug(
        "decay-on-norms", "https://github.com/Lightning-AI/lit-llama/issues/254",
        groups=lambda model: [{"params": list(model.parameters()), "weight_decay": 0.1}],
    ),
    Bug(
        "part-never-updated", "https://github.com/pytorch/pytorch/issues/176076", ("frozen-parameter",),
        groups=_without("lm_head"),
    ),
)  # fmt: skip


def bug_run(place: Path, folder: Path, bug: Bug, data: Callable[[], Dataset]) -> Run:
    """The record of the loop with a bug."""

    def make() -> None:
        with quiet():
            _train(folder, bug, data())

    return made_run(folder, make)


def _train(folder: Path, bug: Bug, data: Dataset) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    bug.model(model)
    optimizer = torch.optim.AdamW(bug.groups(model), lr=LR, betas=(0.9, 0.95))

    def batches(step: int) -> Tensor:
        return torch.from_numpy(data.batch(step - 1, USUAL["batch_size"], USUAL["sequence_length"], 0))

    given = bug.batches(batches)
    settings = {"lr": LR, "steps": STEPS, "gradient_accumulation_steps": MICRO}
    with ng.RunRecorder(folder, model, optimizer, settings=settings, gauges_every=20) as recorder:
        for step in range(1, STEPS + 1):
            if step in bug.at:
                bug.at[step](model, optimizer)
            for group in optimizer.param_groups:
                group["lr"] = LR * bug.rate(step)
            tokens = given(step)
            losses = []
            for part in tokens.chunk(MICRO):
                loss = bug.loss(model(input_ids=part).logits, part)
                (loss * bug.backward).backward()
                losses.append(loss.detach())
            for parameter in model.parameters():
                parameter.grad.mul_(bug.clip_factor)  # type: ignore[union-attr]
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for parameter in model.parameters():
                parameter.grad.div_(bug.clip_factor)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(torch.stack(losses).mean(), tokens=tokens.numel(), grad_norm=norm, batch=tokens)
