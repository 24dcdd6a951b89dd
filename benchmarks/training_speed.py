"""Training a llama-8m: tokens per second of our trainer, against loops that people write.

Claim: ``bfloat16/word``, compiled, is at least 2.5 times as fast as a plain float32 loop, at least
1.05 times as fast as a compiled bfloat16-autocast loop with torch's fused AdamW, and logging and
audit cost it at most 3 %. Batches of 8 × 256 tokens of the standard library's text, every loop on
its own model from the same start and on the same batches, all clipping to a norm of 1, and all in
this one process; ours under the allocator settings that our trainer asks of glibc, the others under
glibc's own upper limits.

Baseline: our trainer with a row written and a line printed, as ``narrowgauge train`` does.
``tokens/s`` and how many times faster it is than each other loop come from the same rounds, of ten
steps each. Loops: plain float32 eager; the whole model compiled under autocast; each layer compiled
under autocast (the better of the two is the one to beat); ours without logging and audit.

Run: ``./dev bench training_speed [--quick]``.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _stdlib import stdlib_tokens
from timing import Contender, Report, Row, Timing, measure, parser
from torch import Tensor, nn
from transformers import PreTrainedModel

from narrowgauge.cli.main import keep_pages
from narrowgauge.gauges.recording.run_recorder import RunRecorder
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import language_model, loop
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset, open_data
from narrowgauge.trainer.session import Session, build
from narrowgauge.trainer.step import train_step

OURS = "ours, bfloat16/word"
STRIPPED = "ours, without logging and audit"
PLAIN = "plain float32 eager"
WHOLE = "autocast, whole model compiled"
LAYERS = "autocast, each layer compiled"


@dataclass
class Ours:
    """Our trainer: a step, and its record on disk and on (a buffer that stands for) standard
    output.
    """

    session: Session
    recorder: RunRecorder
    printed: io.StringIO = field(default_factory=io.StringIO)
    audited: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        optimizer = self.session.optimizer
        began = [0.0]

        def before(*_: Any) -> None:
            began[0] = time.perf_counter()

        def after(*_: Any) -> None:
            seconds = time.perf_counter() - began[0]
            (self.others if optimizer.last_audit is None else self.audited).append(seconds)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def step(self) -> None:
        """One step of the loop of ``narrowgauge train``."""
        with contextlib.redirect_stdout(self.printed):
            columns = train_step(self.session)
            self.recorder.step(columns.pop("loss"), **columns)


def stripped(session: Session) -> Callable[[], None]:
    """Our own arithmetic and nothing else."""

    def step() -> None:
        for tokens in session.batch():
            (session.loss(tokens) / session.config.tokens_per_step).backward()
        session.optimizer.step()
        session.optimizer.zero_grad(set_to_none=True)
        session.step += 1

    return step


@dataclass
class Peer:
    """The loop of a tutorial: float32 weights, torch's AdamW, the mean loss read every step."""

    config: TrainConfig
    data: Dataset
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor], Tensor]
    done: int = 0

    def step(self) -> None:
        """One step."""
        c = self.config
        tokens = torch.from_numpy(
            self.data.batch(self.done * c.batch_size, c.batch_size, c.sequence_length, c.seed)
        )
        loss = self.loss(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), c.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss.item()
        self.done += 1


def _whole_loss(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    def loss(tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, -2).float(), tokens[:, 1:].reshape(-1))

    return loss


def _autocast(loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def scoped(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(tokens)

    return scoped


def make_peer(kind: str, config: TrainConfig, data: Dataset) -> Peer:
    """A peer's loop over a model of its own."""
    model = language_model.build(config.model, vocab_size=data.vocab_size, seed=config.seed)
    loss = _whole_loss(model)
    if kind == WHOLE:
        loss = _autocast(torch.compile(loss))
    elif kind == LAYERS:
        layered = language_model.compiled_loss(model)
        loss = _autocast(lambda tokens: layered(tokens) / (tokens.shape[0] * (tokens.shape[1] - 1)))
    assert config.lr is not None
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.optimizer_options["betas"],
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    # Who writes a plain loop takes the default; who compiles the model also asks for the fused
    # optimizer.
    if kind != PLAIN:
        options["fused"] = True
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    return Peer(config, data, model, optimizer, loss)


def settings(quick: bool) -> TrainConfig:
    """What all loops train."""
    common = {
        "recipe": parse("bfloat16/word"),
        "compile": True,
        "schedule": "constant",
        "warmup_steps": 0,
        "log_every": 1,
    }
    if quick:
        sizes: dict[str, Any] = {"model": "llama-1m", "batch_size": 2, "sequence_length": 64}
    else:
        sizes = {"model": "llama-8m", "batch_size": 8, "sequence_length": 256}
    return TrainConfig(**sizes, data=str(stdlib_tokens(sizes["model"])), steps=10_000, **common)


def make_loops(config: TrainConfig, folder: Path) -> tuple[Ours, dict[str, Callable[[], None]]]:
    """Our trainer, and the step of every loop by name."""
    data = open_data(str(config.data), config.held_out)
    session = build(config, folder, data)
    recorder = loop.recorder_of(session, loop.Progress(config, None, is_verbose=True))
    ours = Ours(session, recorder)
    bare = TrainConfig.from_dict({**config.to_dict(), "audit_every": 0})
    loops: dict[str, Callable[[], None]] = {OURS: ours.step}
    loops |= {kind: make_peer(kind, session.config, data).step for kind in (PLAIN, WHOLE, LAYERS)}
    loops[STRIPPED] = stripped(build(bare, folder, data))
    return ours, loops


def row_of(timing: Timing, tokens_per_step: int) -> Row:
    """A loop's speed, and how many times faster ours was in the same rounds."""
    return {
        "": timing.name,
        "tokens/s": tokens_per_step / timing.median,
        "best tokens/s": tokens_per_step / min(timing.seconds),
        "ours is faster by": timing.ratio,
        "quartiles": f"{timing.quartiles[0]:.3f}–{timing.quartiles[1]:.3f}",
        "by best": timing.ratio_of_best,
    }


def audit_share(ours: Ours, step_seconds: float) -> Row:
    """What an audit every tenth step adds, as shares of an optimizer step and of a training step."""
    plain = statistics.median(ours.others)
    audited = statistics.median(ours.audited)
    extra = (audited - plain) / ours.session.config.audit_every
    return {
        "optimizer step ms": 1e3 * plain,
        "audited one ms": 1e3 * audited,
        "audits": len(ours.audited),
        "share of optimizer step": f"{extra / plain:.2%}",
        "share of training step": f"{extra / step_seconds:.2%}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=15).parse_args(arguments)
    report = Report("training speed", options)
    rounds, per_round = (2, 10) if options.quick else (options.rounds, 10)
    config = settings(options.quick).validated()

    def repeated(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(per_round):
                step()

        return run

    with tempfile.TemporaryDirectory() as folder:
        ours, loops = make_loops(config, Path(folder))
        with ours.recorder:
            contenders = [
                # Only our trainer asks glibc to keep its pages: a loop that people write runs under
                # glibc's own limits.
                Contender(
                    name,
                    repeated(step),
                    before=keep_pages
                    if name.startswith("ours")
                    else lambda: keep_pages(32 << 20, 64 << 20),
                    per_call=per_round,
                )
                for name, step in loops.items()
            ]
            first, *later = measure(contenders, baseline=OURS, rounds=rounds, warmup=1)
    rows = [row_of(timing, config.tokens_per_step) for timing in (first, *later)]
    tokens = f"{config.batch_size} × {config.sequence_length} tokens a step"
    report.add(f"{config.model}, {tokens}, {rounds} rounds of {per_round} steps", rows)
    report.add("the audit of every 10th step", [audit_share(ours, first.median)])
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
