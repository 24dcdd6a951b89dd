"""Evaluation in training mode: dropout that is drawn, and norms over the batch, in passes without gradients."""

from __future__ import annotations

from torch import nn

from narrowgauge._torch import plain_name
from narrowgauge.recompute.piece_results import DEPARTS, PieceResult
from narrowgauge.recompute.random_states import RandomStates


class EvaluationModes:
    """The modules that were in training mode although a pass without gradients depends on it.

    Args:
        model: whose passes are told of, before and after each.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._found = model, set[str]()
        self._random: RandomStates | None = None

    def before_pass(self) -> None:
        """Look at the modules' modes, and keep the random generators where these show no more."""
        self._found |= {plain_name(n) for n, m in self._model.named_modules() if m.training and _draws(m)}
        self._random = RandomStates.now() if self._model.training and not self._found else None

    def after_pass(self) -> None:
        """Note modules in training mode that have dropout as a number, if the pass took random numbers.

        Where none has, they came from a number that is kept elsewhere, and no module is named.
        """
        before, self._random = self._random, None
        if before is not None and not before.equals(RandomStates.now()):
            named = {plain_name(n) for n, m in self._model.named_modules() if m.training and _has_dropout(m)}
            self._found |= named or {""}

    def results(self, step: int) -> list[PieceResult]:
        """What was found so far, as of a step; nothing where all is well."""
        if not self._found:
            return []
        names = tuple(sorted(filter(None, self._found)))
        return [PieceResult("evaluation", DEPARTS, names, 1.0, 0.0, "evaluated-in-training", step=step)]


def _draws(module: nn.Module) -> bool:
    """Whether training mode changes what a module computes: dropout, and norms over the batch."""
    kind = type(module).__name__
    return ("Dropout" in kind and getattr(module, "p", 0) > 0) or "BatchNorm" in kind


def _has_dropout(module: nn.Module) -> bool:
    """Whether a module has dropout as a number, as attention that hands it on to a kernel."""
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())
