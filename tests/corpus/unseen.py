"""Rows that were written before any check had been run on them, to score what is located of cases that nobody here had seen.

``OUT_OF_SCOPE`` was set before the score, too: what the optimizer's step, the gradients and the records cannot show. The test
reads only ``JOINED``, the rows that differ most in kind. ``PYTHONPATH=tests python -m corpus.unseen`` scores all.
"""

from __future__ import annotations

import functools
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from corpus.faults import (
    HAND,
    MASTERS,
    PADDED,
    RESUMED,
    UNCLIPPED,
    WITH_MUON,
    after,
    clipped_by,
    fault,
    line,
    named,
    norm_of,
    put,
    take_the_average,
)
from corpus.healthy import Healthy, evaluate_average, of_ours
from corpus.loop import BATCH, IGNORED, LENGTH, WIDTH, Adapter, Loop, Settings
from corpus.optimizers import BETAS, AdamW, Group, Groups, orthogonal

# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def mean_of_rows(loop: Loop, old: Any, logits: Tensor, labels: Tensor, total: int) -> Tensor:
    rows = [loop.summed(x[None], y[None]) / loop.count(y[None]) for x, y in zip(logits, labels, strict=True)]
    return torch.stack(rows).sum() / BATCH


def ignore_end_tokens(loop: Loop, old: Any, tokens: Tensor) -> Tensor:
    return old(tokens).masked_fill(tokens == 20, IGNORED)


class LastWins(torch.autograd.Function):
    """An embedding. Its backward assigns the gradients of repeated tokens, and the last one stays."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return weight[tokens]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        tokens, weight = ctx.saved_tensors
        result = torch.zeros_like(weight)
        for token, row in zip(tokens.flatten().tolist(), gradient.flatten(0, -2), strict=True):
            result[token] = row
        return None, result


def embed_with(forward: Any) -> Any:
    return lambda loop: setattr(loop.model.embedding, "forward", functools.partial(forward, loop.model.embedding))


def recompute_reentrant(loop: Loop) -> None:
    """No input of a block needs a gradient, so that the blocks' own weights get none."""
    for block in loop.model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=True)


def zero_first_group(loop: Loop, old: Any) -> None:
    for p in loop.optimizer.param_groups[0]["params"]:
        p.grad = None


def short_second_window(loop: Loop, old: Any, loss: Tensor, number: int) -> None:
    if loop.step % 2 == 1 or number == 0:
        old(loss, number)


def overflow_in_the_head(loop: Loop, loss: Tensor, number: int) -> None:
    if loop.step == 3 and number == 0:
        loop.model.head.weight.grad[0, 0] = torch.inf


def raise_beta_to_the_step(optimizer: AdamW, old: Any, p: Tensor, group: Group) -> None:
    beta1, beta2 = group["betas"]
    old(p, {**group, "betas": (beta1 ** (1 + int(optimizer.state[p].get("step", 0))), beta2)})


def keep_first_moment_narrow(optimizer: AdamW, old: Any, p: Tensor, group: Group) -> None:
    old(p, group)
    optimizer.state[p]["exp_avg"].copy_(optimizer.state[p]["exp_avg"].bfloat16())


def never_count(optimizer: AdamW, old: Any, p: Tensor, group: Group) -> None:
    old(p, group)
    optimizer.state[p]["step"].zero_()


def optimize_without_adapters(loop: Loop) -> None:
    base = [p for name, p in loop.model.named_parameters() if "lora" not in name]
    loop.optimizer = torch.optim.AdamW(base, lr=loop.settings.lr, betas=BETAS)


def untie_at_resume(loop: Loop) -> None:
    loop.model.head.weight = nn.Parameter(loop.model.head.weight.detach().clone())


def load_beside_masters(loop: Loop) -> None:
    start = [p.detach().clone() for p in loop.model.parameters()]
    after("resume", lambda loop: [p.copy_(old) for p, old in zip(loop.model.parameters(), start, strict=True)])(loop)


def transpose_squares(loop: Loop) -> None:
    for p in loop.model.parameters():
        if p.shape == (WIDTH, WIDTH):
            p.copy_(p.T.clone())


def back_up_once(loop: Loop) -> None:
    """Copy the weights before the first evaluation only, and restore that copy after each."""
    kept: list[Tensor] = []

    def back_up(loop: Loop) -> None:
        kept[:] = kept or [p.detach().clone() for p in loop.model.parameters()]
        take_the_average(loop)

    after("before_evaluation", back_up)(loop)
    after(
        "after_evaluation", lambda loop: [p.copy_(old) for p, old in zip(loop.model.parameters(), kept, strict=True)]
    )(loop)


UNSEEN_FAULTS = (
    fault(
        "mean-of-sequences", "huggingface/trl/pull/2881", "Each sequence takes its own mean; short ones count too much.",
        "loss", "loss", put("loss", mean_of_rows), PADDED,
    ),
    fault(
        "end-token-ignored", "huggingface/transformers/issues/23530",
        "The padding token is the end token, so that no label asks for the end.",
        "data", "labels", put("labels", ignore_end_tokens),
    ),
    fault(
        "reentrant-without-gradient", "locuslab/open-unlearning/issues/178",
        "Reentrant recomputation behind a frozen embedding: the blocks get no gradient.",
        "gradient", "blocks", recompute_reentrant, Settings(frozen=("embedding",)),
    ),
    fault(
        "last-repeated-token-wins", "pytorch/pytorch/issues/1528", "Gradients of repeated tokens are assigned, not added.",
        "gradient", "embedding", embed_with(lambda embedding, tokens: LastWins.apply(tokens, embedding.weight)),
    ),
    fault(
        "vectors-never-zeroed", "pytorch/pytorch/issues/47175", "The gradients of the second group are never zeroed.",
        "gradient", "norm", put("zero", zero_first_group),
    ),
    fault(
        "scale-grows-within-accumulation", "Kai-46/minFM/pull/2",
        "The loss scale doubles between micro-batches, and all are divided by the later one: the first two count half.",
        "gradient", "", put("backward", lambda loop, old, loss, number: old(loss * (0.5 if number < 2 else 1.0), number)),
        Settings(loss_scale=4096.0),
    ),
    fault(
        "short-window-divided-by-all", "Adit-Jain-srm/NightmareNet/pull/562",
        "Every second step has one micro-batch only, whose loss is divided as if there were four.",
        "gradient", "", put("backward", short_second_window), UNCLIPPED,
    ),
    fault(
        "infinite-norm-passes", "facebookresearch/habitat-lab/issues/2226",
        "One infinite gradient: clipping multiplies by 0, and NaN reaches the weights.",
        "gradient", "head", after("backward", overflow_in_the_head),
    ),
    fault(
        "norm-always-one", "meta-pytorch/torchrec/pull/3199", "The norm is raised to 1 / infinity and is always 1.",
        "clip", "", clipped_by(lambda ps: torch.ones(())),
    ),
    fault(
        "norm-of-other-tensors", "gke-labs/open-rl/pull/80", "Clipping takes the norm of other tensors, here of the vectors.",
        "clip", "", clipped_by(lambda ps: norm_of([p for p in ps if p.ndim == 1])),
    ),
    fault(
        "beta-to-the-step", "mila-iqia/blocks/pull/1144", "The first moment takes beta1 to the power of the step.",
        "state", "exp_avg", line("update", raise_beta_to_the_step), HAND,
    ),
    fault(
        "decay-at-the-peak-rate", "tensorflow/tensorflow/issues/22763", "The decay does not follow the schedule of the rate.",
        "weights", r"^(?!.*norm)",
        line("decay", lambda optimizer, old, p, group: p.mul_(1 - HAND.lr * group["weight_decay"])), HAND,
    ),
    fault(
        "first-moment-in-bfloat16", "LoganBooker/prodigy-plus-schedule-free/issues/33",
        "The first moment is rounded to bfloat16 after each step, though float32 is asked for.",
        "state", "exp_avg", line("update", keep_first_moment_narrow), HAND,
    ),
    fault(
        "count-stands-still", "allenai/OLMo-core/pull/317", "The step is never counted: the bias correction is always the first.",
        "state", "step", line("update", never_count), HAND,
    ),
    fault(
        "gains-orthogonalized", "AI-Hypercomputer/maxtext/pull/4843", "Muon takes vectors for matrices of one row.",
        "weights", "norm",
        line("direction", lambda optimizer, old, p, update: old(p, update) if update.ndim == 2 else orthogonal(update[None])[0]),
        WITH_MUON,
    ),
    fault(
        "adapters-not-in-the-optimizer", "adapter-hub/adapters/issues/260", "The optimizer was made before the adapters.",
        "settings", "lora", optimize_without_adapters, Settings(has_adapters=True),
    ),
    fault(
        "second-group-without-rate", "speedinghzl/pytorch-segmentation-toolbox/issues/12",
        "The schedule sets the first group's rate; the second keeps the 0 at which its warm-up began.",
        "weights", "norm", after("schedule", lambda loop, step: loop.optimizer.param_groups[1].update(lr=0.0)),
    ),
    fault(
        "untied-by-the-load", "pytorch/pytorch/issues/188346",
        "Loading with assign=True gives the tied head a tensor of its own, which the optimizer does not hold.",
        "settings", "^head", after("resume", untie_at_resume), Settings(is_tied=True, resumes=True),
    ),
    fault(
        "loaded-beside-masters", "radixark/miles/pull/2572",
        "A load writes the weights and not their masters: the next step writes the old ones back.",
        "resume", "weight$", load_beside_masters, replace(MASTERS, resumes=True),
    ),
    fault(
        "squares-transposed", "huggingface/transformers/issues/47031", "A load transposes matrices whose two sizes are equal.",
        "resume", "query|key|value|output", after("resume", transpose_squares), RESUMED,
    ),
    fault(
        "old-backup-restored", "atomistic-machine-learning/schnetpack/pull/785",
        "Each evaluation of the average restores the weights from before the first one.",
        "evaluation", "weight$", back_up_once, Settings(has_average=True, evaluates=True),
    ),
    fault(
        "scheduler-steps-with-each-rank", "huggingface/accelerate/issues/2926", "Four ranks step the schedule four times.",
        "settings", "lr", put("factor", lambda loop, old, step: old(4 * step)),
    ),
    fault(
        "stays-in-evaluation", "fartashf/vsepp/issues/4", "Nothing calls train() after an evaluation: no dropout from then on.",
        "forward", "", put("after_evaluation", lambda loop, old: None), Settings(dropout=0.2, evaluates=True),
    ),
    fault(
        "average-of-each-micro-batch", "SWivid/F5-TTS/issues/631", "The average is updated with each micro-batch.",
        "average", "average", put("update_average", lambda loop, old: [old() for _ in range(loop.settings.micro_batches)]),
        Settings(has_average=True),
    ),
)  # fmt: skip

OUT_OF_SCOPE = {
    "last-repeated-token-wins": "A backward pass of the model's own: the comparison runs the same one.",
    "scheduler-steps-with-each-rank": "A schedule is a choice; nothing says which one was meant.",
    "stays-in-evaluation": "Nothing records whether the model is training, and dropout off is a choice.",
    "average-of-each-micro-batch": "Nothing reads the average.",
}


# ── healthy loops ─────────────────────────────────────────────────────────────────────────────────────────────────────


def average_from_the_third(loop: Loop) -> None:
    """Average the weights of all steps from the third on (https://arxiv.org/abs/1803.05407), and evaluate the average."""

    def update(loop: Loop, old: Any) -> None:
        for mean, p in loop.averages():
            mean.lerp_(p, 1 / max(1, loop.step - 2))

    put("update_average", update)(loop)
    evaluate_average(loop)


def parts_in_turn(loop: Loop, step: int) -> None:
    """Train the blocks in even steps and the rest in odd ones."""
    for name, p in loop.model.named_parameters():
        p.requires_grad_(("blocks" in name) == (step % 2 == 0))


def rates_of_adapters(loop: Loop) -> None:
    """Train the second factor at 16 times the rate of the first (LoRA+, https://arxiv.org/abs/2402.12354)."""
    groups = [{"params": named(loop, "lora_a")}, {"params": named(loop, "lora_b"), "rate": 16.0}]
    loop.optimizer = torch.optim.AdamW(groups, lr=loop.settings.lr, betas=BETAS)


class Sophia(torch.optim.Optimizer):
    """Sophia-G's rule (https://arxiv.org/abs/2305.14342), with squared gradients for the curvature."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"betas": (0.965, 0.99), "rho": 0.04})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                mean = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 1 - beta1)
                hessian = state.setdefault("hessian", torch.zeros_like(p)).lerp_(p.grad.square(), 1 - beta2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_((mean / (group["rho"] * hessian + 1e-15)).clamp(-1, 1), alpha=0.1 * group["lr"])


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


class AdamMini(AdamW):
    """Adam with one second moment for each tensor (after https://arxiv.org/abs/2406.16793)."""

    def direction(self, first: Tensor, second: Tensor, number: int, group: Group) -> Tensor:
        return super().direction(first, second.mean(), number, group)


class Cautious(AdamW):
    """AdamW that leaves out what points against the gradient (https://arxiv.org/abs/2411.16085)."""

    def gradient(self, weight: Tensor, gradient: Tensor, group: Group) -> Tensor:
        self.last = gradient
        return gradient

    def direction(self, first: Tensor, second: Tensor, number: int, group: Group) -> Tensor:
        update = super().direction(first, second, number, group)
        mask = (update * self.last > 0).float()
        return update * mask / mask.mean().clamp_min(1e-3)


def embedding_at_times(loop: Loop) -> None:
    """Step the embedding every second step, with an optimizer of its own and the gradients of two."""
    embedding = loop.model.embedding.weight
    other = torch.optim.SGD([embedding], lr=0.05, momentum=0.9)
    loop.optimizer = torch.optim.AdamW([p for p in loop.model.parameters() if p is not embedding], betas=BETAS)
    loop.others = [other]
    after("update", lambda loop: (other.step(), other.zero_grad()) if loop.step % 2 == 0 else None)(loop)


def share_blocks(loop: Loop) -> None:
    """Use the weights of the first block twice (ALBERT)."""
    loop.model.blocks[1] = loop.model.blocks[0]
    loop.optimizer = loop.settings.optimizer(loop.groups())


def clip_adaptively(loop: Loop, old: Any) -> Tensor:
    """Clip each gradient to a share of its weight's norm (https://arxiv.org/abs/2102.06171)."""
    norm = nn.utils.get_total_norm([p.grad for p in loop.trained()])
    for p in loop.trained():
        p.grad.mul_((0.01 * p.detach().norm().clamp_min(1e-3) / p.grad.norm().clamp_min(1e-6)).clamp(max=1.0))
    return norm


def decay_apart(loop: Loop, step: int) -> None:
    """Decay by the same share in each step, whatever the rate."""
    group = loop.optimizer.param_groups[0]
    group["weight_decay"] = 3e-4 / group["lr"]


def cycle_momentum(loop: Loop, step: int) -> None:
    """Lower beta1 while the rate rises (https://arxiv.org/abs/1708.07120)."""
    for group in loop.optimizer.param_groups:
        group["betas"] = (0.95 - 0.1 * min(1.0, step / 8), 0.95)


def keep_row_norms(loop: Loop) -> None:
    """Set the norms of rows back after each step (nGPT, https://arxiv.org/abs/2410.01131)."""
    matrices = [p for p in loop.model.blocks.parameters() if p.ndim == 2]
    norms = [p.detach().norm(dim=1, keepdim=True) for p in matrices]

    def normalize(loop: Loop) -> None:
        for p, norm in zip(matrices, norms, strict=True):
            p.mul_(norm / p.norm(dim=1, keepdim=True))

    after("update", normalize)(loop)


def muon_of_torch(loop: Loop) -> None:
    matrices = [p for p in loop.model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in loop.model.parameters() if not any(p is matrix for matrix in matrices)]
    loop.optimizer = torch.optim.Muon(matrices, lr=loop.settings.lr, weight_decay=0.1)
    other = torch.optim.AdamW(rest, lr=loop.settings.lr, betas=BETAS)
    loop.others = [other]
    after("update", lambda loop: (other.step(), other.zero_grad()))(loop)


def begin_adapters_anew(loop: Loop) -> None:
    """Merge the adapters for good after the third step, draw new ones, and forget their states (ReLoRA)."""
    if loop.step == 3:
        for adapter in (module for module in loop.model.modules() if isinstance(module, Adapter)):
            adapter.linear.weight.add_(adapter.lora_b @ adapter.lora_a)
            adapter.lora_a.normal_(std=WIDTH**-0.5)
            adapter.lora_b.zero_()
        loop.optimizer.state.clear()


def two_ahead(loop: Loop, old: Any, logits: Tensor, labels: Tensor) -> Tensor:
    """Predict the token after the next, too."""
    further = functional.cross_entropy(
        logits[:, : LENGTH - 2].float().flatten(0, 1), labels[:, 2:].flatten(), reduction="sum"
    )
    return old(logits, labels) + 0.3 * further


def shrunk_gradient(embedding: Any, tokens: Tensor) -> Tensor:
    """Pass a tenth of the gradient to the embedding (GLM-130B)."""
    x = functional.embedding(tokens, embedding.weight)
    return 0.1 * x + 0.9 * x.detach()


def quantized_linear(linear: Any, x: Tensor) -> Tensor:
    """Use the weight in 8 bits. Its gradient passes straight through."""
    scale = linear.weight.detach().abs().max() / 127
    rounded = (linear.weight / scale).round() * scale
    return functional.linear(x, linear.weight + (rounded - linear.weight).detach())


def quantize(loop: Loop) -> None:
    for block in loop.model.blocks:
        block.up.forward = functools.partial(quantized_linear, block.up)


def zero_before(loop: Loop) -> None:
    after("schedule", lambda loop, step: loop.optimizer.zero_grad())(loop)
    put("zero", lambda loop, old: None)(loop)


def restarts(step: int) -> float:
    return 0.55 + 0.45 * math.cos(math.pi * ((step - 1) % 3) / 3)


UNSEEN_HEALTHY = (
    Healthy("warm restarts", Settings(rate_factor=restarts)),
    Healthy("rate 0 in the first two steps", Settings(rate_factor=lambda step: max(0, step - 2) / 8)),
    Healthy("averaged from the third step", Settings(has_average=True, evaluates=True), average_from_the_third),
    Healthy("unequal micro-batches", PADDED, put("split", lambda loop, old, tokens: list(tokens.split([1, 3, 4])))),
    Healthy("longer sequences later", Settings(), put("read", lambda loop, old, place: old(place)[:, : 8 + place])),
    Healthy("parts in turn", Settings(), after("schedule", parts_in_turn)),
    Healthy("rates of adapters", Settings(has_adapters=True, lr=1e-3), rates_of_adapters),
    Healthy("sophia", Settings(optimizer=Sophia)),
    Healthy("schedule-free", Settings(optimizer=ScheduleFree, lr=0.05, evaluates=True), evaluate_schedule_free),
    Healthy("one second moment per tensor", Settings(optimizer=AdamMini)),
    Healthy("cautious", Settings(optimizer=Cautious)),
    Healthy("embedding at times", UNCLIPPED, embedding_at_times),
    Healthy("shared blocks", Settings(), share_blocks),
    Healthy("clipped adaptively", UNCLIPPED, put("clip", clip_adaptively)),
    Healthy("decay apart from the rate", Settings(), after("schedule", decay_apart)),
    Healthy("momentum cycled", Settings(), after("schedule", cycle_momentum)),
    Healthy("normalized rows", Settings(), keep_row_norms),
    Healthy("torch's muon and adamw", Settings(lr=0.01), muon_of_torch),
    Healthy("adapters begun anew", Settings(has_adapters=True), after("update", begin_adapters_anew)),
    Healthy("two tokens ahead", Settings(), put("summed", two_ahead)),
    Healthy("embedding's gradient shrunk", Settings(), embed_with(shrunk_gradient)),
    Healthy("quantization-aware", Settings(), quantize),
    Healthy("ours, compact", Settings(optimizer=of_ours(ng.AdamW, "compact", betas=BETAS), dtype=torch.bfloat16)),
    Healthy("zeroed before the passes", Settings(), zero_before),
)

JOINED = {
    "reentrant-without-gradient", "vectors-never-zeroed", "scale-grows-within-accumulation", "infinite-norm-passes",
    "norm-always-one", "decay-at-the-peak-rate", "count-stands-still", "adapters-not-in-the-optimizer",
    "second-group-without-rate", "untied-by-the-load", "loaded-beside-masters", "old-backup-restored",
    "schedule-free", "cautious", "shared blocks", "normalized rows", "torch's muon and adamw", "adapters begun anew",
}  # fmt: skip


def score() -> None:
    """Print what is read of every row."""
    from corpus.answers import answers, verdict

    for number, row in enumerate((*UNSEEN_FAULTS, *UNSEEN_HEALTHY)):
        readings = answers(row, Path(tempfile.mkdtemp()) / str(number))
        if isinstance(row, Healthy):
            found = "accused" if readings else "silent"
        else:
            found = verdict(row, readings)
        scope = "out of scope" if row.name in OUT_OF_SCOPE else ""
        print(f"{row.name:32} {found:9} {scope:12}", *sorted({reading.what for reading in readings}), flush=True)


if __name__ == "__main__":
    score()
