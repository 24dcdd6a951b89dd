"""One training loop in plain PyTorch, with a method for each of its lines, so that a bug can be put into any of them.

A tiny Llama of ``transformers``, an optimizer of torch's with two groups, accumulation over four micro-batches, clipping, a
warm-up and a line down. A :class:`Setting` says what a sound loop may do otherwise (dropout, tied weights, a loss scaler, prompts
that are not trained on, packed documents, an average, a restart). A bug replaces a method, or changes the model or the optimizer.

One training gives all that is read of it: the rows that :class:`narrowgauge.RunRecorder` writes without its audit, and what the
audit of steps says, from the same :class:`~narrowgauge.recompute.step_watcher.StepWatcher` that ``audit_every`` uses.

Claim: none of its own; ``public_bugs.py`` measures. Baseline: the same setting without a bug. Run: ``./dev bench public_bugs``.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _injected_runs import SHAPE, USUAL, made_run, quiet
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.recompute.departures import findings_of
from narrowgauge.recompute.piece_results import PieceResult
from narrowgauge.recompute.step_watcher import StepWatcher
from narrowgauge.runs.finding import Finding
from narrowgauge.runs.record import Run
from narrowgauge.trainer.data.dataset import Dataset

STEPS, AT, WARMUP, LR, MICRO, CLIP, EVERY = 60, 33, 8, 3e-3, 4, 0.5, 5
"""A restart, and what happens once, comes before step ``AT``, which is next to no audited step."""
PAD, IGNORED = 0, -100
EPOCH = 12
"""Steps of an epoch, in a loop that has epochs."""
HELD_OUT = 10_000
"""The first batch of those that evaluations read."""
Groups = list[dict[str, Any]]


class WrittenAdamW(torch.optim.AdamW):
    """AdamW as people write it by hand: each line of it is a method, to get wrong."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter."""
        state = self.state[p]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        self.decay(p, group)
        gradient, (beta1, beta2) = self.gradient(p, group), group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        p.sub_(self.rate(group) * self.direction(state["exp_avg"], state["exp_avg_sq"], int(state["step"]), group))

    def decay(self, p: Tensor, group: dict[str, Any]) -> None:
        """Decoupled weight decay."""
        p.mul_(1 - group["lr"] * group["weight_decay"])

    def gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """What the moments average."""
        assert p.grad is not None
        return p.grad

    def rate(self, group: dict[str, Any]) -> float:
        """The learning rate."""
        return float(group["lr"])

    def direction(self, first: Tensor, second: Tensor, number: int, group: dict[str, Any]) -> Tensor:
        """What the rate multiplies."""
        beta1, beta2 = group["betas"]
        return first / (1 - beta1**number) / ((second / (1 - beta2**number)).sqrt() + group["eps"])


def adamw(groups: Groups) -> torch.optim.Optimizer:
    """Torch's, with what language models take."""
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


def written(groups: Groups) -> torch.optim.Optimizer:
    """The one written by hand."""
    return WrittenAdamW(groups, lr=LR, betas=(0.9, 0.95))


@dataclass(frozen=True)
class Setting:
    """What a sound loop does.

    Args:
        optimizer: made of the groups.
        options: further entries of every group, such as ``eps``.
        rate: the factor of the scheduled rate at a step; ``None`` for the usual.
        micro: micro-batches of a step.
        clip: limit of the norm; 0 for none.
        seed: of the first weights and of the data.
        dropout: of attention.
        tied: the head is the embedding.
        dtype: of the weights.
        autocast: to bfloat16.
        scaler: a loss scaler, as for float16.
        lengths: sequences are of several lengths, padded and ignored.
        prompts: half of each sequence is a prompt, ignored.
        packed: two documents a sequence, each sees itself alone; passed as a mask of four dims.
        frozen: modules whose parameters are not trained.
        average: a running average of the weights.
        evaluates: evaluates every 20 steps.
        epochs: goes over few batches again and again, shuffled anew.
        restarts: goes on from a checkpoint before step ``AT``.
        steps: of the run.
        embedding_rate: the factor of the embedding's learning rate.
        declared: what ``ng.task`` is told beside the limit and the groups.
        smoothing: of the targets.
        small_start: projections to the residual stream begin smaller.
    """

    optimizer: Callable[[Groups], torch.optim.Optimizer] = adamw
    options: tuple[tuple[str, Any], ...] = ()
    rate: Callable[[int], float] | None = None
    micro: int = MICRO
    clip: float = CLIP
    seed: int = 0
    dropout: float = 0.0
    tied: bool = False
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    scaler: bool = False
    lengths: bool = False
    prompts: bool = False
    packed: bool = False
    frozen: tuple[str, ...] = ()
    average: bool = False
    evaluates: bool = False
    epochs: bool = False
    restarts: bool = False
    steps: int = STEPS
    embedding_rate: float = 1.0
    declared: tuple[tuple[str, Any], ...] = ()
    smoothing: float = 0.0
    small_start: bool = False


class PublicLoop:
    """A loop; its methods are the places for a bug.

    Args:
        setting: what it does.
        data: of which it reads.
    """

    def __init__(self, setting: Setting, data: Dataset) -> None:
        self.setting, self.data = setting, data
        torch.manual_seed(setting.seed)
        shape = {**SHAPE, "tie_word_embeddings": setting.tied, "attention_dropout": setting.dropout}
        self.model: Any = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="sdpa")).to(setting.dtype)
        self.model.train()
        for name in setting.frozen:
            self.model.get_submodule(name).requires_grad_(False)
        self.optimizer: Any = setting.optimizer(self.groups())
        for group in self.optimizer.param_groups:
            group.update(setting.options)
        self.average = copy.deepcopy(self.model) if setting.average else None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=20) if setting.scaler else None
        self.step = 0
        self.micro_batches: list[Tensor] = []

    # ── what a bug may replace ──────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Begin from other weights than the model's own."""
        if self.setting.small_start:
            self.scale_start(lambda name: name.endswith(("o_proj.weight", "down_proj.weight")))

    def scale_start(self, is_scaled: Callable[[str], bool]) -> None:
        """Halve the first weights of some parameters."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                if is_scaled(name):
                    p.div_(2.0)

    def groups(self) -> Groups:
        """Matrices with decay, vectors without."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        embedding = self.model.model.embed_tokens.weight
        own = [embedding] if self.setting.embedding_rate != 1.0 else []
        rest = [p for p in trained if not any(p is each for each in own)]
        found: Groups = [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.1, "lr": LR},
            {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0, "lr": LR},
        ]
        return found + [{"params": own, "weight_decay": 0.1, "lr": LR}] * bool(own)

    def batch(self, step: int) -> Tensor:
        """The tokens of a step."""
        return self.read(self.place(step))

    def place(self, step: int) -> int:
        """Which batch a step reads."""
        if not self.setting.epochs:
            return step - 1
        epoch, within = divmod(step - 1, EPOCH)
        return int(torch.randperm(EPOCH, generator=torch.Generator().manual_seed(epoch))[within])

    def read(self, place: int) -> Tensor:
        """A batch by its place."""
        size, length = int(USUAL["batch_size"]), int(USUAL["sequence_length"])
        tokens = torch.from_numpy(self.data.batch(place, size, length, self.setting.seed))
        if self.setting.lengths:
            tokens = tokens.clamp_min(1)
            for row in range(len(tokens)):
                tokens[row, 6 + 3 * row :] = PAD
        return tokens

    def split(self, tokens: Tensor) -> list[Tensor]:
        """The micro-batches of a step."""
        return list(tokens.chunk(self.setting.micro))

    def labels(self, tokens: Tensor) -> Tensor:
        """What is trained on, at the places of the tokens; the loss shifts it."""
        labels = tokens.clone()
        if self.setting.lengths:
            labels[tokens == PAD] = IGNORED
        if self.setting.prompts:
            labels[:, : labels.shape[1] // 2] = IGNORED
        return labels

    def mask(self, tokens: Tensor) -> Tensor | None:
        """Of packed documents: what each token may see."""
        if not self.setting.packed:
            return None
        length = tokens.shape[1]
        place = torch.arange(length)
        sees = (place[:, None] >= place[None]) & ((place[:, None] < length // 2) == (place[None] < length // 2))
        return torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None].expand(len(tokens), 1, -1, -1)

    def logits(self, tokens: Tensor) -> Tensor:
        """The model's output."""
        given = {"attention_mask": self.mask(tokens)} if self.setting.packed else {}
        with torch.autocast("cpu", torch.bfloat16, enabled=self.setting.autocast):
            return self.model(input_ids=tokens, use_cache=False, **given).logits

    def count(self, labels: Tensor) -> int:
        """The tokens of some labels that count."""
        return int((labels[:, 1:] != IGNORED).sum())

    def summed(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The sum of the cross entropies of the next tokens."""
        return functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum",
            label_smoothing=self.setting.smoothing,
        )  # fmt: skip

    def loss(self, logits: Tensor, labels: Tensor, total: int) -> Tensor:
        """A micro-batch's part of the step's mean; ``total`` tokens count in the step."""
        return self.summed(logits, labels) / total

    def backward(self, loss: Tensor, number: int) -> None:
        """The backward pass of one micro-batch."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def before_clip(self) -> None:
        """Unscale the gradients."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def clip(self) -> Tensor:
        """Clip the gradients; their norm before."""
        trained = [p for p in self.model.parameters() if p.grad is not None]
        return nn.utils.clip_grad_norm_(trained, self.setting.clip or float("inf"))

    def schedule(self, step: int) -> None:
        """Set the rate of every group."""
        for place, group in enumerate(self.optimizer.param_groups):
            group["lr"] = LR * self.factor(step) * (self.setting.embedding_rate if place == 2 else 1.0)

    def factor(self, step: int) -> float:
        """The factor of the rate."""
        if self.setting.rate is not None:
            return self.setting.rate(step)
        return min(1.0, step / WARMUP) * (1 - 0.9 * max(0, step - WARMUP) / STEPS)

    def update(self) -> None:
        """Step the optimizer."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def zero(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad()

    def averaged(self) -> None:
        """Update the running average."""
        if self.average is not None:
            with torch.no_grad():
                for mean, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.lerp_(p, 0.05)

    def restart(self) -> None:
        """Go on from a checkpoint: everything is written and read again."""
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def evaluate(self) -> float:
        """The loss of held-out batches, per token."""
        self.before_evaluation()
        with torch.no_grad():
            found = self.mean([self.held_out(place) for place in range(4)])
        self.after_evaluation()
        return found

    def before_evaluation(self) -> None:
        """Turn dropout off."""
        self.model.eval()

    def after_evaluation(self) -> None:
        """Turn dropout on."""
        self.model.train()

    def mean(self, found: list[tuple[float, int]]) -> float:
        """Of sums and numbers of tokens, a pair for each batch."""
        return sum(total for total, _ in found) / sum(number for _, number in found)

    def held_out(self, place: int) -> tuple[float, int]:
        """The sum and the number of tokens of a batch that is not trained on; the last one is small."""
        tokens = self.read(HELD_OUT + place)
        tokens = tokens if place < 3 else tokens[:1, :6]
        labels = self.labels(tokens)
        return float(self.summed(self.logits(tokens), labels)), self.count(labels)

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────

    def one_step(self) -> tuple[Tensor, Tensor, Tensor]:
        """A step: its tokens, the reported loss and the norm."""
        self.step += 1
        self.schedule(self.step)
        tokens = self.batch(self.step)
        parts = self.split(tokens)
        counts = [self.count(self.labels(part)) for part in parts]
        losses = []
        for number, part in enumerate(parts):
            logits = self.logits(part)
            loss = self.loss(logits, self.labels(part), sum(counts))
            self.backward(loss, number)
            losses.append(loss.detach())
        self.before_clip()
        norm = self.clip()
        self.update()
        self.zero()
        self.averaged()
        return tokens, torch.stack(losses).sum(), norm

    def task(self) -> Any:
        """What a careful user declares."""
        averages = {"averages": self.average} if self.average is not None else {}
        limit = {"max_grad_norm": self.setting.clip} if self.setting.clip else {}
        return ng.task(**{"decay_groups": "matrices", **limit, **averages, **dict(self.setting.declared)})

    def run(self, folder: Path, audits: bool = True) -> None:
        """Train, record, and write what the audit says beside the record."""
        found: list[dict[str, Any]] = []
        self.start()

        def report(step: int, results: list[PieceResult]) -> None:
            known = {(each["name"], each["where"]) for each in found}
            found.extend(_kept(f) for f in findings_of(results) if (f.name, f.where) not in known)

        settings = {
            "lr": LR, "steps": self.setting.steps, "gradient_accumulation_steps": self.setting.micro,
            "seed": self.setting.seed,
        }  # fmt: skip
        with ng.RunRecorder(folder, self.model, self.optimizer, settings=settings, gauges_every=20) as recorder:
            watcher = (
                StepWatcher(self.model, self.optimizer, EVERY, report, self.task(), is_told_losses=True)
                if audits
                else None
            )
            for step in range(1, self.setting.steps + 1):
                if self.setting.restarts and step == AT:
                    self.restart()
                    recorder.event("resume", f"from step {AT - 1}")
                tokens, loss, norm = self.one_step()
                recorder.step(loss, tokens=tokens.numel(), grad_norm=norm, batch=tokens)
                if self.setting.evaluates and step % 20 == 0:
                    evaluated = self.evaluate()
                    if watcher is not None:
                        watcher.evaluated(evaluated)
                    recorder.evaluate(evaluated)
            if watcher is not None:
                watcher.remove()
        folder.with_suffix(".audit.json").write_text(json.dumps(found))


def _kept(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.name, "where": finding.where, "severity": finding.severity, "step": finding.step,
        "message": finding.message,
    }  # fmt: skip


@dataclass(frozen=True)
class Bug:
    """A bug of a public thread.

    Args:
        name: of the row; where it has no part, this decides whether it is one of those that rules may be mended with.
        source: the thread.
        wrong: what was wrong there, in a sentence.
        plant: puts the same thing into a loop.
        setting: of the loop, with and without it.
        audit: names of the audit's findings that are right words for it; empty where it has none.
        pair: reasons that are right words for the difference from the loop without it.
        rows: causes of the diagnosis of one run that are right words; empty where no row shows it.
        part: ``seen`` if it was there while rules were mended, ``unseen`` or ``later`` if it was added when they were and
            before any was run on it; empty if the checksum of its name decides.
    """

    name: str
    source: str
    wrong: str
    plant: Callable[[PublicLoop], object]
    setting: Setting = field(default_factory=Setting)
    audit: frozenset[str] = frozenset()
    pair: frozenset[str] = frozenset({"bug"})
    rows: frozenset[str] = frozenset()
    part: str = ""


def made(folder: Path, setting: Setting, data: Callable[[], Dataset], plant: Callable[[PublicLoop], object]) -> Run:
    """The record of a loop; what its audit says lies beside it."""

    def make() -> None:
        with quiet(), _generator_kept():
            loop = PublicLoop(setting, data())
            plant(loop)
            loop.run(folder)

    return made_run(folder, make)


def audit_of(folder: Path) -> list[dict[str, Any]]:
    """What the audit of a made loop said, in order."""
    found: list[dict[str, Any]] = json.loads(folder.with_suffix(".audit.json").read_text())
    return found


@contextlib.contextmanager
def _generator_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
