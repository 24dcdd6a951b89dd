"""A run folder for any training loop, as ``narrowgauge train`` writes for its own runs.

:class:`RunRecorder` opens the folder, describes the run, checks it, and goes back in it. A resumed
loop needs only the rows. Nothing of the recorder belongs in a checkpoint.
"""

from __future__ import annotations

import atexit
import math
import shutil
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, in_order, words_of
from narrowgauge.checks.checking import event_of, static_readings
from narrowgauge.checks.gradients import coarse_loss
from narrowgauge.checks.set_up import set_up_of
from narrowgauge.checks.step_check import StepCheck
from narrowgauge.checks.step_samples import weight_of
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import fingerprint_whole, fsdp_modules
from narrowgauge.errors import RecipeError, RecordError
from narrowgauge.gauges.hub import RunNotice
from narrowgauge.gauges.recording.certificate import SAVED, Certificate
from narrowgauge.gauges.recording.fingerprints import Fingerprints
from narrowgauge.gauges.recording.provenance import (
    describe_model,
    describe_process,
    differences,
    formats_of,
)
from narrowgauge.gauges.recording.record import OnRow, Record
from narrowgauge.gauges.recording.step_row import batch_checksum
from narrowgauge.gauges.recording.watch import Watch
from narrowgauge.matmul.linear import Linear
from narrowgauge.optim.audit import unwrapped
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.events import Event
from narrowgauge.runs.places import is_run
from narrowgauge.runs.record import read_run
from narrowgauge.runs.schema import Row, number
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.computes import COMPUTES
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
    without a recorder. Each finding of the watch and of the detectors becomes an event, a
    :class:`RunNotice` and a call of ``ng.on_event``'s callbacks.

    On several ranks, all of them make all calls, and rank 0 writes. The losses are rank 0's. A
    process that ends without :meth:`close` closes the record.

    Args:
        folder: the run folder; absent or empty, unless ``resume``.
        model: the trained model, before ``torch.compile`` if gauges are to see it.
        optimizer: one of Narrowgauge's or of ``torch.optim``'s, possibly in a framework's wrapper.
            Only ours has an audit.
        recipe: the recipe with which the model was prepared. ``None``: read it from the model and
            the optimizer, if possible.
        settings: of your loop, such as ``{"lr": 1e-3, "steps": 400}``. Comparisons show the
            settings in which runs differ, and pair runs of one ``seed``.
        every: steps between sampled steps of the watch, as in :func:`narrowgauge.watch`; 0 for
            none.
        gauges_every: steps between samples of the gauges; 0 for none.
        audit_every: steps between comparisons of an update with the optimizer's rule. The second
            step is compared too. 0 for none. Differences become events, and the step's row says
            which tensors were compared.
        max_grad_norm: the limit to which the loop clips gradients, for these comparisons.
        ignore: kinds of intended readings of a step, such as ``"weights-written"`` if the loop
            averages weights.
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
        tables: further tables of ``run.toml``, such as ``{"data": {"folder": "text"}}``; ``None``
            in place of a table leaves it out.

    Attributes:
        gauges: the gauges, if there are any.

    Raises:
        RecordError: the folder is in use.
        RecipeError: the optimizer's storage is not the recipe's, there are several optimizers, or
            ``ignore`` has an unknown kind of reading.

    Cost: about 0.1 ms per step, reading the loss from the device, and with a reduction one gather over its ranks. Fingerprints
        take 3 ns an element on one CPU thread, for weights, gradients, states and the outputs of
        modules. An audited step copies 4,096 elements of each tensor to the host and recomputes
        their update there.

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
        every: int = 50,
        gauges_every: int = 0,
        audit_every: int = 0,
        fingerprints_every: int = 1000,
        max_grad_norm: float | None = None,
        ignore: Collection[str] = (),
        called: nn.Module | None = None,
        on_row: OnRow | None = None,
        resume: bool = False,
        tables: Mapping[str, Mapping[str, Any] | None] | None = None,
    ) -> None:
        steps = {
            "every": every, "gauges_every": gauges_every, "audit_every": audit_every, "fingerprints_every": fingerprints_every,
        }  # fmt: skip
        for name, value in steps.items():
            _COUNT.check(name, value)
        self.model = set_up_of(model, []).model
        self.optimizer = unwrapped(optimizer)
        policy = _recipe_in_use(model, self.optimizer) if recipe is None else parse(recipe)
        _require_fit(policy, self.optimizer)
        content = self._description(policy, dict(settings or {})) | dict(tables or {})
        here = all_ranks()
        goes_on = here.of_first(lambda: resume and is_run(Path(folder)))
        self._record = Record(
            lambda: RunWriter.open(folder) if goes_on else RunWriter.create(folder, content),
            policy,
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
            super().__init__(model, self.optimizer, every=every, called=called)
            self._record.undo.callback(self.remove)
            self.hub.say = self._note
            self._prints = Fingerprints(self.hub, fingerprints_every)
            self._record.undo.callback(self._prints.end)
            self._columns = Row()
            self._num_taken = 0
            self.gauges = self._record.watch(model, optimizer, every=gauges_every)
            self._limit = max_grad_norm
            self._audited: StepCheck | None = None
            self._reported: set[tuple[str, str]] = set()
            self._recomputed: Row = {}
            if audit_every:
                self._audited = StepCheck(
                    model,
                    self.optimizer,
                    audit_every,
                    self._audited_step,
                    max_grad_norm=max_grad_norm,
                    ignore=ignore,
                )
                self._record.undo.callback(self._audited.remove)
            self._certificate = Certificate(model, self.optimizer)
            self._must_go_back = earlier is not None and bool(earlier.steps)
            self._is_open = True
            self._run = content
            if earlier is not None:
                for event in earlier.events:  # what was said of the set-up is not said again
                    self._reported.add((event.get("detector", ""), ""))
                self._run = {**earlier.run, "config": {**earlier.config, **dict(settings or {})}}
                if self._record.writer is not None:
                    self._record.writer.amend(self._run)
            if earlier is None:
                where = " in a loop of its own" if content["recorder"] else ""
                self.event("start", f"{content['config']['model']}{where}")
                self._check(0)
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
            batch: the step's tokens or inputs, copied to the host. Their checksum reveals repeated
                batches.
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
        entries: Row = {"loss": loss, "skipped": self._was_skipped()}
        if tokens is not None:
            _COUNT.check("tokens", tokens)
            entries["tokens"] = self._record.tokens + tokens
        if batch is not None:
            values = batch.detach().cpu()
            if values.is_floating_point():
                values = values.float().view(torch.int32)  # the bits
            entries["batch_crc"] = batch_checksum(values.numpy())
        entries["recomputed"] = self._recomputed or None
        entries |= self._columns
        entries |= columns
        self._check_clip(entries)
        self._recomputed = {}
        self._columns = {}
        present = {name: value for name, value in entries.items() if value is not None}
        row = self._record.step(present)
        super().step(row.get("loss"))
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

    def event(self, kind: str, message: str, *, at: int | None = None, **fields: Any) -> None:
        """Record an event of the loop at the current step.

        Args:
            kind: a kind of :class:`narrowgauge.Event`, such as ``"note"``.
            message: one sentence.
            at: another step.
            fields: ``tensor``, ``value``, ``threshold``, ``advice``, ``detector``.
        """
        step = self.num_steps if at is None else at
        self._record.event(Event(kind, step, message, **fields))

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
        self.event("checkpoint", f"{SAVED}{Path(path).absolute()}")

    def go_back(self, step: int, **objects: Any) -> None:
        """Continue after ``step``. Delete rows of later steps, since the loop repeats these steps.

        Call it after loading a checkpoint, in a resumed loop or after a rollback. Call it in an
        empty folder too, if a loop continues from another run's checkpoint.

        Args:
            step: steps that the loaded checkpoint has done.
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
            is_certified = event["kind"] == "checkpoint" and event["message"].startswith(SAVED)
            if is_certified and event["step"] == step:
                path = event["message"].removeprefix(SAVED)
        self._record.go_back(step, first=run.steps[0]["step"] if run.steps else step + 1)
        if not began:
            # A rollback keeps the samples of the start, which a new process does not know.
            self._start_samples()
        self._step = step
        if self._audited is not None:
            self._audited.go_on_from_checkpoint()
        self._must_go_back = False
        if path:
            for reading in self._certificate.differences(path, objects):
                self._record.event(event_of(reading, step), shown=True)
        self._begin_at(step)
        self._tell_changes()
        if goes_on or began:
            done = f", after {began} were done" if began else ""
            self.event("resume", f"from step {step}{done}")

    def _tell_changes(self) -> None:
        """Record what has changed on the machine since the run began, once."""
        for change in self._changes:
            self.event("note", change, detector="changed-software")
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
        self._is_open = False
        try:
            if finished and not self._must_go_back:
                self._record.finish(self._summary() | columns)
            elif not self._must_go_back:
                self._record.stop()
        finally:
            self._record.close()

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
        if not is_taken and any(self._stepped_by_others()):
            return None
        return not is_taken

    # ── the checks ────────────────────────────────────────────────────────────────────────────────

    def _check(self, step: int) -> None:
        """Check the set-up.

        Missing parameters may have another optimizer. Report each kind once.
        """
        try:
            readings = static_readings(set_up_of(self.model, self.optimizer))
        except Exception as error:  # states of another library
            self.event("note", f"the set-up was not checked: {words_of(error)}")
            return
        silent = {"missing-parameters", "no-gradient"}
        first: dict[str, Reading] = {}
        for reading in in_order(readings):
            if reading.severity != "note" and reading.what not in silent:
                first.setdefault(reading.what, reading)
        self._record_new(list(first.values()), step, static=True)

    def _check_clip(self, entries: Row) -> None:
        """Compare the norm that reached an audited step with the loop's own norm before clipping."""
        norm = self._recomputed.get("norm")
        before = number(entries.get("grad_norm"))
        if norm is None or before is None or not math.isfinite(before):
            return
        expected = before if self._limit is None else min(self._limit, before)
        kind = KINDS["clip-norm"]
        bound = (kind.bound + 2.0**-7) * expected
        if abs(norm - expected) > bound:
            cause = f", of {before:.4g} before the clip"
            reading = kind.reading("", norm, expected, bound, cause=cause)
            self._record_new([reading], self.num_steps + 1)

    def _audited_step(self, _: int, readings: list[Reading], row: Row) -> None:
        """Report a compared step, and save the compared names for its row."""
        self._recomputed = row or self._recomputed
        # Writes between two steps belong to the step before.
        self._record_new(readings, self.num_steps + bool(row))

    def _record_new(self, readings: list[Reading], step: int, *, static: bool = False) -> None:
        for reading in readings:
            place = reading.what, "" if static else reading.tensor
            if place not in self._reported:
                self._reported.add(place)
                self._record.event(
                    event_of(reading, step), shown=not static and reading.severity != "note"
                )

    def _print_what_is_seen(self) -> None:
        if self.every:
            super()._print_what_is_seen()
            self.event("note", self.seen(), detector="watch")

    def _say(self, readings: list[Reading]) -> None:
        """Write an event for each reading, and show them in a sentence."""
        for reading in readings:
            self._record.event(event_of(reading, reading.step))
        super()._say(readings)

    def _sampled_readings(self, optimizer: torch.optim.Optimizer, step: int) -> Iterator[Reading]:
        yield from super()._sampled_readings(optimizer, step)
        if not isinstance(optimizer, Optimizer):  # the rows of ours have the audit's figures
            for name, value in self.numbers().items():
                if name.startswith("effective_lr"):
                    self._columns[name] = value

    # ── writing ───────────────────────────────────────────────────────────────────────────────────

    def _begin_at(self, step: int) -> None:
        """Record the loop's state after ``step`` steps, and begin the next step."""
        self.hub.guard(self._prints, self._prints.start, step)
        self._record.fingerprint(self._prints)

    def _note(self, message: str) -> None:
        self._record.event(Event("note", self.num_steps, message), shown=True)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that was taken, too."""
        found_inf = getattr(optimizer, "found_inf", None)  # of torch.amp.GradScaler, if fused
        if found_inf is None or not bool(found_inf):
            self._num_taken += 1
        super().after_step(optimizer)

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
            self.event("note", message, detector="changed-settings")

    def _summary(self) -> Row:
        for module in fsdp_modules(self.model):  # an evaluation leaves the weights gathered
            module.reshard()
        stepped = {*members_of(self.optimizer)}
        stored = {}
        for name, p in self.model.named_parameters():
            if p in stepped:
                stored[name] = weight_of(self.optimizer, p)
        fingerprint = None  # of all weights that the optimizer steps, or of none
        if len(stored) == len(stepped):
            fingerprint = fingerprint_whole(stored)
        config = self._record.here.of_first(lambda: read_run(self.folder)).config
        return self._record.summary(
            recipe=config.get("recipe"),
            model=str(config.get("model", self._run["model"]["class"])),
            weights_fingerprint=fingerprint,
        )

    def _description(self, policy: Recipe | None, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the content of ``run.toml``."""
        group = self.optimizer.param_groups[0]
        config = {"model": type(self.model).__name__, "seed": group.get("seed", 0)}
        if policy is not None:
            config = {"recipe": policy.to_value(), **config}
        optimizer = {"class": type(self.optimizer).__name__}
        for name, value in group.items():
            if _is_plain(value):
                optimizer[name] = value
        device = next(self.model.parameters()).device
        return {
            "config": {**config, **settings},
            **describe_process(device, all_ranks().size),
            "optimizer": optimizer,
            "model": describe_model(self.model),
            "recorder": {"program": Path(sys.argv[0]).name},
        }


def _is_plain(value: object) -> bool:
    """Return whether TOML can hold a value. ``Adafactor`` has an epsilon of ``None`` in a tuple."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))


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
    """Refuse anything but one optimizer, and a recipe with another storage.

    The record would describe another run.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RecipeError(
            f"RunRecorder follows one optimizer, and got a {type(optimizer).__name__}.",
            "Pass the one that steps last; ng.check takes several.",
        )
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
