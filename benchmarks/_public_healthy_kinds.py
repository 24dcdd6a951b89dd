"""Healthy loops that do what ``_public_healthy.py`` has no setting for, for the loop of ``_public_loop.py``.

Two optimizers at once, Muon, our own optimizers over their storages, gradient checkpointing, samples of text between steps, two
held-out sets, a teacher, adapters, clipping of values, batches and sequences that grow, layers that are frozen and thawed on
purpose, several passes of the optimizer's closure: what a loop of one's own does beside the usual, with what a careful user
declares. They were written before anything was diagnosed, by the author of the rules.

Claim: at most one in a hundred is named. Baseline: none. Run: ``./dev bench public_bugs --parts healthy-kinds``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from _public_bugs_unseen import then
from _public_loop import HELD_OUT, LR, MICRO, Groups, PublicLoop, Setting
from torch import Tensor, nn
from torch.nn import functional

import narrowgauge as ng

Adjust = Callable[[PublicLoop], object]


def nothing_else(loop: PublicLoop) -> None:
    """The setting says it all."""


# ── optimizers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _ours(kind: Any = ng.AdamW, **options: Any) -> Callable[[Groups], torch.optim.Optimizer]:
    def make(groups: Groups) -> torch.optim.Optimizer:
        usual = {"betas": (0.9, 0.95)} if kind is ng.AdamW else {}
        optimizer: torch.optim.Optimizer = kind(groups, lr=LR, compile=False, **usual, **options)
        return optimizer

    make.__qualname__ = f"{kind.__name__} {options}"
    return make


class _MatricesAndRest:
    """Muon's for matrices between the layers, AdamW's for the rest: one step is a step of both."""

    def __init__(self, loop: PublicLoop) -> None:
        layers = [p for p in loop.model.model.layers.parameters() if p.ndim == 2]
        rest = [p for p in loop.model.parameters() if not any(p is each for each in layers)]
        loop.optimizer = torch.optim.Muon(layers, lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        other = torch.optim.AdamW(rest, lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
        update, schedule = loop.update, loop.schedule

        def both() -> None:
            update()
            other.step()
            other.zero_grad()

        def of_both(step: int) -> None:
            schedule(step)
            for group in other.param_groups:
                group["lr"] = LR * loop.factor(step)

        loop.update, loop.schedule = both, of_both  # type: ignore[method-assign]


def _closure(loop: PublicLoop) -> None:
    """The passes are taken in the optimizer's closure."""
    one_step = loop.one_step

    def stepped() -> tuple[Tensor, Tensor, Tensor]:
        taken: list[Tensor] = []

        def closure() -> Tensor:
            loop.zero()
            tokens = loop.batch(loop.step)
            loss = loop.loss(loop.logits(tokens), loop.labels(tokens), loop.count(loop.labels(tokens)))
            loss.backward()
            taken.extend([tokens, loss.detach(), loop.clip()])
            return loss

        loop.step += 1
        loop.schedule(loop.step)
        loop.optimizer.step(closure)
        loop.averaged()
        tokens, loss, norm = taken
        return tokens, loss, norm

    assert one_step
    loop.one_step = stepped  # type: ignore[method-assign]


def _group_added_later(loop: PublicLoop) -> None:
    """The head is trained from step 21 on, in a group of its own."""
    head = loop.model.lm_head.weight.requires_grad_(False)
    for group in loop.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not head]
    schedule = loop.schedule

    def added(step: int) -> None:
        if step == 21:
            head.requires_grad_(True)
            loop.optimizer.add_param_group({"params": [head], "weight_decay": 0.1, "lr": LR})
        schedule(step)

    loop.schedule = added  # type: ignore[method-assign]


def _thawed(loop: PublicLoop) -> None:
    """A layer is frozen until step 21; it stays in its group, without a gradient."""
    layer = loop.model.model.layers[0].requires_grad_(False)
    then("schedule", lambda _, step: layer.requires_grad_(True) if step == 21 else None)(loop)


def _decay_scheduled(loop: PublicLoop) -> None:
    def decay(_: PublicLoop, step: int) -> None:
        loop.optimizer.param_groups[0]["weight_decay"] = 0.1 * loop.factor(step)

    then("schedule", decay)(loop)


def _zeroed_before(loop: PublicLoop) -> None:
    """Gradients are set to zero before the passes, not after the step."""
    zero = loop.zero
    loop.zero = lambda: None  # type: ignore[method-assign]
    then("schedule", lambda *_: zero())(loop)


def _zeros(loop: PublicLoop) -> None:
    loop.zero = lambda: loop.optimizer.zero_grad(set_to_none=False)  # type: ignore[method-assign]


def _skips_large_norms(loop: PublicLoop) -> None:
    """A step whose norm is far above the usual is left out."""
    update, clip, norms = loop.update, loop.clip, [0.0]

    def seen() -> Tensor:
        norms.append(float(found := clip()))
        return found

    def some() -> None:
        if loop.step < 10 or norms[-1] <= 1.15 * sorted(norms[1:])[len(norms) // 2]:
            update()

    loop.clip, loop.update = seen, some  # type: ignore[method-assign]


# ── clipping ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _clips_values(loop: PublicLoop) -> None:
    def values() -> Tensor:
        trained = [p for p in loop.model.parameters() if p.grad is not None]
        nn.utils.clip_grad_value_(trained, 0.02)
        return nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])

    loop.clip = values  # type: ignore[method-assign]


def _total_norm(loop: PublicLoop) -> None:
    def two_calls() -> Tensor:
        trained = [p for p in loop.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        nn.utils.clip_grads_with_norm_(trained, loop.setting.clip, norm)
        return norm

    loop.clip = two_calls  # type: ignore[method-assign]


def _clips_each_group(loop: PublicLoop) -> None:
    def groups() -> Tensor:
        norms = [nn.utils.clip_grad_norm_(group["params"], 0.3) for group in loop.optimizer.param_groups]
        return torch.stack(norms).norm()

    loop.clip = groups  # type: ignore[method-assign]


# ── the loss ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _in_chunks(loop: PublicLoop) -> None:
    """The cross entropy of a quarter of the positions at a time."""
    loop.summed = (
        lambda logits, labels: torch.stack(  # type: ignore[method-assign]
            [
                functional.cross_entropy(part.float(), wanted, reduction="sum")
                for part, wanted in zip(
                    logits[:, :-1].flatten(0, 1).chunk(4), labels[:, 1:].flatten().chunk(4), strict=True
                )
            ]
        ).sum()
    )


def _z_loss(loop: PublicLoop) -> None:
    summed = loop.summed
    loop.summed = (
        lambda logits, labels: (  # type: ignore[method-assign]
            summed(logits, labels) + 1e-4 * logits[:, :-1].float().logsumexp(-1).square().sum()
        )
    )


def _taught(loop: PublicLoop) -> None:
    """Half of the loss is the distance to a teacher's distribution."""
    teacher = copy.deepcopy(loop.model).eval().requires_grad_(False)
    logits, tokens_of_pass = loop.logits, []
    loop.logits = lambda tokens: (tokens_of_pass.append(tokens), logits(tokens))[1]  # type: ignore[method-assign,func-returns-value]
    summed = loop.summed

    def both(found: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=tokens_of_pass[-1], use_cache=False).logits
        apart = functional.kl_div(
            found[:, :-1].float().log_softmax(-1),
            wanted[:, :-1].float().log_softmax(-1),
            log_target=True,
            reduction="sum",
        )
        return 0.5 * summed(found, labels) + 0.5 * apart

    loop.summed = both  # type: ignore[method-assign]


def _weights_of_the_teacher(loop: PublicLoop) -> None:
    """An auxiliary loss on the weights, declared: they stay near those of the start."""
    start = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    backward = loop.backward

    def with_penalty(loss: Tensor, number: int) -> None:
        apart = [(p - start[name]).square().sum() for name, p in loop.model.named_parameters()]
        backward(loss + 1e-2 * torch.stack(apart).sum() / MICRO, number)

    loop.backward = with_penalty  # type: ignore[method-assign]


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _checkpointed(loop: PublicLoop) -> None:
    loop.model.gradient_checkpointing_enable({"use_reentrant": False})


class _Adapted(nn.Module):
    """A frozen linear layer with a low-rank update."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, linear.in_features, dtype=torch.float32) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, 4, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + x @ self.a.T @ self.b.T
        return y


def _adapters(loop: PublicLoop) -> None:
    loop.model.requires_grad_(False)
    for layer in loop.model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = map(_Adapted, (layer.self_attn.q_proj, layer.self_attn.v_proj))
    trained = [p for p in loop.model.parameters() if p.requires_grad]
    loop.optimizer = torch.optim.AdamW([{"params": trained, "weight_decay": 0.1, "lr": LR}], lr=LR, betas=(0.9, 0.95))


def _drops_layers(loop: PublicLoop) -> None:
    """Stochastic depth: the attention of a layer is left out now and then while it is trained."""

    def maybe(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if module.training and float(torch.rand(())) < 0.2:
            return (torch.zeros_like(output[0]), *output[1:])
        return output

    for layer in loop.model.model.layers:
        layer.self_attn.register_forward_hook(maybe, with_kwargs=True)


# ── data ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _more_micro_batches(loop: PublicLoop) -> None:
    loop.split = lambda tokens: list(tokens.chunk(2 if loop.step <= 30 else 4))  # type: ignore[method-assign]


def _longer_sequences(loop: PublicLoop) -> None:
    batch = loop.batch
    loop.batch = lambda step: batch(step)[:, : 16 if step <= 20 else None]  # type: ignore[method-assign]


def _smaller_batches(loop: PublicLoop) -> None:
    batch = loop.batch
    loop.batch = lambda step: batch(step)[: 4 if step <= 30 else None]  # type: ignore[method-assign]


# ── between steps ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _samples(loop: PublicLoop) -> None:
    """A few tokens are sampled after every fourth step."""

    def sample(*_: object) -> None:
        if loop.step % 4:
            return
        loop.model.eval()
        tokens = loop.read(HELD_OUT)[:1, :4]
        with torch.no_grad():
            for _ in range(4):
                tokens = torch.cat([tokens, loop.logits(tokens)[:, -1:].argmax(-1)], 1)
        loop.model.train()

    then("zero", sample)(loop)


def _two_sets(loop: PublicLoop) -> None:
    """Two held-out sets, each with its own mean; the first one's is reported last."""
    evaluate = loop.evaluate

    def both() -> float:
        loop.before_evaluation()
        with torch.no_grad():
            other = loop.mean([loop.held_out(100 + place) for place in range(3)])
        loop.after_evaluation()
        assert other > 0
        return evaluate()

    loop.evaluate = both  # type: ignore[method-assign]


def _saved_often(loop: PublicLoop) -> None:
    """Weights and states are written every fifth step, and read again at once."""

    def saved(*_: object) -> None:
        if loop.step % 5 == 4:
            loop.restart()

    then("zero", saved)(loop)


def _average_that_warms_up(loop: PublicLoop) -> None:
    def averaged() -> None:
        kept = min(0.95, (1 + loop.step) / (10 + loop.step))
        assert loop.average is not None
        with torch.no_grad():
            for mean, p in zip(loop.average.parameters(), loop.model.parameters(), strict=True):
                mean.lerp_(p, 1 - kept)

    loop.averaged = averaged  # type: ignore[method-assign]


def _running_mean(loop: PublicLoop) -> None:
    """The reported loss is a running mean."""
    one_step, mean = loop.one_step, [0.0, 0.0]

    def smoothed() -> tuple[Tensor, Tensor, Tensor]:
        tokens, loss, norm = one_step()
        mean[:] = [0.9 * mean[0] + float(loss), 0.9 * mean[1] + 1]
        return tokens, torch.tensor(mean[0] / mean[1]), norm

    loop.one_step = smoothed  # type: ignore[method-assign]


_UNDECAYED = (("decay_groups", ""),)
KINDS: dict[str, tuple[Setting, Adjust]] = {
    "ours, word": (Setting(optimizer=_ours(storage="word"), dtype=torch.bfloat16), nothing_else),
    "ours, compact": (Setting(optimizer=_ours(storage="compact"), dtype=torch.bfloat16), nothing_else),
    "ours, master": (Setting(optimizer=_ours(storage="master"), dtype=torch.bfloat16), nothing_else),
    "ours, states8": (Setting(optimizer=_ours(storage="states8"), dtype=torch.bfloat16), nothing_else),
    "ours, float32": (Setting(optimizer=_ours(storage="float32")), nothing_else),
    "ours, restart": (Setting(optimizer=_ours(storage="word"), dtype=torch.bfloat16, restarts=True), nothing_else),
    "our lion": (Setting(optimizer=_ours(ng.Lion, storage="float32"), rate=lambda step: 0.1), nothing_else),
    "our muon": (Setting(optimizer=_ours(ng.Muon, storage="float32", adjust_lr_fn="match_rms_adamw")), nothing_else),
    "our muon, word": (
        Setting(optimizer=_ours(ng.Muon, storage="word", adjust_lr_fn="match_rms_adamw"), dtype=torch.bfloat16), nothing_else,
    ),
    "our adafactor": (
        Setting(optimizer=_ours(ng.Adafactor, storage="float32", relative_step=False), rate=lambda step: 3.0), nothing_else,
    ),
    "muon and adamw": (Setting(declared=_UNDECAYED), _MatricesAndRest),
    "radam": (Setting(optimizer=lambda groups: torch.optim.RAdam(groups, lr=LR)), nothing_else),
    "closure": (Setting(micro=1), _closure),
    "group added later": (Setting(), _group_added_later),
    "thawed": (Setting(), _thawed),
    "decay scheduled": (Setting(), _decay_scheduled),
    "zeroed before": (Setting(), _zeroed_before),
    "zeros": (Setting(), _zeros),
    "skips large norms": (Setting(), _skips_large_norms),
    "clips values": (Setting(clip=0.0), _clips_values),
    "total norm": (Setting(), _total_norm),
    "clips each group": (Setting(clip=0.0), _clips_each_group),
    "in chunks": (Setting(), _in_chunks),
    "z-loss, declared": (Setting(declared=(("loss", "own"),)), _z_loss),
    "taught": (Setting(declared=(("loss", "own"),)), _taught),
    "near the start, declared": (Setting(declared=(("auxiliary", True),)), _weights_of_the_teacher),
    "checkpointed": (Setting(), _checkpointed),
    "checkpointed, dropout": (Setting(dropout=0.2), _checkpointed),
    "adapters": (Setting(), _adapters),
    "drops layers": (Setting(), _drops_layers),
    "more micro-batches": (Setting(), _more_micro_batches),
    "longer sequences": (Setting(), _longer_sequences),
    "smaller batches": (Setting(), _smaller_batches),
    "samples": (Setting(evaluates=True), _samples),
    "two sets": (Setting(evaluates=True), _two_sets),
    "two sets, dropout": (Setting(evaluates=True, dropout=0.2), _two_sets),
    "saved often": (Setting(), _saved_often),
    "average that warms up": (Setting(average=True, evaluates=True), _average_that_warms_up),
    "running mean": (Setting(), _running_mean),
    "float64": (Setting(dtype=torch.float64), nothing_else),
}  # fmt: skip
