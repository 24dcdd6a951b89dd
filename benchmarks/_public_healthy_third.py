"""Healthy loops of a third author, who had seen no rule: unusual things that users do, and that are right.

Rates by layer and by matrix, warm restarts, noise and centralized gradients, a step of two passes, Lookahead and averages of
several kinds, freezing bit by bit, a curriculum, adapters that are merged for evaluations, stochastic depth, a head for one more
token, a router with a loss of its own, packing with positions that begin anew: with what a careful user declares, for the loop of
``_public_loop.py``. They were written before anything was diagnosed.

Claim: at most one in a hundred is named. Baseline: none. Run: ``./dev bench public_bugs --parts healthy-third``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from _public_bugs_unseen import then
from _public_healthy_kinds import Adjust, nothing_else
from _public_loop import IGNORED, LR, MICRO, STEPS, WARMUP, Groups, PublicLoop, Setting
from torch import Tensor, nn
from torch.nn import functional

OWN_LOSS, BESIDE = (("loss", "own"),), (("auxiliary", True),)


# ── rates ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rates(loop: PublicLoop, groups: Groups, factors: list[float]) -> None:
    """Groups whose rates are the schedule's times a factor each."""
    loop.optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))

    def schedule(step: int) -> None:
        for group, factor in zip(loop.optimizer.param_groups, factors, strict=True):
            group["lr"] = LR * loop.factor(step) * factor

    loop.schedule = schedule  # type: ignore[method-assign]


def _by_layer(loop: PublicLoop) -> None:
    """Layer-wise decay of the rate, as for BEiT (microsoft/unilm, optim_factory.py): 0.7 times less a layer down."""
    model = loop.model
    levels = [
        [model.lm_head, model.model.norm],
        model.model.layers[1:],
        model.model.layers[:1],
        [model.model.embed_tokens],
    ]
    groups, factors = [], []
    for depth, modules in enumerate(levels):
        weights = [p for module in modules for p in module.parameters()]
        for is_matrix in (True, False):
            chosen = [p for p in weights if (p.ndim > 1) == is_matrix]
            if chosen:
                groups.append({"params": chosen, "weight_decay": 0.1 if is_matrix else 0.0})
                factors.append(0.7**depth)
    _rates(loop, groups, factors)


def _by_matrix(loop: PublicLoop) -> None:
    """A group for each parameter, rates of hidden matrices by 1 / fan-in, as muP has them (microsoft/mup)."""
    groups, factors = [], []
    for name, p in loop.model.named_parameters():
        is_hidden = p.ndim > 1 and not name.endswith("embed_tokens.weight")
        groups.append({"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0})
        factors.append(32 / p.shape[1] if is_hidden else 1.0)
    _rates(loop, groups, factors)


def _warm_restarts(step: int) -> float:
    """Cosines of 12, 24 and 48 steps, each from the full rate (torch's CosineAnnealingWarmRestarts, T_mult=2)."""
    since, length = step - 1, 12
    while since >= length:
        since, length = since - length, 2 * length
    return 0.05 + 0.475 * (1 + math.cos(math.pi * since / length))


def _one_cycle(loop: PublicLoop) -> None:
    """Torch's OneCycleLR, which moves the momentum the other way."""

    def betas(_: PublicLoop, step: int) -> None:
        for group in loop.optimizer.param_groups:
            group["betas"] = (0.95 - 0.1 * loop.factor(step), 0.95)

    then("schedule", betas)(loop)


# ── the gradient ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _noise(loop: PublicLoop) -> None:
    """Gradient noise that fades (https://arxiv.org/abs/1511.06807)."""

    def add(_: PublicLoop) -> None:
        for p in loop.model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=1e-3 / (1 + loop.step) ** 0.275)

    then("before_clip", add)(loop)


def _centralized(loop: PublicLoop) -> None:
    """Gradient centralization (https://arxiv.org/abs/2004.01461): each row's mean is subtracted."""

    def center(_: PublicLoop) -> None:
        for p in loop.model.parameters():
            if p.ndim > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))

    then("before_clip", center)(loop)


def _sharpness_aware(loop: PublicLoop) -> None:
    """SAM (davda54/sam): a second pass where the first one's gradient leads up to, and the step from the old weights."""

    def passes(tokens: Tensor) -> Tensor:
        parts = loop.split(tokens)
        total = sum(loop.count(loop.labels(part)) for part in parts)
        losses = []
        for number, part in enumerate(parts):
            loss = loop.loss(loop.logits(part), loop.labels(part), total)
            loop.backward(loss, number)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def one_step() -> tuple[Tensor, Tensor, Tensor]:
        loop.step += 1
        loop.schedule(loop.step)
        tokens, weights = loop.batch(loop.step), list(loop.model.parameters())
        loss = passes(tokens)
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in weights]).norm()
            old = [p.clone() for p in weights]
            for p in weights:
                p.add_(p.grad, alpha=0.02 / (float(norm) + 1e-12))
        loop.zero()
        passes(tokens)
        with torch.no_grad():
            for p, was in zip(weights, old, strict=True):
                p.copy_(was)
        norm = loop.clip()
        loop.update()
        loop.zero()
        return tokens, loss, norm

    loop.one_step = one_step  # type: ignore[method-assign]


# ── the loss ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _r_drop(loop: PublicLoop) -> None:
    """R-Drop (dropreg/R-Drop): each row passes twice with other dropout, and the two outputs are drawn together."""
    logits, summed = loop.logits, loop.summed
    loop.logits = lambda tokens: logits(torch.cat([tokens, tokens]))  # type: ignore[method-assign]

    def both(found: Tensor, labels: Tensor) -> Tensor:
        one, other = found.chunk(2)
        p, q = (each[:, :-1].float().log_softmax(-1) for each in (one, other))
        apart = functional.kl_div(p, q, log_target=True, reduction="sum")
        apart = apart + functional.kl_div(q, p, log_target=True, reduction="sum")
        return 0.5 * (summed(one, labels) + summed(other, labels)) + 0.25 * apart

    loop.summed = both  # type: ignore[method-assign]


def _weighted_rows(loop: PublicLoop) -> None:
    """Rows count by a weight of their own, as data of several qualities do; the weight is the row's share of frequent tokens."""

    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        each = functional.cross_entropy(logits[:, :-1].float().transpose(1, 2), labels[:, 1:], reduction="none")
        weights = 0.5 + (labels[:, 1:] < 256).float().mean(1)
        return (weights[:, None] * each).sum()

    loop.summed = summed  # type: ignore[method-assign]


def _beside(loop: PublicLoop, extra: Any) -> None:
    """Add a loss to each micro-batch's, as a mean over micro-batches."""
    backward = loop.backward
    loop.backward = lambda loss, number: backward(loss + extra() / MICRO, number)  # type: ignore[method-assign]


def _next_but_one(loop: PublicLoop) -> None:
    """A second head predicts the token after the next (https://arxiv.org/abs/2404.19737); it is not in the reported loss."""
    head, kept = nn.Linear(32, 512, bias=False), []
    loop.model.second_head = head
    loop.optimizer.param_groups[0]["params"].append(head.weight)
    loop.model.model.norm.register_forward_hook(lambda module, given, output: kept.__setitem__(slice(None), [output]))
    logits, tokens_of_pass = loop.logits, []

    def remembered(tokens: Tensor) -> Tensor:
        tokens_of_pass[:] = [tokens]
        return logits(tokens)

    def extra() -> Tensor:
        found, tokens = head(kept[0])[:, :-2], tokens_of_pass[0]
        return 0.3 * functional.cross_entropy(found.flatten(0, 1), tokens[:, 2:].flatten())

    loop.logits = remembered  # type: ignore[method-assign]
    _beside(loop, extra)


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class _TwoExperts(nn.Module):
    """Two gated layers; each token goes to the one that its router prefers, times its probability."""

    def __init__(self, mlp: nn.Module, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2, bias=False)
        self.experts = nn.ModuleList([mlp, type(mlp)(mlp.config)])  # type: ignore[operator,arg-type]
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        chosen = functional.one_hot(shares.argmax(-1), 2).to(x.dtype)
        self.balance = 2 * (chosen.mean((0, 1)) * shares.mean((0, 1))).sum()
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        y: Tensor = (outputs * (chosen * shares)[..., None, :]).sum(-1)
        return y


def _routed(loop: PublicLoop) -> None:
    """Switch's router (https://arxiv.org/abs/2101.03961), with its loss of balance, declared."""
    layers = loop.model.model.layers
    for layer in layers:
        layer.mlp = _TwoExperts(layer.mlp, loop.model.config.hidden_size)
    loop.optimizer = torch.optim.AdamW(loop.groups(), lr=LR, betas=(0.9, 0.95))
    _beside(loop, lambda: 0.01 * torch.stack([layer.mlp.balance for layer in layers]).sum())


def _drop_path(loop: PublicLoop) -> None:
    """Stochastic depth by rows (timm's DropPath): the rows that keep a block count 1 / (1 - p) times."""

    def drop(module: nn.Module, given: Any, output: Any) -> Any:
        found = output[0] if isinstance(output, tuple) else output
        if not module.training:
            return output
        keep = torch.rand(len(found), 1, 1, dtype=torch.float32) >= 0.1
        found = found * keep / 0.9
        return (found, *output[1:]) if isinstance(output, tuple) else found

    for layer in loop.model.model.layers:
        layer.self_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


def _scaled_embedding(loop: PublicLoop) -> None:
    """Embeddings times the root of the width, as in Gemma, tied to the head."""
    root = math.sqrt(loop.model.config.hidden_size)
    loop.model.model.embed_tokens.register_forward_hook(lambda module, given, output: output * root)


def _reentrant(loop: PublicLoop) -> None:
    """Reentrant checkpoints, with inputs that are made to have a gradient, as PEFT does."""
    loop.model.gradient_checkpointing_enable({"use_reentrant": True})
    loop.model.enable_input_require_grads()


class _Adapter(nn.Module):
    """A frozen linear layer with a low-rank update, which can be merged."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, linear.in_features) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, 4))
        self.is_merged = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if self.is_merged else y + functional.dropout(x, 0.05, self.training) @ self.a.T @ self.b.T

    @torch.no_grad()
    def merge(self, sign: float) -> None:
        """Add the update to the layer, or take it away."""
        self.linear.weight.add_(self.b @ self.a, alpha=sign)
        self.is_merged = sign > 0


def _merged_adapters(loop: PublicLoop) -> None:
    """LoRA+ (https://arxiv.org/abs/2402.12354): the second matrix has 16 times the rate; merged while it is evaluated."""
    loop.model.requires_grad_(False)
    adapters: list[_Adapter] = []
    for layer in loop.model.model.layers:
        for name in ("q_proj", "v_proj"):
            adapters.append(_Adapter(getattr(layer.self_attn, name)))
            setattr(layer.self_attn, name, adapters[-1])
    groups: Groups = [{"params": [getattr(each, name) for each in adapters], "weight_decay": 0.0} for name in "ab"]
    _rates(loop, groups, [1.0, 16.0])

    def merged(sign: float) -> Adjust:
        return lambda _: [each.merge(sign) for each in adapters]

    then("before_evaluation", merged(1.0))(loop)
    then("after_evaluation", merged(-1.0))(loop)


# ── what is trained, and with which data ──────────────────────────────────────────────────────────────────────────────


def _frozen_bit_by_bit(loop: PublicLoop) -> None:
    """FreezeOut (https://arxiv.org/abs/1706.04983): the embedding is frozen at step 21, the first layer at step 41."""

    def freeze(_: PublicLoop, step: int) -> None:
        if step == 21:
            loop.model.model.embed_tokens.requires_grad_(False)
        if step == 41:
            loop.model.model.layers[0].requires_grad_(False)

    then("schedule", freeze)(loop)


def _easy_first(loop: PublicLoop) -> None:
    """A curriculum: rows by the number of their distinct tokens, declared."""
    read = loop.read
    rows = torch.cat([read(place) for place in range(STEPS)])
    order = torch.tensor([len(row.unique()) for row in rows]).argsort(stable=True)
    batches = rows[order].chunk(STEPS)
    loop.read = lambda place: batches[place] if place < STEPS else read(place)  # type: ignore[method-assign]


def _positions_anew(loop: PublicLoop) -> None:
    """Packed documents with positions of their own; the first token of the second is not predicted from the first."""
    labels = loop.labels

    def logits(tokens: Tensor) -> Tensor:
        half = tokens.shape[1] // 2
        positions = (torch.arange(tokens.shape[1]) % half).expand(len(tokens), -1)
        found: Tensor = loop.model(
            input_ids=tokens, attention_mask=loop.mask(tokens), position_ids=positions, use_cache=False
        ).logits
        return found

    def within(tokens: Tensor) -> Tensor:
        found = labels(tokens)
        found[:, found.shape[1] // 2] = IGNORED
        return found

    loop.logits, loop.labels = logits, within  # type: ignore[method-assign]


# ── weights after the step, and averages ──────────────────────────────────────────────────────────────────────────────


class Lamb(torch.optim.Optimizer):
    """LAMB (https://arxiv.org/abs/1904.00962): Adam's step, scaled by each weight's norm."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** state["step"])
                root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt()
                update = mean / (root + group["eps"]) + group["weight_decay"] * p
                trust = float(p.norm() / update.norm()) if group["weight_decay"] else 1.0
                p.sub_(update, alpha=group["lr"] * trust)


def _pairs(loop: PublicLoop) -> Iterator[tuple[Tensor, Tensor]]:
    assert loop.average is not None
    return zip(loop.average.parameters(), loop.model.parameters(), strict=True)


def _lookahead(loop: PublicLoop) -> None:
    """Lookahead (https://arxiv.org/abs/1907.08610): every fifth step the weights go half of the way back to the slow ones."""
    slow = [p.detach().clone() for p in loop.model.parameters()]

    @torch.no_grad()
    def back(_: PublicLoop) -> None:
        if loop.step % 5 == 0:
            for kept, p in zip(slow, loop.model.parameters(), strict=True):
                kept.lerp_(p, 0.5)
                p.copy_(kept)

    then("update", back)(loop)


def _stochastic_averaging(loop: PublicLoop) -> None:
    """SWA, as torch's AveragedModel: from step 31 on the mean of all weights, each counting the same."""
    taken = [0]

    @torch.no_grad()
    def averaged() -> None:
        if loop.step > 30:
            taken[0] += 1
            for mean, p in _pairs(loop):
                mean.lerp_(p, 1 / taken[0])

    loop.averaged = averaged  # type: ignore[method-assign]


def _averaged_at_times(loop: PublicLoop) -> None:
    """The average is updated every fifth step, with a decay for five."""

    @torch.no_grad()
    def sometimes() -> None:
        if loop.step % 5 == 0:
            for mean, p in _pairs(loop):
                mean.lerp_(p, 1 - 0.95**5)

    loop.averaged = sometimes  # type: ignore[method-assign]


def _evaluates_the_average(loop: PublicLoop) -> None:
    """The average takes the place of the weights while they are evaluated, and they are put back."""

    @torch.no_grad()
    def exchange(_: PublicLoop) -> None:
        for mean, p in _pairs(loop):
            now = p.clone()
            p.copy_(mean)
            mean.copy_(now)

    then("before_evaluation", exchange)(loop)
    then("after_evaluation", exchange)(loop)


def _triangle(step: int) -> float:
    return step / 20 if step <= 20 else max(0.02, 1 - (step - 20) / 40)


def _square_root(step: int) -> float:
    """Noam's: a warm-up, and the inverse root of the step."""
    return min(step / WARMUP, (WARMUP / step) ** 0.5)


MORE_KINDS: dict[str, tuple[Setting, Adjust]] = {
    "rates by layer": (Setting(), _by_layer),
    "rates by matrix": (Setting(), _by_matrix),
    "warm restarts": (Setting(rate=_warm_restarts), nothing_else),
    "inverse root": (Setting(rate=_square_root), nothing_else),
    "one cycle": (Setting(rate=_triangle), _one_cycle),
    "noise, declared": (Setting(declared=BESIDE), _noise),
    "centralized, declared": (Setting(declared=(("gradient", "own"),)), _centralized),
    "sharpness-aware, declared": (Setting(declared=(("gradient", "own"), ("data", "own"))), _sharpness_aware),
    "smoothing, its number declared": (Setting(smoothing=0.1, declared=(("label_smoothing", 0.1),)), nothing_else),
    "r-drop, declared": (Setting(dropout=0.1, declared=(*OWN_LOSS, ("data", "own"))), _r_drop),
    "weighted rows, declared": (Setting(declared=OWN_LOSS), _weighted_rows),
    "next but one, declared": (Setting(declared=BESIDE), _next_but_one),
    "routed, declared": (Setting(declared=BESIDE), _routed),
    "drop path": (Setting(evaluates=True), _drop_path),
    "scaled embedding": (Setting(tied=True), _scaled_embedding),
    "checkpointed, reentrant": (Setting(), _reentrant),
    "checkpointed, reentrant, dropout": (Setting(dropout=0.2, evaluates=True), _reentrant),
    "merged adapters": (Setting(evaluates=True, declared=(("decay_groups", ""),)), _merged_adapters),
    "frozen bit by bit": (Setting(), _frozen_bit_by_bit),
    "curriculum, declared": (Setting(declared=(("data", "curriculum"),)), _easy_first),
    "positions anew": (Setting(packed=True), _positions_anew),
    "lamb": (Setting(optimizer=Lamb, rate=lambda step: 10.0 * _square_root(step)), nothing_else),
    "lookahead, declared": (Setting(declared=(("weights", "own"),)), _lookahead),
    "stochastic averaging": (Setting(average=True), _stochastic_averaging),
    "averaged at times": (Setting(average=True), _averaged_at_times),
    "evaluates the average": (Setting(average=True, evaluates=True), _evaluates_the_average),
}  # fmt: skip
