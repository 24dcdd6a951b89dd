"""Bugs that others had, each from a public thread, collected while rules were mended with those of ``_public_bugs_unseen.py``.

They are a part of their own, by another author: no rule was mended with them, and their right words were written from the tables
of names alone, before any of them was diagnosed. What a row is, is said in ``_public_bugs.py``; no row repeats one of the other
three files.

Claim: none of its own; ``public_bugs.py`` measures. Baseline: the loop without a bug.
Run: ``./dev bench public_bugs --parts later``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from _public_bugs import EVALUATED, attention, bug
from _public_bugs_of_steps import HAND, RESTARTED, RESUMED, after_restart, put, rate_is, written_line
from _public_bugs_unseen import SCHEDULE, Plant, evaluates, rate_of_sgd, sgd, then
from _public_loop import AT, HELD_OUT, IGNORED, LR, MICRO, STEPS, WARMUP, Bug, PublicLoop, Setting
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

later = functools.partial(bug, part="later")


# ── the loss ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _smooths_over_ignored(loop: PublicLoop) -> None:
    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        log_p, targets = logits[:, :-1].float().log_softmax(-1), labels[:, 1:]
        hard = functional.nll_loss(log_p.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return (1 - loop.setting.smoothing) * hard - loop.setting.smoothing * log_p.mean(-1).sum()

    loop.summed = summed  # type: ignore[method-assign]


def _divided_by_sequences(loop: PublicLoop) -> None:
    loop.loss = lambda logits, labels, total: (  # type: ignore[method-assign]
        loop.summed(logits, labels) / (MICRO * len(labels))
    )


OF_THE_LOSS: tuple[Bug, ...] = (
    later(
        "ignored-tokens-smoothed", "pytorch/pytorch/issues/73205",
        "The smoothed part of the loss was summed over all positions, those that are ignored included.", _smooths_over_ignored,
        setting=Setting(prompts=True, smoothing=0.1, declared=(("label_smoothing", 0.1),)),
        audit="label-smoothing-other tokens-weighted ignored-counted loss-departs",
    ),
    later(
        "divided-by-sequences", "eric-mitchell/direct-preference-optimization/issues/68",
        "The loss was the sum over a sequence's tokens, averaged over sequences, so that it grew with their length.",
        _divided_by_sequences, setting=Setting(lengths=True), audit="loss-scaled gradient-scaled",
    ),
)  # fmt: skip


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _softmax_over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(unseen, float("-inf")).softmax(-2) @ v


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _turn_by_head(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The dim of heads is taken for that of the sequence: each head has one angle, wherever its token is."""
    number = q.shape[1]
    q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos[:, :number], sin[:, :number])
    return q.transpose(1, 2), k.transpose(1, 2)


def _adds_to_the_norm(loop: PublicLoop) -> None:
    def forward(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        hidden_states = normed + self.self_attn(hidden_states=normed, **given)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    for layer in loop.model.model.layers:
        layer.forward = forward.__get__(layer)


def _mask_of_a_small_number(loop: PublicLoop) -> None:
    mask = loop.mask

    def small(tokens: Tensor) -> Tensor:
        found = mask(tokens)
        assert found is not None
        return torch.where(found < 0, 1e-9, 0.0)

    loop.mask = small  # type: ignore[method-assign]


def _head_still_trained(loop: PublicLoop) -> None:
    weight = loop.model.lm_head.weight.requires_grad_(True)
    loop.optimizer.param_groups[0]["params"].append(weight)


def _keeps_what_it_should_drop(loop: PublicLoop) -> None:
    for layer in loop.model.model.layers:
        layer.self_attn.attention_dropout = 1 - loop.setting.dropout


OF_THE_MODEL: tuple[Bug, ...] = (
    later(
        "softmax-over-queries", "labmlai/annotated_deep_learning_paper_implementations/issues/146",
        "The softmax of attention was taken over the queries, not over the keys.",
        lambda loop: attention(loop, _softmax_over_queries), audit="sees-future forward-departs",
    ),
    later(
        "turned-by-head", "mlfoundations/open_lm/issues/4",
        "Rotary angles were those of the head's number, not of the position: the two dims were exchanged.",
        lambda loop: attention(loop, _causal, _turn_by_head), audit="order-unseen forward-departs",
    ),
    later(
        "residual-of-the-norm", "Howuhh/faster-trajectory-transformer/issues/3",
        "The output of attention was added to its normed input, not to the input itself.", _adds_to_the_norm,
    ),
    later(
        "masked-with-a-small-number", "awslabs/gluonts/pull/1401",
        "What the mask leaves out was given 1e-9 for -1e9, which is no mask at all.", _mask_of_a_small_number,
        setting=Setting(packed=True), audit="sees-future",
    ),
    later(
        "dropout-keeps-and-drops-exchanged", "tensorflow/mesh/issues/162",
        "The number was taken for the probability to keep, in a GPT whose author meant the one to drop.",
        _keeps_what_it_should_drop, setting=Setting(dropout=0.2),
    ),
    later(
        "frozen-by-an-attribute", "CSCYQJ/MICCAI23-ProtoContra-SFDA/issues/18",
        "requires_grad was set on the module, which has no such attribute: the last layer was trained.", _head_still_trained,
        setting=Setting(frozen=("lm_head",)), pair="bug missing-part other-model optimizer-settings",
    ),
)  # fmt: skip


# ── gradients, and clipping ───────────────────────────────────────────────────────────────────────────────────────────

PIPELINED = 2
"""Micro-batches of a pipeline's schedule."""


def _before_each_backward(do: Callable[[PublicLoop], object]) -> Plant:
    def plant(loop: PublicLoop) -> None:
        backward = loop.backward

        def first(loss: Tensor, number: int) -> None:
            do(loop)
            backward(loss, number)

        loop.backward = first  # type: ignore[method-assign]

    return plant


def _scale_what_is_accumulated(loop: PublicLoop) -> None:
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.div_(PIPELINED)


def _forget_all_but_the_embedding(loop: PublicLoop) -> None:
    for p in loop.model.parameters():
        if p is not loop.model.model.embed_tokens.weight:
            p.grad = None


def _head_of_one_rank(loop: PublicLoop) -> None:
    """Two ranks have two micro-batches each; what the head gives to the tied weight is that of the second one alone."""
    head, backward, before_clip = loop.model.lm_head, loop.backward, loop.before_clip
    excess, sign = torch.zeros_like(head.weight), [0.0]

    def remember(module: Any, given: tuple[Tensor], output: Tensor) -> None:
        def add(gradient: Tensor) -> None:
            excess.add_(torch.einsum("...o,...i->oi", gradient, given[0].detach()), alpha=sign[0])

        if output.requires_grad:
            output.register_hook(add)

    def then_backward(loss: Tensor, number: int) -> None:
        sign[0] = -1.0 if number < MICRO // 2 else 1.0
        backward(loss, number)
        sign[0] = 0.0

    def with_excess() -> None:
        before_clip()
        head.weight.grad.add_(excess)
        excess.zero_()

    head.register_forward_hook(remember)
    loop.backward, loop.before_clip = then_backward, with_excess  # type: ignore[method-assign]


def _through_float16(loop: PublicLoop) -> None:
    for p in loop.model.parameters():
        p.grad.copy_(p.grad.half())


def _squares_not_reduced(loop: PublicLoop) -> None:
    """A parameter that fills a bucket keeps the gradient of its own rank: that of the first micro-batch, as its mean."""
    size = loop.model.config.hidden_size**2
    squares, own = [p for p in loop.model.parameters() if p.numel() == size], []

    def keep(loop: PublicLoop, loss: Tensor, number: int) -> None:
        if number == 0:
            own[:] = [MICRO * p.grad for p in squares]

    def put_back(loop: PublicLoop) -> None:
        for p, gradient in zip(squares, own, strict=True):
            p.grad.copy_(gradient)

    then("backward", keep)(loop)
    then("before_clip", put_back)(loop)


def _clip_each(loop: PublicLoop) -> Tensor:
    trained = [p for p in loop.model.parameters() if p.grad is not None]
    return torch.stack([nn.utils.clip_grad_norm_([p], loop.setting.clip) for p in trained]).norm()


def _clips_updates(loop: PublicLoop) -> None:
    update, weights = loop.update, list(loop.model.parameters())

    @torch.no_grad()
    def then_limit() -> None:
        before = [p.clone() for p in weights]
        update()
        norm = torch.stack([(p - b).norm() for p, b in zip(weights, before, strict=True)]).norm()
        for p, b in zip(weights, before, strict=True):
            p.copy_(b.lerp(p, min(1.0, loop.setting.clip / float(norm))))

    loop.clip = lambda: nn.utils.clip_grad_norm_(weights, float("inf"))  # type: ignore[method-assign]
    loop.update = then_limit  # type: ignore[method-assign]


OF_THE_GRADIENT: tuple[Bug, ...] = (
    later(
        "sum-scaled-with-each-part", "pytorch/torchtitan/pull/1732",
        "The pipeline divided all gradients by its micro-batches each time, also what was accumulated before.",
        _before_each_backward(_scale_what_is_accumulated), audit="micro-batches-weighted",
    ),
    later(
        "buffers-overwritten", "ServiceNow/Fast-LLM/pull/551",
        "A buffer of gradients that stages share was copied out, not added: all but the tied embedding had the last micro-batch "
        "alone.",
        _before_each_backward(_forget_all_but_the_embedding), setting=Setting(tied=True), audit="micro-batch-missing",
    ),
    later(
        "tied-gradient-of-one-rank", "NVIDIA/Megatron-LM/issues/844",
        "The gradients of the tied embedding were added over pipeline stages after they were scattered: of the last stage it had "
        "one rank's.",
        _head_of_one_rank, setting=Setting(tied=True), audit="gradient-departs micro-batch-missing micro-batches-weighted",
    ),
    later(
        "reduced-in-float16", "deepspeedai/DeepSpeed/issues/2071",
        "With bfloat16 on, gradients were communicated in float16 all the same.",
        then("before_clip", _through_float16), setting=Setting(autocast=True), audit="gradient-narrow gradient-underflow",
        rows="narrow-all-reduce gradient-underflow narrow-accumulation", pair="bug format reduction",
    ),
    later(
        "full-buckets-not-reduced", "deepspeedai/DeepSpeed/pull/4321",
        "Parameters of exactly a bucket's size, such as square projections, were not reduced over ranks.",
        _squares_not_reduced, audit="micro-batch-missing micro-batches-weighted gradient-departs",
    ),
    later(
        "clipped-one-by-one", "carpedm20/MemN2N-tensorflow/issues/19",
        "Each matrix was clipped by its own norm, where the paper means that of all.",
        put("clip", lambda loop: lambda: _clip_each(loop)), audit="clip-each clip-norm clip-limit",
    ),
    later(
        "updates-clipped", "sanchit-gandhi/seq2seq-speech/pull/7",
        "The norm of the updates was clipped, not that of the gradients.", _clips_updates,
        audit="clip-missing rate step-scaled", pair="bug optimizer-settings",
    ),
)  # fmt: skip


# ── the update ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _decays_afterwards(loop: PublicLoop) -> None:
    """The decay takes a part of the weights that are updated already."""
    update, decay = loop.optimizer.update, loop.optimizer.decay

    def then_decay(p: Tensor, group: dict[str, Any]) -> None:
        update(p, group)
        decay(p, group)

    loop.optimizer.update, loop.optimizer.decay = then_decay, lambda p, group: None


def _never_counts(loop: PublicLoop) -> None:
    update = loop.optimizer.update

    def without_count(p: Tensor, group: dict[str, Any]) -> None:
        update(p, group)
        loop.optimizer.state[p]["step"].zero_()

    loop.optimizer.update = without_count


def _one_count_for_all(loop: PublicLoop) -> None:
    direction, count = loop.optimizer.direction, itertools.count(1)
    loop.optimizer.direction = lambda first, second, number, group: direction(first, second, next(count), group)


def _velocity_never_decays(velocity: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
    velocity.add_(gradient, alpha=group["momentum"])


def _moves_by_the_old_velocity(loop: PublicLoop) -> None:
    accumulate, old = loop.optimizer.accumulate, []

    def keep(velocity: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        old[:] = [velocity.clone()]
        accumulate(velocity, gradient, group)

    loop.optimizer.accumulate = keep
    loop.optimizer.direction = lambda gradient, velocity, group: old.pop() if old else torch.zeros_like(velocity)


def _listed_twice(loop: PublicLoop) -> None:
    loop.optimizer.param_groups[0]["params"].append(loop.model.lm_head.weight)


def _default_betas(loop: PublicLoop) -> None:
    for group in loop.optimizer.param_groups:
        group["betas"] = (0.9, 0.999)


SGD = Setting(optimizer=sgd, rate=rate_of_sgd)
OF_THE_UPDATE: tuple[Bug, ...] = (
    later(
        "decays-what-is-updated", "huggingface/transformers/issues/14539",
        "Weight decay was multiplied by the weights after the update, not by those before it.", _decays_afterwards, setting=HAND,
        audit="decay decay-of-other update-departs",
    ),
    later(
        "steps-never-counted", "allenai/OLMo-core/pull/317",
        "The count of steps stayed where it was: every step was corrected as the first, and 2.2 times too long.", _never_counts,
        setting=HAND, audit="step-count count-moved count-anew state-frozen no-bias-correction",
    ),
    later(
        "counted-once-a-parameter", "flashlight/flashlight/issues/143",
        "The optimizer's one count of steps was raised within the loop over parameters.", _one_count_for_all, setting=HAND,
        audit="count-shared step-count no-bias-correction",
    ),
    later(
        "velocity-never-decays", "ooples/AiDotNet/issues/2008",
        "The momentum was multiplied by the gradient, not by the velocity, which became a sum without end.",
        written_line("accumulate", lambda own: _velocity_never_decays), setting=SGD, audit="state-other-factors beta",
        rows="learning-rate-too-high",
    ),
    later(
        "moves-by-the-old-velocity", "mdenil/dropout/issues/4",
        "Weights moved by the velocity of before the step, which does not have its gradient.", _moves_by_the_old_velocity,
        setting=SGD, audit="stale-moment gradient-stale",
    ),
    later(
        "listed-twice", "pytorch/pytorch/issues/40967",
        "A parameter was twice in the list of a group, and updated twice a step.", _listed_twice,
        setting=Setting(optimizer=HAND.optimizer, tied=True), audit="listed-often count-moved step-count rate update-departs",
        pair="bug optimizer-settings",
    ),
    later(
        "betas-not-passed-on", "LucasPrietoAl/grokking-at-the-edge-of-numerical-stability/issues/11",
        "The inner optimizer was made without the betas that were given, and took its defaults.", _default_betas,
        setting=Setting(declared=(("settings", {"betas": (0.9, 0.95)}),)), audit="setting-other beta",
        pair="optimizer-settings bug",
    ),
)  # fmt: skip


# ── rates ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _cosine(period: int, warmup: int = WARMUP) -> Callable[[int], float]:
    """Half a period down, and up again as torch's does."""

    def rate(step: int) -> float:
        return min(1.0, step / max(1, warmup)) * (0.55 + 0.45 * math.cos(math.pi * max(0, step - warmup) / period))

    return rate


LONG, SHORT = _cosine(STEPS), _cosine(STEPS // 2, warmup=0)
DROP = 20


def _dropping(factor: float) -> Callable[[int], float]:
    return lambda step: min(1.0, step / WARMUP) * factor ** (step // DROP)


TENTHS = _dropping(0.1)


def _one_rate(loop: PublicLoop) -> None:
    def schedule(step: int) -> None:
        for group in loop.optimizer.param_groups:
            group["lr"] = LR * loop.factor(step)

    loop.schedule = schedule  # type: ignore[method-assign]


OF_RATES: tuple[Bug, ...] = (
    later(
        "cosine-as-long-as-the-warm-up", "lucidrains/imagen-pytorch/issues/71",
        "The period of the cosine was given the number of warm-up steps, so that the rate went up and down again and again.",
        rate_is(_cosine(WARMUP)), setting=Setting(rate=LONG), pair=SCHEDULE,
    ),
    later(
        "cosine-jumps-back", "tracel-ai/burn/pull/5191",
        "The step was taken modulo the period plus one: at its end the rate jumped back to the highest.",
        rate_is(lambda step: SHORT(step % (STEPS // 2 + 1))), setting=Setting(rate=SHORT), pair=SCHEDULE,
    ),
    later(
        "power-of-the-lowest-rate", "open-edge-platform/physical-ai-studio/pull/407",
        "Each drop multiplied by the rate that it should reach, not by its ratio to the first rate.",
        rate_is(_dropping(0.1 * LR)), setting=Setting(rate=TENTHS), pair=SCHEDULE, rows="learning-rate-too-low",
    ),
    later(
        "one-rate-from-the-schedule", "microsoft/hi-ml/issues/611",
        "The schedule gave every group the rate of the first one.", _one_rate, setting=Setting(embedding_rate=0.1), pair=SCHEDULE,
    ),
)  # fmt: skip


# ── states, restarts and averages ─────────────────────────────────────────────────────────────────────────────────────


def _shift_states(loop: PublicLoop) -> None:
    """Each parameter has the states of the next; where that has another shape, they begin anew."""
    weights = [p for group in loop.optimizer.param_groups for p in group["params"]]
    for p, following in itertools.pairwise(weights):
        for name in ("exp_avg", "exp_avg_sq"):
            state = loop.optimizer.state[following][name]
            loop.optimizer.state[p][name] = state.clone() if state.shape == p.shape else torch.zeros_like(p)


def _masters_of_the_start(loop: PublicLoop) -> None:
    """The optimizer steps from copies that were made before the checkpoint was read."""
    weights, update = list(loop.model.parameters()), loop.update
    masters = [p.detach().clone() for p in weights]

    def from_masters() -> None:
        if loop.step == AT:
            with torch.no_grad():
                for p, master in zip(weights, masters, strict=True):
                    p.copy_(master)
        update()

    loop.update = from_masters  # type: ignore[method-assign]


def _copy(source: Any, target: Any) -> None:
    for own, other in zip(target.parameters(), source.parameters(), strict=True):
        own.copy_(other)


def _average_in_bfloat16(loop: PublicLoop) -> None:
    average = loop.average = loop.average.bfloat16()  # type: ignore[union-attr]

    @torch.no_grad()
    def averaged() -> None:
        for mean, p in zip(average.parameters(), loop.model.parameters(), strict=True):
            mean.lerp_(p.bfloat16(), 0.05)

    loop.averaged = averaged  # type: ignore[method-assign]


RESTARTED_AVERAGE = Setting(average=True, restarts=True)
OF_RESTARTS: tuple[Bug, ...] = (
    later(
        "states-of-the-next-parameter", "wochenlong/lora-scripts-next/pull/320",
        "States were given back by their place in another list: each parameter had those of the next.",
        after_restart(_shift_states), setting=RESTARTED, audit="states-written states-lost", rows=RESUMED,
    ),
    later(
        "masters-of-the-start", "NVIDIA/Megatron-LM/issues/174",
        "The optimizer held copies of the weights from before loading, and the first step went on from those.",
        _masters_of_the_start, setting=RESTARTED, audit="weights-written update-departs", rows=RESUMED,
    ),
    later(
        "average-in-bfloat16", "d8ahazard/sd_dreambooth_extension/pull/1415",
        "The average had the weights' 16 bits, where most of its updates are lost.", _average_in_bfloat16,
        setting=Setting(average=True), audit="average-still average-other weight-narrow", pair="",
    ),
    later(
        "average-begins-anew", "ai2cm/ace/issues/349", "The average was not in the checkpoint, and began with the weights.",
        after_restart(lambda loop: _copy(loop.model, loop.average)), setting=RESTARTED_AVERAGE, audit="average-other", pair="",
    ),
    later(
        "resumes-from-the-average", "Megvii-BaseDetection/YOLOX/issues/1318",
        "The checkpoint had the average alone: after a resume it was the weights, too.",
        after_restart(lambda loop: _copy(loop.average, loop.model)), setting=RESTARTED_AVERAGE, audit="weights-written",
        rows=RESUMED,
    ),
)  # fmt: skip


# ── the data, and evaluations ─────────────────────────────────────────────────────────────────────────────────────────


def _placed(other: Callable[[int], int]) -> Plant:
    """Read the batch of another step."""

    def plant(loop: PublicLoop) -> None:
        place = loop.place
        loop.place = lambda step: place(other(step))  # type: ignore[method-assign]

    return plant


def _in_eight_bits(loop: PublicLoop) -> None:
    """The vocabulary is of 512 here: as with 16 bits there, about the second half of it does not fit."""
    read = loop.read
    loop.read = lambda place: read(place) % 256  # type: ignore[method-assign]


def _labels_of_another_row(loop: PublicLoop) -> None:
    labels = loop.labels
    loop.labels = lambda tokens: labels(tokens.roll(1, 0))  # type: ignore[method-assign]


def _counts_rows(loop: PublicLoop) -> None:
    held_out = loop.held_out

    def by_rows(place: int) -> tuple[float, int]:
        total, number = held_out(place)
        rows = len(loop.read(HELD_OUT + place)) if place < 3 else 1
        return total / number * rows, rows

    loop.held_out = by_rows  # type: ignore[method-assign]


def _never_forgets(loop: PublicLoop) -> None:
    mean, all_of_them = loop.mean, []

    def of_all(found: list[tuple[float, int]]) -> float:
        all_of_them.extend(found)
        return mean(all_of_them)

    loop.mean = of_all  # type: ignore[method-assign]


def _goes_on_in_the_held_out(loop: PublicLoop) -> None:
    read, passed = loop.read, [0]

    def count(loop: PublicLoop) -> None:
        passed[0] += 4

    loop.read = lambda place: read(place if place < HELD_OUT else place + passed[0])  # type: ignore[method-assign]
    then("after_evaluation", count)(loop)


def _evaluates_the_step_before(loop: PublicLoop) -> None:
    update, weights, kept = loop.update, list(loop.model.parameters()), []

    def keep_and_update() -> None:
        kept[:] = [p.detach().clone() for p in weights]
        update()

    @torch.no_grad()
    def exchange(loop: PublicLoop) -> None:
        for number, p in enumerate(weights):
            now = p.clone()
            p.copy_(kept[number])
            kept[number] = now

    loop.update = keep_and_update  # type: ignore[method-assign]
    then("before_evaluation", exchange)(loop)
    then("after_evaluation", exchange)(loop)


def _overlapping(number: int, held: Tensor, own: Tensor) -> Tensor:
    half = own.shape[1] // 2
    return torch.cat([own[:, half:], own.roll(-1, 0)[:, :half]], 1)


REPEATED = "repeated-data resume-changed"
OF_THE_DATA: tuple[Bug, ...] = (
    later(
        "tokens-in-few-bits", "huggingface/transformers/issues/2825",
        "Tokens were stored as 16-bit integers, and 45 % of the vocabulary wrapped around.", _in_eight_bits, pair="data",
    ),
    later(
        "begins-anew-after-each-evaluation", "tensorflow/tensorflow/issues/19062",
        "After each evaluation the training's iterator was made anew, and read the first batches again.",
        _placed(lambda step: (step - 1) % 20 + 1), setting=EVALUATED, audit="rows-again rows-few", rows="repeated-data",
        pair="data-order data",
    ),
    later(
        "forwarded-by-a-quarter", "EleutherAI/gpt-neox/pull/308",
        "On a resume the reader was forwarded by steps where it counts micro-batches, and read again what it had read.",
        _placed(lambda step: step if step < AT else step - AT + (AT - 1) // MICRO + 1), setting=RESTARTED,
        audit="rows-again rows-anew", rows=REPEATED, pair="data-order data",
    ),
    later(
        "one-batch-again", "Red-Hat-AI-Innovation-Team/mini_trainer/pull/79",
        "A resume skipped one batch too few, and took the last one before it again.",
        _placed(lambda step: step if step < AT else step - 1), setting=RESTARTED, audit="rows-again rows-anew", rows=REPEATED,
        pair="data-order data",
    ),
    later(
        "labels-of-another-row", "mlcommons/GaNDLF/pull/870", "Data and labels were shuffled separately.",
        _labels_of_another_row, audit="labels-other", pair="bug data",
    ),
    later(
        "evaluation-weighted-by-rows", "keras-team/keras-hub/pull/2958",
        "Batch means were averaged with the number of rows, not of tokens, for weights.", _counts_rows, setting=EVALUATED,
        audit="evaluation-mean-of-means evaluation-departs", pair="evaluation",
    ),
    later(
        "last-batch-reported", "NVIDIA/DeepLearningExamples/pull/299",
        "The validation's loss was that of its last batch.",
        put("mean", lambda loop: lambda found: found[-1][0] / found[-1][1]), setting=EVALUATED,
        audit="evaluation-of-one-batch evaluation-scaled evaluation-departs", pair="evaluation",
    ),
    later(
        "evaluations-never-cleared", "mehta-lab/VisCy/pull/202",
        "What an evaluation had summed was not cleared: the loss was the mean of all evaluations so far.", _never_forgets,
        setting=EVALUATED, audit="evaluation-not-cleared evaluation-scaled evaluation-departs", pair="evaluation",
    ),
    later(
        "other-rows-each-evaluation", "NVIDIA-NeMo/Megatron-Bridge/issues/5626",
        "The validation's iterator was never made anew: each evaluation went on where the last one had stopped.",
        _goes_on_in_the_held_out, setting=EVALUATED, audit="evaluation-data-changed", pair="evaluation evaluation-settings",
    ),
    later(
        "evaluated-before-the-update", "intel/ipex-llm/pull/2710",
        "Validation did not have the weights of the latest step, but those of the step before.", _evaluates_the_step_before,
        setting=EVALUATED, audit="evaluated-stale", pair="evaluation",
    ),
    later(
        "windows-overlap", "zzx-JLU/ECLGCNN/issues/5",
        "Overlapping windows were divided at random: what is evaluated is in the windows of the training, half in each of two.",
        evaluates(_overlapping), setting=EVALUATED, audit="rows-evaluated evaluated-on-training",
        pair="evaluation evaluation-settings",
    ),
)  # fmt: skip

LATER: tuple[Bug, ...] = (
    *OF_THE_LOSS, *OF_THE_MODEL, *OF_THE_GRADIENT, *OF_THE_UPDATE, *OF_RATES, *OF_RESTARTS, *OF_THE_DATA,
)  # fmt: skip
