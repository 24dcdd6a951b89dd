"""A run folder for any training loop, as ``narrowgauge train`` writes for its own runs.

:class:`RunRecorder` opens the folder, describes the run, measures and writes its steps, and goes back
in it. A resumed loop needs only the rows. Nothing of the recorder belongs in a checkpoint.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import fingerprint_whole, fsdp_modules
from narrowgauge.errors import RecipeError, RecordError
from narrowgauge.matmul.linear import Linear
from narrowgauge.measuring.fingerprints import Fingerprints
from narrowgauge.measuring.hooks import Listener, RunNotice
from narrowgauge.measuring.laws import Laws
from narrowgauge.measuring.loss_value import coarse_loss
from narrowgauge.measuring.meter import Meter
from narrowgauge.measuring.provenance import describe_run, differences, formats_of
from narrowgauge.measuring.reading import measured
from narrowgauge.measuring.record import OnRow, Record
from narrowgauge.measuring.resume import Certificate
from narrowgauge.measuring.set_up import set_up_of
from narrowgauge.measuring.step import Step
from narrowgauge.measuring.step_row import batch_checksum
from narrowgauge.measuring.watch import (
    SEEN_AT,
    Watch,
    groups_of,
    hub_of,
    numbers_of,
    require_kinds,
    seen,
)
from narrowgauge.optim.audit import unwrapped
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.places import is_run
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES
from narrowgauge.spec.values import require_number
from narrowgauge.torch_support.torch_hooks import members_of

_MOST = 1 << 63


class RunRecorder:
    """Watch a training loop of your own, and record it in a run folder, as ``narrowgauge train``
    records its runs.

    ``narrowgauge report``, ``narrowgauge diagnose`` and ``ng.read_run`` read the folder like the trainer's.
    A loop computes the same bits with and without a recorder. Each reading becomes an event and a :class:`RunNotice`.

    On several ranks, all of them make all calls, and rank 0 writes. The losses are rank 0's. A run is
    finished when :meth:`close` or the end of the ``with`` block says so. Nothing happens at exit.

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
        tables: further tables of ``run.toml``, such as ``{"data": {"folder": "text"}}``; ``None``
            in place of a table leaves it out.

    Raises:
        RecordError: the folder is in use.
        RecipeError: the optimizer's storage is not the recipe's, or ``ignore`` has an unknown kind
            of reading.

    Cost: that of :func:`narrowgauge.watch`, about 0.1 ms per step, reading the loss from the device,
        and with a reduction one gather over its ranks. Fingerprints take 3 ns an element on one CPU
        thread, for weights, gradients, states and the outputs of modules.

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
        tables: Mapping[str, Mapping[str, Any] | None] | None = None,
    ) -> None:
        require_number("gauges_every", gauges_every, 0, _MOST, is_whole=True)
        require_number("fingerprints_every", fingerprints_every, 0, _MOST, is_whole=True)
        require_kinds(ignore)
        set_up = set_up_of(model, _unwrapped_all(optimizer))
        self.model = set_up.model
        self.optimizers = set_up.optimizers
        self.optimizer = self.optimizers[-1]
        self.recipe = _recipe_in_use(model, self.optimizer) if recipe is None else parse(recipe)
        _require_fit(self.recipe, self.optimizer)
        content = describe_run(self.model, self.optimizer, self.recipe, settings or {})
        content |= {"watch": {"ignore": list(ignore)}, **dict(tables or {})}
        here = all_ranks()
        goes_on = here.of_first(lambda: resume and is_run(Path(folder)))
        earlier = here.of_first(lambda: read_run(folder)) if goes_on else None
        self._record = Record(
            lambda: RunWriter.open(folder) if goes_on else RunWriter.create(folder, content),
            warn,
            on_row,
        )
        self.folder = self._record.folder
        with ExitStack() as undo:
            if not goes_on and here.is_first:
                undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            undo.callback(self._record.close)
            self._hook(model, called, max_grad_norm, gauges_every, fingerprints_every)
            self._record.laws = Laws(ignore, say=self._record.note)
            self._begin(content, earlier, settings or {}, is_asked=recipe is not None)
            undo.pop_all()

    def _hook(
        self,
        model: nn.Module,
        called: nn.Module | None,
        limit: float | None,
        gauges_every: int,
        fingerprints_every: int,
    ) -> None:
        """Hook the loop: the meter first, which ends a step before the next one has fingerprints."""
        self.hub = hub_of(model, self.optimizers, called)
        self._record.undo.callback(self.hub.undo.close)
        self.hub.say = self._record.note
        self.meter = Meter(self.hub, self._write, limit=limit)
        self._record.undo.callback(self.meter.end)
        self._prints = Fingerprints(self.hub, fingerprints_every)
        self._record.undo.callback(self._prints.end)
        self.hub.listeners.append(_Formats(self))
        self._record.watch(model, self.optimizer, every=gauges_every, hub=self.hub)
        self._certificate = Certificate(model, self.optimizer)

    def _begin(
        self, content: Row, earlier: Run | None, settings: Mapping[str, Any], *, is_asked: bool
    ) -> None:
        """Write what is known before the first step."""
        self._told: Row = {}
        self._is_open = True
        self._must_go_back = False
        self._changes: list[str] = []
        self._run = content
        if earlier is None:
            where = str(content["config"]["model"])
            if content["recorder"]:
                where += " in a loop of its own"
            self.event("start", where)
            if is_asked:
                self._compare_formats()
            self._begin_at(0)
            return
        # Its steps may be lost, and other rows tell of them.
        rows = [*earlier.steps, *earlier.evals, *earlier.events]
        self._must_go_back = any(row["step"] for row in rows)
        self._run = {**content, **earlier.run, "config": {**earlier.config, **settings}}
        if self._record.writer is not None:
            self._record.writer.amend(self._run)
        self._changes = differences(earlier.run, content)
        if not self._must_go_back:
            self._begin_at(0)
            self._tell_changes()

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

        An optimizer step without such a call has a row without a loss.

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
        self._require_step()
        told: Row = {"loss": loss}
        if tokens is not None:
            require_number("tokens", tokens, 0, _MOST, is_whole=True)
            told["tokens"] = self._record.tokens + tokens
        if batch is not None:
            values = batch.detach().cpu()
            if values.is_floating_point():
                values = values.float().view(torch.int32)  # the bits
            checksums = self._record.here.gather(int(batch_checksum(values.numpy()), 16))
            told["batch_crc"] = f"{sum(checksums) % 2**64:016x}"
        told |= columns
        self._told = {name: value for name, value in told.items() if value is not None}
        self.meter.end_step()
        if self.num_steps == 1:
            for line in coarse_loss(loss):
                self.event("note", line)

    def _require_step(self) -> None:
        """Refuse a step of a resumed run that was not told where it goes on."""
        if self._must_go_back:
            raise RecordError(
                f"{self.folder} holds steps already, and the step from which the loop continues is "
                "unknown.",
                "Call recorder.go_back(step) with the step of the checkpoint that was loaded, or "
                "0.",
            )

    def _write(self, step: Step) -> None:
        """Write the row of a step that has ended."""
        self._require_step()
        told = self._told
        self._told = {}
        measured_row = step.row()
        measured_row.pop("step", None)
        if step.lr is not None:
            told.setdefault("lr", step.lr)  # a schedule may have stepped since
        for index, group in groups_of(self.meter):
            if index in self.meter.shares:  # the rows of ours have the audit's figures
                rate = float(group["lr"]) * self.meter.shares[index]
                measured_row[f"effective_lr/group{index}"] = rate
        self._record.step(told, measured_row)
        if self.num_steps == SEEN_AT:
            self._print_seen()
        self._record.fingerprint(self._prints)

    def _print_seen(self) -> None:
        """Log what is not measured. The trainer prints lines of its own."""
        line = seen(self.meter)
        if self._run.get("recorder") and self._record.here.is_first:
            print(line, file=sys.stderr)
        for area, reason in self.meter.unseen.items():
            self.event("unseen", reason, tensor=area)

    def evaluate(self, loss: float | Tensor, **columns: Any) -> None:
        """Record an evaluation at the current step.

        Args:
            loss: validation loss in nats per token.
            columns: further columns of the row.
        """
        self._record.eval({"val_loss": loss, **columns})
        self.meter.restart_clock()

    def event(self, what: str, words: str, *, at: int | None = None, **fields: Any) -> None:
        """Log something that happened in the loop at the current step.

        Args:
            what: its kind, such as ``"note"``.
            words: what happened and what to do, in sentences.
            at: another step.
            fields: further columns of ``events.jsonl``, such as ``tensor`` and ``value``. The
                ``severity`` is ``"note"`` if not given.
        """
        self._record.event(what, words, step=at, **fields)

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
        require_number("step", step, 0, _MOST, is_whole=True)
        began = self.num_steps
        goes_on = self._must_go_back or step > 0
        # The first row may be of a later step, if the loop continued another run's checkpoint.
        run = self._record.here.of_first(lambda: read_run(self.folder))
        path = ""
        for event in run.events:
            if event["what"] == "checkpoint" and event["step"] == step:
                path = event.get("place", "")
        first = step + 1
        if run.steps:
            first = run.steps[0]["step"]
        self._record.go_back(step, first=first)
        if tokens is not None:
            self._record.tokens = tokens
        self.meter.go_on_after(step)
        self._must_go_back = False
        if path:
            for kind, text in self._certificate.differences(path, objects).items():
                words = f"{kind}: {text}.".removeprefix(": ")
                self._record.event(
                    "not-restored", words, step=step, shown=True, tensor=kind, severity="error"
                )
        self._begin_at(step)
        self._tell_changes()
        if goes_on or began:
            words = f"from step {step}"
            if began:
                words += f", after {began} were done"
            self.event("resume", words)

    def _tell_changes(self) -> None:
        """Record what has changed on the machine since the run began, once."""
        for change in self._changes:
            self.event("changed-software", change, severity="warning")
        self._changes = []

    def numbers(self) -> dict[str, float]:
        """Return the newest numbers by name, as :meth:`narrowgauge.measuring.watch.Watch.numbers`."""
        return numbers_of(self.meter)

    def close(self, finished: bool = True, **columns: Any) -> None:
        """End the record. A second call does nothing.

        Args:
            finished: the loop has done its last step, so write ``summary.json``. Otherwise the run
                can be resumed.
            columns: of ``summary.json``, in place of those counted here.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self.meter.has_stepped and not self._must_go_back:
                self.meter.end_step()
            if finished and not self._must_go_back:
                self._record.finish(self._summary() | columns)
            elif not self._must_go_back:
                self._record.stop()
        finally:
            self._record.close()

    def remove(self) -> None:
        """End the record, and remove every hook."""
        self.close()

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(finished=kind is None)

    # ── writing ───────────────────────────────────────────────────────────────────────────────────

    def _compare_formats(self) -> None:
        """Compare the format of the trained weights with that of the recipe that was asked for."""
        assert self.recipe is not None
        total = 0
        elements = 0
        others = []
        for p in dict.fromkeys(members_of(*self.optimizers)):
            total += p.numel()
            if dtype_name(p.dtype) != self.recipe.storage.visible:
                elements += p.numel()
                others.append(self.meter.names[p])
        if 2 * elements > total:
            self._record.log(measured("not-as-asked", others, len(others), 0), shown=True)

    def _begin_at(self, step: int) -> None:
        """Record the loop's state after ``step`` steps, and begin the next step."""
        self.hub.guard(self._prints, self._prints.start, step)
        self._record.fingerprint(self._prints)

    def see_formats(self, output: Any) -> bool:
        """Record the formats of the first forward pass. After a resume, note changed formats."""
        formats = formats_of(output)
        if not formats:
            return False
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
        return True

    def _summary(self) -> Row:
        for module in fsdp_modules(self.model):  # an evaluation leaves the weights gathered
            module.reshard()
        holders: dict[Any, torch.optim.Optimizer] = {}
        for optimizer in self.optimizers:
            holders |= dict.fromkeys(members_of(optimizer), optimizer)
        stored = {}
        count = 0
        for name, p in self.model.named_parameters():
            holder = holders.get(p)
            stored[name] = holder.stored(p) if isinstance(holder, Optimizer) else p
            count += holder is not None
        fingerprint = None  # of all weights, or of none
        if count == len(holders):
            fingerprint = fingerprint_whole(stored)
        config = self._record.here.of_first(lambda: read_run(self.folder)).config
        return self._record.summary(
            recipe=config.get("recipe"),
            model=str(config.get("model", self._run["model"]["class"])),
            weights_fingerprint=fingerprint,
        )


class _Formats(Listener):
    """Tell a recorder the formats of the first forward pass."""

    title = "the record of formats"

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder
        self._is_done = False

    def after_pass(self, output: Any) -> None:
        self._is_done = self._is_done or self._recorder.see_formats(output)


def _unwrapped_all(optimizer: Any) -> list[Any]:
    """Return optimizers without the wrappers of frameworks."""
    if isinstance(optimizer, (list, tuple)):
        return [*map(unwrapped, optimizer)]
    return [unwrapped(optimizer)]


def _recipe_in_use(model: nn.Module, optimizer: torch.optim.Optimizer) -> Recipe | None:
    """Return the compute and storage of a model in a user's loop; ``None`` if unknown."""
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
        if goes_on:
            return used
        return free

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
) -> Watch | RunRecorder:
    """Watch a training loop.

    Print after the third step what is measured and what is not, and a sentence at a step that is not
    well. Each kind of fault is told once, and again when it is twice as large:

    * the share of the update that the formats of the weights store, for optimizers whose step on a copy
      of some elements gives the same result;
    * tensors that never moved, frozen tensors that change by a few roundings, a weight that jumps;
    * gradients that are zero, that were not cleared, or that are beyond the limit of the clip;
    * the first weight, output, gradient or loss that is not finite; skipped steps, and the loss scale;
    * on several ranks, gradients that were not summed, and weights that differ.

    A watched loop computes the same bits. On several ranks, all of them make the call.

    Args:
        model: the trained model, before ``torch.compile`` or not.
        optimizer: any ``torch.optim.Optimizer``, possibly wrapped; or a list of several, the last
            to step at the end.
        record: a folder in which the run is recorded: the watch is a
            :class:`narrowgauge.RunRecorder`, and writes a row for each step of the optimizer, with the
            loss where :meth:`Watch.step` tells it.
        called: the module whose forward pass the loop calls, if not the model itself.
        max_grad_norm: the limit to which the loop clips gradients.
        ignore: kinds of readings that are intended. ``narrowgauge show checks`` lists them.
        options: of :class:`narrowgauge.RunRecorder`, with ``record``.
    Returns:
        The watch. ``numbers()`` is a flat dict of floats for a logger; ``step(loss)`` tells the loss
            too; ``remove()`` ends it.
    Raises:
        RecipeError: ``model`` is not a module, ``optimizer`` not an optimizer, or ``ignore`` has an
            unknown kind.
        RecordError: the folder is in use.

    Cost: the norm of each gradient and the sum of each block's output, and two steps of the
        optimizer's class on 64 elements of 16 tensors.

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
        >>> str(caught[0].message).split(":")[0], watch.numbers()["lr/group0"]
        ('step 6', 1e-05)
    """
    options |= {"called": called, "max_grad_norm": max_grad_norm, "ignore": ignore}
    if record is None:
        return Watch(model, optimizer, **options)
    return RunRecorder(record, model, optimizer, **options)
