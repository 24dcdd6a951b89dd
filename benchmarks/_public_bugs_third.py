"""Bugs that others had, each from a public thread: a third set by an author who had seen no rule.

They were collected from the threads alone, and their right words were written from the tables of names, before any of them was
diagnosed. What a row is, is said in ``_public_bugs.py``; no row repeats one of the other four files.

Claim: none of its own; ``public_bugs.py`` measures. Baseline: the loop without a bug.
Run: ``./dev bench public_bugs --parts third``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _public_bugs import DROPPED, EOS, EPOCHS, EVALUATED, attention, bug
from _public_bugs_later import LONG, TENTHS
from _public_bugs_of_steps import HAND, RANKS, RESTARTED, RESUMED, after_restart, put, rate_is, usual_rate, written_line
from _public_bugs_unseen import SCHEDULE, Plant, WrittenSGD, nesterov, rate_of_sgd, sgd, then
from _public_loop import AT, EPOCH, IGNORED, LR, MICRO, STEPS, WARMUP, Bug, Groups, PublicLoop, Setting
from torch import Tensor
from torch.nn import functional
from torch.optim._muon import _zeropower_via_newtonschulz

import narrowgauge as ng

third = functools.partial(bug, part="third")


def ours(storage: str) -> Callable[[Groups], torch.optim.Optimizer]:
    """Our own AdamW over a storage."""

    def make(groups: Groups) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = ng.AdamW(groups, lr=LR, betas=(0.9, 0.95), storage=storage, compile=False)
        return optimizer

    make.__qualname__ = f"ours {storage}"
    return make


OURS = ours("word")
WORD = Setting(optimizer=OURS, dtype=torch.bfloat16)


# ── the loss ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _in_the_format_of_logits(loop: PublicLoop) -> None:
    loop.summed = (
        lambda logits, labels: functional.cross_entropy(  # type: ignore[method-assign]
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )
    )


def _own_means(loop: PublicLoop) -> None:
    """The trainer divides by the number of micro-batches only where the loss does not divide by the step's tokens."""
    loop.loss = lambda logits, labels, total: (  # type: ignore[method-assign]
        loop.summed(logits, labels) / loop.count(labels)
    )


def _labelled(change: Callable[[Tensor, Tensor], None]) -> Plant:
    """Change the labels in place; given are the labels and the tokens."""

    def plant(loop: PublicLoop) -> None:
        labels = loop.labels

        def changed(tokens: Tensor) -> Tensor:
            found = labels(tokens)
            change(found, tokens)
            return found

        loop.labels = changed  # type: ignore[method-assign]

    return plant


def _only_the_last_answer(labels: Tensor, tokens: Tensor) -> None:
    """What is trained on are two answers here, of a quarter of the sequence each."""
    labels[:, : 3 * labels.shape[1] // 4] = IGNORED


def _prompt_of_zeros(labels: Tensor, tokens: Tensor) -> None:
    labels[:, : labels.shape[1] // 2] = 0


def _without_a_template(labels: Tensor, tokens: Tensor) -> None:
    """A third of the rows has this token in the prompt: in those the template is not found."""
    labels[(tokens[:, : tokens.shape[1] // 2] == EOS).any(1)] = IGNORED


PROMPTS = Setting(prompts=True)
OF_THE_LOSS: tuple[Bug, ...] = (
    third(
        "loss-in-bfloat16", "Modalities/modalities/pull/464",
        "The cross entropy was computed in the logits' bfloat16, which nothing had promoted.", _in_the_format_of_logits,
        setting=Setting(autocast=True), audit="gradient-narrow loss-departs", pair="bug format",
    ),
    third(
        "smoothed-means-not-divided", "huggingface/transformers/issues/46731",
        "With label smoothing each micro-batch took its own mean, and the trainer no longer divided by their number.", _own_means,
        setting=Setting(smoothing=0.1, declared=(("label_smoothing", 0.1),)), audit="loss-scaled gradient-scaled",
    ),
    third(
        "last-answer-only", "zai-org/GLM-4/pull/803",
        "Of a conversation's answers the last one alone was trained on; the earlier ones were masked like the prompt.",
        _labelled(_only_the_last_answer), setting=PROMPTS, audit="tokens-weighted",
    ),
    third(
        "prompt-labelled-zero", "meta-llama/llama-cookbook/issues/101",
        "The labels of the prompt were set to 0, which is a token, where the loss ignores -100.", _labelled(_prompt_of_zeros),
        setting=PROMPTS, audit="labels-other ignored-counted",
    ),
    third(
        "template-not-found", "huggingface/trl/issues/1920",
        "The template's last space was one token with the word after it: samples in which it was not found were ignored whole.",
        _labelled(_without_a_template), setting=PROMPTS, audit="tokens-weighted",
    ),
)  # fmt: skip


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────────

WINDOW = 8
Tensors = tuple[Tensor | None, ...]


def _causal_mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def _own_document(length: int) -> Tensor:
    """What each token of two packed documents may see."""
    is_first = torch.arange(length) < length // 2
    return _causal_mask(length) & (is_first[:, None] == is_first[None])


def _windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sees = _causal_mask(q.shape[-2]).triu(1 - WINDOW)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=sees)


def _inverted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=~_causal_mask(q.shape[-2]))


def _added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """True is added as 1, False as 0."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + _own_document(q.shape[-2])
    return scores.softmax(-1) @ v


class _MaskedForward(torch.autograd.Function):
    """Attention within documents, whose backward pass knows of causality alone."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~_own_document(q.shape[-2]), float("-inf"))
        output = scores.softmax(-1) @ v
        ctx.save_for_backward(q, k, v, output, scores.logsumexp(-1, keepdim=True))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensors:  # type: ignore[override]
        q, k, v, output, log_sums = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[-1])
        weights = (q @ k.transpose(-2, -1) * scale - log_sums).exp().masked_fill(~_causal_mask(q.shape[-2]), 0.0)
        of_scores = gradient @ v.transpose(-2, -1) - (gradient * output).sum(-1, keepdim=True)
        of_scores = weights * of_scores * scale
        return of_scores @ k, of_scores.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ gradient


class _NormOfOtherRows(torch.autograd.Function):
    """RMS norm; in its backward pass each position subtracts the mean of the position before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        inverse = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        ctx.save_for_backward(x, gain, inverse)
        return gain * (x * inverse)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensors:  # type: ignore[override]
        x, gain, inverse = ctx.saved_tensors
        of_normed = gain * gradient
        means = (of_normed * x).mean(-1, keepdim=True).roll(1, -2)
        of_gain = (gradient * x * inverse).flatten(0, -2).sum(0)
        return inverse * of_normed - inverse**3 * x * means, of_gain, None


def _norms(loop: PublicLoop, forward: Callable[[Any, Tensor], Tensor]) -> None:
    for norm in loop.model.modules():
        if hasattr(norm, "variance_epsilon"):
            norm.forward = functools.partial(forward, norm)


def _gain_detached(norm: Any, x: Tensor) -> Tensor:
    return norm.weight.detach() * (x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt())


def _seeded_each_time(loop: PublicLoop) -> None:
    logits = loop.logits

    def seeded(tokens: Tensor) -> Tensor:
        torch.manual_seed(loop.setting.seed)
        return logits(tokens)

    loop.logits = seeded  # type: ignore[method-assign]


PACKED = Setting(packed=True)
OF_THE_MODEL: tuple[Bug, ...] = (
    third(
        "window-not-asked-for", "huggingface/transformers/issues/38002",
        "The mask of a sliding window was applied although the configuration turned the window off.",
        lambda loop: attention(loop, _windowed), audit="forward-departs",
    ),
    third(
        "mask-of-the-other-convention", "rasbt/LLMs-from-scratch/issues/1061",
        "The upper triangle was given to a function for which True means that a token takes part: the future alone was seen.",
        lambda loop: attention(loop, _inverted), audit="sees-future past-unseen",
    ),
    third(
        "mask-added-as-numbers", "huggingface/transformers/pull/41443",
        "A mask of truth values was added to the scores, where it is no more than 1.",
        lambda loop: attention(loop, _added), setting=PACKED, audit="sees-future",
    ),
    third(
        "a-token-taken-for-padding", "ibalazevic/TuckER/issues/17",
        "padding_idx was the index of a real entity, whose embedding had no gradient and stayed as it was.",
        lambda loop: setattr(loop.model.model.embed_tokens, "padding_idx", EOS), audit="part gradient-departs",
    ),
    third(
        "one-dropout-for-ever", "PaddlePaddle/Paddle/issues/7796",
        "Dropout drew its mask from one seed each time.", _seeded_each_time, setting=Setting(dropout=0.2),
        pair="bug random-numbers",
    ),
    third(
        "gains-without-gradient", "unslothai/unsloth/issues/4533",
        "The kernel of RMS norms gave no gradient for their gains, which no full fine-tuning ever trained.",
        lambda loop: _norms(loop, _gain_detached), audit="unused gradient-missing", rows="frozen-parameter dead-layer",
        pair="missing-part bug",
    ),
    third(
        "norm-backward-of-other-rows", "BobMcDear/attorch/issues/17",
        "The backward kernel of RMS norms lacked an axis: each row subtracted the term of another.",
        lambda loop: _norms(loop, lambda norm, x: _NormOfOtherRows.apply(x, norm.weight, norm.variance_epsilon)),
        audit="gradient-departs",
    ),
    third(
        "mask-lost-in-backward", "Dao-AILab/flash-attention/issues/2424",
        "The mask was given to the forward pass and not kept for the backward pass, whose gradients had none.",
        lambda loop: attention(loop, _MaskedForward.apply), setting=PACKED, audit="gradient-departs",
    ),
)  # fmt: skip


# ── gradients, and clipping ───────────────────────────────────────────────────────────────────────────────────────────


def _head_reduced_early(loop: PublicLoop) -> None:
    """What the head gets of the last micro-batch comes when its gradient is reduced already."""
    head, backward, before_clip, reduced = loop.model.lm_head.weight, loop.backward, loop.before_clip, []

    def keep_then_backward(loss: Tensor, number: int) -> None:
        if number == MICRO - 1:
            reduced[:] = [head.grad.clone()]
        backward(loss, number)

    def with_reduced() -> None:
        before_clip()
        head.grad.copy_(reduced.pop())

    loop.backward, loop.before_clip = keep_then_backward, with_reduced  # type: ignore[method-assign]


def _parts_count(factors: Sequence[float]) -> Plant:
    """Each micro-batch's gradient counts as often as is given."""

    def plant(loop: PublicLoop) -> None:
        backward, before_clip, weights = loop.backward, loop.before_clip, list(loop.model.parameters())
        sums = [torch.zeros_like(p) for p in weights]

        def weighted(loss: Tensor, number: int) -> None:
            before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in weights]
            backward(loss, number)
            for total, p, was in zip(sums, weights, before, strict=True):
                total.add_(p.grad - was, alpha=factors[number])

        def with_sums() -> None:
            for p, total in zip(weights, sums, strict=True):
                p.grad.copy_(total)
                total.zero_()
            before_clip()

        loop.backward, loop.before_clip = weighted, with_sums  # type: ignore[method-assign]

    return plant


TIMES_MORE_TOKENS = 256
"""Gradients of a mean are as many times smaller where a step has as many times more tokens than here."""


def _in_float16(loop: PublicLoop) -> None:
    backward = loop.backward

    def logits(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            found: Tensor = loop.model(input_ids=tokens, use_cache=False).logits
        return found

    def multiply(loop: PublicLoop) -> None:
        for p in loop.model.parameters():
            p.grad.mul_(TIMES_MORE_TOKENS)

    loop.logits = logits  # type: ignore[method-assign]
    loop.backward = lambda loss, number: backward(loss / TIMES_MORE_TOKENS, number)  # type: ignore[method-assign]
    then("before_clip", multiply)(loop)


def _scaled_to_the_limit(loop: PublicLoop) -> Tensor:
    trained = [p for p in loop.model.parameters() if p.grad is not None]
    norm = torch.stack([p.grad.float().norm() for p in trained]).norm()
    for p in trained:
        p.grad.mul_(loop.setting.clip / (norm + 1e-6))
    return norm


OF_THE_GRADIENT: tuple[Bug, ...] = (
    third(
        "head-computed-after-the-reduction", "NVIDIA/Megatron-LM/issues/1012",
        "The gradient of the output layer was put off, and its last part computed when gradients had been reduced.",
        _head_reduced_early, setting=WORD, audit="micro-batch-missing micro-batches-weighted gradient-departs",
    ),
    third(
        "synchronized-with-the-first", "modelscope/FunASR/pull/3472",
        "Ranks exchanged gradients after the first micro-batch of a step, not after the last: of the rest each kept its own. "
        "(Two ranks with two micro-batches each; the first rank's step is taken.)",
        _parts_count((1.0, 2.0, 1.0, 0.0)), audit="micro-batches-weighted micro-batch-missing",
    ),
    third(
        "float16-without-a-scale", "engichang1467/Open-Rig3R/issues/35",
        "Autocast took float16, and there was no loss scaler: small gradients became zero. (They are made 256 times "
        "smaller for it here.)",
        _in_float16,
        setting=Setting(autocast=True), audit="gradient-underflow gradient-narrow", rows="gradient-underflow",
        pair="bug format",
    ),
    third(
        "clip-factor-above-one", "DingfanChen/GS-WGAN/issues/5",
        "The factor of clipping was not limited to 1, and small gradients were scaled up to the limit.",
        put("clip", lambda loop: lambda: _scaled_to_the_limit(loop)),
        setting=Setting(optimizer=OURS, dtype=torch.bfloat16, clip=2.0), audit="gradient-scaled clip-limit",
        pair="bug optimizer-settings",
    ),
)  # fmt: skip


# ── the update ────────────────────────────────────────────────────────────────────────────────────────────────────────


class WrittenMuon(torch.optim.Muon):
    """Muon as people write it by hand: its lines are methods, to get wrong."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            updates = []
            for p in trained:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                updates.append(self.direction(p.grad, buffer, group))
            for p, update in zip(trained, self.orthogonal(trained, updates, group), strict=True):
                self.decay(p, group)
                p.add_(update, alpha=-group["lr"] * self.scale(p.shape, group))

    def direction(self, gradient: Tensor, buffer: Tensor, group: dict[str, Any]) -> Tensor:
        """What is made orthogonal."""
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def orthogonal(self, parameters: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """The updates with singular values near 1."""
        return [newton_schulz(update, group) for update in updates]

    def decay(self, p: Tensor, group: dict[str, Any]) -> None:
        """Decoupled weight decay."""
        p.mul_(1 - group["lr"] * group["weight_decay"])

    def scale(self, shape: torch.Size, group: dict[str, Any]) -> float:
        """The factor of a matrix's rate."""
        if group["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(shape))
        return math.sqrt(max(1.0, shape[0] / shape[1]))


def newton_schulz(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Torch's own iteration."""
    return _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])


def _muon(adjust: str) -> Callable[[Groups], torch.optim.Optimizer]:
    def make(groups: Groups) -> torch.optim.Optimizer:
        return WrittenMuon([group for group in groups if group["params"]], lr=LR, adjust_lr_fn=adjust)

    make.__qualname__ = f"muon {adjust}"
    return make


VECTORS = (
    "model.norm",
    *(f"model.layers.{n}.{name}" for n in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")),
)
"""Muon takes matrices alone; here the gains of norms are not trained with it."""
MUON = Setting(optimizer=_muon("match_rms_adamw"), frozen=VECTORS)
ORIGINAL = Setting(optimizer=_muon("original"), frozen=VECTORS, rate=lambda step: 5.0 * usual_rate(step))


def _queries_keys_and_values_together(loop: PublicLoop) -> None:
    """The fused matrix of the three is made orthogonal as one."""
    layers, orthogonal = loop.model.model.layers, loop.optimizer.orthogonal
    fused = [[getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv"] for layer in layers]

    def together(parameters: list[Tensor], updates: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        found, place = orthogonal(parameters, updates, group), {id(p): n for n, p in enumerate(parameters)}
        for three in fused:
            numbers = [place[id(p)] for p in three]
            parts = newton_schulz(torch.cat([updates[n] for n in numbers]), group).chunk(3)
            for number, part in zip(numbers, parts, strict=True):
                found[number] = part
        return found

    loop.optimizer.orthogonal = together


def plain(groups: Groups) -> torch.optim.Optimizer:
    """SGD by hand, without momentum."""
    return WrittenSGD(groups, lr=LR)


def _velocity_is_the_direction(gradient: Tensor, velocity: Tensor, group: dict[str, Any]) -> Tensor:
    return velocity.mul_(group["momentum"]).add_(gradient)


def _velocity_from_zero(velocity: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
    velocity.zero_().mul_(group["momentum"]).add_(gradient)


def _decay_after_the_momentum(loop: PublicLoop) -> None:
    now: list[Tensor] = []

    def undecayed(p: Tensor, group: dict[str, Any]) -> Tensor:
        now[:] = [p]
        assert p.grad is not None
        return p.grad

    loop.optimizer.decayed = undecayed
    loop.optimizer.direction = lambda gradient, velocity, group: velocity.add(now[0], alpha=group["weight_decay"])


def _sum_of_squares(loop: PublicLoop) -> None:
    """The second moment takes the whole square, not 1 - beta2 of it."""
    update = loop.optimizer.update

    def with_the_rest(p: Tensor, group: dict[str, Any]) -> None:
        state = loop.optimizer.state[p]
        if not state:
            zeros = torch.zeros_like
            state.update(step=torch.tensor(0.0), exp_avg=zeros(p), exp_avg_sq=zeros(p))
        state["exp_avg_sq"].addcmul_(p.grad, p.grad)  # type: ignore[arg-type]  # times beta2 it is what 1 - beta2 leaves out
        update(p, group)

    loop.optimizer.update = with_the_rest


def _root_of_the_rest(first: Tensor, second: Tensor, number: int, group: dict[str, Any]) -> Tensor:
    beta1, beta2 = group["betas"]
    return first * (beta2**number) ** 0.5 / (1 - beta1**number) / (second.sqrt() + group["eps"])


def _coupled(loop: PublicLoop) -> None:
    loop.optimizer.gradient = lambda p, group: p.grad.add(p, alpha=group["weight_decay"])
    loop.optimizer.decay = lambda p, group: None


SGD = Setting(optimizer=sgd, rate=rate_of_sgd)
OF_THE_UPDATE: tuple[Bug, ...] = (
    third(
        "muon-without-its-scale", "google-deepmind/optax/pull/1249",
        "The factor of a matrix's rate, the root of max(1, rows / columns), was left out.",
        written_line("scale", lambda own: lambda shape, group: 1.0), setting=ORIGINAL, audit="scale-of-shape",
    ),
    third(
        "muon-never-decays", "tinygrad/tinygrad/pull/17708",
        "The decayed weight was assigned to a name that nothing used afterwards.",
        written_line("decay", lambda own: lambda p, group: None), setting=MUON, audit="decay-lost decay",
        pair="bug optimizer-settings",
    ),
    third(
        "muon-without-momentum", "KellerJordan/Muon/pull/4",
        "With nesterov off the momentum was kept and not used: the step was that of the gradient.",
        written_line("direction", lambda own: lambda gradient, buffer, group: gradient),
        setting=Setting(optimizer=MUON.optimizer, frozen=VECTORS, options=(("nesterov", False),)), audit="no-momentum",
    ),
    third(
        "muon-of-fused-projections", "NVIDIA/Megatron-LM/pull/7117",
        "On sharded weights the test that splits queries, keys and values failed, and the three were made orthogonal as one.",
        _queries_keys_and_values_together, setting=MUON, audit="update-departs",
    ),
    third(
        "nesterov-in-place", "google-research/google-research/issues/1711",
        "Nesterov's combination was computed in the buffer of the momentum itself.",
        written_line("direction", lambda own: _velocity_is_the_direction),
        setting=Setting(optimizer=nesterov, rate=rate_of_sgd), audit="state-other-factors beta",
    ),
    third(
        "no-decay-without-momentum", "ml-explore/mlx/issues/440",
        "Without momentum the step returned early, before the line with weight decay.",
        written_line("decayed", lambda own: lambda p, group: p.grad), setting=Setting(optimizer=plain, rate=rate_of_sgd),
        audit="decay-lost decay", pair="bug optimizer-settings",
    ),
    third(
        "velocity-zeroed-each-step", "kozistr/pytorch_optimizer/pull/516",
        "The buffer of the momentum was made anew in each step, so that it held this step's gradient alone.",
        written_line("accumulate", lambda own: _velocity_from_zero), setting=SGD,
        audit="no-momentum state-lost state-other-factors beta",
    ),
    third(
        "decay-after-the-momentum", "pytorch/pytorch/pull/13801",
        "Weight decay was added after the momentum, which so had no part in it.", _decay_after_the_momentum, setting=SGD,
        audit="decay decay-lost decay-in-gradient",
    ),
    third(
        "squares-summed", "fastai/fastbook/pull/342",
        "The running mean of squares took each square whole: 1 - beta was missing.", _sum_of_squares, setting=HAND,
        audit="state-other-factors beta",
    ),
    third(
        "root-of-the-wrong-term", "kozistr/AdaBound-tensorflow/issues/3",
        "The step size took the root of 1 minus the correction, which is beta**step, so that steps vanish.",
        written_line("direction", lambda own: _root_of_the_rest), setting=HAND,
        audit="correction-other no-bias-correction step-count update-departs step-scaled", rows="learning-rate-too-low",
    ),
    third(
        "decays-through-the-moments", "deepspeedai/DeepSpeed/pull/482",
        "With the optimizer on the CPU the decay was that of Adam, in the gradient, where AdamW was asked for.", _coupled,
        setting=HAND, audit="decay-in-gradient decay-lost decay optimizer-other",
    ),
)  # fmt: skip


# ── rates ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _warmed(rate: Callable[[int], float]) -> Callable[[int], float]:
    """A rate of the steps since the warm-up."""
    return lambda step: step / WARMUP if step < WARMUP else rate(step - WARMUP)


def _half_cosine(step: int) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * step / STEPS)


def _constant_until_resumed(step: int) -> float:
    """The run goes on from a checkpoint with another schedule, as it is asked to."""
    return min(1.0, step / WARMUP) if step < AT else 1 - (step - AT) / (STEPS - AT + 1)


COSINE = Setting(rate=LONG)
OF_RATES: tuple[Bug, ...] = (
    third(
        "cosine-cut-at-the-lowest", "EleutherAI/gpt-neox/pull/1008",
        "The cosine went to zero and was cut at the lowest rate, where it should end there.",
        rate_is(_warmed(lambda step: max(0.1, _half_cosine(step)))), setting=COSINE, pair=SCHEDULE,
    ),
    third(
        "decays-during-the-warm-up", "facebookresearch/fairchem/pull/1967",
        "The cosine had begun with the warm-up, so that the rate dropped at its end.",
        rate_is(lambda step: step / WARMUP if step < WARMUP else 0.1 + 0.9 * _half_cosine(step)), setting=COSINE, pair=SCHEDULE,
    ),
    third(
        "warm-up-set-back-to-none", "allenai/open-instruct/pull/579",
        "A test that always passes set the number of warm-up steps back to zero.",
        rate_is(lambda step: usual_rate(step + WARMUP)), setting=WORD, pair=SCHEDULE,
    ),
    third(
        "drops-with-each-step", "Lornatang/SRGAN-PyTorch/issues/1",
        "A schedule that counts epochs was stepped with each batch, and the rate was zero after a few.",
        rate_is(lambda step: min(1.0, step / WARMUP) * 0.1 ** (step // 2)), setting=Setting(rate=TENTHS), pair=SCHEDULE,
        rows="learning-rate-too-low",
    ),
    third(
        "old-schedule-kept", "NVIDIA/Megatron-LM/issues/1138",
        "A resume was told to override the schedule, and the groups' old limits of the rate, which were loaded, went first.",
        rate_is(lambda step: min(1.0, step / WARMUP)), setting=Setting(restarts=True, rate=_constant_until_resumed),
        pair=SCHEDULE,
    ),
)  # fmt: skip


# ── states, restarts and averages ─────────────────────────────────────────────────────────────────────────────────────


def _masters_from_weights(loop: PublicLoop) -> None:
    for p, state in loop.optimizer.state.items():
        state["master"].copy_(p.float())


def _narrow_from_then_on(loop: PublicLoop) -> None:
    @torch.no_grad()
    def narrow(loop: PublicLoop) -> None:
        if loop.step >= AT:
            for p in loop.model.parameters():
                p.copy_(p.bfloat16())

    then("update", narrow)(loop)


def _vectors_counted_anew(loop: PublicLoop) -> None:
    for p in loop.optimizer.param_groups[1]["params"]:
        loop.optimizer.state[p]["step"].fill_(1.0)


def _untied_then_rebuilt(loop: PublicLoop) -> None:
    """The head is a tensor of its own from the start; a checkpoint does not hold it, as it is said to be tied."""
    head = loop.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    loop.optimizer.param_groups[0]["params"].append(head.weight)
    after_restart(lambda loop: head.weight.copy_(loop.model.model.embed_tokens.weight))(loop)


def _weights_of_an_older_file(loop: PublicLoop) -> None:
    kept: list[Tensor] = []

    def keep(loop: PublicLoop) -> None:
        if loop.step == 25:
            kept[:] = [p.detach().clone() for p in loop.model.parameters()]

    def put_back(loop: PublicLoop) -> None:
        for p, old in zip(loop.model.parameters(), kept, strict=True):
            p.copy_(old)

    then("update", keep)(loop)
    after_restart(put_back)(loop)


def _stage_begins_anew(loop: PublicLoop) -> None:
    """Where a second stage begins, the optimizer and its schedule are made again."""
    factor, schedule = loop.factor, loop.schedule

    def anew(step: int) -> None:
        if step == AT:
            loop.optimizer.state.clear()
        schedule(step)

    loop.factor = lambda step: factor(step if step < AT else step - AT + 1)  # type: ignore[method-assign]
    loop.schedule = anew  # type: ignore[method-assign]


@torch.no_grad()
def _exchange(loop: PublicLoop) -> None:
    """Exchange the weights and their average."""
    assert loop.average is not None
    for p, mean in zip(loop.model.parameters(), loop.average.parameters(), strict=True):
        now = p.clone()
        p.copy_(mean)
        mean.copy_(now)


@torch.no_grad()
def _take_the_average(loop: PublicLoop) -> None:
    assert loop.average is not None
    for p, mean in zip(loop.model.parameters(), loop.average.parameters(), strict=True):
        p.copy_(mean)


def _average_from_zero(loop: PublicLoop) -> None:
    assert loop.average is not None
    with torch.no_grad():
        for mean in loop.average.parameters():
            mean.zero_()
    then("before_evaluation", _exchange)(loop)
    then("after_evaluation", _exchange)(loop)


def _average_of_the_start(loop: PublicLoop) -> None:
    loop.averaged = lambda: None  # type: ignore[method-assign]
    then("before_evaluation", _take_the_average)(loop)


AVERAGED = Setting(average=True, evaluates=True)
OF_RESTARTS: tuple[Bug, ...] = (
    third(
        "masters-from-narrow-weights", "TensorAuto/OpenTau/issues/185",
        "Checkpoints held the bfloat16 weights and the moments, and the float32 masters were made of the weights on each resume.",
        after_restart(_masters_from_weights),
        setting=Setting(optimizer=ours("master"), dtype=torch.bfloat16, restarts=True),
        audit="weights-written states-written weight-narrow", rows="resume-changed", pair="bug format",
    ),
    third(
        "masters-off-after-the-resume", "NVIDIA/Model-Optimizer/pull/2322",
        "A resume dropped the float32 masters without a word: from there on the weights were bfloat16 alone.",
        _narrow_from_then_on, setting=RESTARTED, audit="weight-narrow frozen lost-in-dtype weights-written",
        rows="resume-changed lost-updates frozen-parameter", pair="bug format",
    ),
    third(
        "one-group-counted-anew", "NVIDIA/TransformerEngine/issues/1986",
        "The group without decay is empty on some ranks, and a rank that has it loaded the count of such a one: 1.",
        after_restart(_vectors_counted_anew), setting=RESTARTED, audit="count-anew step-count states-written", rows=RESUMED,
    ),
    third(
        "head-made-anew-when-loaded", "shibing624/MedicalGPT/issues/213",
        "The head was saved under another name, not found when the model was loaded, and initialized at random.",
        after_restart(lambda loop: loop.model.lm_head.weight.normal_(0.0, 0.02)), setting=RESTARTED, audit="weights-written",
        rows=RESUMED,
    ),
    third(
        "head-rebuilt-from-the-embedding", "NVIDIA-NeMo/Automodel/pull/2511",
        "The head was said to be tied and was not: checkpoints left it out, and a resume made it a copy of the embedding.",
        _untied_then_rebuilt, setting=Setting(tied=True, restarts=True), audit="tie-cut weights-written", rows=RESUMED,
        pair="missing-part bug other-model",
    ),
    third(
        "old-weights-with-new-states", "NVIDIA/physicsnemo/issues/2012",
        "Loading took the latest file of weights and the latest of states, which were of different steps.",
        _weights_of_an_older_file, setting=RESTARTED, audit="states-of-other-step weights-written", rows=RESUMED,
    ),
    third(
        "optimizer-made-anew", "nianticlabs/manydepth/issues/46",
        "When a part was frozen, the optimizer and the schedule were made anew, and the schedule began with its first step.",
        _stage_begins_anew, audit="states-lost state-lost schedule-anew", rows="recovering-spike", pair="bug optimizer-settings",
    ),
    third(
        "average-from-zero", "PaddlePaddle/Paddle/pull/17677",
        "The average began with zeros, and was evaluated without a division by 1 - decay**steps.", _average_from_zero,
        setting=AVERAGED, audit="evaluated-scaled", pair="evaluation",
    ),
    third(
        "average-of-the-start", "MultimediaTechLab/YOLO/issues/97",
        "The average was never updated, and copied over the weights at each checkpoint, so that training began again.",
        _average_of_the_start, setting=AVERAGED, audit="average-still weights-written", rows="recovering-spike",
        pair="bug evaluation",
    ),
)  # fmt: skip


# ── the data, and evaluations ─────────────────────────────────────────────────────────────────────────────────────────


def _begin_doubled(loop: PublicLoop) -> None:
    read = loop.read

    def doubled(place: int) -> Tensor:
        tokens = read(place)
        return torch.cat([tokens[:, :1], tokens[:, :-1]], 1)

    loop.read = doubled  # type: ignore[method-assign]


def _last_batches_dropped(step: int) -> int:
    """The rest that fills no batch of all ranks is cut off before anything is shuffled."""
    epoch, within = divmod(step - 1, EPOCH - 2)
    return int(torch.randperm(EPOCH - 2, generator=torch.Generator().manual_seed(epoch))[within])


def _drawn_with_replacement(step: int) -> int:
    return int(torch.randint(EPOCH, (), generator=torch.Generator().manual_seed(step)))


def _evaluates_once(loop: PublicLoop) -> None:
    """The iterator is at its end after the first time: the sum of no batches is zero."""
    evaluate, done = loop.evaluate, []

    def once() -> float:
        done.append(evaluate() if not done else 0.0)
        return done[-1]

    loop.evaluate = once  # type: ignore[method-assign]


def _without_the_last_batch(loop: PublicLoop) -> None:
    def evaluate() -> float:
        loop.before_evaluation()
        with torch.no_grad():
            found = loop.mean([loop.held_out(place) for place in range(3)])
        loop.after_evaluation()
        return found

    loop.evaluate = evaluate  # type: ignore[method-assign]


def _times_ranks(loop: PublicLoop) -> None:
    mean = loop.mean
    loop.mean = lambda found: RANKS * mean(found)  # type: ignore[method-assign]


OF_THE_DATA: tuple[Bug, ...] = (
    third(
        "first-token-twice", "unslothai/unsloth/issues/2648",
        "The template had put the token that begins a text, and the tokenizer put it again.", _begin_doubled, pair="data",
    ),
    third(
        "last-batches-never-seen", "NVlabs/VILA/pull/123",
        "What does not fill a batch was cut off before the shuffle: the same samples were left out in every epoch.",
        put("place", lambda loop: _last_batches_dropped), setting=EPOCHS, pair="data-order data",
    ),
    third(
        "drawn-with-replacement", "fchollet/deep-learning-with-python-notebooks/pull/68",
        "The shuffle drew indices with replacement: some samples came often, others never.",
        put("place", lambda loop: _drawn_with_replacement), setting=EPOCHS, rows="repeated-data", pair="data-order data",
    ),
    third(
        "evaluation-at-its-end", "kyutai-labs/moshi-finetune/issues/13",
        "The iterator over the held-out set was made once: from the second evaluation on it was at its end, and the loss was 0.",
        _evaluates_once, setting=EVALUATED, audit="evaluation-departs", pair="evaluation",
    ),
    third(
        "last-batch-not-evaluated", "thuml/Autoformer/issues/104",
        "The loader of the evaluation dropped its last, smaller batch.", _without_the_last_batch, setting=EVALUATED,
        pair="evaluation evaluation-settings",
    ),
    third(
        "evaluation-times-ranks", "huggingface/transformers/issues/35078",
        "The factor that makes up for the mean of gradients over ranks was on the evaluation's loss, too.", _times_ranks,
        setting=EVALUATED, audit="evaluation-scaled", pair="evaluation",
    ),
    third(
        "evaluation-seeds-the-training", "ai2cm/ace/pull/1170",
        "Each evaluation set the generator that the training draws from to one seed, and nothing put it back.",
        then("before_evaluation", lambda loop: torch.manual_seed(0)), setting=DROPPED, pair="bug random-numbers",
    ),
)  # fmt: skip

THIRD: tuple[Bug, ...] = (
    *OF_THE_LOSS, *OF_THE_MODEL, *OF_THE_GRADIENT, *OF_THE_UPDATE, *OF_RATES, *OF_RESTARTS, *OF_THE_DATA,
)  # fmt: skip
