"""Steps of a fit of Lightning's ``Trainer`` computed again, with its settings as the declaration of what they mean to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from narrowgauge.errors import RecipeError
from narrowgauge.integrations.audited_steps import AuditedSteps
from narrowgauge.integrations.lightning.packages import joined_when_asked
from narrowgauge.integrations.lightning.precision import RecipePrecision
from narrowgauge.recompute.task import EACH_STEP, Task, task

_Base: Any = AuditedSteps


def declared_by(trainer: Any, pl_module: Any) -> Task:
    """What Lightning's ``Trainer`` says that the steps of a fit do, as :func:`narrowgauge.task` would.

    The optimizer is the module's own, and so not declared; nor is clipping of values, or by a module's own
    ``configure_gradient_clipping``.
    """
    limit = None
    by_norm = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) in (
        "norm",
        "None",
    )
    is_own = type(pl_module).configure_gradient_clipping.__module__.partition(".")[0] in _PACKAGES
    if trainer.gradient_clip_val and by_norm and is_own:
        limit = float(trainer.gradient_clip_val)
    configs = trainer.lr_scheduler_configs if pl_module.automatic_optimization else []
    is_each = bool(configs) and all(each.interval == "step" and each.frequency == 1 for each in configs)
    schedule = EACH_STEP if is_each else ""
    return task(max_grad_norm=limit, micro_batches=trainer.accumulate_grad_batches, schedule=schedule)


_PACKAGES = ("lightning", "pytorch_lightning", "narrowgauge")


def called_model(trainer: Any, pl_module: nn.Module) -> nn.Module:
    """The model that ``training_step`` calls: what a module wraps if that has all parameters, else the module itself."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, RecipePrecision):
        return plugin.trained_part(pl_module)
    children = [child for child in pl_module.children() if next(child.parameters(), None) is not None]
    is_whole = len(children) == 1 and next(pl_module.parameters(recurse=False), None) is None
    return children[0] if is_whole else pl_module


class FitAudit(_Base):
    """Compute some steps of a fit of Lightning's ``Trainer`` again, piece by piece: :doc:`ideas/recompute`.

    After the fit ``findings`` say what departed, and ``unchecked`` what was not checked.

    Args:
        every: steps between audited ones; the second is one too.
        task: what the fit means to do; ``None`` takes the Trainer's own settings.

    Raises:
        RecipeError: at the start, several optimizers.

    Cost: an audited step takes its forward and backward passes twice more, with a copy of the parameters.

    Example:
        >>> audit = FitAudit(every=1000)
        >>> audit.findings
        []
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch the fit."""
        if len(trainer.optimizers) != 1:
            raise RecipeError(
                f"steps are computed again of one optimizer, and the fit has {len(trainer.optimizers)}.",
                "Use ng.check(model, optimizer, step=2) in your training_step.",
            )
        declared, done = declared_by(trainer, pl_module), trainer.global_step
        self.begin(called_model(trainer, pl_module), trainer.optimizers[0], declared, done)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.end()


if TYPE_CHECKING:
    StepAudit = FitAudit

__getattr__ = joined_when_asked(FitAudit, "StepAudit", "callbacks", "Callback")
