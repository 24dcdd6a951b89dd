"""A run folder for any training loop, as ``narrowgauge train`` writes for its own runs.

:class:`RunRecorder` opens the folder, describes the run, checks it, and goes back in it. A resumed
loop needs only the rows. Nothing of the recorder belongs in a checkpoint.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.log import happened
from narrowgauge.analysis.reading import Reading, in_order, of_all, words_of
from narrowgauge.analysis.snapshot import Snapshot, is_sampled
from narrowgauge.checks.checking import static_readings
from narrowgauge.checks.loss_value import coarse_loss
from narrowgauge.checks.set_up import set_up_of
from narrowgauge.checks.step_samples import weight_of
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import fingerprint_whole, fsdp_modules
from narrowgauge.errors import RecipeError, RecordError
from narrowgauge.gauges.hub import RunNotice
from narrowgauge.gauges.recording.provenance import (
    describe_run,
    differences,
    formats_of,
)
from narrowgauge.gauges.recording.record import OnRow, Record
from narrowgauge.gauges.recording.step_row import batch_checksum
from narrowgauge.gauges.recording.watch import Watch
from narrowgauge.matmul.linear import Linear
from narrowgauge.measuring.fingerprints import Fingerprints
from narrowgauge.measuring.resume import Certificate
from narrowgauge.optim.audit import unwrapped
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.places import is_run
from narrowgauge.runs.record import read_run
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES
from narrowgauge.spec.update_rules import Range
from narrowgauge.torch_support.torch_hooks import members_of

_OPEN: weakref.WeakSet[RunRecorder] = weakref.WeakSet()
_COUNT = Range(0, 1 << 63, is_integer=True)
atexit.register(lambda: deque(map(RunRecorder.__del__, [*_OPEN]), 0))


class RunRecorder(Watch):
    """Watch a training loop of your own, and record it in a run folder, as ``narrowgauge train``
    records its runs.

    It is an :func:`narrowgauge.watch` with a folder. ``narrowgauge report``, ``ng.compare_runs``
    and ``ng.read_run`` read the folder like the trainer's. A loop computes the same bits with and
    without a recorder. Each reading of the watch
    and of the rows becomes an event, a :class:`RunNotice` and a call of ``ng.on_event``'s
    callbacks.

    On several ranks, all of them make all calls, and rank 0 writes. The losses are rank 0's. A
    process that ends without :meth:`close` closes the record.

    Args:
        folder: the run folder; absent or empty, unless ``resume``.
        model: the trained model, before ``torch.compile`` if gauges are to see it.
        optimizer: one of Narrowgauge's or of ``torch.optim``'s, possibly in a framework's wrapper;
            or a list of several. Rows, gauges and checkpoints are of the last one, which steps at
            the end. Only ours has an audit.
        recipe: the recipe with which the model was prepared. ``None``: read it from the model and
            the optimizer, if possible.
        settings: of your loop, such as ``{"lr": 1e-3, "steps": 400}``. Comparisons show the
            settings in which runs differ, and pair runs of one ``seed``.
        gauges_every: steps between samples of what tensors hold and casts lose
            (:class:`narrowgauge.measuring.casts.Gauges`); 0 for none.
        max_grad_norm, ignore: as in :func:`narrowgauge.watch`.
        fingerprints_every: steps between fingerprints of every tensor. With them ``narrowgauge
            diagnose RUN OTHER`` finds the first different tensor. The start and the first step have
            fingerprints too. 0 for none.
        called: the part of the model whose forward pass the loop calls, if not the model itself.
        on_row: called as ``on_row(kind, row)`` after each row is written, on rank 0; ``kind`` is
            ``"steps"``, ``"evals"``, ``"gauges"`` or ``"events"``, and ``row`` a dict. With
            :func:`narrowgauge.runs.schema.numbers_of`, for Weights & Biases: ``lambda kind, row:
            wandb.log(numbers_of(kind, row), step=row["step"])``. For TensorBoard: ``lambda kind,
            row: [board.add_scalar(tag, x, row["step"]) for tag, x in numbers_of(kind,
            row).items()]``. Its exceptions end the loop.
        resume: continue the run in the folder, if there is one; then call :meth:`go_back` before
            the first step. The ``settings`` replace those in its ``run.toml``.
        steps_itself: write a row for each step of the optimizer, also without a call of
            :meth:`step`, as ``ng.watch(record=)`` does.
        tables: further tables of ``run.toml``, such as ``{"data": {"folder": "text"}}``; ``None``
            in place of a table leaves it out.

    Raises:
        RecordError: the folder is in use.
        RecipeError: the optimizer's storage is not the recipe's, or ``ignore`` has an unknown kind
            of reading.

    Cost: about 0.1 ms per step, reading the loss from the device, and with a reduction one gather over its ranks. Fingerprints
        take 3 ns an element on one CPU thread, for weights, gradients, states and the outputs of
        modules. A sampled step repeats the step on 4,096 elements of each tensor.

    Example:
        >>> import tempfile, torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "bfloat16/word", lr=1e-3)
        >>> folder = Path(tempfile.mkdtemp(), "mine")
        >>> with RunRecorder(folder, model, optimizer, recipe="bfloat16/word", settings={"steps": 3}) as recorder:
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
        folder: str | Path,
        model: nn.Module,
        optimizer: Any,
        *,
        recipe: str | Path | Recipe | None = None,
        settings: Mapping[str, Any] | None = None,
        gauges_every: int = 0,
        fingerprints_every: int = 1000,
        max_grad_norm: float | None = None,
        ignore: Collection[str] = (),
        called: nn.Module | None = None,
        on_row: OnRow | None = None,
        resume: bool = False,
        steps_itself: bool = False,
        tables: Mapping[str, Mapping[str, Any] | None] | None = None,
    ) -> None:
        _COUNT.check("gauges_every", gauges_every)
        _COUNT.check("fingerprints_every", fingerprints_every)
        outer_ones = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        optimizers = [*map(unwrapped, outer_ones)]
        self.model = set_up_of(model, optimizers).model
        self.optimizer = optimizers[-1]
        self.recipe = _recipe_in_use(model, self.optimizer) if recipe is None else parse(recipe)
        _require_fit(self.recipe, self.optimizer)
        self._asked = None if recipe is None else self.recipe
        content = describe_run(self.model, self.optimizer, self.recipe, settings or {}) | dict(
            tables or {}
        )
        here = all_ranks()
        goes_on = here.of_first(lambda: resume and is_run(Path(folder)))
        self._record = Record(
            lambda: RunWriter.open(folder) if goes_on else RunWriter.create(folder, content),
            self.recipe,
            warn,
            on_row,
        )
        self.folder = self._record.folder
        with ExitStack() as undo:
            if not goes_on and here.is_first:
                undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            undo.callback(self._record.close)
            earlier = here.of_first(lambda: read_run(folder)) if goes_on else None
            self._has_formats = False
            self._steps_itself = steps_itself
            self._has_unwritten = False
            super().__init__(
                model, optimizers, called=called, max_grad_norm=max_grad_norm, ignore=ignore
            )
            self._record.undo.callback(self.remove)
            self.hub.say = self._note
            self._prints = Fingerprints(self.hub, fingerprints_every)
            self._record.undo.callback(self._prints.end)
            self._columns = Row()
            self._num_taken = 0
            self._record.laws = self.laws
            self._record.see = self._tell
            self._record.watch(model, self.optimizer, every=gauges_every, hub=self.hub)
            self._certificate = Certificate(model, self.optimizer)
            self._must_go_back = False
            if earlier is not None:  # its steps may be lost, and other rows tell of them
                rows = [*earlier.steps, *earlier.evals, *earlier.events]
                self._must_go_back = any(row["step"] for row in rows)
            self._is_open = True
            self._run = content
            if earlier is not None:
                self._run = {**earlier.run, "config": {**earlier.config, **dict(settings or {})}}
            self._run["watch"] = self.laws.facts.table()
            if self._record.writer is not None:
                self._record.writer.amend(self._run)
            if earlier is None:
                where = " in a loop of its own" if content["recorder"] else ""
                self.event("start", f"{content['config']['model']}{where}")
            if not self._must_go_back:
                self._begin_at(0)
            self._changes = differences(earlier.run, content) if earlier is not None else []
            if not self._must_go_back:
                self._tell_changes()
            undo.pop_all()
        _OPEN.add(self)

    @property
    def num_steps(self) -> int:
        """Steps recorded so far."""
        return self._record.num_steps

    # ── the loop calls these ──────────────────────────────────────────────────────────────────────

    def step(
        self,
        loss: float | Tensor | None = None,
        *,
        tokens: int | None = None,
        batch: Tensor | None = None,
        **columns: Any,
    ) -> None:
        """Record an optimizer step. Call it after ``optimizer.step()`` and before the schedule's.

        Args:
            loss: of the step, in nats per token; ``None`` if it is unknown. Reading a tensor waits
                for its device.
            tokens: trained on in this step; the row holds their sum so far.
            batch: the step's tokens or inputs on this rank, copied to the host. The sum of the
                ranks' checksums reveals repeated batches.
            columns: further columns. ``lr``, ``grad_norm`` (before clipping) and ``seconds``
                replace those read here, which are the rate of the optimizer's first group, our
                optimizer's norm, if it clips, and the time since the last call.
        Raises:
            RecordError: the run is resumed, and :meth:`go_back` was not called.
        """
        if self._must_go_back:
            raise RecordError(
                f"{self.folder} holds steps already, and the step from which the loop continues is "
                "unknown.",
                "Call recorder.go_back(step) with the step of the checkpoint that was loaded, or "
                "0.",
            )
        self._has_unwritten = False
        entries: Row = {"loss": loss, "skipped": self._was_skipped()}
        if tokens is not None:
            _COUNT.check("tokens", tokens)
            entries["tokens"] = self._record.tokens + tokens
        if batch is not None:
            values = batch.detach().cpu()
            if values.is_floating_point():
                values = values.float().view(torch.int32)  # the bits
            checksums = self._record.here.gather(int(batch_checksum(values.numpy()), 16))
            entries["batch_crc"] = f"{sum(checksums) % 2**64:016x}"
        entries["compared"] = self.sampled.num_compared or None
        entries |= self._columns
        entries |= columns
        self.sampled.num_compared = 0
        self._columns = {}
        present = {name: value for name, value in entries.items() if value is not None}
        self._count_call()
        if "grad_norm" in present:
            self._read()  # the norm of what arrived comes first
        self._record.step(present)
        if self.num_steps == 1:
            self._check(1)  # now the optimizer has its states
            for line in coarse_loss(loss):
                self.event("note", line)
        self._record.fingerprint(self._prints)

    def evaluate(self, loss: float | Tensor, **columns: Any) -> None:
        """Record an evaluation at the current step.

        Args:
            loss: validation loss in nats per token.
            columns: further columns of the row.
        """
        self._record.eval({"val_loss": loss, **columns})

    def event(self, what: str, words: str, *, at: int | None = None, **fields: Any) -> None:
        """Log something that happened in the loop at the current step.

        Args:
            what: its kind, such as ``"note"``.
            words: what happened and what to do, in sentences.
            at: another step.
            fields: of :class:`narrowgauge.Reading`, such as ``tensor`` and ``value``. The
                ``severity`` is ``"note"`` if not given.
        """
        step = self.num_steps if at is None else at
        self._record.event(happened(what, step, words, **fields))

    def saved(self, path: str | Path, **objects: Any) -> None:
        """Certify a checkpoint that the loop has saved: write hashes of every state beside it.

        After a resume, :meth:`go_back` warns of each kind of state that differs from them, causes
        first.

        Args:
            path: the file or folder of the checkpoint.
            objects: what decides the next step besides model, optimizer and the process's random
                generators: ``scheduler``, ``scaler``, ``loader``, a ``torch.Generator``, and
                ``batch``, the next one.
        Cost: one read of every state, and a second for its norm.
        """
        self._certificate.write(path, objects)
        self.event("checkpoint", "the loop saved a checkpoint", place=str(Path(path).absolute()))

    def go_back(self, step: int, *, tokens: int | None = None, **objects: Any) -> None:
        """Continue after ``step``. Delete rows of later steps, since the loop repeats these steps.

        Call it after loading a checkpoint, in a resumed loop or after a rollback. Call it in an
        empty folder too, if a loop continues from another run's checkpoint.

        Args:
            step: steps that the loaded checkpoint has done.
            tokens: trained on in these steps; ``None``: as the last row says.
            objects: the loaded ones, by the names that :meth:`saved` was given.
        Missing rows up to that step are a note: a record is a log, and not what a run goes on from.
        """
        _COUNT.check("step", step)
        began = self.num_steps
        goes_on = self._must_go_back or step > 0
        # The first row may be of a later step, if the loop continued another run's checkpoint.
        run = self._record.here.of_first(lambda: read_run(self.folder))
        path = ""
        for event in run.events:
            if event["what"] == "checkpoint" and event["step"] == step:
                path = event.get("place", "")
        self._record.go_back(step, first=run.steps[0]["step"] if run.steps else step + 1)
        if tokens is not None:
            self._record.tokens = tokens
        # A rollback keeps the samples of the start, which a new process does not know.
        self.go_on_after(step, anew=not began)
        self._must_go_back = False
        if path:
            for d in self._certificate.differences(path, objects):
                words = f"{d.kind}: {d.text}." if d.kind else f"{d.text}."
                kind = KINDS["not-restored"]
                reading = kind.reading(d.kind, d.value, d.expected, step=step, message=words)
                self._record.event(reading, shown=True)
        self._begin_at(step)
        self._tell_changes()
        if goes_on or began:
            done = f", after {began} were done" if began else ""
            self.event("resume", f"from step {step}{done}")

    def _tell_changes(self) -> None:
        """Record what has changed on the machine since the run began, once."""
        for change in self._changes:
            self.event("changed-software", change, severity="warning")
        self._changes = []

    def close(self, finished: bool = True, **columns: Any) -> None:
        """End the record.

        A second call does nothing. Without a call, the end of the process or of the recorder is
        one.

        Args:
            finished: the loop has done its last step, so write ``summary.json``. Otherwise the run
                can be resumed.
            columns: of ``summary.json``, in place of those counted here.
        """
        if not self._is_open:
            return
        if self._has_unwritten:
            self.step()
        self._is_open = False
        if not self.is_ended:
            self.hub.guard(self, self._read)
        try:
            if finished and not self._must_go_back:
                self._record.finish(self._summary() | columns)
            elif not self._must_go_back:
                self._record.stop()
        finally:
            self._record.close()

    def remove(self) -> None:
        """End the record, and remove every hook."""
        if getattr(self, "_is_open", False):  # it was not refused
            self.close()
        super().remove()

    def __del__(self) -> None:
        # Ranks that may have ended already are not waited for.
        if getattr(self, "_is_open", False) and self._record.here.size == 1:
            self.close(finished=getattr(sys, "last_value", None) is None)

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finished=kind is None)

    def _was_skipped(self) -> bool | None:
        """Return whether the step was left out.

        Our optimizers tell it; where another one steps the weights, it is unknown.
        """
        if isinstance(self.optimizer, Optimizer) or self.is_ended:
            return None
        is_taken = self._num_taken > 0
        self._num_taken = 0
        if not is_taken and any(self.steppers.stepped_by_others(self.names)):
            return None
        return not is_taken

    # ── the checks ────────────────────────────────────────────────────────────────────────────────

    def _check(self, step: int) -> None:
        """Check the set-up.

        Missing parameters may have another optimizer. Report each kind once.
        """
        try:
            readings = static_readings(set_up_of(self.model, self.optimizers))
        except Exception as error:  # states of another library
            self.event("note", f"the set-up was not checked: {words_of(error)}")
            return
        silent = {"missing-parameters", "no-gradient"}
        if step == 0:
            readings = [*readings, *self._asked_readings()]
        checked = in_order(readings)
        readings = []
        for reading in checked:
            if reading.severity != "note" and reading.what not in silent:
                readings.append(replace(reading, step=step))
        for reading in self.laws.new(readings):
            self._log(reading)

    def _asked_readings(self) -> Iterator[Reading]:
        """Compare the format of the trained weights with that of the recipe that was asked for."""
        if self._asked is None:
            return
        asked = self._asked.storage.visible
        total = 0
        elements = 0
        other = {}
        for name, p in self.trained.items():
            total += p.numel()
            if dtype_name(p.dtype) != asked:
                elements += p.numel()
                other[name] = dtype_name(p.dtype)
        if 2 * elements > total:
            formats = of_all(dict.fromkeys(other.values()))
            kind = KINDS["not-as-asked"]
            yield from kind.of(list(other), recipe=self._asked.title, asked=asked, formats=formats)

    def _print_what_is_seen(self) -> None:
        if self._run.get("recorder"):  # the trainer prints lines of its own
            super()._print_what_is_seen()
        for area, reason in self.unseen.items():
            self.event("unseen", reason, tensor=area)

    def _log(self, reading: Reading) -> None:
        self._record.event(reading)

    def _keep(self, now: Snapshot) -> None:
        if self._record.writer is not None:
            self._record.writer.append("snapshots", now.row())

    # ── writing ───────────────────────────────────────────────────────────────────────────────────

    def _begin_at(self, step: int) -> None:
        """Record the loop's state after ``step`` steps, and begin the next step."""
        if step == 0:
            self._check(0)
        self.hub.guard(self._prints, self._prints.start, step)
        self._record.fingerprint(self._prints)

    def _note(self, message: str) -> None:
        self._record.event(happened("note", self.num_steps, message), shown=True)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that was taken, too."""
        found_inf = getattr(optimizer, "found_inf", None)  # of torch.amp.GradScaler, if fused
        if found_inf is None or not bool(found_inf):
            self._num_taken += 1
        is_read = is_sampled(self.now.step) or self.goes_on
        if is_read and not isinstance(optimizer, Optimizer):
            # The rows of ours have the audit's figures.
            for name, value in self.numbers().items():
                if name.startswith("effective_lr"):
                    self._columns[name] = value
        super().after_step(optimizer)
        self._has_unwritten = self._steps_itself and optimizer is self.optimizers[-1]
        rate = optimizer.param_groups[0].get("lr")
        if rate is not None:
            self._columns["lr"] = float(rate)  # a schedule may step before the row is written

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the row of the last step, if nobody did."""
        if self._has_unwritten:
            self.step()
        if self.num_steps + 1 != self.now.step:
            self.now.at_row = self.num_steps + 1
        super().before_step(optimizer)

    def after_pass(self, output: Any) -> None:
        """Record the formats of the first forward pass too.

        After a resume, note changed formats.
        """
        super().after_pass(output)
        formats = {} if self._has_formats else formats_of(output)
        if not formats:
            return
        self._has_formats = True
        model = self._run["model"]
        before = model.get("formats")
        now = formats["formats"]
        if before is None:
            if self._record.writer is not None:
                self._record.writer.amend({**self._run, "model": {**model, **formats}})
        elif before != now:
            began = f"the model computed in {before} when the run began"
            message = f"{began}, and now computes in {now}"
            self.event("changed-settings", message, severity="warning")

    def _summary(self) -> Row:
        for module in fsdp_modules(self.model):  # an evaluation leaves the weights gathered
            module.reshard()
        stepped = {*members_of(*self.optimizers)}
        stored = {}
        found = 0
        for name, p in self.model.named_parameters():
            holder = self.optimizer_of.get(p, self.optimizer)
            stored[name] = weight_of(holder, p) if p in stepped else p
            found += p in stepped
        fingerprint = None  # of all weights, or of none
        if found == len(stepped):
            fingerprint = fingerprint_whole(stored)
        config = self._record.here.of_first(lambda: read_run(self.folder)).config
        return self._record.summary(
            recipe=config.get("recipe"),
            model=str(config.get("model", self._run["model"]["class"])),
            weights_fingerprint=fingerprint,
        )


def _recipe_in_use(model: nn.Module, optimizer: torch.optim.Optimizer) -> Recipe | None:
    """Return the compute and storage of a model in a user's loop, for the alarms.

    ``None`` if unknown.
    """
    if not isinstance(optimizer, Optimizer):
        return None
    storage = STORAGES.get(optimizer.param_groups[0]["storage"])
    if storage is None:
        return None
    compute = COMPUTES["bfloat16"]
    for module in model.modules():
        if isinstance(module, Linear):
            compute = module.compute
            break
    try:
        return Recipe(compute, storage)
    except RecipeError:
        return None


def _require_fit(recipe: Recipe | None, optimizer: Any) -> None:
    """Refuse a recipe with another storage. The record would describe another run."""
    if recipe is None or not isinstance(optimizer, Optimizer):
        return
    names = [group["storage"].rpartition("/")[2] for group in optimizer.param_groups]
    storage = recipe.storage.name.rpartition("/")[2]
    if storage not in names:
        raise RecipeError(
            f"a record of recipe '{recipe.name}' was requested, and the optimizer's storage is "
            f"'{names[0]}'.",
            "Name the recipe that was given to prepare, or leave it out.",
        )


def warn(kind: str, sentence: str) -> None:
    """Show an event of a recorded loop. The loop has its own display."""
    warnings.warn(f"{kind}: {sentence}.", RunNotice, stacklevel=5)


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
    called: nn.Module | None = None,
    max_grad_norm: float | None = None,
    ignore: Collection[str] = (),
    **options: Any,
) -> Watch:
    """Watch a training loop.

    Print at the third step what is watched and what is not, and a sentence at a step that is not
    well.

    Each kind of fault is told once, and again when it is twice as large:

    * the learning rate at which the weights really train, for any optimizer;
    * after 50 steps, tensors that never moved or never had a gradient;
    * at the third step, and later after sampled ones, tensors with a gradient and no optimizer, or with two;
    * on sampled steps, frozen tensors that the optimizer changes, and a step, a decay, a state or a count unlike its class's;
    * weights and states that are written after a sampled step; gradients beyond the limit of the clip;
    * gradients that were not cleared, that are zero everywhere, or that are not finite; a step that is repeated;
    * gradients that were cleared between the passes of a few steps, and passes with equal gradients;
    * groups that began with different rates and have one, or none;
    * training in evaluation mode, evaluation in training mode, weights that an evaluation did not restore;
    * batch norms of frozen weights whose statistics move;
    * the first module whose output is not finite;
    * a copy of the model that the loop writes, such as an average of its weights: it cannot move in its format, runs away, or
      keeps nearly nothing of itself;
    * a loss that has one value in all steps, or that of a uniform guess, that jumps, or that is not finite;
    * on several ranks, equal batches and equal dropout masks; on sampled steps, weights that differ;
    * on sampled steps, a rank whose loss is far from the others';

    A watched loop computes the same bits. On several ranks, all of them make the call.

    Args:
        model: the trained model, before ``torch.compile`` or not.
        optimizer: any ``torch.optim.Optimizer``, possibly wrapped; or a list of several, the last
            to step at the end.
        record: a folder in which the run is recorded: the watch is a
            :class:`narrowgauge.RunRecorder`, and writes a row for each step
            of the optimizer, with the loss where :meth:`step` tells it.
        called: the module whose forward pass the loop calls, if not the model itself.
        max_grad_norm: the limit to which the loop clips gradients.
        options: of :class:`narrowgauge.RunRecorder`, with ``record``.
        ignore: kinds of readings that are intended, such as ``"weights-written"`` if the loop
            averages weights. ``narrowgauge show checks`` lists them.
    Returns:
        The watch. ``numbers()`` is a flat dict of floats for a logger; ``step(loss)`` watches the
            loss too; ``remove()`` ends it.
    Raises:
        RecipeError: ``model`` is not a module, ``optimizer`` not an optimizer, or ``ignore`` has an
            unknown kind.
        RecordError: the folder is in use.

    Cost: one read of the gradients and of the blocks' outputs in each step. A sampled step repeats
        the optimizer's step on at most 4,096 elements of each tensor, in float64: for rules that
        need matrices, on at most 65,536.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> watch = ng.watch(model, optimizer)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     for _ in range(2):
        ...         model(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> str(caught[0].message).split(":")[0], watch.numbers()["lr/group0"]
        ('step 1', 1e-05)
    """
    options |= {"called": called, "max_grad_norm": max_grad_norm, "ignore": ignore}
    if record is None:
        return Watch(model, optimizer, **options)
    return RunRecorder(record, model, optimizer, steps_itself=True, **options)
