"""A comparison in a training loop of one's own: one call puts into a run's record what gauges and the audit read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.comparison.comparison import Comparison
from narrowgauge.experiment import own_loop
from narrowgauge.experiment.own_loop import RunLog
from narrowgauge.gauges.attach import Gauges, attach_gauges
from narrowgauge.optim.audit import figures_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter


class WatchedLog(RunLog):
    """The log of a run, which can watch a model and its optimizer.

    Args:
        writer: of the run folder.
    """

    def __init__(self, writer: RunWriter) -> None:
        super().__init__(writer)
        self._gauges: list[Gauges] = []
        self._audits: dict[Optimizer, Tensor | None] = {}
        self._total: Tensor | None = None

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int = 20) -> Gauges:
        """Write down what gauges read of a model, and what the audit reads of its optimizer, until the run ends.

        The gauges' rows go to the run's ``gauges.jsonl``; an audited step's figures into the row of the ``log.step`` that
        follows it; the sums over the run and the bytes per parameter into its summary, where nothing else is given.

        Args:
            model: before it is compiled, as for :func:`ng.attach_gauges`.
            optimizer: ours, whose audit is read, or torch's, which has none.
            every: steps from one sample of the gauges to the next; 0 never.
        Returns:
            The gauges.
        """
        gauges = attach_gauges(model, optimizer, every=every, on_row=self.gauge)
        self._gauges.append(gauges)
        if isinstance(gauges.optimizer, Optimizer):
            self._audits[gauges.optimizer] = None
        return gauges

    def found_in_step(self) -> Row:
        """What was audited of the last step."""
        found = [sums for optimizer in self._audits if (sums := self._new_audit(optimizer)) is not None]
        if not found:
            return {}
        step = torch.stack(found).sum(0)
        self._total = step if self._total is None else self._total + step
        return dict(figures_of(step))

    def _new_audit(self, optimizer: Optimizer) -> Tensor | None:
        """The sums of the optimizer's last step, if that was audited; none twice."""
        optimizer.settle()
        sums = optimizer.last_audit
        if sums is None or sums is self._audits[optimizer]:
            return None
        self._audits[optimizer] = sums
        return sums.to("cpu", torch.float64)

    def found(self) -> Row:
        """Figures of the whole run that the training function need not give."""
        known: Row = {} if self._total is None else dict(figures_of(self._total))
        if len(self._audits) == 1:
            known["bytes_per_param"] = next(iter(self._audits)).bytes_per_param()
        return known

    def release(self) -> None:
        """Take the gauges away."""
        for gauges in self._gauges:
            gauges.detach()
        self._gauges.clear()
        self._audits.clear()


def compare(
    train_function: Callable[[str, int, WatchedLog], Any],
    recipes: Sequence[str],
    *,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
) -> Comparison:
    """Compare recipes in a training loop of your own.

    Law: runs of one seed are paired, so let the seed alone decide the initial weights and the batches. Seeds are gone
    through one after the other, each in all recipes.

    Args:
        train_function: called as ``train_function(recipe, seed, log)``. It trains once and returns the last validation
            loss, or a dict of summary figures (``val_loss``, ``bytes_per_param``, ``tokens_per_second``,
            ``peak_memory_bytes``, ``edq``, ``noise``, ``lost_fraction``), or nothing if it called
            ``log.eval({"val_loss": …})``. ``log.step({"loss": …})`` writes down a step, ``log.eval`` a validation;
            ``log.watch(model, optimizer)`` adds gauges and the audit.
        recipes: what is handed to the function, names of recipes or any others.
        seeds: how many, from 0 on, or which ones.
        out: a new or empty folder for the runs, ``compare.json`` and ``report.html``, which show what was done also
            where the function raises; ``None`` keeps nothing.

    Returns:
        The comparison: ``rows``, a ``verdict`` in sentences, ``differences`` from the ``yardstick``.

    Raises:
        NarrowgaugeError: no recipe or seed, one named twice, a function that gives no loss, or a row that is none.
        RecordError: something lies in ``out``.

    Cost: that of the function's calls.

    Example:
        >>> def train_function(recipe, seed, log):
        ...     for step in range(1, 4):
        ...         log.step({"loss": 3 - step / 2})
        ...     wide = recipe == "bfloat16/master"
        ...     return {"val_loss": 1.5 + seed / 10 - 0.002 * seed * wide, "bytes_per_param": 16 if wide else 8}
        >>> found = compare(train_function, ["bfloat16/master", "bfloat16/word"], seeds=2)
        >>> [(row["recipe"], row["num_seeds"]) for row in found.rows]
        [('bfloat16/master', 2), ('bfloat16/word', 2)]
        >>> found.yardstick
        'bfloat16/master'
    """
    return own_loop.compare(train_function, recipes, seeds=seeds, out=out, log_type=WatchedLog)
