"""Silent faults of public training code, each put into the loop of ``loop.py``.

A row cites the thread it comes from. ``stage`` and ``where`` (a regular expression of names) say what a report should point at.
One process runs the loop: a fault of ranks is done to micro-batches.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from corpus.loop import IGNORED, LENGTH, Loop, Norm, Settings
from corpus.optimizers import AdamW, Group, Lion, Muon, adamw, corrected, nesterov, orthogonal, sgd

Apply = Callable[[Loop], object]
RANKS = 8
HEALTHY_SETTINGS = Settings()


@dataclass(frozen=True)
class Fault:
    """One fault, and where a tool should locate it."""

    name: str
    source: str
    what: str
    stage: str
    where: str
    apply: Apply
    settings: Settings = HEALTHY_SETTINGS


def fault(name: str, thread: str, what: str, stage: str, where: str, apply: Apply, *args: Any, **options: Any) -> Fault:
    return Fault(name, f"https://github.com/{thread}", what, stage, where, apply, *args, **options)


def put(name: str, method: Callable[..., Any]) -> Apply:
    """Replace a method of the loop. The new one gets the loop and the old method first."""

    def apply(loop: Loop) -> None:
        setattr(loop, name, functools.partial(method, loop, getattr(loop, name)))

    return apply


def after(name: str, action: Callable[..., object]) -> Apply:
    """Act after a method of the loop. The action gets the loop and the method's arguments."""

    def method(loop: Loop, old: Callable[..., Any], *args: Any) -> Any:
        result = old(*args)
        with torch.no_grad():
            action(loop, *args)
        return result

    return put(name, method)


def line(name: str, method: Callable[..., Any]) -> Apply:
    """Replace a method of the optimizer. The new one gets the optimizer and the old method first."""

    def apply(loop: Loop) -> None:
        setattr(loop.optimizer, name, functools.partial(method, loop.optimizer, getattr(loop.optimizer, name)))

    return apply


def set_in_blocks(name: str, method: Callable[..., Any]) -> Apply:
    def apply(loop: Loop) -> None:
        for block in loop.model.blocks:
            setattr(block, name, functools.partial(method, block))

    return apply


def named(loop: Loop, part: str) -> list[Any]:
    return [p for name, p in loop.model.named_parameters() if re.search(part, name)]


# ── the loss ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def shifted_by(shift: int) -> Apply:
    return put(
        "summed",
        lambda loop, old, logits, labels: functional.cross_entropy(
            logits[:, : LENGTH - shift].float().flatten(0, 1), labels[:, shift:].flatten(), reduction="sum"
        ),
    )


def smooth_ignored(loop: Loop, old: Any, logits: Tensor, labels: Tensor) -> Tensor:
    log_p, smoothing = logits[:, :-1].float().log_softmax(-1), loop.settings.smoothing
    hard = functional.nll_loss(log_p.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")
    return (1 - smoothing) * hard - smoothing * log_p.mean(-1).sum()


def in_logits_dtype(loop: Loop, old: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


class NarrowGradient(torch.autograd.Function):
    """Round the gradient to bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.bfloat16().to(gradient.dtype)


PADDED, PROMPTS, PACKED = Settings(is_padded=True), Settings(has_prompts=True), Settings(is_packed=True)
LOSS = (
    fault(
        "sum-of-micro-batches", "karpathy/nanoGPT/issues/206", "The loss is not divided by the number of micro-batches: 4 times.",
        "loss", "loss", put("loss", lambda loop, old, *args: old(*args) * loop.settings.micro_batches),
    ),
    fault(
        "labels-shifted-twice", "huggingface/transformers/pull/37830", "Model and loss both shift the labels.",
        "loss", "loss", shifted_by(2),
    ),
    fault(
        "first-tokens-counted", "huggingface/transformers/pull/46204",
        "The denominator counts the first token of each row, which nothing predicts: 15/16.",
        "loss", "loss", put("count", lambda loop, old, labels: int((labels != IGNORED).sum())),
    ),
    fault(
        "mean-of-means", "meta-pytorch/torchtune/pull/1875",
        "Each micro-batch takes its own mean over unpadded tokens; these means are averaged.",
        "loss", "loss",
        put("loss", lambda loop, old, logits, labels, total: loop.summed(logits, labels) / loop.count(labels) / 4), PADDED,
    ),
    fault(
        "ignored-tokens-smoothed", "pytorch/pytorch/issues/73205", "Label smoothing is summed over ignored positions too.",
        "loss", "loss", put("summed", smooth_ignored), Settings(has_prompts=True, smoothing=0.1),
    ),
    fault(
        "loss-in-bfloat16", "Modalities/modalities/pull/464", "The cross entropy is computed in the bfloat16 of the logits.",
        "loss", "loss", put("summed", in_logits_dtype), Settings(autocast=torch.bfloat16),
    ),
    fault(
        "logit-gradient-in-bfloat16", "NVIDIA/TransformerEngine/pull/3193",
        "The fused loss keeps the gradient of float32 logits in bfloat16.",
        "gradient", "", put("summed", lambda loop, old, logits, labels: old(NarrowGradient.apply(logits), labels)),
    ),
    fault(
        "padding-counted", "EleutherAI/gpt-neo/pull/45", "Padding tokens count in the loss.",
        "data", "labels", put("labels", lambda loop, old, tokens: tokens.clone()), PADDED,
    ),
)  # fmt: skip


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def half_norm(norm: Any, x: Tensor) -> Tensor:
    variance = x.half().square().mean(-1, keepdim=True).float()
    return norm.weight * (x * (variance + 1e-6).rsqrt())


class NormOfOtherRows(torch.autograd.Function):
    """RMS norm. Its backward subtracts the mean of the previous position."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        inverse = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, gain, inverse)
        return gain * x * inverse

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, gain, inverse = ctx.saved_tensors
        scaled = gain * gradient
        means = (scaled * x).mean(-1, keepdim=True).roll(1, -2)
        return inverse * scaled - inverse**3 * x * means, (gradient * x * inverse).flatten(0, -2).sum(0)


def set_norms(forward: Callable[[Any, Tensor], Tensor]) -> Apply:
    def apply(loop: Loop) -> None:
        for norm in loop.model.modules():
            if isinstance(norm, Norm):
                norm.forward = functools.partial(forward, norm)

    return apply


class MaskedForward(torch.autograd.Function):
    """Attention with a mask. Its backward uses the causal mask only."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, float("-inf"))
        output = scores.softmax(-1) @ v
        ctx.save_for_backward(q, k, v, output, scores.logsumexp(-1, keepdim=True))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, log_sums = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[-1])
        p = ((q @ k.mT) * scale - log_sums).exp().tril()
        of_scores = p * (gradient @ v.mT - (gradient * output).sum(-1, keepdim=True)) * scale
        return of_scores @ k, of_scores.mT @ q, p.mT @ gradient, None


def untie(loop: Loop) -> None:
    loop.model.head.weight = nn.Parameter(loop.model.head.weight.detach().clone())
    loop.optimizer.param_groups[0]["params"].append(loop.model.head.weight)


def detach_mlp(loop: Loop) -> None:
    block = loop.model.blocks[1]
    block.mlp = lambda x: type(block).mlp(block, x).detach()


def recompute_with_other_dropout(loop: Loop) -> None:
    for block in loop.model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def half_query_key_norm(x: Tensor) -> Tensor:
    x = x.half()
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


MODEL = (
    fault(
        "sees-the-future", "huggingface/transformers/issues/48745", "Attention has no causal mask.",
        "forward", "logits", put("mask", lambda loop, old, length: torch.ones(length, length, dtype=torch.bool)),
    ),
    fault(
        "frequencies-in-bfloat16", "huggingface/transformers/pull/29285", "model.bfloat16() rounds the rotary frequencies.",
        "forward", "logits", lambda loop: setattr(loop.model, "frequencies", loop.model.frequencies.bfloat16().float()),
    ),
    fault(
        "norms-in-float16", "young-geng/EasyLM/pull/50", "RMS norms square and average in float16.",
        "forward", "logits", set_norms(half_norm),
    ),
    fault(
        "mask-lost-in-backward", "Dao-AILab/flash-attention/issues/2424", "The backward pass of attention has no document mask.",
        "gradient", "blocks|embedding", set_in_blocks("attend", lambda block, *args: MaskedForward.apply(*args)), PACKED,
    ),
    fault(
        "norm-backward-of-other-rows", "BobMcDear/attorch/issues/17", "The backward of RMS norms uses another row.",
        "gradient", "blocks|embedding", set_norms(lambda norm, x: NormOfOtherRows.apply(x, norm.weight)),
    ),
    fault(
        "part-detached", "Cadene/murel.bootstrap.pytorch/issues/7", "The output of an MLP is detached.",
        "gradient", r"blocks.1.(up|down|mlp_norm)", detach_mlp,
    ),
    fault(
        "recomputed-with-other-dropout", "allenai/OLMo-core/pull/828", "Recomputed blocks draw other dropout masks.",
        "gradient", "", recompute_with_other_dropout, Settings(dropout=0.2),
    ),
    fault(
        "token-taken-for-padding", "ibalazevic/TuckER/issues/17", "padding_idx is a real token: its embedding gets no gradient.",
        "gradient", "embedding", lambda loop: setattr(loop.model.embedding, "padding_idx", 20),
    ),
    fault(
        "untied", "facebookresearch/lingua/pull/75", "Tied weights become two tensors when the model is wrapped.",
        "settings", r"^head", untie, Settings(is_tied=True),
    ),
    fault(
        "every-step-skipped", "unslothai/unsloth-zoo/issues/866",
        "A norm of queries and keys overflows in the float16 backward at any loss scale: every step is skipped.",
        "gradient", "query|key", set_in_blocks("query_key_norm", lambda block, x: half_query_key_norm(x)),
        Settings(autocast=torch.float16, loss_scale=65536.0, has_query_key_norm=True),
    ),
)  # fmt: skip


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def before_backward(action: Callable[[Loop, int], object]) -> Apply:
    def backward(loop: Loop, old: Any, loss: Tensor, number: int) -> None:
        action(loop, number)
        old(loss, number)

    return put("backward", backward)


def scale_gradients(factor: float, part: str = "") -> Callable[..., object]:
    """Return an action that multiplies the gradients of the parameters whose name matches ``part``."""

    def action(loop: Loop, *args: Any) -> None:
        for p in named(loop, part):
            if p.grad is not None:
                p.grad.mul_(factor)

    return action


def round_gradients(dtype: torch.dtype, part: str = "") -> Callable[..., object]:
    def action(loop: Loop, *args: Any) -> None:
        for p in named(loop, part):
            p.grad.copy_(p.grad.to(dtype))

    return action


def reduce_head_early(loop: Loop) -> None:
    """Reduce the gradient of the head before the last micro-batch has added to it."""
    head, reduced = loop.model.head.weight, []
    before_backward(lambda loop, number: reduced.append(head.grad.clone()) if number == 3 else None)(loop)
    after("before_clip", lambda loop: head.grad.copy_(reduced.pop()))(loop)


def step_within(loop: Loop, loss: Tensor, number: int) -> None:
    if number < 3:
        loop.update()
        loop.zero()


def use_float16_without_a_scale(loop: Loop) -> None:
    """A step of 256 times more tokens has gradients as many times smaller."""
    put("backward", lambda loop, old, loss, number: old(loss / 256, number))(loop)
    after("before_clip", scale_gradients(256.0))(loop)


def replace_head(loop: Loop) -> None:
    loop.model.head.weight = nn.Parameter(loop.model.head.weight.detach().clone())


UNCLIPPED = Settings(clip=0.0)
GRADIENT = (
    fault(
        "never-zeroed", "tenstorrent/tt-blacksmith/pull/711", "Nothing zeroes the gradients after a step.",
        "gradient", "", put("zero", lambda loop, old: None),
    ),
    fault(
        "zeroed-within-accumulation", "tatsu-lab/alpaca_farm/issues/57",
        "Gradients are zeroed before each micro-batch: only the last one counts.",
        "gradient", "", before_backward(lambda loop, number: loop.model.zero_grad()),
    ),
    fault(
        "doubled-by-each-micro-batch", "NVIDIA/Megatron-LM/issues/6660",
        "A buffer of the MLPs is added to itself after each micro-batch: micro-batches count 16, 8, 4, 2 times.",
        "gradient", r"up|down", after("backward", lambda loop, *args: scale_gradients(2.0, r"(up|down).weight")(loop)),
    ),
    fault(
        "head-reduced-early", "NVIDIA/Megatron-LM/issues/1012", "The last part of the head's gradient comes after the reduction.",
        "gradient", "head", reduce_head_early,
    ),
    fault(
        "norms-averaged-over-ranks", "EleutherAI/gpt-neox/pull/1259",
        "Sequence-parallel ranks average the gradients of norms, which they should sum: 1/4.",
        "gradient", "norm", after("before_clip", scale_gradients(0.25, "norm")),
    ),
    fault(
        "summed-in-bfloat16", "linkedin/Liger-Kernel/pull/830", "The gradient of the head is accumulated in bfloat16.",
        "gradient", "head", after("backward", round_gradients(torch.bfloat16, "head")),
    ),
    fault(
        "reduced-in-float16", "deepspeedai/DeepSpeed/issues/2071", "Gradients of a bfloat16 model are reduced in float16.",
        "gradient", "", after("before_clip", round_gradients(torch.float16)), Settings(autocast=torch.bfloat16),
    ),
    fault(
        "float16-without-a-scale", "engichang1467/Open-Rig3R/issues/35", "Autocast takes float16 and nothing scales the loss.",
        "gradient", "", use_float16_without_a_scale, Settings(autocast=torch.float16),
    ),
    fault(
        "divided-by-the-next-scale", "deepspeedai/DeepSpeed/pull/8588",
        "Where the loss scale grows, it grows before gradients are divided by it: 1/2.",
        "gradient", "", after("before_clip", lambda loop: scale_gradients(0.5)(loop) if loop.step % 3 == 0 else None),
        Settings(loss_scale=4096.0, growth_interval=3, clip=0.0),
    ),
    fault(
        "divided-by-a-scale-never-applied", "deepspeedai/DeepSpeed/pull/7839",
        "Gradients are divided by the loss scale of 65,536, which multiplied no loss.",
        "gradient", "", after("before_clip", scale_gradients(1 / 65536)),
    ),
    fault(
        "steps-with-each-micro-batch", "jiaweizzhao/GaLore/issues/78",
        "A hook steps with each micro-batch, whose loss is a quarter of the step's.",
        "forward", "logits", after("backward", step_within), UNCLIPPED,
    ),
    fault(
        "optimizer-has-other-tensors", "pytorch/pytorch/issues/149205", "The optimizer holds a head that the model replaced.",
        "settings", "head|unknown", replace_head,
    ),
)  # fmt: skip


# ── clipping ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def norm_of(params: list[Any]) -> Tensor:
    return torch.stack([p.grad.norm() for p in params]).norm()


def clipped_by(norm: Callable[[list[Any]], Tensor], limit: float = 1.0) -> Apply:
    """Clip by another norm. ``limit`` bounds the factor."""

    def clip(loop: Loop, old: Any) -> Tensor:
        params = loop.trained()
        value = norm(params)
        for p in params:
            p.grad.mul_((loop.settings.clip / (value + 1e-6)).clamp(max=limit))
        return value

    return put("clip", clip)


def halves(params: list[Any]) -> tuple[list[Any], list[Any]]:
    return params[: len(params) // 2], params[len(params) // 2 :]


def clip_each_half(loop: Loop, old: Any) -> Tensor:
    return torch.stack([nn.utils.clip_grad_norm_(half, loop.settings.clip) for half in halves(loop.trained())])[0]


def float16_norm(params: list[Any]) -> Tensor:
    """Sum squares in float16. Gradients of a larger loss are 1,024 times as large."""
    return torch.stack([(1024 * p.grad).half().square().sum() for p in params]).sum().sqrt().float() / 1024


def clip_scaled(loop: Loop) -> None:
    put("before_clip", lambda loop, old: None)(loop)
    after("clip", lambda loop: loop.scaler.unscale_(loop.optimizer))(loop)


def clip_each_micro_batch(loop: Loop, loss: Tensor, number: int) -> None:
    if number < 3:
        nn.utils.clip_grad_norm_(loop.trained(), loop.settings.clip)


CLIPPING = (
    fault(
        "clipped-each-micro-batch", "huggingface/transformers/issues/986", "Gradients are clipped after each micro-batch.",
        "gradient", "", after("backward", clip_each_micro_batch), Settings(clip=0.2),
    ),
    fault(
        "clipped-scaled-gradients", "harubaru/waifu-diffusion/issues/64", "Gradients are clipped before they are unscaled.",
        "clip", "", clip_scaled, Settings(loss_scale=4096.0),
    ),
    fault(
        "never-clipped", "NVIDIA/OpenSeq2Seq/pull/192", "Gradients are not clipped.",
        "clip", "", put("clip", lambda loop, old: norm_of(loop.trained())),
    ),
    fault(
        "norm-of-one-stage", "pytorch/torchtitan/issues/596", "Each pipeline stage clips by the norm of its own parameters.",
        "clip", "", put("clip", clip_each_half),
    ),
    fault(
        "replicas-counted-often", "mindspore-ai/hyper-parallel/issues/526",
        "The squares of vectors, which every shard holds, are summed over all shards.",
        "clip", "", clipped_by(lambda ps: torch.stack([p.grad.norm() * (1 if p.ndim > 1 else RANKS**0.5) for p in ps]).norm()),
    ),
    fault(
        "norm-overflows", "tracel-ai/burn/issues/5699", "The norm is summed in float16 and overflows: the factor is 0.",
        "clip", "", clipped_by(float16_norm),
    ),
    fault(
        "clip-factor-above-one", "DingfanChen/GS-WGAN/issues/5", "The factor has no limit of 1: small gradients are scaled up.",
        "clip", "", clipped_by(norm_of, limit=math.inf), Settings(clip=20.0),
    ),
)  # fmt: skip


# ── the optimizer's step ──────────────────────────────────────────────────────────────────────────────────────────────


def direction(formula: Callable[[Tensor, Tensor, int, Group], Tensor]) -> Apply:
    """Replace what the rate multiplies, given both moments."""
    return line("direction", lambda optimizer, old, *args: formula(*args))


def epsilon_inside(first: Tensor, second: Tensor, number: int, group: Group) -> Tensor:
    m, v = corrected(first, second, number, group)
    return m / (v + group["eps"]).sqrt()


def epsilon_before_correction(first: Tensor, second: Tensor, number: int, group: Group) -> Tensor:
    beta1, beta2 = group["betas"]
    return first / (1 - beta1**number) * (1 - beta2**number) ** 0.5 / (second.sqrt() + group["eps"])


def correct_in_place(first: Tensor, second: Tensor, number: int, group: Group) -> Tensor:
    beta1, beta2 = group["betas"]
    return first.div_(1 - beta1**number) / ((second / (1 - beta2**number)).sqrt() + group["eps"])


def float16_quotient(first: Tensor, second: Tensor, number: int, group: Group) -> Tensor:
    m, v = corrected(first, second, number, group)
    return (m.half() / (v.half().sqrt() + torch.tensor(group["eps"]).half())).float()


def count_a_step_before_the_first(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        for p in group["params"]:
            zeros = torch.zeros_like(p)
            loop.optimizer.state[p].update(step=torch.tensor(1.0), exp_avg=zeros, exp_avg_sq=zeros.clone())


def couple_decay(loop: Loop) -> None:
    """Add the decay to the gradient, as Adam does."""
    optimizer = loop.optimizer
    if isinstance(optimizer, Lion):
        optimizer.gradient = lambda p, group: p.grad.add(p, alpha=group["weight_decay"])
    else:
        optimizer.gradient = lambda weight, gradient, group: gradient.add(weight, alpha=group["weight_decay"])
    optimizer.decay = lambda p, group: None


def sum_squares(optimizer: AdamW, old: Any, p: Tensor, group: Group) -> None:
    """Add each square whole, not 1 - beta2 of it."""
    optimizer.state[p] or old(p, {**group, "lr": 0.0})
    optimizer.state[p]["exp_avg_sq"].addcmul_(p.grad, p.grad)
    old(p, group)


def decay_frozen(loop: Loop) -> None:
    embedding = loop.model.embedding.weight
    loop.optimizer.param_groups[0]["params"].append(embedding)
    after("before_clip", lambda loop: setattr(embedding, "grad", torch.zeros_like(embedding)))(loop)


def update_decayed_only(optimizer: AdamW, old: Any, p: Tensor, group: Group) -> None:
    if group["weight_decay"]:
        old(p, group)


def orthogonalize_together(loop: Loop) -> None:
    """Treat query, key and value as one fused matrix."""
    fused = {id(p): [b.query.weight, b.key.weight, b.value.weight] for b in loop.model.blocks for p in
             (b.query.weight, b.key.weight, b.value.weight)}  # fmt: skip

    def of_fused(optimizer: Muon, old: Any, p: Tensor, update: Tensor) -> Tensor:
        if id(p) not in fused:
            return old(p, update)
        stacked = torch.cat([q.grad if q is not p else update for q in fused[id(p)]])
        return orthogonal(stacked).chunk(3)[[q is p for q in fused[id(p)]].index(True)]

    line("direction", of_fused)(loop)


def flatten_parameters(loop: Loop) -> None:
    """Give Muon one flat tensor, as ZeRO does: it sees no matrix."""
    params = list(loop.model.parameters())
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in params]))
    for p, part in zip(params, flat.detach().split([p.numel() for p in params]), strict=True):
        p.data = part.view_as(p)
    loop.optimizer = Muon([{"params": [flat], "lr": loop.settings.lr, "weight_decay": 0.0}])

    def update(loop: Loop, old: Any) -> None:
        flat.grad = torch.cat([p.grad.flatten() for p in params])
        old()

    put("update", update)(loop)
    after("zero", lambda loop: loop.model.zero_grad())(loop)


def forget_masters(optimizer: AdamW, old: Any, p: Tensor, group: Group) -> None:
    old(p, group)
    optimizer.state[p]["master"].copy_(p)


HAND, WITH_SGD, WITH_MUON = (
    Settings(optimizer=adamw),
    Settings(optimizer=sgd, lr=0.05),
    Settings(optimizer=Muon, lr=0.02),
)
NESTEROV = replace(WITH_SGD, optimizer=nesterov)
MASTERS = Settings(optimizer=adamw, dtype=torch.bfloat16, lr=1e-3, rate_factor=lambda step: 1.0)
STEP = (
    fault(
        "adam-decays-like-adamw", "flagos-ai/FlagGems/issues/4988", "Adam and AdamW share a kernel: the decay is the other's.",
        "state", r"exp_avg", couple_decay, replace(HAND, group_options=(("weight_decay", 0.1),)),
    ),
    fault(
        "decay-without-the-weight", "e-sensing/torchopt/pull/14", "lr times decay is subtracted, not times the weight.",
        "weights", r"^(?!.*norm)", line("decay", lambda optimizer, old, p, group: p.sub_(group["lr"] * group["weight_decay"])),
        HAND,
    ),
    fault(
        "decay-grows-weights", "chainer/chainer/issues/261", "The gradient of the penalty is subtracted.",
        "state", r"^(?!.*norm)", line("decayed", lambda optimizer, old, p, group: p.grad.sub(p, alpha=group["weight_decay"])),
        WITH_SGD,
    ),
    fault(
        "decay-on-all-norms", "ServiceNow/Fast-LLM/issues/542", "Weight decay is applied to the gains of norms.",
        "settings", r"norm.*weight_decay", lambda loop: loop.optimizer.param_groups[1].update(weight_decay=0.1),
    ),
    fault(
        "lion-decays-in-the-gradient", "bitsandbytes-foundation/bitsandbytes/issues/1992",
        "Lion's decay is added to the gradient, before the sign.",
        "state", r"^(?!.*norm)", couple_decay, Settings(optimizer=Lion),
    ),
    fault(
        "epsilon-inside-the-root", "CyberZHG/keras-radam/issues/29", "Epsilon is added under the root.",
        "weights", "", direction(epsilon_inside), HAND,
    ),
    fault(
        "epsilon-before-correction", "tensorflow/tensorflow/issues/9047", "Epsilon is added before the bias correction.",
        "weights", "", direction(epsilon_before_correction), replace(HAND, group_options=(("eps", 1e-3),)),
    ),
    fault(
        "epsilon-zero-in-float16", "google-deepmind/optax/issues/1754", "1e-8 is 0 in float16: NaN where a gradient is zero.",
        "weights", "", direction(float16_quotient), replace(HAND, dtype=torch.float16, lr=1e-3),
    ),
    fault(
        "corrected-in-place", "frgfm/holocron/issues/1", "The bias correction overwrites the first moment.",
        "state", "exp_avg$", direction(correct_in_place), HAND,
    ),
    fault(
        "betas-turned-round", "mila-iqia/blocks/issues/1159", "The optimizer takes 1 - beta for beta.",
        "state", "exp_avg",
        line("update", lambda optimizer, old, p, group: old(p, {**group, "betas": tuple(1 - beta for beta in group["betas"])})),
        HAND,
    ),
    fault(
        "squares-summed", "fastai/fastbook/pull/342", "The second moment takes each square whole: 1 - beta2 is missing.",
        "state", "", line("update", sum_squares), HAND,
    ),
    fault(
        "counted-before-the-first", "NVIDIA/Megatron-LM/pull/5976", "A step that only made the states is counted.",
        "state", "step", count_a_step_before_the_first, HAND,
    ),
    fault(
        "one-rate-for-all-groups", "LiyuanLucasLiu/RAdam/issues/24", "All groups take the first group's rate.",
        "weights", "embedding", line("rate", lambda optimizer, old, group: float(optimizer.param_groups[0]["lr"])),
        replace(HAND, embedding_rate=0.1),
    ),
    fault(
        "listed-twice", "pytorch/pytorch/issues/40967", "A parameter is twice in a group and is updated twice a step.",
        "state", "embedding", lambda loop: loop.optimizer.param_groups[0]["params"].append(loop.model.head.weight),
        replace(HAND, is_tied=True),
    ),
    fault(
        "undecayed-not-updated", "PaddlePaddle/PaddleCustomDevice/pull/1202", "The kernel skips parameters without decay.",
        "state", "norm", line("update", update_decayed_only), HAND,
    ),
    fault(
        "frozen-parts-decay", "ahrefs/ocannl/issues/673", "Frozen parameters are stepped with zero gradients, and decay.",
        "settings", "embedding", decay_frozen, Settings(frozen=("embedding",)),
    ),
    fault(
        "velocity-never-decays", "ooples/AiDotNet/issues/2008", "The momentum multiplies the gradient, not the velocity.",
        "state", "momentum_buffer",
        line("accumulate", lambda optimizer, old, velocity, gradient, group: velocity.add_(gradient, alpha=group["momentum"])),
        WITH_SGD,
    ),
    fault(
        "nesterov-adds-the-momentum", "PaddlePaddle/Paddle/pull/12231", "A sign is lost: the momentum is added to the weights.",
        "weights", "",
        line("direction", lambda optimizer, old, gradient, velocity, group: gradient.sub(velocity, alpha=group["momentum"])),
        NESTEROV,
    ),
    fault(
        "muon-without-its-scale", "google-deepmind/optax/pull/1249", "The factor sqrt(max(1, rows / columns)) is missing.",
        "weights", "up|embedding|head", line("scale", lambda optimizer, old, shape: 1.0), WITH_MUON,
    ),
    fault(
        "muon-of-fused-projections", "NVIDIA/Megatron-LM/pull/7117", "Query, key and value are orthogonalized as one matrix.",
        "weights", "query|key|value", orthogonalize_together, WITH_MUON,
    ),
    fault(
        "muon-on-flat-tensors", "deepspeedai/DeepSpeed/issues/8461", "Muon gets one flat partition and orthogonalizes nothing.",
        "settings", "", flatten_parameters, WITH_MUON,
    ),
    fault(
        "norms-stay-at-one", "vllm-project/speculators/pull/765",
        "Without masters, bfloat16 gains of norms stay exactly 1.0 at this rate.",
        "weights", "norm", line("update", forget_masters), MASTERS,
    ),
    fault(
        "rate-after-the-cure", "areal-project/AReaL/issues/1634",
        "Masters are introduced and the rate, tuned without them, is kept: 6 times what they need.",
        "settings", "lr", put("factor", lambda loop, old, step: 6.0), MASTERS,
    ),
)  # fmt: skip


# ── weights and states between steps, restarts, averages ──────────────────────────────────────────────────────────────


def states_of(loop: Loop, *keys: str) -> list[Tensor]:
    return [state[key] for state in loop.optimizer.state.values() for key in keys]


def round_to_half(tensors: Any) -> None:
    for tensor in tensors:
        tensor.copy_(tensor.detach().half())


def restart_count_of_vectors(loop: Loop) -> None:
    for p in loop.optimizer.param_groups[1]["params"]:
        loop.optimizer.state[p]["step"].fill_(0.0)


def restart_count_of_kernel(loop: Loop) -> None:
    """The kernel counts the steps of this process."""
    line("direction", lambda optimizer, old, first, second, number, group: old(
        first, second, number if loop.step < loop.resume_step else loop.step - loop.resume_step + 1, group))(loop)  # fmt: skip


def shift_states(loop: Loop) -> None:
    params = [p for group in loop.optimizer.param_groups for p in group["params"]]
    for p, following in itertools.pairwise(params):
        for key in ("exp_avg", "exp_avg_sq"):
            state = loop.optimizer.state[following][key]
            loop.optimizer.state[p][key] = state.clone() if state.shape == p.shape else torch.zeros_like(p)


def go_back_to_start(loop: Loop) -> None:
    """Load the oldest file of weights beside the newest file of states."""
    start = [p.detach().clone() for p in loop.model.parameters()]
    after("resume", lambda loop: [p.copy_(old) for p, old in zip(loop.model.parameters(), start, strict=True)])(loop)


def average_in_bfloat16(loop: Loop) -> None:
    loop.average.bfloat16()

    def update(loop: Loop, old: Any) -> None:
        for mean, p in loop.averages():
            mean.lerp_(p.bfloat16(), 0.05)

    put("update_average", update)(loop)


def take_the_average(loop: Loop) -> None:
    for mean, p in loop.averages():
        p.copy_(mean)


RESUMED, RESUMED_HAND = Settings(resumes=True), replace(HAND, resumes=True)
RESTARTS = (
    fault(
        "states-lost-at-resume", "EvolvingLMMs-Lab/OneVision-Encoder/pull/65", "Checkpoints do not hold the optimizer's states.",
        "resume", "exp_avg|step", after("resume", lambda loop: loop.optimizer.state.clear()), RESUMED,
    ),
    fault(
        "states-cast-to-float16", "facebookresearch/fairscale/issues/50", "Loading casts the states to float16 and back.",
        "resume", "exp_avg", after("resume", lambda loop: round_to_half(states_of(loop, "exp_avg", "exp_avg_sq"))), RESUMED,
    ),
    fault(
        "weights-cast-to-float16", "facebookresearch/metaseq/pull/254", "A resume passes the weights through float16.",
        "resume", "weight$", after("resume", lambda loop: round_to_half(loop.model.parameters())), RESUMED,
    ),
    fault(
        "states-of-the-next-parameter", "wochenlong/lora-scripts-next/pull/320", "Parameters get the states of the next one.",
        "resume", "exp_avg", after("resume", shift_states), RESUMED,
    ),
    fault(
        "one-group-counted-anew", "NVIDIA/TransformerEngine/issues/1986", "An empty rank saves the count of vectors as 0.",
        "resume", "norm.*step", after("resume", restart_count_of_vectors), RESUMED,
    ),
    fault(
        "kernel-counts-anew", "deepspeedai/DeepSpeed/pull/564", "The kernel's own count of steps restarts after a resume.",
        "weights", "", restart_count_of_kernel, RESUMED_HAND,
    ),
    fault(
        "old-weights-with-new-states", "NVIDIA/physicsnemo/issues/2012", "Weights and states are of different steps.",
        "resume", "weight$", go_back_to_start, RESUMED,
    ),
    fault(
        "masters-from-narrow-weights", "TensorAuto/OpenTau/issues/185", "A resume makes masters from bfloat16 weights.",
        "resume", "master",
        after("resume", lambda loop: [s["master"].copy_(p) for p, s in loop.optimizer.state.items()]),
        replace(MASTERS, resumes=True),
    ),
    fault(
        "loss-scale-not-saved", "huggingface/lerobot/issues/4652", "The scaler is not in the checkpoint and starts at 65,536.",
        "resume", "loss_scale", after("resume", lambda loop: setattr(loop, "scaler", loop.new_scaler(65536.0))),
        Settings(resumes=True, loss_scale=1024.0, autocast=torch.float16),
    ),
    fault(
        "average-in-bfloat16", "d8ahazard/sd_dreambooth_extension/pull/1415", "The average is bfloat16 and loses most updates.",
        "average", "average", average_in_bfloat16, Settings(has_average=True),
    ),
    fault(
        "continues-from-the-average", "PKU-YuanGroup/Open-Sora-Plan/issues/186",
        "The average replaces the weights for an evaluation, and nothing restores them.",
        "evaluation", "loss", after("before_evaluation", take_the_average), Settings(has_average=True, evaluates=True),
    ),
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (*LOSS, *MODEL, *GRADIENT, *CLIPPING, *STEP, *RESTARTS)
