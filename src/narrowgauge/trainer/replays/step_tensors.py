"""The tensors of one step by name, in the order in which the step makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge._torch import plain_name
from narrowgauge.runs.schema import Row
from narrowgauge.trainer.fingerprints import MOMENTS
from narrowgauge.trainer.session import Session


def tensors_of_step(session: Session, advance: Callable[[], Row]) -> tuple[Row, dict[str, Tensor]]:
    """Take a step and copy its tensors.

    Args:
        session: before the step; its model is not compiled, or the outputs of its modules are missing.
        advance: takes the step: ``past.advance``, or ``partial(train_step, session)``.
    Returns:
        Its row, and copies under the names of fingerprints (:mod:`narrowgauge.trainer.fingerprints`): ``tokens:batch``,
        ``output:MODULE`` in the order of the forward pass, micro-batches along the first dim, ``grad:PARAMETER`` from
        the last to the first and not clipped, then ``weight:``, ``exp_avg:`` and ``exp_avg_sq:`` after the update, in float32.

    Cost: memory for all of them.
    """
    batches: list[Tensor] = []
    outputs: dict[str, list[Tensor]] = {}
    gradients: dict[str, Tensor] = {}
    loss, find = session.loss, session.prints.gradients

    def seen(tokens: Tensor) -> Tensor:
        batches.append(tokens)
        with _outputs(session.model if not session.config.compile else nn.Module(), outputs):
            return loss(tokens)

    def found() -> None:
        find()
        named = {n: p.grad.detach().clone() for n, p in session.named_parameters() if p.grad is not None}
        gradients.update({f"grad:{plain_name(name)}": grad for name, grad in reversed(named.items())})

    session.loss, session.prints.gradients = seen, found  # type: ignore[method-assign]
    try:
        row = advance()
    finally:
        session.loss = loss
        del session.prints.gradients
    joined = {key: torch.cat(parts) for key, parts in outputs.items()}
    return row, {"tokens:batch": torch.cat(batches), **joined, **gradients, **stored_tensors(session)}


@contextmanager
def _outputs(model: nn.Module, into: dict[str, list[Tensor]]) -> Iterator[None]:
    """Copy what each module with parameters gives."""

    def take(key: str, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if torch.is_grad_enabled() and type(first) is Tensor and first.is_floating_point():
            into.setdefault(key, []).append(first.detach().clone())

    handles = [
        module.register_forward_hook(partial(take, f"output:{plain_name(name)}"))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def stored_tensors(session: Session) -> dict[str, Tensor]:
    """The stored weights and moments by the names of fingerprints, float32 copies."""
    trained = session.optimizer.parameter_names()
    found: dict[str, Tensor] = {}
    for what in ("weight", *MOMENTS):
        for name, parameter in session.named_parameters():
            if parameter in trained:
                found[f"{what}:{plain_name(name)}"] = session.optimizer.stored(parameter, what)
    return found
