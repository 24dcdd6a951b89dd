"""What a training loop means to do where that is not the usual: ``ng.task`` says it in one line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.errors import RecipeError, suggestion

LOSSES = {
    "next-token": "the mean over all counted tokens of the step of the cross entropy of the next token",
    "own": "another loss; only its gradient's way through the model is computed again",
}
"""The losses that a task can declare."""
GROUPS = {
    "": "not declared: any division is taken as meant",
    "all": "every parameter is decayed alike",
    "matrices": "parameters of two dims and more are decayed, norms and biases are not",
    "matrices-not-embeddings": "as matrices, without embeddings",
}
"""Which parameters a task can declare to be decayed."""
RULES = ("adamw", "adam", "sgd", "lion", "muon")
"""The rules that a task can declare."""
DATA = {
    "": "not declared: rows in any order that does not depend on them, from one source",
    "curriculum": "order and frequencies change as they are meant to; rows still come again only after a whole pass",
    "own": "rows may come again at any time, too, as those of a replay buffer do",
}
"""What a task can declare of its data."""
OWN = "own"
GRADIENT = {
    "": "not declared: gradients are unscaled and clipped, and nothing else is done to them",
    OWN: "changed on purpose, as by centralization, noise, or a second pass at other weights; not judged, nor what passes count",
}
"""What a task can declare of its gradients between backward passes and the step."""
WEIGHTS = {
    "": "not declared: the optimizer alone writes weights",
    OWN: "written on purpose between steps, too, as Lookahead does; not judged there",
}
"""What a task can declare of its weights between steps."""
EACH_STEP, OWN_SCHEDULE = "step", OWN
SCHEDULES = {
    "": "not declared: it may move once a step, once an epoch, or by hand",
    EACH_STEP: "it moves once in each step of the optimizer",
    OWN_SCHEDULE: "it moves otherwise on purpose, several times a step, say",
}
"""What a task can declare of its learning-rate schedule."""


@dataclass(frozen=True)
class Task:
    """What is declared of a loop, as :func:`task` takes it.

    Args:
        loss: a key of ``LOSSES``, or empty.
        decay_groups: a key of ``GROUPS``, or the names of the parameters that are decayed.
        averages: a module that averages the model's parameters.
        auxiliary: whether terms beside the logits' loss add to gradients.
        max_grad_norm: the limit of clipping.
        ignore: the token that is not trained on.
        label_smoothing: the share of each target that is spread over all tokens.
        micro_batches: of a step, at most.
        optimizer: one of ``RULES``, or empty.
        settings: of the optimizer's groups, by name.
        data: a key of ``DATA``.
        schedule: a key of ``SCHEDULES``.
        gradient: a key of ``GRADIENT``.
        weights: a key of ``WEIGHTS``.
    """

    loss: str = ""
    decay_groups: str | frozenset[str] = ""
    averages: Any = None
    auxiliary: bool = False
    max_grad_norm: float | None = None
    ignore: int | None = None
    label_smoothing: float = 0.0
    micro_batches: int | None = None
    optimizer: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: str = ""
    schedule: str = ""
    gradient: str = ""
    weights: str = ""


def task(
    *,
    loss: str = "",
    decay_groups: str | Collection[str] = "",
    averages: Any = None,
    auxiliary: bool = False,
    max_grad_norm: float | None = None,
    ignore: int | None = None,
    label_smoothing: float = 0.0,
    micro_batches: int | None = None,
    optimizer: str = "",
    settings: Mapping[str, Any] | None = None,
    data: str = "",
    schedule: str = "",
    gradient: str = "",
    weights: str = "",
) -> Task:
    """Declare what a training loop means to do, for the audit of its steps.

    What is not declared is not judged: an undeclared division of weight decay is taken as meant, and clipping is compared
    only with that of other steps.

    Args:
        loss: a key of ``LOSSES``: ``"next-token"``, or ``"own"`` for any other. Empty: next-token where the gradient of the
            logits has its form, otherwise not judged.
        decay_groups: a key of ``GROUPS``: ``"all"``, ``"matrices"``, ``"matrices-not-embeddings"``; or the names of those
            that are decayed.
        averages: a module whose parameters average those of the model, updated after each step.
        auxiliary: whether terms beside the logits' loss add to gradients, as a router's balancing loss does. Then gradients
            that differ without an explanation are not reported.
        max_grad_norm: the limit to which gradients are clipped.
        ignore: the token that is not trained on, such as padding.
        label_smoothing: as in ``torch.nn.CrossEntropyLoss``.
        micro_batches: forward passes of a step; the last step of an epoch may have fewer.
        optimizer: ``"adamw"``, ``"adam"``, ``"sgd"``, ``"lion"`` or ``"muon"``.
        settings: ``lr`` (before schedules), ``betas``, ``eps``, ``weight_decay`` (of those that are decayed), ``momentum`` …
        data: a key of ``DATA``: ``"curriculum"`` where order and frequencies of tokens change on purpose, ``"own"`` where rows
            come again on purpose, too. Empty: rows are drawn from one source, in epochs or with replacement.
        schedule: a key of ``SCHEDULES``: ``"step"`` where a :mod:`torch.optim.lr_scheduler` is stepped once after each step of
            the optimizer, ``"own"`` where it moves otherwise on purpose. Empty: one that stands still is taken as meant.
        gradient: ``"own"`` where gradients are changed on purpose between backward passes and the step, otherwise than by
            unscaling and clipping.
        weights: ``"own"`` where weights are written on purpose between steps.
    Returns:
        The declaration, for ``ng.check(…, task=…)`` and ``ng.RunRecorder(…, task=…)``.
    Raises:
        RecipeError: an unknown value of one of these names.
    Example:
        >>> import narrowgauge as ng
        >>> ng.task(decay_groups="matrices", max_grad_norm=1.0).max_grad_norm
        1.0
    """
    division = decay_groups if isinstance(decay_groups, str) else frozenset(decay_groups)
    named = division if isinstance(division, str) else ""
    for name, value, known in (
        ("loss", loss, ("", *LOSSES)),
        ("decay_groups", named, GROUPS),
        ("optimizer", optimizer, ("", *RULES)),
        ("data", data, DATA),
        ("schedule", schedule, SCHEDULES),
        ("gradient", gradient, GRADIENT),
        ("weights", weights, WEIGHTS),
    ):
        if value not in known:
            hint = suggestion(value, known) or f"Known are {', '.join(repr(each) for each in known if each)}."
            raise RecipeError(f"a task has no {name} {value!r}.", hint)
    return Task(
        loss=loss,
        decay_groups=division,
        averages=averages,
        auxiliary=auxiliary,
        max_grad_norm=max_grad_norm,
        ignore=ignore,
        label_smoothing=label_smoothing,
        micro_batches=micro_batches,
        optimizer=optimizer,
        settings=dict(settings or {}),
        data=data,
        schedule=schedule,
        gradient=gradient,
        weights=weights,
    )
