"""Bounds of rows: the scale of each row of a matrix, known before a step writes anything.

A storage that is scaled by row keeps for each scaled code a bound that no exact value of a row exceeds. The rule itself is
applied to the largest magnitudes of each row: it is monotone in them, so the result bounds every new state of the row. A
row's scale is therefore a function of its own gradients alone. All rows of all matrices are taken at once; on a GPU by one
kernel, since some eighty small operations would each be a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from narrowgauge.numerics.edge_values import edge_values
from narrowgauge.optim import codec
from narrowgauge.optim.compilation import Definition, compiled, example_words
from narrowgauge.optim.kernel import CONTROL, StepKernel
from narrowgauge.optim.rules.elementwise import Rule, rule_source
from narrowgauge.optim.state import ParameterState, peaks_of_all, weight_bound
from narrowgauge.spec.storages import Code, Storage

Scale = tuple[Tensor, Tensor, Tensor]
"""Of rows, shaped alike: their new bounds, and the multipliers into and out of the window in this step."""


def rescaled(code: Code, old: Tensor, new: Tensor, skip: Tensor) -> Scale:
    """What rows get that have the ``old`` bounds and would have the ``new`` ones, unless the step is skipped (bool, 0-d)."""
    bound = torch.where(skip, old, new)
    return bound, codec.multipliers(code, bound)[0], codec.multipliers(code, old)[1]


def takes_weights(rule: Rule, storage: Storage) -> bool:
    """Whether new bounds depend on the weights."""
    return rule.coupled or "weight" in storage.scaled


def scales_of(rule: Rule, storage: Storage, arguments: Sequence[Tensor]) -> list[Tensor]:
    """The three of :data:`Scale` for each scaled code, one after the other.

    Args:
        arguments: float32: the largest magnitudes of the gradient in each row, those of the weight where
            :func:`takes_weights`, and the bounds of each scaled code; then the scalars of ``CONTROL`` and of the rule.
    """
    slopes, *rest, values = arguments
    weights = rest.pop(0) if takes_weights(rule, storage) else torch.zeros_like(slopes)
    old = dict(zip(storage.scaled, rest, strict=True))
    new = _new_bounds(rule, slopes, weights, old, values)
    skip = values[CONTROL.index("skip")] != 0
    return [each for name in old for each in rescaled(storage.code(name), old[name], new[name], skip)]


def make_bounds(rule: Rule, storage: Storage) -> Callable[..., Tensor]:
    """What a GPU runs for :func:`scales_of`: ``(*arguments, *results) -> [0]`` writes the results, each float32 ``[rows]``."""
    count = 3 * len(storage.scaled)

    def step(*arguments: Tensor) -> Tensor:
        given, results = arguments[:-count], arguments[-count:]
        for result, value in zip(results, scales_of(rule, storage, given), strict=True):
            result.copy_(value)
        return results[0].new_zeros(0)

    return step


def _new_bounds(
    rule: Rule, slopes: Tensor, weights: Tensor, old: Mapping[str, Tensor], values: Tensor
) -> dict[str, Tensor]:
    slopes = slopes * values[0].abs()
    scalars = {name: values[place] for place, name in enumerate((*CONTROL, *rule.scalars))}
    # A state that is not scaled by row needs no bound.
    moments = [old.get(name, torch.zeros_like(slopes)) for name in rule.states]
    either = [rule.update(weights, sign * slopes, *moments, scalars)[1:] for sign in (1.0, -1.0)]
    new = {
        # A gradient that is not finite must not stay in a bound: inf - inf would be NaN for good.
        name: torch.maximum(plus.abs(), minus.abs()).nan_to_num(nan=3e38, posinf=3e38)
        for name, plus, minus in zip(rule.states, *either, strict=True)
        if name in old
    }
    if "weight" in old:
        new["weight"] = weight_bound(weights)
    return new


def define_bounds(rule: Rule, storage: Storage, device: torch.device) -> Definition:
    """What a GPU's kernel of :func:`make_bounds` is compiled from."""
    rows = example_words(device)
    count = len(storage.scaled) + (2 if takes_weights(rule, storage) else 1)
    ends = torch.linspace(1.0, 0.0, len(CONTROL), dtype=torch.float32, device=device)
    values = torch.cat([ends, torch.linspace(0.1, 0.9, len(rule.scalars), dtype=torch.float32, device=device)])
    results = [torch.zeros(rows, dtype=torch.float32, device=device) for _ in range(3 * len(storage.scaled))]

    def given(draw: Callable[[int], Tensor]) -> list[Tensor]:
        return [*(draw(seed).abs().to(device) for seed in range(count)), values, *results]

    def edges() -> list[Tensor]:
        return given(lambda seed: edge_values(torch.float32, (rows,), seed=seed, finite=True))

    def normal(seed: int) -> Tensor:
        return torch.randn(rows, dtype=torch.float32, generator=torch.Generator().manual_seed(seed))

    lengths: list[tuple[int, ...]] = [(0,)] * count
    return Definition(make_bounds(rule, storage), given(normal), [*lengths, (), *[(0,)] * len(results)], edges=edges)


def bound_rows(kernel: StepKernel, batch: Sequence[ParameterState], values: Tensor) -> None:
    """Give states of one kernel that have their gradients their rows' new bounds, and the scales of this step.

    ``values`` are the scalars of ``CONTROL`` and of the rule, float32.
    """
    rule, storage, device = kernel.rule, kernel.storage, values.device
    names = storage.scaled
    given = [peaks_of_all(batch, [state.gradient for state in batch])]
    if takes_weights(rule, storage):
        given.append(peaks_of_all(batch, [state.parameter.detach() for state in batch]))
    rows = sum(state.num_rows for state in batch)
    old = torch.cat([state.bounds[name] for name in names for state in batch]).view(len(names), rows)
    arguments = [*(peaks.view(-1) for peaks in given), *old, values]
    run = None
    if kernel.compiles_for(device) and device.type != "cpu" and rows > 1:  # one row is no dynamic length
        title = f"bounds {rule.name} {storage!r} {rule_source(rule)}"
        run = compiled(title, device, lambda: define_bounds(rule, storage, device))
    if run is None:
        results = scales_of(rule, storage, arguments)
    else:
        # Each its own memory: a kernel writes no tensor that begins between multiples of 16 bytes.
        results = [torch.empty_like(old[0]) for _ in range(3 * len(names))]
        run([*arguments, *results])
    set_scales(batch, {name: results[3 * k : 3 * k + 3] for k, name in enumerate(names)})


def set_scales(batch: Sequence[ParameterState], scales: Mapping[str, Sequence[Tensor]]) -> None:
    """Give states of one storage, for each scaled code, the :data:`Scale` of all their rows, one state's after the other's."""
    sizes = [state.num_rows for state in batch]
    parts = {name: [each.view(-1, 1).split(sizes) for each in scale] for name, scale in scales.items()}
    torch._foreach_copy_(
        [state.bounds[name] for name in parts for state in batch],
        [bound for bounds, _, _ in parts.values() for bound in bounds],
    )
    for place, state in enumerate(batch):
        state.set_scales(*({name: parts[name][k][place] for name in parts} for k in (1, 2)))
