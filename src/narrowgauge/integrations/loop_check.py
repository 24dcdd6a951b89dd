"""``narrowgauge.check``: what is wrong in a training loop of one's own, before it runs or while it takes a few steps.

The rows of ``CHECKS`` read the model, its optimizers and the process. Those that need steps read what hooks saw
(:mod:`narrowgauge.integrations.loop_watch`). Optimizers of PyTorch and of other libraries are judged as ours are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.integrations.check_table import found_in
from narrowgauge.integrations.findings import Findings
from narrowgauge.integrations.loop_watch import Seen, Watch
from narrowgauge.integrations.set_up import SetUp, set_up_of, storage_of, updates_of_averages
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.validation import Range
from narrowgauge.runs.finding import Finding


def check(
    model: nn.Module,
    optimizer: Any,
    *,
    steps: int = 0,
    scheduler: Any = None,
    scaler: Any = None,
    average: Any = None,
    loss: Tensor | None = None,
) -> Findings:
    """What is wrong in a training set-up: in a loop of your own, Lightning, Hugging Face's Trainer or Accelerate.

    Invariant: nothing is changed. Watched steps give the bits of unwatched ones, and every hook is removed after the last.

    Schedules of these optimizers are found by themselves; so is a ``GradScaler`` that calls a watched step, and an
    ``AveragedModel`` that is updated while steps are watched.

    Args:
        model: as the loop calls it, perhaps wrapped.
        optimizer: any ``torch.optim.Optimizer``, of this or another library, perhaps wrapped; or a list of several.
        steps: optimizer steps to watch from now on; after the last, all findings are reported once, by a
            :class:`SetUpWarning <narrowgauge.SetUpWarning>` and by events. 0 watches none but those inside
            ``with ng.check(…) as watched:``.
        scheduler: a learning-rate schedule that is no ``LRScheduler``.
        scaler: a loss scaler.
        average: an average of the weights: a module, tensors, or a state dict.
        loss: the loss of a step, before ``backward()``.
    Returns:
        The findings, most serious first; they print as a table. ``ok`` is whether there is nothing worse than a note,
        ``require()`` raises otherwise.
    Raises:
        RecipeError: the model or the optimizer is none.

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
    set_up = set_up_of(model, optimizer, scheduler, scaler, average, loss)
    return Findings(found_in(set_up), map(_described, set_up.optimizers), lambda handle: _watch(set_up, handle), steps)


def _watch(set_up: SetUp, handle: Findings) -> Callable[[], list[Finding]]:
    """Begin to watch; returns what ends it and looks again, at states too that the first steps made."""
    set_up.seen = Seen()

    def is_scaled() -> bool:
        return any(isinstance(scaler, torch.amp.GradScaler) for scaler in set_up.scalers())

    before = updates_of_averages(set_up.model)
    watch = Watch(set_up.model, set_up.optimizers, set_up.seen, is_scaled, handle.steps, handle.finish)

    def end() -> list[Finding]:
        watch.remove()
        now = updates_of_averages(set_up.model)
        updated = [average for average, count in now.items() if count > before.get(average, 0)]
        set_up.averages += [each for each in updated if all(each is not known for known in set_up.averages)]
        return found_in(set_up)

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
