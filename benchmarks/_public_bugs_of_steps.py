"""Bugs that others had, each from a public thread, put into a plain PyTorch loop: gradients, clipping, updates, restarts.

The other rows, and what a row is, are in ``_public_bugs.py``.

Claim: none of its own; ``public_bugs.py`` measures. Baseline: the loop without a bug. Run: ``./dev bench public_bugs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from _public_bugs import OF_THE_DATA, OF_THE_LOSS, OF_THE_MODEL, bug
from _public_loop import AT, LR, MICRO, STEPS, WARMUP, Bug, Groups, PublicLoop, Setting, written
from torch import Tensor, nn

RANKS = 8


def put(name: str, value: Callable[[PublicLoop], Any]) -> Callable[[PublicLoop], None]:
    """Replace a method of the loop."""
    return lambda loop: setattr(loop, name, value(loop))


def _trained(loop: PublicLoop) -> list[Any]:
    return [p for p in loop.model.parameters() if p.grad is not None]


def _norm(parameters: Iterable[Any]) -> Tensor:
    return torch.stack([p.grad.norm() for p in parameters]).norm()


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _deposited_twice(loop: PublicLoop) -> None:
    """The first step's gradients are computed once more, and added."""
    backward = loop.backward

    def twice(loss: Tensor, number: int) -> None:
        if loop.step == 1:
            loss.backward(retain_graph=True)
        backward(loss, number)

    loop.backward = twice  # type: ignore[method-assign]


def _only_the_last(loop: PublicLoop) -> None:
    backward = loop.backward

    def after_zero(loss: Tensor, number: int) -> None:
        loop.model.zero_grad()
        backward(loss, number)

    loop.backward = after_zero  # type: ignore[method-assign]


def _clipped_each_time(loop: PublicLoop) -> None:
    backward = loop.backward

    def then_clip(loss: Tensor, number: int) -> None:
        backward(loss, number)
        if number < MICRO - 1:
            nn.utils.clip_grad_norm_(_trained(loop), loop.setting.clip)

    loop.backward = then_clip  # type: ignore[method-assign]


def _head_summed_in_bfloat16(loop: PublicLoop) -> None:
    backward, head = loop.backward, loop.model.lm_head.weight

    def then_round(loss: Tensor, number: int) -> None:
        backward(loss, number)
        head.grad.copy_(head.grad.bfloat16())

    loop.backward = then_round  # type: ignore[method-assign]


def _divided_by_the_next_scale(loop: PublicLoop) -> None:
    """Where the loss scale grows, it grows before the gradients are divided by it."""
    before = loop.before_clip

    def unscale() -> None:
        before()
        if loop.step % 20 == 0:
            for p in _trained(loop):
                p.grad.div_(2.0)

    loop.before_clip = unscale  # type: ignore[method-assign]


def _divided_by_ranks(loop: PublicLoop) -> None:
    loss = loop.loss
    loop.loss = lambda logits, labels, total: loss(logits, labels, total) / RANKS  # type: ignore[method-assign]


def _another_head(loop: PublicLoop) -> None:
    head = loop.model.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())


OF_THE_GRADIENT: tuple[Bug, ...] = (
    bug(
        "never-zeroed", "tenstorrent/tt-blacksmith/pull/711", "The trainer left out zero_grad after each step.",
        put("zero", lambda loop: lambda: None), audit="gradient-kept",
    ),
    bug(
        "deposited-twice-at-first", "karpathy/llm.c/pull/548", "Gradients were deposited twice in the first step.",
        _deposited_twice, setting=Setting(clip=0.0),
    ),
    bug(
        "zeroed-within-accumulation", "tatsu-lab/alpaca_farm/issues/57",
        "zero_grad of the model was called before each micro-batch, and the last one alone was left.", _only_the_last,
        audit="micro-batch-missing",
    ),
    bug(
        "clipped-each-micro-batch", "huggingface/transformers/issues/986",
        "Accumulated gradients were clipped after each micro-batch.", _clipped_each_time,
        audit="micro-batches-weighted clip-norm",
    ),
    bug(
        "summed-in-bfloat16", "linkedin/Liger-Kernel/pull/830",
        "The gradient of the head's weight was accumulated chunk by chunk in bfloat16.", _head_summed_in_bfloat16,
        audit="gradient-narrow", rows="narrow-accumulation",
    ),
    bug(
        "divided-by-the-next-scale", "deepspeedai/DeepSpeed/pull/8588",
        "The loss scale was updated before gradients were divided by it.", _divided_by_the_next_scale,
        setting=Setting(scaler=True, clip=0.0), audit="gradient-scaled",
    ),
    bug(
        "divided-by-ranks-twice", "verl-project/verl-SpeCo/pull/29",
        "The loss was divided by all ranks' tokens, and gradients were averaged over ranks again.", _divided_by_ranks,
        audit="loss-scaled gradient-scaled",
    ),
    bug(
        "optimizer-has-other-tensors", "pytorch/pytorch/issues/149205",
        "The optimizer held other tensors than those that the model trains.", _another_head, audit="no-group",
        rows="frozen-parameter", pair="missing-part bug",
    ),
)  # fmt: skip


# ── clipping ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def clipped_by(norm: Callable[[list[Any]], Tensor]) -> Callable[[PublicLoop], None]:
    """Clip by another norm."""

    def clip(loop: PublicLoop) -> Tensor:
        trained = _trained(loop)
        found = norm(trained)
        factor = (loop.setting.clip / (found + 1e-6)).clamp(max=1.0)
        for p in trained:
            p.grad.mul_(factor)
        return found

    return put("clip", lambda loop: lambda: clip(loop))


def _halves(parameters: list[Any]) -> tuple[list[Any], list[Any]]:
    return parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]


def _each_stage(loop: PublicLoop) -> Tensor:
    return torch.stack([nn.utils.clip_grad_norm_(half, loop.setting.clip) for half in _halves(_trained(loop))])[0]


def _before_unscaled(loop: PublicLoop) -> Tensor:
    norm = nn.utils.clip_grad_norm_(_trained(loop), loop.setting.clip)
    loop.scaler.unscale_(loop.optimizer)  # type: ignore[union-attr]
    return norm


def _clip_before_unscaling(loop: PublicLoop) -> None:
    loop.before_clip = lambda: None  # type: ignore[method-assign]
    loop.clip = lambda: _before_unscaled(loop)  # type: ignore[method-assign]


def _scaled_while_clipped(loop: PublicLoop) -> Tensor:
    for p in _trained(loop):
        p.grad.mul_(65536.0)
    norm = nn.utils.clip_grad_norm_(_trained(loop), loop.setting.clip)
    for p in _trained(loop):
        p.grad.div_(65536.0)
    return norm


OF_CLIPPING: tuple[Bug, ...] = (
    bug(
        "clipped-before-unscaled", "Lightning-AI/pytorch-lightning/issues/9599",
        "Gradients were clipped before they were unscaled.",
        put("clip", lambda loop: lambda: _scaled_while_clipped(loop)), audit="clip-limit clip-norm", part="seen",
        pair="bug optimizer-settings",
    ),
    bug(
        "clipped-scaled-gradients", "harubaru/waifu-diffusion/issues/64",
        "With a GradScaler the scaled gradients were clipped.", _clip_before_unscaling, setting=Setting(scaler=True),
        audit="clip-norm clip-limit",
    ),
    bug(
        "norm-of-one-stage", "pytorch/torchtitan/issues/596",
        "Each pipeline stage clipped by the norm of its own parameters.", put("clip", lambda loop: lambda: _each_stage(loop)),
        audit="clip-norm clip-each clip-limit",
    ),
    bug(
        "replicas-counted-often", "mindspore-ai/hyper-parallel/issues/526",
        "The squares of parameters that are not sharded were summed over all shards.",
        clipped_by(lambda ps: torch.stack([p.grad.norm() * (1 if p.ndim > 1 else RANKS**0.5) for p in ps]).norm()),
        audit="clip-norm clip-limit",
    ),
    bug(
        "largest-shard-only", "facebookresearch/fairscale/pull/167",
        "The norm of all shards was taken to be the largest of theirs.",
        clipped_by(lambda ps: torch.stack([_norm(half) for half in _halves(ps)]).max()), audit="clip-norm clip-limit",
    ),
    bug(
        "norm-overflows", "tracel-ai/burn/issues/5699",
        "The norm was summed in float16: it overflows, and the factor is zero. (Gradients are multiplied by 1,024 for it here.)",
        clipped_by(
            lambda ps: torch.stack([(1024 * p.grad).half().square().sum().half() for p in ps]).sum().sqrt().float() / 1024
        ),
        audit="clip-norm clip-limit gradient-zero", rows="fp16-overflow",
    ),
    bug(
        "never-clipped", "NVIDIA/OpenSeq2Seq/pull/192", "A bug turned clipping off.",
        put("clip", lambda loop: lambda: _norm(_trained(loop))), audit="clip-missing", pair="bug optimizer-settings",
    ),
)  # fmt: skip


# ── the update ────────────────────────────────────────────────────────────────────────────────────────────────────────


def written_line(name: str, of: Callable[[Any], Callable[..., Any]]) -> Callable[[PublicLoop], None]:
    """Replace a line of the optimizer that is written by hand."""
    return lambda loop: setattr(loop.optimizer, name, of(loop.optimizer))


def _moments(first: Tensor, second: Tensor, number: int, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    beta1, beta2 = group["betas"]
    return first / (1 - beta1**number), second / (1 - beta2**number)


def _inside_root(first: Tensor, second: Tensor, number: int, group: dict[str, Any]) -> Tensor:
    m, v = _moments(first, second, number, group)
    return m / (v + group["eps"]).sqrt()


def _before_correction(first: Tensor, second: Tensor, number: int, group: dict[str, Any]) -> Tensor:
    beta1, beta2 = group["betas"]
    return first / (1 - beta1**number) * (1 - beta2**number) ** 0.5 / (second.sqrt() + group["eps"])


def _minus(first: Tensor, second: Tensor, number: int, group: dict[str, Any]) -> Tensor:
    m, v = _moments(first, second, number, group)
    return m / (v.sqrt() - group["eps"])


def _squared(first: Tensor, second: Tensor, number: int, group: dict[str, Any]) -> Tensor:
    m, v = _moments(first, second, number, group)
    return m / (v.square() + group["eps"])


def _corrected_in_place(first: Tensor, second: Tensor, number: int, group: dict[str, Any]) -> Tensor:
    beta1, beta2 = group["betas"]
    return first.div_(1 - beta1**number) / ((second / (1 - beta2**number)).sqrt() + group["eps"])


def _own_count(loop: PublicLoop) -> None:
    """The kernel counts steps itself, and begins anew with the process."""
    direction = loop.optimizer.direction

    def since_start(first: Tensor, second: Tensor, number: int, group: dict[str, Any]) -> Tensor:
        return direction(first, second, number if loop.step < AT else loop.step - AT + 1, group)

    loop.optimizer.direction = since_start


def _counted_before_the_first(loop: PublicLoop) -> None:
    """States are made by a step with zero gradients, which is counted."""
    for group in loop.optimizer.param_groups:
        for p in group["params"]:
            zeros = torch.zeros_like
            loop.optimizer.state[p].update(step=torch.tensor(1.0), exp_avg=zeros(p), exp_avg_sq=zeros(p))


def adam(groups: Groups) -> torch.optim.Optimizer:
    """Adam, whose decay is an L2 penalty."""
    return torch.optim.Adam(groups, lr=LR, betas=(0.9, 0.95))


def momentum(groups: Groups) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(groups, lr=LR, momentum=0.9)


class _DecoupledAdam(torch.optim.Adam):
    """Adam that decays as AdamW does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        kept = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0
        torch.optim.Adam.step.__wrapped__(self)  # type: ignore[attr-defined]
        for group, decay in zip(self.param_groups, kept, strict=True):
            group["weight_decay"] = decay


def _decoupled(loop: PublicLoop) -> None:
    loop.optimizer = _DecoupledAdam(loop.groups(), lr=LR, betas=(0.9, 0.95))


def _decay_everywhere(loop: PublicLoop) -> None:
    loop.optimizer.param_groups[1]["weight_decay"] = 0.1


def _decay_of_one_norm(loop: PublicLoop) -> None:
    """One norm is of another class than the one that is asked for."""
    norm = loop.model.model.norm.weight
    matrices, vectors = loop.optimizer.param_groups
    matrices["params"].append(norm)
    vectors["params"] = [p for p in vectors["params"] if p is not norm]


def _decay_of_frozen(loop: PublicLoop) -> None:
    """Frozen parameters are among those that are stepped, with a gradient of zeros."""
    embedding = loop.model.model.embed_tokens.weight
    loop.optimizer.param_groups[0]["params"].append(embedding)
    before = loop.before_clip

    def with_zeros() -> None:
        embedding.grad = torch.zeros_like(embedding)
        before()

    loop.before_clip = with_zeros  # type: ignore[method-assign]


def _skip_undecayed(loop: PublicLoop) -> None:
    update = loop.optimizer.update

    def only_decayed(p: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            update(p, group)

    loop.optimizer.update = only_decayed


def _one_rate_for_all(loop: PublicLoop) -> None:
    loop.optimizer.rate = lambda group: float(loop.optimizer.param_groups[0]["lr"])


def _last_group_only(loop: PublicLoop) -> None:
    def schedule(step: int) -> None:
        loop.optimizer.param_groups[-1]["lr"] = LR * loop.factor(step)

    loop.schedule = schedule  # type: ignore[method-assign]


def _average_away(loop: PublicLoop) -> None:
    def averaged() -> None:
        with torch.no_grad():
            for mean, p in zip(loop.average.parameters(), loop.model.parameters(), strict=True):  # type: ignore[union-attr]
                mean.add_(mean - p, alpha=0.05)

    loop.averaged = averaged  # type: ignore[method-assign]


def _average_of_its_own_decay(loop: PublicLoop) -> None:
    """What is meant to be the decay of a step replaces the decay of all."""
    kept = [0.95]

    def averaged() -> None:
        kept[0] = 1 - min(kept[0], (1 + loop.step) / (10 + loop.step))
        with torch.no_grad():
            for mean, p in zip(loop.average.parameters(), loop.model.parameters(), strict=True):  # type: ignore[union-attr]
                mean.lerp_(p, 1 - kept[0])

    loop.averaged = averaged  # type: ignore[method-assign]


HAND = Setting(optimizer=written)
OF_THE_UPDATE: tuple[Bug, ...] = (
    bug(
        "adam-decays-like-adamw", "flagos-ai/FlagGems/issues/4988",
        "A fused Adam took the decoupled decay of AdamW, so that its moments did not see it.", _decoupled,
        setting=Setting(optimizer=adam), audit="decay decay-lost decay-in-gradient",
    ),
    bug(
        "decay-without-the-weight", "e-sensing/torchopt/pull/14", "The decay was not multiplied by the weight.",
        written_line("decay", lambda own: lambda p, group: p.sub_(group["lr"] * group["weight_decay"])), setting=HAND,
        audit="decay decay-lost decay-of-other",
    ),
    bug(
        "decay-ignored", "fastai/fastai2/issues/246", "The list that held weight decay was overwritten.",
        written_line("decay", lambda own: lambda p, group: None), setting=HAND, audit="decay-lost decay",
        pair="bug optimizer-settings",
    ),
    bug(
        "epsilon-inside-the-root", "CyberZHG/keras-radam/issues/29", "Epsilon was added under the root.",
        written_line("direction", lambda own: _inside_root), setting=HAND, audit="eps-inside-root eps",
    ),
    bug(
        "epsilon-before-correction", "tensorflow/tensorflow/issues/9047",
        "Epsilon was added before the second moment's bias was corrected, which scales it.",
        written_line("direction", lambda own: _before_correction), setting=replace(HAND, options=(("eps", 1e-3),)),
        audit="eps eps-before-correction",
    ),
    bug(
        "epsilon-subtracted", "tensorflow/tensorflow/pull/61411", "Epsilon was subtracted from the root.",
        written_line("direction", lambda own: _minus), setting=replace(HAND, options=(("eps", 1e-5),)), audit="eps",
    ),
    bug(
        "squared-for-the-root", "torch/optim/pull/48", "The step divided by the square of the second moment, not by its root.",
        written_line("direction", lambda own: _squared), setting=replace(HAND, options=(("eps", 1e-2),)),
        audit="update-departs",
    ),
    bug(
        "corrected-in-place", "frgfm/holocron/issues/1", "The bias was corrected in place, and the corrections accumulated.",
        written_line("direction", lambda own: _corrected_in_place), setting=HAND, audit="state-other-factors beta",
    ),
    bug(
        "counted-before-the-first", "NVIDIA/Megatron-LM/pull/5976",
        "A step that only made the states was counted: the first real one was corrected as the second.",
        _counted_before_the_first, setting=HAND, audit="step-count",
    ),
    bug(
        "own-count-of-steps", "deepspeedai/DeepSpeed/pull/564",
        "The kernel's own count of steps began anew after a checkpoint was loaded.", _own_count,
        setting=replace(HAND, restarts=True), audit="step-count no-bias-correction", rows="resume-changed recovering-spike",
    ),
    bug(
        "decay-on-all-norms", "ServiceNow/Fast-LLM/issues/542", "A refactoring put weight decay on the gains of norms.",
        _decay_everywhere, audit="decay-unwanted", pair="bug optimizer-settings",
    ),
    bug(
        "decay-on-norms", "Lightning-AI/lit-llama/issues/254", "All parameters were in one group with decay.",
        _decay_everywhere, setting=Setting(declared=(("decay_groups", ""),)), pair="bug optimizer-settings", part="seen",
    ),
    bug(
        "decay-on-one-norm", "bigscience-workshop/Megatron-DeepSpeed/pull/262",
        "One norm was of another class than the one that decides the groups, and was decayed.", _decay_of_one_norm,
        audit="decay-unwanted", pair="bug optimizer-settings",
    ),
    bug(
        "frozen-parts-decay", "ahrefs/ocannl/issues/673", "Frozen parameters took optimizer steps, and decayed.",
        _decay_of_frozen, setting=Setting(frozen=("model.embed_tokens",)), audit="step-lost gradient-zero decay frozen-moves",
        pair="bug missing-part optimizer-settings",
    ),
    bug(
        "undecayed-not-updated", "PaddlePaddle/PaddleCustomDevice/pull/1202",
        "The kernel did not update parameters without decay.", _skip_undecayed, setting=HAND, audit="frozen",
        rows="frozen-parameter", pair="bug missing-part",
    ),
    bug(
        "one-rate-for-all-groups", "LiyuanLucasLiu/RAdam/issues/24",
        "A step size was cached by the step alone, so that all groups took the first one's rate.", _one_rate_for_all,
        setting=replace(HAND, embedding_rate=0.1), audit="rate rate-of-other-group",
    ),
    bug(
        "last-group-scheduled", "rasbt/LLMs-from-scratch/issues/692",
        "The rate was set after the loop over the groups, in the last one alone.", _last_group_only,
        pair="optimizer-settings bug",
    ),
    bug(
        "average-moves-away", "ostris/ai-toolkit/issues/1034", "The average was moved away from the weights, not to them.",
        _average_away, setting=Setting(average=True), audit="average-other", pair="evaluation",
    ),
    bug(
        "average-of-its-own-decay", "huggingface/diffusers/issues/1864",
        "Each step's decay replaced the one that is given, and the average became the last weights.",
        _average_of_its_own_decay, setting=Setting(average=True), audit="average-other", pair="evaluation",
    ),
    bug(
        "norms-stand-still", "vllm-project/speculators/pull/765",
        "Weights were bfloat16 without a wider copy, and gains of 1 never moved.",
        lambda loop: loop.model.bfloat16(), setting=Setting(rate=lambda step: 1 / 3),
        audit="weight-narrow frozen lost-in-dtype", rows="lost-updates frozen-parameter", pair="format bug",
    ),
)  # fmt: skip


# ── rates, and restarts ───────────────────────────────────────────────────────────────────────────────────────────────


def usual_rate(step: int, steps: int = STEPS) -> float:
    return min(1.0, step / WARMUP) * (1 - 0.9 * max(0, step - WARMUP) / steps)


def rate_is(factor: Callable[[int], float]) -> Callable[[PublicLoop], None]:
    return put("factor", lambda loop: factor)


def after_restart(change: Callable[[PublicLoop], object]) -> Callable[[PublicLoop], None]:
    """Do something at the restart, after everything was read again."""

    def plant(loop: PublicLoop) -> None:
        restart = loop.restart

        def and_change() -> None:
            restart()
            with torch.no_grad():
                change(loop)

        loop.restart = and_change  # type: ignore[method-assign]

    return plant


def _half(tensors: Iterable[Tensor]) -> None:
    for each in tensors:
        each.copy_(each.half())


def _states(loop: PublicLoop) -> list[Tensor]:
    return [s[name] for s in loop.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


RESTARTED = Setting(restarts=True)
RESUMED = "resume-changed recovering-spike"
OF_RESTARTS: tuple[Bug, ...] = (
    bug(
        "schedule-runs-four-times", "huggingface/accelerate/issues/2926", "The schedule was stepped once a process.",
        rate_is(lambda step: max(0.0, usual_rate(4 * step))), pair="optimizer-settings bug", part="seen",
    ),
    bug(
        "rate-stays-in-warm-up", "huggingface/accelerate/issues/2318", "The rate stayed where warm-up begins.",
        rate_is(lambda step: 0.004), rows="learning-rate-too-low", pair="optimizer-settings bug", part="seen",
    ),
    bug(
        "first-rate-is-zero", "EleutherAI/gpt-neox/issues/1373", "Warm-up gives the first step a rate of zero.",
        rate_is(lambda step: usual_rate(step - 1)), pair="optimizer-settings bug",
    ),
    bug(
        "first-rate-is-full", "marian-nmt/marian/issues/156", "Warm-up began with the second batch: the first had the full rate.",
        rate_is(lambda step: 1.0 if step == 1 else usual_rate(step)), pair="optimizer-settings bug",
    ),
    bug(
        "rate-warms-up-again", "YehLi/xmodaler/issues/15", "The scheduler's state was not in the checkpoint.",
        rate_is(lambda step: usual_rate(step if step < AT else step - AT + 1)), setting=RESTARTED, rows="resume-changed",
        pair="optimizer-settings bug",
    ),
    bug(
        "rate-is-zero-after-resume", "kohya-ss/sd-scripts/issues/141", "After a resume the schedule gave zero.",
        rate_is(lambda step: usual_rate(step) if step < AT else 0.0), setting=RESTARTED,
        rows="resume-changed learning-rate-too-low", pair="optimizer-settings bug",
    ),
    bug(
        "states-lost-at-resume", "EvolvingLMMs-Lab/OneVision-Encoder/pull/65", "Checkpoints did not hold the optimizer's state.",
        after_restart(lambda loop: loop.optimizer.state.clear()), setting=RESTARTED,
        audit="states-lost", rows=RESUMED, part="seen",
    ),
    bug(
        "momentum-lost-at-resume", "neuroailab/tfutils/issues/72", "The momentum was not in the checkpoint.",
        after_restart(lambda loop: loop.optimizer.state.clear()),
        setting=Setting(optimizer=momentum, restarts=True, rate=lambda step: 30.0), rows=RESUMED,
        audit="states-lost state-lost",
    ),
    bug(
        "states-cast-to-float16", "facebookresearch/fairscale/issues/50",
        "Loading cast the optimizer's states to float16 and back.", after_restart(lambda loop: _half(_states(loop))),
        setting=RESTARTED, rows=RESUMED, audit="state-narrow states-written",
    ),
    bug(
        "weights-cast-to-float16", "facebookresearch/metaseq/pull/254",
        "Weights in bfloat16 passed through float16 when a run was queued again.",
        after_restart(lambda loop: _half(loop.model.parameters())), setting=RESTARTED, rows="resume-changed",
        audit="weight-narrow weights-written",
    ),
)  # fmt: skip

BUGS: tuple[Bug, ...] = (
    *OF_THE_LOSS, *OF_THE_MODEL, *OF_THE_DATA, *OF_THE_GRADIENT, *OF_CLIPPING, *OF_THE_UPDATE, *OF_RESTARTS,
)  # fmt: skip
assert len({row.name for row in BUGS}) == len(BUGS), "two rows have one name"
