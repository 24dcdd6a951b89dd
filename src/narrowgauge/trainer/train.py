"""``narrowgauge train`` on one page: build a run or load its checkpoint, step, evaluate, save, show.

Read it from the top. The step contains no arithmetic and no format: it uses what ``prepare``
returns, like any loop. The other files say what is asked for (``settings``), which sequences
(``tokens``), which model (``language_model``), and what is on the disk (``checkpoints``).

Everything that decides the next step is in the checkpoint, and the data are a function of (seed,
step). So a killed run loses only the steps since its last checkpoint, and repeats them with the
same bits on any number of ranks: micro-batch m of a step holds the same sequences for any number
of ranks, and runs on rank m % ranks. Rank 0 decides what depends on files or on a signal.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

from narrowgauge.assembly.preparation import compute_scope, matrices_decay, prepare
from narrowgauge.distributed.process_group import require_same, threads_of
from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.distributed.sharding import fsdp_modules
from narrowgauge.measuring.watch.hooks import RunNotice
from narrowgauge.measuring.watch.recorder import RunRecorder
from narrowgauge.optim.audit.audit import UpdateLossWarning
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.schema import EVAL, STEP
from narrowgauge.runs.writer import Record
from narrowgauge.spec.parse import parse
from narrowgauge.spec.tables import Row
from narrowgauge.torch_support.preserve import preserve_generators
from narrowgauge.trainer import checkpoints, language_model
from narrowgauge.trainer.settings import Settings, Start, find_start, has_settings
from narrowgauge.trainer.tokens import Tokens, open_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COLUMNS = ("loss", "tokens_per_second", "lr", "edq")
"""The columns of a step that are shown."""


def train(named: Mapping[str, Any], *, is_verbose: bool = True) -> Path:
    """Train a model, and return the run folder. All ranks call it.

    Args:
        named: the settings that were named; others are those of the run in ``out``, or defaults.
        is_verbose: show the progress, and warn of what the record shows.
    Raises:
        NarrowgaugeError: an invalid setting. Nothing is written then.
        RecordError: the run is being written, or cannot be continued with these settings.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, once the checkpoint is saved.
    """
    ranks = all_ranks()
    start = ranks.of_first(lambda: find_start(named, ranks.size))
    settings = start.settings
    if start.is_finished:
        return settings.folder
    with threads_of(parse(settings.recipe).reduction.order_invariant), warnings.catch_warnings():
        if not is_verbose:
            warnings.simplefilter("ignore", RunNotice)
            warnings.simplefilter("ignore", UpdateLossWarning)
        tokens = ranks.together(lambda: open_tokens(settings.data))
        require_same({"tokens": tokens.fingerprint})
        run = build(settings, tokens)
        if start.checkpoint is not None:
            load_into(run, start.checkpoint)
        say = _say if is_verbose and ranks.is_first else lambda words: None
        try:
            with _recorder_of(run, start, say) as recorder:
                _loop(run, recorder, say)
        finally:
            if run.optimizer.reduction is not None:
                run.optimizer.reduction.close()  # its hooks would keep the process group
    return settings.folder


def _say(words: str) -> None:
    """Print a line. A reader that has left, such as head, or a full disk ends no training."""
    with suppress(OSError):
        print(words, flush=True)


# ── a run in memory ───────────────────────────────────────────────────────────────────────────────


@dataclass
class Session:
    """A run in memory, after ``step`` optimizer steps."""

    settings: Settings
    tokens: Tokens
    model: PreTrainedModel
    optimizer: Optimizer
    ranks: Ranks
    scaler: GradScaler
    step: int = 0

    def loss_sum(self, tokens: Tensor) -> Tensor:
        """Return the summed cross entropy of some sequences."""
        tokens = tokens.to(self.model.device)
        with compute_scope(parse(self.settings.recipe), tokens.device):
            return language_model.loss_sum(self.model, tokens)

    def sum_over_ranks(self, shares: Sequence[Tensor]) -> float:
        """Return the exact sum of all ranks' shares: the same bits for any number of ranks."""
        return math.fsum(chain.from_iterable(self.ranks.gather([float(share) for share in shares])))


def build(settings: Settings, tokens: Tokens) -> Session:
    """Build a run at step 0."""
    model = language_model.build(settings.model, vocab_size=tokens.vocab_size, seed=settings.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nn.Module.to(model, device)
    ranks = all_ranks()
    mesh = init_device_mesh(device.type, (ranks.size,)) if ranks.size > 1 else None
    _, optimizer = prepare(
        model, settings.recipe, lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay,
        optimizer=matrices_decay, max_grad_norm=settings.max_grad_norm or None, seed=settings.seed, mesh=mesh, average=False,
    )  # fmt: skip
    if settings.gradient_accumulation_steps > 1 and mesh is None and optimizer.reduction is None:
        for parameter in model.parameters():
            if parameter.dtype.itemsize == 2:
                parameter.grad_dtype = torch.float32  # autograd sums in it
    scaler = GradScaler(device.type, enabled=optimizer.scales_loss)
    return Session(settings, tokens, model, optimizer, ranks, scaler)


# ── one step, and one evaluation ──────────────────────────────────────────────────────────────────


def train_step(run: Session) -> float:
    """Take one optimizer step, and return its loss in nats per token."""
    settings = run.settings
    reduction = run.optimizer.reduction
    for group in run.optimizer.param_groups:
        group["lr"] = settings.learning_rate(run.step + 1)
    shares = []
    size = settings.micro_batch_size
    numbers = range(run.ranks.rank, settings.gradient_accumulation_steps, run.ranks.size)
    for number in numbers:
        first = run.step * settings.batch_size + number * size
        windows = run.tokens.batch(first, size, settings.sequence_length, settings.seed)
        is_last = number == numbers[-1]
        with nullcontext() if reduction is None else reduction.micro_batch(is_last):
            with preserve_generators():
                # A function of these three, so that a repeated step draws the same numbers.
                torch.manual_seed(hash((settings.seed, run.step, number)))
                loss = run.loss_sum(torch.from_numpy(windows)) / settings.tokens_per_step
            run.scaler.scale(loss).backward()
        shares.append(loss.detach())
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    run.step += 1
    return run.sum_over_ranks(shares)


@torch.no_grad()
def evaluate(run: Session) -> float:
    """Return the mean loss in nats per token over the validation sequences, of the model in
    evaluation mode.

    They are the same for every number of micro-batches and ranks.
    """
    settings = run.settings
    tokens = run.tokens.validation(settings.eval_sequences, settings.sequence_length)
    batches = torch.from_numpy(tokens).split(settings.micro_batch_size)
    run.model.eval()
    shares = []
    for first in range(0, len(batches), run.ranks.size):
        # All ranks take part in gathering weights. One without a batch repeats an earlier one.
        number = first + run.ranks.rank
        share = run.loss_sum(batches[number % len(batches)])
        shares.append(share * (number < len(batches)))
    run.model.train()
    for module in fsdp_modules(run.model):  # no backward pass frees the gathered parameters
        module.reshard()
    return run.sum_over_ranks(shares) / (len(tokens) * settings.sequence_length)


# ── the loop ──────────────────────────────────────────────────────────────────────────────────────


def _loop(run: Session, recorder: RunRecorder, say: Callable[[str], object]) -> None:
    """Train until the last step or a reason to stop, and end with a checkpoint."""
    settings = run.settings
    last = min(settings.steps, settings.stop_after or settings.steps)
    is_stopped = False
    with _signals() as received:
        while run.step < last and not is_stopped:
            recorder.step(train_step(run), tokens=settings.tokens_per_step)
            if run.step == settings.steps or _is_due(run.step, settings.eval_every):
                recorder.evaluate(evaluate(run))
            # A signal may reach the ranks in different steps. All stop after the same one.
            is_stopped = any(run.ranks.gather(bool(received)))
            if is_stopped or run.step == last or _is_due(run.step, settings.checkpoint_every):
                save(run)
                recorder.event("checkpoint", f"step-{run.step:08d} is complete")
    is_finished = run.step == settings.steps
    recorder.close(is_finished)
    if is_finished:
        say(f"Finished after {run.step} steps.")
    else:
        say(f"Stopped after step {run.step}. The same command continues.")
    if is_stopped and not is_finished:
        raise KeyboardInterrupt


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the first SIGINT and SIGTERM. A second one ends the process."""
    received = []

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)
        # Past Python's buffers: the signal may have interrupted a print.
        os.write(2, b"Stopping after this step; press Ctrl-C again to stop at once.\n")

    with ExitStack() as undo:
        for number in (signal.SIGINT, signal.SIGTERM):
            undo.callback(signal.signal, number, signal.signal(number, receive))
        yield received


# ── its checkpoints ───────────────────────────────────────────────────────────────────────────────


def save(run: Session) -> None:
    """Write a checkpoint of a run."""
    settings = run.settings
    notes = {
        "step": run.step, "settings": vars(replace(settings, stop_after=0)),
        "tokens": run.tokens.fingerprint, "vocab_size": run.tokens.vocab_size, "scaler": run.scaler.state_dict(),
    }  # fmt: skip
    checkpoints.save(settings.folder, run.model, run.optimizer, notes, settings.keep_checkpoints)


def load_into(run: Session, checkpoint: Path) -> None:
    """Set weights, states and step of a run to those of a good checkpoint."""
    notes = checkpoints.load(checkpoint, run.model, run.optimizer)
    run.step = notes["step"]
    run.scaler.load_state_dict(notes["scaler"])


def load(checkpoint: Path) -> Session:
    """Load a run at a good checkpoint, for export or sampling."""
    notes = checkpoints.notes_of(checkpoint)
    none = np.zeros(0, np.uint16)
    run = build(Settings(**notes["settings"]), Tokens(none, none, notes["vocab_size"]))
    load_into(run, checkpoint)
    return run


# ── what it records and shows ─────────────────────────────────────────────────────────────────────


def _recorder_of(run: Session, start: Start, say: Callable[[str], object]) -> RunRecorder:
    """Create the record of a run, or open it and go back to the step of the session."""
    settings = run.settings
    if start.checkpoint is not None:
        run.ranks.of_first(lambda: _mend(settings))
    data = {"fingerprint": run.tokens.fingerprint, "unigram_loss": run.tokens.unigram_loss()}
    recorder = RunRecorder(
        settings.folder, run.model, run.optimizer, settings=vars(settings),
        fingerprints_every=settings.fingerprints_every,
        on_row=_shown(settings, say), resume=True, tables={"data": data},
    )  # fmt: skip
    recorder.go_back(run.step, tokens=run.step * settings.tokens_per_step)
    if not run.step and not start.events:
        say(f"A new run in {settings.folder}.")
    for kind, words in start.events:
        recorder.event(kind, words)
        say(f"{kind}: {words}")
    return recorder


def _mend(settings: Settings) -> None:
    """Write ``run.toml`` again if it is damaged."""
    if not has_settings(settings.folder):
        with Record(settings.folder) as record:
            record.amend({"config": vars(settings)})


def _shown(settings: Settings, say: Callable[[str], object]) -> Callable[[str, Row], None]:
    """Return what shows a row that was written: a line per step in a terminal, else now and then."""
    every = 1 if sys.stdout.isatty() else max(1, min(100, settings.steps // 10))

    def show(kind: str, row: Row) -> None:
        step = row["step"]
        words = ""
        if kind == "evals":
            words = EVAL["val_loss"].text(row)
        elif kind == "steps" and (step % every == 0 or step in (1, settings.steps)):
            words = "  ".join(STEP[name].text(row) for name in _COLUMNS if name in row)
        if words:
            say(f"step {step:>6}/{settings.steps}  {words}")

    return show
