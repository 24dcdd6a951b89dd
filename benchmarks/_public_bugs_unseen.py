"""Bugs that others had, each from a public thread, that no rule was mended with: a part of their own.

They were collected after the rules of the other rows had been mended, and their right words were written from the tables of
names alone, before any of them was diagnosed. A figure of this part says what the rules are worth only until it has been looked
at row by row. What a row is, is said in ``_public_bugs.py``; no row repeats one of the other two files.

Claim: none of its own; ``public_bugs.py`` measures. Baseline: the loop without a bug.
Run: ``./dev bench public_bugs --parts unseen``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from _public_bugs import DROPPED, EPOCHS, EVALUATED, attention, bug
from _public_bugs_of_steps import (
    HAND,
    RESTARTED,
    RESUMED,
    after_restart,
    clipped_by,
    put,
    rate_is,
    usual_rate,
    written_line,
)  # fmt: skip
from _public_loop import AT, EPOCH, HELD_OUT, IGNORED, LR, MICRO, PAD, STEPS, Bug, Groups, PublicLoop, Setting
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Plant = Callable[[PublicLoop], None]
unseen = functools.partial(bug, part="unseen")


def then(name: str, do: Callable[..., object]) -> Plant:
    """Do something after a method of the loop; it is given the loop and what the method was given."""

    def plant(loop: PublicLoop) -> None:
        method = getattr(loop, name)

        def both(*given: Any) -> Any:
            found = method(*given)
            do(loop, *given)
            return found

        setattr(loop, name, both)

    return plant


def _in_evaluations(name: str, other: Callable[..., object]) -> Plant:
    """Replace a method in evaluations alone."""

    def plant(loop: PublicLoop) -> None:
        method = getattr(loop, name)
        setattr(loop, name, lambda *given: (method if torch.is_grad_enabled() else other)(*given))

    return plant


# ── the loss ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sum_of_chunk_means(loop: PublicLoop) -> None:
    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        flat, targets = logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
        number = -(-len(targets) // 32)
        means = [
            functional.cross_entropy(*each) for each in zip(flat.chunk(number), targets.chunk(number), strict=True)
        ]
        return torch.stack(means).sum() * len(targets)

    loop.summed = summed  # type: ignore[method-assign]


def _softmax_twice(loop: PublicLoop) -> None:
    summed = loop.summed
    loop.summed = lambda logits, labels: summed(logits.float().softmax(-1), labels)  # type: ignore[method-assign]


def _reported_divided_again(loop: PublicLoop) -> None:
    one_step = loop.one_step

    def step() -> tuple[Tensor, Tensor, Tensor]:
        tokens, loss, norm = one_step()
        return tokens, loss / MICRO, norm

    loop.one_step = step  # type: ignore[method-assign]


def _mask_shifted(loop: PublicLoop) -> None:
    """The answer's mask is one place early: the prompt's last token is trained on, the answer's last one is not."""
    labels = loop.labels

    def shifted(tokens: Tensor) -> Tensor:
        is_counted = functional.pad(labels(tokens)[:, 1:] != IGNORED, (0, 1), value=False)
        return torch.where(is_counted, tokens, IGNORED)

    loop.labels = shifted  # type: ignore[method-assign]


PROMPTS = Setting(prompts=True)
OF_THE_LOSS: tuple[Bug, ...] = (
    unseen(
        "ignored-in-the-denominator", "Lightning-AI/litgpt/pull/751",
        "The mean of the chunks' losses was taken over all positions, those of the prompt included, whose loss is zero.",
        put("count", lambda loop: lambda labels: labels[:, 1:].numel()), setting=PROMPTS, audit="loss-scaled gradient-scaled",
    ),
    unseen(
        "chunk-means-summed", "NVIDIA-NeMo/Automodel/issues/3803",
        "The chunks of a sequence were averaged each, and their means summed: the loss was as many times too large.",
        _sum_of_chunk_means, audit="loss-scaled gradient-scaled",
    ),
    unseen(
        "softmax-twice", "sugi-chan/custom_bert_pipeline/issues/1",
        "The training loop took the softmax of the logits, and the cross entropy took it again.", _softmax_twice,
        audit="loss-departs",
    ),
    unseen(
        "mask-one-place-early", "verl-project/verl/pull/5362",
        "The mask of the answer was shifted once too often: its last token was not trained on, and the prompt's last one was.",
        _mask_shifted, setting=PROMPTS, audit="tokens-weighted",
    ),
    unseen(
        "reported-loss-divided-twice", "BottleCapAI/NoCap-Test/pull/2",
        "The reported loss was divided by the number of micro-batches a second time; the trained one was right.",
        _reported_divided_again,
    ),
)  # fmt: skip


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _chunks_begin_at_zero(loop: PublicLoop) -> None:
    rotary = loop.model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids % (position_ids.shape[1] // 2))


def _half_norms(loop: PublicLoop) -> None:
    def narrow(x: Tensor, norm: Any) -> Tensor:
        variance = x.half().square().mean(-1, keepdim=True).float()
        return norm.weight * (x * (variance + norm.variance_epsilon).rsqrt())

    for norm in loop.model.modules():
        if hasattr(norm, "variance_epsilon"):
            norm.forward = functools.partial(narrow, norm=norm)


def _sees_whole_documents(tokens: Tensor) -> Tensor:
    is_first = torch.arange(tokens.shape[1]) < tokens.shape[1] // 2
    sees = torch.where(is_first[:, None] == is_first[None], 0.0, torch.finfo(torch.float32).min)
    return sees[None, None].expand(len(tokens), 1, -1, -1)


OF_THE_MODEL: tuple[Bug, ...] = (
    unseen(
        "attention-drops-in-evaluation", "karpathy/nanoGPT/pull/240",
        "The fused attention was given its dropout as a number, which the evaluation mode does not turn off.",
        lambda loop: attention(
            loop,
            lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=loop.setting.dropout),
        ),
        setting=DROPPED, audit="random-in-evaluation", pair="evaluation bug",
    ),
    unseen(
        "frequencies-of-zero", "ByteDance-Seed/VeOmni/issues/414",
        "The rotary frequencies were right when the model was made, and all zero in training.",
        lambda loop: loop.model.model.rotary_emb.inv_freq.zero_(), audit="frequencies-zero order-unseen forward-departs",
    ),
    unseen(
        "chunks-begin-at-position-zero", "thunlp/Seq1F1B/issues/6",
        "A sequence was computed in chunks, and the rotary positions of each chunk began with zero.", _chunks_begin_at_zero,
        audit="positions-absolute border-ignored forward-departs",
    ),
    unseen(
        "norms-in-float16", "young-geng/EasyLM/pull/50", "RMS norms squared and averaged in float16.", _half_norms,
        audit="module-cast", pair="bug format",
    ),
    unseen(
        "mask-loses-causality-when-moved", "facebookresearch/xformers/issues/1185",
        "Moved to a device, the causal mask of packed documents became one that lets each see all of itself.",
        put("mask", lambda loop: _sees_whole_documents), setting=Setting(packed=True), audit="sees-future",
    ),
)  # fmt: skip


# ── gradients, and clipping ───────────────────────────────────────────────────────────────────────────────────────────


def _other_dropout_again(loop: PublicLoop) -> None:
    for layer in loop.model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _divide(parameters: list[Any], by: float) -> None:
    for p in parameters:
        p.grad.div_(by)


def _norm_of_own_tokens(loop: PublicLoop) -> None:
    """The last norm's gradient is that of the first of four parts of each sequence: those of the other ranks are not added."""
    norm, backward, before_clip = loop.model.model.norm, loop.backward, loop.before_clip
    others, is_training = torch.zeros_like(norm.weight), [False]

    def remember(module: Any, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            normed = (output / module.weight).detach()
            output.register_hook(lambda gradient: add(gradient * normed))

    def add(each: Tensor) -> None:
        if is_training[0]:
            others.add_(each[:, each.shape[1] // 4 :].sum((0, 1)).detach())

    def then_backward(loss: Tensor, number: int) -> None:
        is_training[0] = True
        backward(loss, number)
        is_training[0] = False

    def without_others() -> None:
        before_clip()
        norm.weight.grad.sub_(others)
        others.zero_()

    norm.register_forward_hook(remember)
    loop.backward, loop.before_clip = then_backward, without_others  # type: ignore[method-assign]


def _step_within(loop: PublicLoop, loss: Tensor, number: int) -> None:
    if number < MICRO - 1:
        loop.update()
        loop.zero()


def _tail_of_the_epoch(loop: PublicLoop) -> None:
    """Two micro-batches more than fill a step; nothing steps or zeroes before the next epoch begins."""
    if loop.step % EPOCH == 0:
        for part in loop.split(loop.read(EPOCH))[: MICRO // 2]:
            labels = loop.labels(part)
            loop.backward(loop.loss(loop.logits(part), labels, MICRO * loop.count(labels)), 0)


def _clip_each_group(loop: PublicLoop) -> Tensor:
    limit, groups = loop.setting.clip, loop.optimizer.param_groups
    return torch.stack([nn.utils.clip_grad_norm_(group["params"], limit) for group in groups]).norm()


def _clip_after_step(loop: PublicLoop) -> None:
    clip, update = loop.clip, loop.update

    def step_then_clip() -> Tensor:
        update()
        return clip()

    loop.clip, loop.update = step_then_clip, lambda: None  # type: ignore[method-assign]


OF_THE_GRADIENT: tuple[Bug, ...] = (
    unseen(
        "recomputed-with-other-dropout", "allenai/OLMo-core/pull/828",
        "Checkpointed layers were computed again without the generator's state: gradients were those of other dropout masks.",
        _other_dropout_again, setting=Setting(dropout=0.2), audit="gradient-departs",
    ),
    unseen(
        "norms-averaged-over-ranks", "EleutherAI/gpt-neox/pull/1259",
        "With sequence parallelism the gradients of norms were averaged over the ranks, which each have a part of the sum.",
        then("before_clip", lambda loop: _divide([p for p in loop.model.parameters() if p.ndim == 1], MICRO)),
        audit="gradient-scaled",
    ),
    unseen(
        "last-norm-not-reduced", "NVIDIA/Megatron-LM/issues/1446",
        "With sequence parallelism the gradient of the last norm was that of the rank's own tokens.", _norm_of_own_tokens,
        audit="gradient-departs",
    ),
    unseen(
        "steps-with-each-micro-batch", "jiaweizzhao/GaLore/issues/78",
        "The hook of each parameter stepped and zeroed with each micro-batch, whose loss was a part of the step's.",
        then("backward", _step_within), setting=Setting(clip=0.0), audit="loss-scaled gradient-scaled micro-batch-missing",
    ),
    unseen(
        "tail-of-the-epoch-leaks", "WalkingMeatAxolotl/AnimaLoraStudio/pull/305",
        "The last micro-batches of an epoch filled no step, and their gradients stayed for the first step of the next.",
        then("zero", _tail_of_the_epoch), setting=EPOCHS, audit="loss-scaled gradient-scaled micro-batches-many",
    ),
    unseen(
        "divided-by-a-scale-never-applied", "deepspeedai/DeepSpeed/pull/7839",
        "In bfloat16 the loss was not scaled, and the step divided the gradients by the scale of 65,536 all the same.",
        then("before_clip", lambda loop: _divide(list(loop.model.parameters()), 65536.0)), audit="gradient-scaled",
        rows="eps-too-large",
    ),
    unseen(
        "squared-norms-squared", "paiml/entrenar/issues/311",
        "What was squared and summed over the parameters were the squares of their norms already.",
        clipped_by(lambda ps: torch.stack([p.grad.norm() ** 2 for p in ps]).norm()), audit="clip-norm clip-limit",
    ),
    unseen(
        "clipped-by-group", "huggingface/transformers/pull/614", "Each group of parameters was clipped by its own norm.",
        put("clip", lambda loop: lambda: _clip_each_group(loop)), audit="clip-norm clip-each clip-limit",
    ),
    unseen(
        "clipped-after-the-step", "awslabs/graphstorm/issues/1366", "Gradients were clipped when the optimizer had stepped.",
        _clip_after_step, audit="clip-missing", pair="bug optimizer-settings",
    ),
)  # fmt: skip


# ── the update ────────────────────────────────────────────────────────────────────────────────────────────────────────


class WrittenSGD(torch.optim.SGD):
    """SGD as people write it by hand: its lines are methods, to get wrong."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    gradient, state = self.decayed(p, group), self.state[p]
                    if "momentum_buffer" in state:
                        self.accumulate(state["momentum_buffer"], gradient, group)
                    else:
                        state["momentum_buffer"] = gradient.clone()
                    p.sub_(self.direction(gradient, state["momentum_buffer"], group), alpha=group["lr"])

    def decayed(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient with that of the penalty."""
        assert p.grad is not None
        return p.grad.add(p, alpha=group["weight_decay"])

    def accumulate(self, velocity: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update the momentum."""
        velocity.mul_(group["momentum"]).add_(gradient)

    def direction(self, gradient: Tensor, velocity: Tensor, group: dict[str, Any]) -> Tensor:
        """What the rate multiplies."""
        return gradient.add(velocity, alpha=group["momentum"]) if group["nesterov"] else velocity


class Lion(torch.optim.Optimizer):
    """Lion (https://arxiv.org/abs/2302.06675, Algorithm 2), likewise."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": LR, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    gradient = self.gradient(p, group)
                    self.decay(p, group)
                    p.sub_(momentum.lerp(gradient, 1 - beta1).sign(), alpha=group["lr"])
                    momentum.lerp_(gradient, 1 - beta2)

    def gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """What the momentum averages."""
        assert p.grad is not None
        return p.grad

    def decay(self, p: Tensor, group: dict[str, Any]) -> None:
        """Decoupled weight decay."""
        p.mul_(1 - group["lr"] * group["weight_decay"])


def sgd(groups: Groups) -> torch.optim.Optimizer:
    """The one written by hand, with momentum."""
    return WrittenSGD(groups, lr=LR, momentum=0.9)


def nesterov(groups: Groups) -> torch.optim.Optimizer:
    """The same with that of Nesterov."""
    return WrittenSGD(groups, lr=LR, momentum=0.9, nesterov=True)


def rate_of_sgd(step: int) -> float:
    return 30.0 * usual_rate(step)


def _rate_of_lion(step: int) -> float:
    return 0.1 * usual_rate(step)


def _coupled(loop: PublicLoop) -> None:
    loop.optimizer.gradient = lambda p, group: p.grad.add(p, alpha=group["weight_decay"])
    loop.optimizer.decay = lambda p, group: None


def _corrected(correct: Callable[[Tensor, float, int], Tensor]) -> Plant:
    """Correct the bias of both moments otherwise; given are the moment, its beta and the number of the step."""

    def direction(first: Tensor, second: Tensor, number: int, group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        return correct(first, beta1, number) / (correct(second, beta2, number).sqrt() + group["eps"])

    return written_line("direction", lambda own: direction)


def _other_betas(loop: PublicLoop) -> None:
    """The powers that correct the bias are of torch's usual betas, those of the optimizer before it was loaded."""
    direction = loop.optimizer.direction
    loop.optimizer.direction = lambda first, second, number, group: direction(
        first, second, number, {**group, "betas": (0.9, 0.999)}
    )


def _turned_betas(loop: PublicLoop) -> None:
    update = loop.optimizer.update
    loop.optimizer.update = lambda p, group: update(p, {**group, "betas": tuple(1 - beta for beta in group["betas"])})


OF_THE_UPDATE: tuple[Bug, ...] = (
    unseen(
        "decayed-once-more-a-partition", "huggingface/pytorch-image-models/pull/2750",
        "The loop over partitions decayed all parameters each time: with two of them, twice a step.",
        written_line("decay", lambda own: lambda p, group: p.mul_((1 - group["lr"] * group["weight_decay"]) ** 2)),
        setting=HAND, audit="decay",
    ),
    unseen(
        "decayed-at-the-unscheduled-rate", "kozistr/pytorch_optimizer/pull/170",
        "Weight decay was multiplied by the rate that the group was given, not by the one that the step computes from it.",
        written_line("decay", lambda own: lambda p, group: p.mul_(1 - LR * group["weight_decay"])), setting=HAND,
        audit="decay",
    ),
    unseen(
        "decay-not-times-the-rate", "FluxML/model-zoo/pull/303",
        "Weight decay was applied after the optimizer's rule, and so not multiplied by the learning rate.",
        written_line("decay", lambda own: lambda p, group: p.mul_(1 - group["weight_decay"])),
        setting=Setting(optimizer=HAND.optimizer, options=(("weight_decay", 0.01),), declared=(("decay_groups", "all"),)),
        audit="decay",
    ),
    unseen(
        "decay-grows-weights", "chainer/chainer/issues/261", "The penalty's gradient was subtracted from the gradient.",
        written_line("decayed", lambda own: lambda p, group: p.grad.sub(p, alpha=group["weight_decay"])),
        setting=Setting(optimizer=sgd, rate=rate_of_sgd), audit="decay decay-in-gradient",
    ),
    unseen(
        "nesterov-adds-the-momentum", "PaddlePaddle/Paddle/pull/12231",
        "A sign was not carried into a bracket: the gradient was subtracted from the weights, and the momentum added.",
        written_line("direction", lambda own: lambda gradient, velocity, group: gradient.sub(velocity, alpha=group["momentum"])),
        setting=Setting(optimizer=nesterov, rate=rate_of_sgd), audit="sign nesterov update-departs",
    ),
    unseen(
        "lion-decays-in-the-gradient", "bitsandbytes-foundation/bitsandbytes/issues/1992",
        "Lion's decoupled weight decay was added to the gradient, before the sign is taken.", _coupled,
        setting=Setting(optimizer=Lion, rate=_rate_of_lion), audit="decay-in-gradient decay-lost decay",
    ),
    unseen(
        "bias-of-the-other-betas-corrected", "ryankiros/skip-thoughts/issues/82",
        "The moments took 1 - beta for beta, and the correction of their bias did not.",
        _corrected(lambda moment, beta, number: moment / (1 - (1 - beta) ** number)), setting=HAND,
        audit="no-bias-correction step-count",
    ),
    unseen(
        "multiplied-by-the-correction", "karpathy/convnetjs/pull/70",
        "The moments were multiplied by what they should be divided by.",
        _corrected(lambda moment, beta, number: moment * (1 - beta**number)), setting=HAND,
        audit="correction-other no-bias-correction step-count update-departs",
    ),
    unseen(
        "one-minus-twice", "kozistr/pytorch_optimizer/pull/308",
        "The correction of the bias was subtracted from one a second time, so that steps grow without end.",
        _corrected(lambda moment, beta, number: moment / beta**number), setting=HAND,
        audit="correction-other no-bias-correction step-count update-departs", rows="learning-rate-too-high",
    ),
    unseen(
        "betas-turned-round", "mila-iqia/blocks/issues/1159",
        "The optimizer took 1 - beta where its user gave beta.", _turned_betas, setting=HAND, audit="beta state-other-factors",
        pair="bug optimizer-settings",
    ),
)  # fmt: skip


# ── averages, rates, and restarts ─────────────────────────────────────────────────────────────────────────────────────


def _average_with_each_micro_batch(loop: PublicLoop, loss: Tensor, number: int) -> None:
    if number < MICRO - 1:
        loop.averaged()


def _take_the_average(loop: PublicLoop) -> None:
    with torch.no_grad():
        for p, mean in zip(loop.model.parameters(), loop.average.parameters(), strict=True):  # type: ignore[union-attr]
            p.copy_(mean)


def _stepped_with_each_micro_batch(loop: PublicLoop) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda number: max(0.0, usual_rate(number + 1)))
    loop.schedule = lambda step: None  # type: ignore[method-assign]
    then("backward", lambda *_: scheduler.step())(loop)


AVERAGED = Setting(average=True)
SCHEDULE = "optimizer-settings bug"
OF_RESTARTS: tuple[Bug, ...] = (
    unseen(
        "average-finds-no-name", "wandb/senpai/pull/2899",
        "The compiled model's names have a prefix, and the average passed over each parameter that it did not find.",
        put("averaged", lambda loop: lambda: None), setting=AVERAGED, audit="average-still", pair="",
    ),
    unseen(
        "averaged-with-each-micro-batch", "SWivid/F5-TTS/issues/631",
        "The average was updated with each micro-batch, not with each step.", then("backward", _average_with_each_micro_batch),
        setting=AVERAGED, audit="average-other", pair="",
    ),
    unseen(
        "goes-on-from-the-average", "PKU-YuanGroup/Open-Sora-Plan/issues/186",
        "The average was copied into the model for validation, and the weights were not put back.",
        then("before_evaluation", _take_the_average), setting=Setting(average=True, evaluates=True),
        audit="weights-written", pair="evaluation bug",
    ),
    unseen(
        "warm-up-and-length-exchanged", "shirley-wu/cross-doc-misinfo-detection/issues/1",
        "Two arguments were exchanged, and the rate rose to the end of the training.", rate_is(lambda step: step / STEPS),
        pair=SCHEDULE,
    ),
    unseen(
        "length-in-examples", "huggingface/transformers/pull/27667",
        "The schedule was given the number of examples for that of steps, and hardly fell.",
        rate_is(lambda step: usual_rate(step, 8 * STEPS)), pair=SCHEDULE,
    ),
    unseen(
        "scheduled-with-each-micro-batch", "huggingface/accelerate/issues/963",
        "The scheduler stepped with each micro-batch, whether or not the optimizer did.", _stepped_with_each_micro_batch,
        audit="schedule-per-micro-batch schedule-many", pair=SCHEDULE, rows="learning-rate-too-low",
    ),
    unseen(
        "first-rate-after-resume", "huggingface/nanotron/pull/245",
        "The first step after a resume was taken with the rate that the schedule multiplies.",
        rate_is(lambda step: 1.0 if step == AT else usual_rate(step)), setting=RESTARTED, pair=SCHEDULE, rows="resume-changed",
    ),
    unseen(
        "powers-before-betas-are-read", "tenstorrent/tt-metal/issues/53212",
        "Loading computed the powers that correct the bias, and read the betas of the checkpoint afterwards.",
        after_restart(_other_betas), setting=Setting(optimizer=HAND.optimizer, restarts=True),
        audit="correction-other step-count no-bias-correction update-departs", rows=RESUMED,
    ),
)  # fmt: skip


# ── the data, and evaluations ─────────────────────────────────────────────────────────────────────────────────────────


def _skips_in_each_epoch(loop: PublicLoop) -> None:
    place, (epoch, skipped) = loop.place, divmod(AT - 1, EPOCH)

    def resumed(step: int) -> int:
        passed, within = divmod(step - AT, EPOCH - skipped)
        return place(step if step < AT else (epoch + passed) * EPOCH + skipped + within + 1)

    loop.place = resumed  # type: ignore[method-assign]


def _in_order_of_class(loop: PublicLoop) -> None:
    """What the run would read comes sorted; the mean of a row's tokens stands for its class."""
    read = loop.read
    rows = torch.cat([read(place) for place in range(STEPS)])
    batches = rows[rows.float().mean(1).argsort()].chunk(STEPS)
    loop.read = lambda place: batches[place] if place < STEPS else read(place)  # type: ignore[method-assign]


def evaluates(of: Callable[[int, Tensor, Tensor], Tensor]) -> Plant:
    """Evaluate other rows, of the number of a batch, those held out and those of the training's batch of this number."""

    def plant(loop: PublicLoop) -> None:
        read = loop.read
        loop.read = lambda place: (  # type: ignore[method-assign]
            read(place) if place < HELD_OUT else of(place - HELD_OUT, read(place), read(place - HELD_OUT))
        )

    return plant


OF_THE_DATA: tuple[Bug, ...] = (
    unseen(
        "workers-draw-alike", "pytorch/pytorch/issues/5059",
        "Four workers of a loader had one state of numpy's generator, and drew the same batch one after another.",
        lambda loop: setattr(loop, "place", lambda step: (step - 1) // 4), audit="rows-again", rows="repeated-data",
        pair="data data-order",
    ),
    unseen(
        "skips-in-each-epoch", "allenai/open-instruct/pull/681",
        "After a resume each epoch, not the first one alone, left out the batches that were done before the resume.",
        _skips_in_each_epoch, setting=Setting(epochs=True, restarts=True), audit="rows-again rows-few rows-anew",
        rows="repeated-data resume-changed", pair="data-order data",
    ),
    unseen(
        "never-shuffled", "Deci-AI/super-gradients/issues/416",
        "The loader did not shuffle data that are stored class by class.", _in_order_of_class,
        audit="rows-sorted tokens-change", rows="other-data", pair="data-order data",
    ),
    unseen(
        "four-fifths-trained-on", "openai/parameter-golf/issues/2127",
        "The training began 10,000 documents into the text, and validation had the first 50,000: 80 % of it was trained on.",
        evaluates(lambda number, held, own: torch.cat([own[: 6 + (number == 0)], held[6 + (number == 0) :]])),
        setting=EVALUATED, audit="rows-evaluated", pair="evaluation evaluation-settings",
    ),
    unseen(
        "validates-on-the-training-file", "huggingface/transformers/issues/8295",
        "The validation set was made from the training file.", evaluates(lambda number, held, own: own), setting=EVALUATED,
        audit="evaluated-on-training rows-evaluated", pair="evaluation evaluation-settings",
    ),
    unseen(
        "evaluation-counts-first-tokens", "Shark-NLP/OpenICL/issues/26",
        "The sum was divided by all tokens, also by the first of each row, which nothing predicts.",
        _in_evaluations("count", lambda labels: int((labels != IGNORED).sum())), setting=EVALUATED,
        audit="evaluation-count evaluation-scaled", pair="evaluation",
    ),
    unseen(
        "evaluation-scores-padding", "axolotl-ai-cloud/axolotl/pull/3988",
        "The evaluation's labels were the padded tokens, and padding was scored.", _in_evaluations("labels", torch.clone),
        setting=Setting(lengths=True, evaluates=True, declared=(("ignore", PAD),)),
        audit="ignored-counted evaluation-count evaluation-departs", pair="evaluation",
    ),
)  # fmt: skip

UNSEEN: tuple[Bug, ...] = (
    *OF_THE_LOSS, *OF_THE_MODEL, *OF_THE_GRADIENT, *OF_THE_UPDATE, *OF_RESTARTS, *OF_THE_DATA,
)  # fmt: skip
