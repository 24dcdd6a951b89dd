"""A run folder for any training loop, as ``narrowgauge train`` writes for its own runs.

A recorder is a watch that writes each step, and lets the laws read what it wrote. A resumed loop needs
only the rows. Nothing of the recorder belongs in a checkpoint.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import fsdp_modules
from narrowgauge.errors import RecordError
from narrowgauge.measuring.check.training_setup import setup_of
from narrowgauge.measuring.diagnose.diagnose import ignored, steps_of
from narrowgauge.measuring.diagnose.laws import Laws
from narrowgauge.measuring.diagnose.step_metrics import StepMetrics
from narrowgauge.measuring.provenance import describe_run
from narrowgauge.measuring.watch.fingerprints import Fingerprints, fingerprints_whole
from narrowgauge.measuring.watch.hooks import LoopHooks, RunNotice
from narrowgauge.measuring.watch.meter import Meter
from narrowgauge.measuring.watch.optimizer_columns import columns_of, summary_of
from narrowgauge.numerics.hashing import fingerprint_all
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.step.state import bytes_per_param
from narrowgauge.runs.paths import is_run
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.text import plural
from narrowgauge.runs.writer import Record, plain, require_columns, shortened
from narrowgauge.spec.tables import Row
from narrowgauge.torch_support.torch_names import is_compiled_model, unwrapped_model

SEEN_AT = 3
"""The step after which the recorder says what is not measured."""


class RunRecorder:
    """Watch a training loop of your own, and record it in a run folder, as ``narrowgauge train``
    records its runs.

    ``narrowgauge report``, ``narrowgauge diagnose`` and ``ng.read_run`` read the folder like the trainer's.
    A loop computes the same bits with and without a recorder. Each reading becomes an event and a :class:`RunNotice`.

    On several ranks, all of them make all calls, and rank 0 writes. The losses are rank 0's. A run is
    finished when :meth:`close` or the end of the ``with`` block says so. Nothing happens at exit.

    Args:
        folder: the run folder; absent or empty, unless ``resume``. ``None`` records nothing.
        model: the trained model.
        optimizer: one of Narrowgauge's or of ``torch.optim``'s, possibly in a framework's wrapper;
            or a list of several. Rows and checkpoints are of the last one, which steps at
            the end. Only ours has an audit.
        settings: of your loop, such as ``{"lr": 1e-3, "steps": 400}``. Comparisons show the
            settings in which runs differ, and pair runs of one ``seed``. The ``recipe`` is read from
            the model and our optimizer, if it is not among them.
        max_grad_norm, ignore: as in :func:`narrowgauge.watch`.
        fingerprints_every: steps between fingerprints of every tensor. With them ``narrowgauge
            diagnose RUN OTHER`` finds the first different tensor. The start and the first step have
            fingerprints too. 0 for none.
        called: the part of the model whose forward pass the loop calls, if not the model itself.
        on_row: called as ``on_row(kind, row)`` after each row is written, on rank 0; ``kind`` is
            ``"steps"``, ``"evals"`` or ``"events"``, and ``row`` a dict. With
            :func:`narrowgauge.runs.schema.numbers_of`, for Weights & Biases: ``lambda kind, row:
            wandb.log(numbers_of(kind, row), step=row["step"])``. For TensorBoard: ``lambda kind,
            row: [board.add_scalar(tag, x, row["step"]) for tag, x in numbers_of(kind,
            row).items()]``. Its exceptions end the loop.
        resume: continue the run in the folder, if there is one; call :meth:`go_back` before the
            first step. The ``settings`` replace those in its ``run.toml``.
        tables: further tables of ``run.toml``, such as ``{"data": {"folder": "text"}}``.

    Attributes:
        hooks: the hooks on the loop.
        meter: measures each step.
        laws: read the steps.

    Raises:
        RecordError: the folder is in use.
        RecipeError: ``ignore`` has an unknown kind of reading.

    Cost: that of :func:`narrowgauge.watch`, about 0.1 ms per step, reading the loss from the device,
        and with a reduction one gather over its ranks. Fingerprints take 3 ns an element on one CPU
        thread, for weights, gradients, states and the outputs of modules.

    Example:
        >>> import tempfile, torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "bfloat16/word", lr=1e-3)
        >>> folder = Path(tempfile.mkdtemp(), "mine")
        >>> with RunRecorder(folder, model, optimizer, settings={"steps": 3}) as recorder:
        ...     for _ in range(3):
        ...         loss = model(torch.ones(8, 16, dtype=torch.bfloat16)).float().square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         recorder.step(loss, tokens=8)
        ...     recorder.evaluate(loss)
        >>> run = ng.read_run(folder)
        >>> [row["tokens"] for row in run.steps], run.summary["steps"]
        ([8, 16, 24], 3)
    """

    def __init__(
        self,
        folder: str | Path | None,
        model: nn.Module,
        optimizer: Any,
        *,
        settings: Mapping[str, Any] | None = None,
        fingerprints_every: int = 1000,
        max_grad_norm: float | None = None,
        ignore: Collection[str] = (),
        called: nn.Module | None = None,
        on_row: Callable[[str, Row], object] | None = None,
        resume: bool = False,
        tables: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.laws = Laws(ignore, say=self._ended)
        self.model = unwrapped_model(model)
        if called is None:
            # A compiler skips hooks inside the model that it compiles.
            called = model if is_compiled_model(model) else self.model
        self._ranks = all_ranks()
        self._on_row = on_row
        self._record: Record | None = None
        self._started = time.perf_counter()
        self._tokens = 0
        self._unseen: set[str] = set()  # areas that were told
        self._must_go_back = False
        self._is_open = True
        with ExitStack() as undo:
            optimizers = setup_of(model, optimizer).optimizers
            self.hooks = LoopHooks(self.model, optimizers, called, self._ended)
            undo.callback(self.hooks.close)
            self.optimizer = optimizers[-1]
            self.meter = Meter(self.hooks, self._write, limit=max_grad_norm)
            self._prints = Fingerprints(self.hooks, fingerprints_every if self.folder else 0)
            if self.folder is not None:
                self._begin(undo, dict(settings or {}), tables or {}, resume)
            self._undo = undo.pop_all()

    @property
    def num_steps(self) -> int:
        """Return the number of steps recorded so far."""
        return self.meter.number

    def _begin(
        self, undo: ExitStack, settings: Row, tables: Mapping[str, Any], resume: bool
    ) -> None:
        """Open the folder, and write what is known before the first step."""
        content = describe_run(self.model, self.optimizer, settings)
        content |= {"watch": {"ignore": list(self.laws.ignore)}, **tables}
        self._must_go_back = self._ranks.of_first(lambda: self._open(content, settings, resume))
        if self._record is not None:
            undo.callback(self._record.close)
        if isinstance(self.optimizer, Optimizer):
            self.optimizer.name_parameters(self.model)
        if not self._must_go_back:
            self.event("start", str(content["config"]["model"]))
            self._prints.start(0)

    def _open(self, content: Row, settings: Row, resume: bool) -> bool:
        """Open the folder on rank 0, and return whether this run continues the one in it."""
        folder = Path(str(self.folder))
        goes_on = resume and is_run(folder)
        if goes_on:
            self._record = Record.open(folder)
            run = read_run(folder)
            self._record.amend({**content, **run.run, "config": {**run.config, **settings}})
        else:
            self._record = Record.create(folder, content)
        return goes_on

    # ── the loop calls these ──────────────────────────────────────────────────────────────────────

    def step(
        self,
        loss: float | Tensor | None = None,
        *,
        tokens: int | None = None,
        **columns: Any,
    ) -> None:
        """Record an optimizer step. Call it after ``optimizer.step()`` and before the schedule's.

        An optimizer step without such a call has a row without a loss.

        Args:
            loss: of the step, in nats per token; ``None`` if it is unknown. Reading a tensor waits
                for its device.
            tokens: trained on in this step; the row holds their sum so far.
            columns: further columns: numbers, or texts of at most 200 bytes. ``lr``, ``grad_norm``
                (before clipping) and ``seconds`` replace those read here, which are the largest rate
                of all groups, our optimizer's norm, if it clips, and the time since the last call. A
                row without a step counts as skipped, but for those of micro-batches.
        Raises:
            RecordError: the run is resumed, and :meth:`go_back` was not called; or a column is not
                a number or a short text.
        """
        row = plain({"loss": loss, **columns})
        require_columns({"tokens": tokens, **row})
        if tokens is not None:
            row["tokens"] = self._tokens + tokens
        self.meter.end_step(row)

    def _write(self, row: Row) -> None:
        """Write the row of a step that has ended, and let the laws read it."""
        if self._must_go_back:
            raise RecordError(
                f"Cannot continue in {self.folder} because the step of the checkpoint is unknown.",
                "Call recorder.go_back(step) first.",
            )
        if self.folder is not None or self._on_row is not None:
            row = columns_of(self.model, self.optimizer) | row
        tokens = row.get("tokens", self._tokens)
        if tokens > self._tokens and row["seconds"]:
            row.setdefault("tokens_per_second", (tokens - self._tokens) / row["seconds"])
        self._tokens = tokens
        self._read(self._append("steps", shortened(row)))
        if self.num_steps >= SEEN_AT:
            self._tell_unseen()
        for row in self._prints.take(self.num_steps):
            self._append("fingerprints", row)

    def _tell_unseen(self) -> None:
        """Tell once what is not measured, each with its reason."""
        areas = []
        for area, reason in self.meter.unseen.items():
            if area not in self._unseen:
                self.event("unseen", reason, tensor=area)
            self._unseen.add(area)
            areas.append(f"{area} ({reason})")
        if self.num_steps == SEEN_AT and self.folder is None and self._ranks.is_first:
            number = plural(len({*self.meter.names.values()}), "tensor")
            print(f"watch: {number}; not: {', '.join(areas) or 'nothing'}", file=sys.stderr)

    def evaluate(self, loss: float | Tensor) -> None:
        """Record the validation loss, in nats per token, at the current step. Its time does not count
        as a step's.
        """
        row = {"step": self.num_steps, "val_loss": loss, "tokens": self._tokens or None}
        self._read(self._append("evals", row))
        self.meter.restart_clock()

    def event(self, what: str, words: str, **fields: Any) -> None:
        """Log something that happened in the loop at the current step.

        Args:
            what: its kind, such as ``"note"``.
            words: what happened and what to do, in sentences.
            fields: further columns of ``events.jsonl``, such as ``tensor`` and ``value``. The
                ``severity`` is ``"note"`` if not given.
        """
        row = {"step": self.num_steps, "what": what, "severity": "note"}
        self._append("events", {**row, **fields, "text": words})

    def go_back(self, step: int, *, tokens: int | None = None) -> None:
        """Continue after ``step``. Move rows of later steps to ``FILE.cut``, since the loop repeats
        these steps.

        Call it before the first step after a checkpoint was loaded, in a resumed loop or after a
        rollback. Call it in an empty folder too, if a loop continues from another run's checkpoint.

        Args:
            step: steps that the loaded checkpoint has done.
            tokens: trained on in these steps; ``None``: as the last row says.
        Raises:
            RecordError: ``step`` is below 0.
        """
        if step < 0:
            raise RecordError(
                f"Cannot go back to step {step} because the first step is 0.",
                "Give the step of the loaded checkpoint.",
            )
        if self.folder is None:  # no row says what the laws read up to this step
            self.laws = Laws(self.laws.ignore, say=self._ended)
            self._tokens = self._tokens if tokens is None else tokens
            self.meter.go_on_after(step)
            return
        run = self._ranks.of_first(lambda: self._rewound(step))
        is_fresh = step == self.num_steps == 0 and len(run.events) == 1
        self.laws = Laws(ignored(run), steps_of(run), self._ended)
        self._tokens = run.last_step.get("tokens", 0) if tokens is None else tokens
        self._started = time.perf_counter() - sum(row.get("seconds", 0.0) for row in run.steps)
        self.meter.go_on_after(step)
        self._must_go_back = False
        self._prints.start(step)
        if not is_fresh:
            self.event("resume", f"from step {step}")

    def _rewound(self, step: int) -> Run:
        """Set the rows after a step aside, on rank 0, and return the run that is left."""
        assert self._record is not None
        self._record.rewind(step)
        while self._record.notes:
            self._tell("note", self._record.notes.pop())
        run = read_run(self._record.path)
        last = run.last_step.get("step", step)
        if last < step:
            self._tell("note", f"steps {last + 1} to {step} have no rows")
        return run

    def close(self, finished: bool = True) -> None:
        """End the record, and remove every hook. A second call does nothing.

        Args:
            finished: the loop has done its last step, so write ``summary.json``. Otherwise the run
                can be resumed.
        """
        if not self._is_open:
            return
        self._is_open = False
        with self._undo:
            if self._must_go_back:
                return
            if self.meter.has_stepped:
                self.meter.end_step({})
            if finished and self.folder is not None:
                self._finish()
            else:
                self.event("stop", "the loop ended before its last step")

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finished=kind is None)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────

    def _append(self, kind: str, row: Row) -> Row:
        """Write a row, and return it as written."""
        row = plain(row)
        if self._record is not None:
            self._record.append(kind, row)
        if self._on_row is not None and kind != "fingerprints" and self._ranks.is_first:
            self._on_row(kind, row)
        return row

    def _read(self, row: Row) -> None:
        """Let the laws read the row of a step or an evaluation, and log and show what is new."""
        step = StepMetrics.of(row)
        sentences = []
        place = f"step {step.step}"
        for reading in self.laws.fresh(step):
            self._append("events", reading.to_dict())
            words = f"{reading.tensor}: {reading.text}".removeprefix(": ")
            sentences.append(words.rstrip("."))
            if reading.step < step.step:
                place = f"steps {reading.step} to {step.step}"
        if sentences:
            self._warn(f"{place}: {'; '.join(sentences)}")

    def _ended(self, text: str, area: str = "") -> None:
        """Log that a measure ended, as what is not looked at from here on, and show it."""
        self._unseen.add(area)
        self._tell("unseen", text, tensor=area or f"what comes after step {self.num_steps}")

    def _tell(self, what: str, text: str, **fields: Any) -> None:
        """Log what happened, and show it."""
        self.event(what, text, **fields)
        self._warn(f"{what}: {text}")

    def _warn(self, text: str) -> None:
        """Show a sentence. No line of the loop is at fault, so none is shown."""
        if self._ranks.is_first:
            warnings.warn_explicit(text, RunNotice, "narrowgauge.watch", self.num_steps)

    def _finish(self) -> None:
        """Write the last event and ``summary.json``, which makes the run finished."""
        run = self._ranks.of_first(lambda: read_run(str(self.folder)))
        summary = {
            "recipe": run.config.get("recipe"), "model": str(run.config.get("model")),
            "weights_fingerprint": self._fingerprint_of_weights(), "steps": self.num_steps,
            "tokens": self._tokens or None, "bytes_per_param": bytes_per_param(self.optimizer),
            "wall_seconds": time.perf_counter() - self._started, **summary_of(run),
        }  # fmt: skip
        self.event("finish", f"after {plural(self.num_steps, 'step')}")
        if self._record is not None:
            self._record.summary(summary)

    def _fingerprint_of_weights(self) -> str:
        """Return the fingerprint of all weights, with the low bits that our optimizer holds."""
        for module in fsdp_modules(self.model):  # an evaluation leaves the weights gathered
            module.reshard()
        stored = dict(self.model.named_parameters())
        if isinstance(self.optimizer, Optimizer):
            for name, p in stored.items():
                with suppress(KeyError):  # another optimizer's, or frozen
                    stored[name] = self.optimizer.stored(p)
        return fingerprint_all(fingerprints_whole(stored))


def folder_for(folder: Path, *, goes_on: bool) -> Path:
    """Return the first free folder of ``folder``, ``folder-2`` ….

    To continue from a checkpoint, return the last used one.

    All ranks call it, and get rank 0's result. Rank 0 may create the folder before another rank
    looks.
    """

    def first_free() -> Path:
        used = folder
        free = folder
        number = 1
        while is_run(free):
            number += 1
            used = free
            free = folder.with_name(f"{folder.name}-{number}")
        return used if goes_on else free

    return all_ranks().of_first(first_free)


def watch(
    model: nn.Module,
    optimizer: Any,
    *,
    record: str | Path | None = None,
    max_grad_norm: float | None = None,
    ignore: Collection[str] = (),
    **options: Any,
) -> RunRecorder:
    """Watch a training loop.

    Print after the third step what is measured and what is not, and a sentence at a step that is not
    well. Each kind of fault is reported once, and again when it is twice as large:

    * the fraction of the update that the formats of the weights store, for optimizers whose step on a copy
      of some elements gives the same result;
    * a weight that jumps;
    * gradients that are zero, missing, not cleared, or beyond the limit of the clip;
    * learning rates that stay at 0;
    * the first weight, loss or gradient that is not finite; skipped steps, and the loss scale;
    * on several ranks, gradients and weights that differ in any bit, the only rank that has others, and
      inputs of the model that are the same on all.

    A watched loop computes the same bits. On several ranks, all of them make the call.

    Args:
        model: the trained model, before ``torch.compile`` or not.
        optimizer: any ``torch.optim.Optimizer``, possibly wrapped; or a list of several, the last
            to step at the end.
        record: a folder in which the run is recorded, with a row for each step of the optimizer, and
            the loss where :meth:`RunRecorder.step` passes it.
        max_grad_norm: the limit to which the loop clips gradients.
        ignore: kinds of readings that are intended. ``narrowgauge show checks`` lists them.
        options: of :class:`narrowgauge.RunRecorder`, such as ``on_row`` for a logger, and ``called``
            for the module whose forward pass the loop calls, if it is not the model itself.
    Returns:
        The watch. ``step(loss)`` passes the loss too; ``close()`` ends it, as the end of a ``with`` block.
    Raises:
        RecipeError: ``model`` is not a module, ``optimizer`` not an optimizer, or ``ignore`` has an
            unknown kind.
        RecordError: the folder is in use.

    Cost: the norm of each gradient, and two steps of the optimizer's class on 64 elements of 16
        tensors; on several ranks one read more of all gradients and weights.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> watch = ng.watch(model, optimizer)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     for _ in range(8):
        ...         model(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> str(caught[0].message).split(":")[0]
        'step 6'
    """
    options |= {"max_grad_norm": max_grad_norm, "ignore": ignore}
    return RunRecorder(record, model, optimizer, **options)
