"""``narrowgauge.check``: what is wrong in a training loop of your own, before it runs or while it takes a few steps.

The rows of ``CHECKS`` read the model, its optimizers and the process. Those that need steps read what hooks saw
(:mod:`narrowgauge.integrations.check.watch`). Optimizers of PyTorch and of other libraries pass the same checks as
Narrowgauge's. The findings are a list that prints itself: as a table on a terminal, as a paragraph per finding in a pipe.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RecipeError
from narrowgauge.integrations.check.set_up import SetUp, set_up_of, storage_of, updates_of_averages
from narrowgauge.integrations.check.table import found_in
from narrowgauge.integrations.check.watch import Seen, Watch
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.recompute.departures import findings_of, unchecked
from narrowgauge.recompute.piece_results import PieceResult
from narrowgauge.recompute.step_watcher import StepWatcher
from narrowgauge.recompute.task import Task
from narrowgauge.runs.departure_table import PIECES
from narrowgauge.runs.events import Event, emit
from narrowgauge.runs.finding import SEVERITIES, Finding
from narrowgauge.spec.tables import Table, name_columns, text_columns
from narrowgauge.spec.update_rules import Range


class SetUpWarning(UserWarning):
    """Something is wrong in a training loop that :func:`narrowgauge.check` watched."""


class Findings(Sequence[Finding]):
    """What :func:`narrowgauge.check` found, and the handle that ends its watching.

    Iterates over :class:`Finding` (``name``, ``message``, ``advice``, ``where``, ``severity``), errors first. As a context
    manager, it watches the loop inside.

    Args:
        found: the findings.
        set_up: a line for each optimizer that was checked: what it stores, and its options.
        begin: starts watching; returns a function that ends it and runs the checks again.
        steps: optimizer steps to watch at most; 0 for all within ``with``.

    Attributes:
        unchecked: pieces of the step that was to be computed again, and why they were not: ``{"gradient": "…"}``.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(8, 8)
        >>> findings = ng.check(model, torch.optim.AdamW([model.bias]))
        >>> findings.ok, [finding.where for finding in findings]
        (False, ['weight'])
    """

    def __init__(
        self,
        found: Iterable[Finding],
        set_up: Iterable[str] = (),
        begin: Callable[[Findings], Callable[[], list[Finding]]] | None = None,
        steps: int = 0,
    ) -> None:
        self.set_up, self.steps, self.unchecked = list(set_up), steps, dict[str, str]()
        self._begin, self._end = begin, None if begin is None or not steps else begin(self)
        self._take(found)

    @property
    def ok(self) -> bool:
        """Whether nothing worse than a note was found."""
        return all(finding.severity == "note" for finding in self)

    @property
    def is_watching(self) -> bool:
        """Whether the optimizer still has hooks."""
        return self._end is not None

    def require(self) -> Findings:
        """Raise if anything worse than a note was found; else return the findings.

        Raises:
            RecipeError: with all that was found.
        """
        if not self.ok:
            serious = [finding for finding in self if finding.severity != "note"]
            lines = [f"{each.label}: {each.message}" for each in serious]
            raise RecipeError(f"the set-up has {len(serious)} faults. " + " ".join(lines), serious[0].advice)
        return self

    def close(self) -> Findings:
        """Stop watching, remove every hook, add what was seen, and return the findings; without effect if nothing is watched."""
        if self._end is not None:
            end, self._end = self._end, None
            self._take(end())
        return self

    def finish(self) -> None:
        """:meth:`close` after the last step to watch; the first rank reports by a warning and events."""
        self.close()
        if all_ranks().rank != 0:
            return
        for each in self:
            kind = "note" if each.severity == "note" else "warning"
            emit(Event.of(kind, self.steps, replace(each, message=f"{each.name}: {each.message}")))
        if not self.ok:
            warnings.warn(f"narrowgauge.check watched {self.steps} steps.\n{self.plain()}", SetUpWarning, stacklevel=2)

    def _take(self, found: Iterable[Finding]) -> None:
        rank = list(SEVERITIES)
        self._found = sorted(found, key=lambda each: rank.index(each.severity))

    def __enter__(self) -> Findings:
        if self._begin is not None and self._end is None:
            self._end = self._begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def __getitem__(self, index: int) -> Finding: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Finding]: ...

    def __getitem__(self, index: int | slice) -> Finding | Sequence[Finding]:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found)

    def __repr__(self) -> str:
        return f"Findings({[each.name for each in self]})"

    def __str__(self) -> str:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None where it is closed
        return self._on_terminal() if is_terminal else self.plain()

    def plain(self) -> str:
        """A line per optimizer and a paragraph per finding."""
        found = [*map(str, self)] if len(self) else ["nothing was found"]
        return "\n".join([*self.set_up, *found, *self._not_again()])

    def _not_again(self) -> list[str]:
        return [f"not computed again: {PIECES.get(piece, piece)}: {why}" for piece, why in self.unchecked.items()]

    def _on_terminal(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), force_terminal=True, highlight=False, width=Console().width)
        for line in self.set_up:
            console.print(line, style="dim", markup=False)
        if len(self):
            table = self._table()
            widths = table.widths(console.width)
            console.print(table.rich(widths) if widths else table.cards(console.width), markup=False)
        else:
            console.print("nothing was found", style="green")
        for line in self._not_again():
            console.print(line, style="dim", markup=False)
        return _text(console)

    def _table(self) -> Table:
        heads = (*name_columns(check="name"), *text_columns(severity="severity", where="where"))
        prose = text_columns(what_was_found="message", what_to_do="advice")
        return Table((*heads, *prose), [asdict(each) for each in self])


def _text(console: Any) -> str:
    text: str = console.file.getvalue()
    return text.rstrip("\n")


# ── the check ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def check(
    model: nn.Module,
    optimizer: Any,
    *,
    steps: int = 0,
    step: int = 0,
    task: Task | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    average: Any = None,
    loss: Tensor | None = None,
) -> Findings:
    """What is wrong in a training set-up: in a loop of your own, Lightning, Hugging Face's Trainer or Accelerate.

    Invariant: nothing is changed. Watched steps give the bits of unwatched ones, and every hook is removed after the last.

    It finds the schedules of these optimizers, a ``GradScaler`` that calls a watched step, and an ``AveragedModel`` that is
    updated while steps are watched.

    Args:
        model: as the loop calls it, perhaps wrapped.
        optimizer: any ``torch.optim.Optimizer``, of this or another library, perhaps wrapped; or a list of several.
        steps: optimizer steps to watch from now on; after the last, all findings are reported once, by a
            :class:`SetUpWarning <narrowgauge.integrations.SetUpWarning>` and by events. 0 watches none but those inside
            ``with ng.check(…) as watched:``.
        step: the optimizer step, counted from now, that is computed again piece by piece: loss, forward pass, gradient,
            clipping, update. What departs is a finding; watches that many steps at least. 0 for none.
        task: what the loop means to do, where that is not the usual (:func:`narrowgauge.task`).
        scheduler: a learning-rate schedule that is no ``LRScheduler``.
        scaler: a loss scaler.
        average: an average of the weights: a module, tensors, or a state dict.
        loss: the loss of a step, before ``backward()``.
    Returns:
        The findings, most serious first. ``ok`` is true if none is worse than a note; ``require()`` raises otherwise.
    Raises:
        RecipeError: ``model`` is not a module, or ``optimizer`` not an optimizer; ``step`` with several optimizers.

    Cost: reads 16,384 elements of each parameter, and the list of the process's objects once: a second. Watched steps copy the
        gradients of six small parameters, and wait for the device.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(64, 64).bfloat16()
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> [finding.name for finding in ng.check(model, optimizer) if finding.severity == "error"]
        ['lost-updates', 'rate-below-spacing', 'frozen-second-moment']
    """
    Range().check("steps", steps)
    Range().check("step", step)
    set_up = set_up_of(model, optimizer, scheduler, scaler, average, loss)
    if step and len(set_up.optimizers) > 1:
        raise RecipeError(
            f"step={step} computes the step of one optimizer again, and check was given {len(set_up.optimizers)}.",
            "Leave step out, or pass one optimizer.",
        )
    audit = Audit(step, task)
    described = map(_described, set_up.optimizers)
    return Findings(found_in(set_up), described, lambda handle: _watch(set_up, handle, audit), max(steps, step))


@dataclass(frozen=True)
class Audit:
    """The step that is computed again, and what is declared of it; step 0 is none."""

    step: int
    task: Task | None = None


def _watch(set_up: SetUp, handle: Findings, audit: Audit) -> Callable[[], list[Finding]]:
    """Start watching; returns a function that ends it and runs the checks again, now that the optimizers have states."""
    set_up.seen = Seen()
    results: list[PieceResult] = []
    audited = None
    if audit.step:  # its hooks come first, so that its results are there when the watch ends
        audited = StepWatcher(
            set_up.model,
            set_up.optimizers[0],
            audit.step,
            lambda _, found: results.extend(found),
            audit.task,
            first=audit.step,
        )

    def is_scaled() -> bool:
        return any(isinstance(scaler, torch.amp.GradScaler) for scaler in set_up.scalers())

    before = updates_of_averages(set_up.model)
    watch = Watch(set_up.model, set_up.optimizers, set_up.seen, is_scaled, handle.steps, handle.finish)

    def end() -> list[Finding]:
        watch.remove()
        if audited is not None:
            audited.remove()
            handle.unchecked = unchecked(results)
        now = updates_of_averages(set_up.model)
        updated = [average for average, count in now.items() if count > before.get(average, 0)]
        set_up.averages += [each for each in updated if all(each is not known for known in set_up.averages)]
        return [*found_in(set_up), *findings_of(results)]

    return end


def _described(optimizer: torch.optim.Optimizer) -> str:
    """What an optimizer stores, and its options."""
    options = {"max_grad_norm": getattr(optimizer, "max_grad_norm", None), **optimizer.param_groups[0]}
    stored = dict.fromkeys(
        storage_of(optimizer, group, parameter).name
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    names = ("lr", "betas", "weight_decay", *(("max_grad_norm",) if isinstance(optimizer, Optimizer) else ()))
    said = [f"{name} {_value(options[name])}" for name in names if name in options]
    package = type(optimizer).__module__.split(".")[0]
    return f"{package}.{type(optimizer).__name__}, stores {' and '.join(stored)}: {', '.join(said)}"


def _value(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_value, value))})"
    return "none" if value is None else f"{float(value):g}"
