"""Unusual training loops in which nothing is wrong. No check, gauge, alarm or comparison should accuse them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from corpus.loop import (
    BETAS,
    IGNORED,
    WIDTH,
    AdamW,
    Adapter,
    Groups,
    Lion,
    Loop,
    Muon,
    Settings,
    adamw,
    nesterov,
    sgd,
)

Apply = Callable[[Loop], object]
USUAL = Settings()


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


def no_change(loop: Loop) -> None:
    """Train as the settings say."""


@dataclass(frozen=True)
class Healthy:
    """One healthy loop."""

    name: str
    settings: Settings = USUAL
    apply: Apply = no_change

    def loop(self, steps: int) -> Loop:
        loop = Loop(self.settings, steps)
        self.apply(loop)
        return loop


# ── optimizers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_torch(kind: Any, **options: Any) -> Callable[[Groups], torch.optim.Optimizer]:
    return functools.partial(kind, **options)


def of_ours(kind: Any, storage: str, **options: Any) -> Callable[[Groups], torch.optim.Optimizer]:
    return functools.partial(kind, storage=storage, compile=False, **options)


class Lamb(torch.optim.Optimizer):
    """LAMB (https://arxiv.org/abs/1904.00962): Adam's step times the ratio of the norms of weight and step."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"betas": BETAS, "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                mean = state["exp_avg"].lerp_(p.grad, 1 - beta1) / (1 - beta1 ** state["step"])
                square = state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = mean / ((square / (1 - beta2 ** state["step"])).sqrt() + group["eps"])
                update += group["weight_decay"] * p
                p.sub_(update, alpha=group["lr"] * float(p.norm() / update.norm()))


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (https://arxiv.org/abs/2405.15682). Evaluations see the average, training the interpolation."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"beta": 0.9, "k": 0})

    def move(self, weight: float) -> None:
        with torch.no_grad():
            for p, state in self.state.items():
                p.lerp_(state["z"], weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            beta, share, lr = group["beta"], 1 / group["k"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share).add_(p.grad, alpha=lr * (beta * (1 - share) - 1))
                z.sub_(p.grad, alpha=lr)


def evaluate_schedule_free(loop: Loop) -> None:
    after("before_evaluation", lambda loop: loop.optimizer.move(1 - 1 / 0.9))(loop)
    after("after_evaluation", lambda loop: loop.optimizer.move(1 - 0.9))(loop)


class Cautious(AdamW):
    """AdamW that leaves out what points against the gradient (https://arxiv.org/abs/2411.16085)."""

    def direction(self, first: Tensor, second: Tensor, gradient: Tensor, eps: float) -> Tensor:
        update = super().direction(first, second, gradient, eps)
        mask = (update * gradient > 0).float()
        return update * mask / mask.mean().clamp_min(1e-3)


def with_adamw(muon: Callable[[Groups], torch.optim.Optimizer]) -> Apply:
    """Train the matrices of blocks with Muon and the rest with AdamW. One step is a step of both."""

    def apply(loop: Loop) -> None:
        matrices = [p for p in loop.model.blocks.parameters() if p.ndim == 2]
        rest = [p for p in loop.model.parameters() if not any(p is matrix for matrix in matrices)]
        loop.optimizer = muon([{"params": matrices, "weight_decay": 0.1, "lr": loop.settings.lr}])
        other = torch.optim.AdamW(rest, lr=loop.settings.lr, betas=BETAS)
        loop.others = [other]
        after("update", lambda loop: (other.step(), other.zero_grad()))(loop)

    return apply


def keep_row_norms(loop: Loop) -> None:
    """Set the norms of rows back after each step (nGPT, https://arxiv.org/abs/2410.01131)."""
    matrices = [p for p in loop.model.blocks.parameters() if p.ndim == 2]
    norms = [p.detach().norm(dim=1, keepdim=True) for p in matrices]

    def normalize(loop: Loop) -> None:
        for p, norm in zip(matrices, norms, strict=True):
            p.mul_(norm / p.norm(dim=1, keepdim=True))

    after("update", normalize)(loop)


def lookahead(loop: Loop) -> None:
    """Go half of the way back to the slow weights every second step (https://arxiv.org/abs/1907.08610)."""
    slow = [p.detach().clone() for p in loop.model.parameters()]

    def back(loop: Loop) -> None:
        if loop.step % 2 == 0:
            for old, p in zip(slow, loop.model.parameters(), strict=True):
                p.copy_(old.lerp_(p, 0.5))

    after("update", back)(loop)


def add_head_later(loop: Loop) -> None:
    """Train the head from the second step on, in its own group."""
    head = loop.model.head.weight.requires_grad_(False)
    for group in loop.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not head]

    def add(loop: Loop, step: int) -> None:
        if step == 2:
            head.requires_grad_(True)
            loop.optimizer.add_param_group({"params": [head], "weight_decay": 0.1, "lr": loop.settings.lr})

    after("schedule", add)(loop)


def closure(loop: Loop) -> None:
    """Compute the passes in the optimizer's closure."""

    def one_step(loop: Loop, old: Any) -> Tensor:
        losses = []

        def passes() -> Tensor:
            loop.zero()
            tokens = loop.read(loop.place(loop.step))
            labels = loop.labels(tokens)
            loss = loop.loss(loop.logits(tokens), labels, loop.count(labels))
            loss.backward()
            losses.append(loss.detach())
            loop.clip()
            return loss

        loop.schedule(loop.step)
        loop.optimizer.step(passes)
        return losses[0]

    put("one_step", one_step)(loop)


def sharpness_aware(loop: Loop) -> None:
    """Take the gradient where the first gradient leads uphill, and step from the old weights (davda54/sam)."""

    def second_pass(loop: Loop) -> None:
        params, tokens = list(loop.model.parameters()), loop.read(loop.place(loop.step))
        labels, norm = loop.labels(tokens), nn.utils.get_total_norm([p.grad for p in params])
        old = [p.detach().clone() for p in params]
        for p in params:
            p.data.add_(p.grad, alpha=0.02 / float(norm))
        loop.zero()
        with torch.enable_grad():
            loop.loss(loop.logits(tokens), labels, loop.count(labels)).backward()
        for p, weight in zip(params, old, strict=True):
            p.data.copy_(weight)

    after("before_clip", second_pass)(loop)


# ── gradients, clipping, skipped steps ────────────────────────────────────────────────────────────────────────────────


def add_noise(loop: Loop) -> None:
    """Add gradient noise that fades (https://arxiv.org/abs/1511.06807)."""
    for p in loop.trained():
        p.grad.add_(torch.randn_like(p), alpha=1e-3 / (1 + loop.step) ** 0.275)


def clip_values(loop: Loop, old: Any) -> Tensor:
    norm = nn.utils.get_total_norm([p.grad for p in loop.trained()])
    nn.utils.clip_grad_value_(loop.trained(), 0.02)
    return norm


def skip_second_step(loop: Loop, old: Any) -> None:
    """Leave out a step, as loops do whose norm is far above the usual."""
    if loop.step != 2:
        old()


def overflow_once(loop: Loop, loss: Tensor, number: int) -> None:
    """Overflow one element in the second step: the scaler halves its scale and skips that step, as it should."""
    if loop.step == 2 and number == 0:
        loop.model.head.weight.grad[0, 0] = torch.inf


# ── the loss and the model ────────────────────────────────────────────────────────────────────────────────────────────


def z_loss(loop: Loop, old: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return old(logits, labels) + 1e-4 * logits[:, :-1].float().logsumexp(-1).square().sum()


def distill(loop: Loop) -> None:
    """Add the distance to a teacher's distribution."""
    teacher, inputs = copy.deepcopy(loop.model).eval().requires_grad_(False), []
    after("logits", lambda loop, tokens: inputs.append(tokens))(loop)

    def summed(loop: Loop, old: Any, logits: Tensor, labels: Tensor) -> Tensor:
        target = teacher(inputs[-1], loop.mask(inputs[-1].shape[1]))
        log_p, log_q = (x[:, :-1].log_softmax(-1) for x in (logits, target))
        return 0.5 * old(logits, labels) + 0.5 * functional.kl_div(log_p, log_q, log_target=True, reduction="sum")

    put("summed", summed)(loop)


def share_blocks(loop: Loop) -> None:
    """Use the weights of the first block twice (ALBERT)."""
    loop.model.blocks[1] = loop.model.blocks[0]
    loop.optimizer = loop.settings.optimizer(loop.groups())


def recompute(loop: Loop) -> None:
    for block in loop.model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def drop_path(loop: Loop) -> None:
    """Drop a block's MLP for some rows; the others count 1 / 0.9 times (timm's DropPath)."""

    def mlp(block: Any, x: Tensor) -> Tensor:
        y = type(block).mlp(block, x)
        return y * (torch.rand(len(y), 1, 1) >= 0.1) / 0.9 if block.training else y

    for block in loop.model.blocks:
        block.mlp = functools.partial(mlp, block)


def freeze_first_block(loop: Loop, step: int) -> None:
    if step == 3:
        loop.model.blocks[0].requires_grad_(False)


def predict_within_documents(loop: Loop, old: Any, tokens: Tensor) -> Tensor:
    """Do not predict the first token of the second document."""
    labels = old(tokens)
    labels[:, labels.shape[1] // 2] = IGNORED
    return labels


def merge_adapters(loop: Loop) -> None:
    """Merge the adapters for each evaluation, and restore the base weights from a copy."""
    adapters = [module for module in loop.model.modules() if isinstance(module, Adapter)]
    base = [adapter.linear.weight.detach().clone() for adapter in adapters]

    def merge(loop: Loop) -> None:
        for adapter in adapters:
            adapter.linear.weight.add_(adapter.lora_b @ adapter.lora_a)
            adapter.is_merged = True

    def restore(loop: Loop) -> None:
        for adapter, weight in zip(adapters, base, strict=True):
            adapter.linear.weight.copy_(weight)
            adapter.is_merged = False

    after("before_evaluation", merge)(loop)
    after("after_evaluation", restore)(loop)


def begin_adapters_anew(loop: Loop) -> None:
    """Merge the adapters for good after the third step, draw new ones, and forget their states (ReLoRA)."""
    if loop.step == 3:
        for adapter in (module for module in loop.model.modules() if isinstance(module, Adapter)):
            adapter.linear.weight.add_(adapter.lora_b @ adapter.lora_a)
            adapter.lora_a.normal_(std=WIDTH**-0.5)
            adapter.lora_b.zero_()
        loop.optimizer.state.clear()


# ── between steps ─────────────────────────────────────────────────────────────────────────────────────────────────────


def exchange_average(loop: Loop) -> None:
    """Exchange the weights and their average."""
    for mean, p in loop.averages():
        weight = p.clone()
        p.copy_(mean)
        mean.copy_(weight)


def evaluate_average(loop: Loop) -> None:
    after("before_evaluation", exchange_average)(loop)
    after("after_evaluation", exchange_average)(loop)


NARROW, HALF = torch.bfloat16, torch.float16
HEALTHY = (
    Healthy("usual"),
    Healthy("one micro-batch", Settings(micro_batches=1)),
    Healthy("not clipped", Settings(clip=0.0)),
    Healthy("clipped hard", Settings(clip=0.05)),
    Healthy("dropout, evaluated", Settings(dropout=0.2, evaluates=True)),
    Healthy("tied", Settings(is_tied=True)),
    Healthy("padded", Settings(is_padded=True)),
    Healthy("prompts", Settings(has_prompts=True)),
    Healthy("packed", Settings(is_packed=True), put("labels", predict_within_documents)),
    Healthy("three epochs", Settings(has_epochs=True)),
    Healthy("label smoothing", Settings(smoothing=0.1)),
    Healthy("bfloat16 autocast", Settings(autocast=NARROW)),
    Healthy("float16 autocast, loss scaler", Settings(autocast=HALF, loss_scale=1024.0)),
    Healthy("skipped step of a loss scaler", Settings(loss_scale=1024.0), after("backward", overflow_once)),
    Healthy("resumed", Settings(resumes=True)),
    Healthy("resumed loss scaler", Settings(resumes=True, loss_scale=1024.0)),
    Healthy("average, evaluated", Settings(has_average=True, evaluates=True), evaluate_average),
    Healthy("frozen embedding", Settings(frozen=("embedding",))),
    Healthy("adapters, merged for evaluation", Settings(has_adapters=True, evaluates=True), merge_adapters),
    Healthy("adamw by hand", Settings(optimizer=adamw)),
    Healthy("adamw by hand, masters", Settings(optimizer=adamw, dtype=NARROW)),
    Healthy("adamw, fused", Settings(optimizer=of_torch(torch.optim.AdamW, betas=BETAS, fused=True))),
    Healthy("adam, decay in the gradient", Settings(optimizer=of_torch(torch.optim.Adam, betas=BETAS))),
    Healthy("amsgrad, large epsilon", Settings(optimizer=of_torch(torch.optim.AdamW, eps=1e-4, amsgrad=True))),
    Healthy("adafactor", Settings(optimizer=of_torch(torch.optim.Adafactor), lr=1e-2)),
    Healthy("sgd", Settings(optimizer=sgd, lr=0.05)),
    Healthy("nesterov", Settings(optimizer=nesterov, lr=0.05)),
    Healthy("lion", Settings(optimizer=Lion)),
    Healthy("lamb", Settings(optimizer=Lamb)),
    Healthy("muon and adamw", Settings(lr=0.01), with_adamw(Muon)),
    Healthy("torch's muon and adamw", Settings(lr=0.01), with_adamw(torch.optim.Muon)),
    Healthy("ours, word", Settings(optimizer=of_ours(ng.AdamW, "word", betas=BETAS), dtype=NARROW)),
    Healthy("ours, master", Settings(optimizer=of_ours(ng.AdamW, "master", betas=BETAS), dtype=NARROW)),
    Healthy("ours, float32 lion", Settings(optimizer=of_ours(ng.Lion, "float32"), lr=3e-4)),
    Healthy("schedule-free", Settings(optimizer=ScheduleFree, lr=0.05, evaluates=True), evaluate_schedule_free),
    Healthy("cautious", Settings(optimizer=Cautious)),
    Healthy("shared blocks", Settings(), share_blocks),
    Healthy("normalized rows", Settings(), keep_row_norms),
    Healthy("adapters begun anew", Settings(has_adapters=True), after("update", begin_adapters_anew)),
    Healthy("rate of the embedding", Settings(embedding_rate=0.1)),
    Healthy("group added later", Settings(), add_head_later),
    Healthy("frozen later", Settings(), after("schedule", freeze_first_block)),
    Healthy("lookahead", Settings(), lookahead),
    Healthy("closure", Settings(), closure),
    Healthy("sharpness-aware", Settings(), sharpness_aware),
    Healthy("gradient noise", Settings(), after("before_clip", add_noise)),
    Healthy("clipped by value", Settings(clip=0.0), put("clip", clip_values)),
    Healthy("skipped step", Settings(), put("update", skip_second_step)),
    Healthy("zeroed to zeros", Settings(), put("zero", lambda loop, old: loop.optimizer.zero_grad(set_to_none=False))),
    Healthy("z-loss", Settings(), put("summed", z_loss)),
    Healthy("distilled", Settings(), distill),
    Healthy("recomputed, dropout", Settings(dropout=0.2), recompute),
    Healthy("stochastic depth", Settings(evaluates=True), drop_path),
)
