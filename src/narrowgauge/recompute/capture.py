"""What one training step needs to be computed again, in bounded memory.

The update of most optimizers is elementwise, so a few thousand elements of each parameter are enough to compute it again: the
weight and the states before and after, and the gradient. Where a step depends on the whole matrix, as Muon's does, matrices
that are small enough are kept whole. Norms are kept as sums of squares of the whole tensors. Of the forward passes the inputs
are kept, the state of the random generators, and the gradients that arrived at their outputs, up to a number of bytes; of larger
outputs some positions are kept (:mod:`narrowgauge.recompute.output_samples`).

Nothing here changes a tensor of the run. Samples of parameters lie on the CPU, wherever the run computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.shards import local_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.recompute.inputs_and_outputs import tensors_in
from narrowgauge.recompute.output_samples import CrossEntropy, OutputSample
from narrowgauge.recompute.random_states import RandomStates
from narrowgauge.recompute.side_effects import Before
from narrowgauge.recompute.stored_values import Rounding

ELEMENTS = 1 << 12
"""Elements that are kept of each parameter."""
CALL_BYTES = 1 << 28
"""Bytes that are kept of the forward passes of one step."""
TOO_LARGE = (
    f"the outputs of a step and their gradients exceed {CALL_BYTES >> 20} MiB, "
    "and the loss is no cross entropy in which all tokens count alike"
)
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""The states of the rules that are computed again."""
SETTINGS = (
    "lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "amsgrad", "decoupled_weight_decay",
    "ns_steps", "ns_coefficients", "ns_dtype", "adjust_lr_fn",
)  # fmt: skip
RULES = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Lion": "lion", "Muon": "muon"}
"""The classes of optimizers that are computed again, and those derived from them."""


def spread(tensor: Tensor, most: int = ELEMENTS) -> Tensor:
    """A copy of evenly spread elements of this rank's part of a tensor; the same places at every call.

    The stride has no divisor in common with the last dim, so that every column is met.

    Args:
        tensor: any shape.
        most: elements, about.
    Returns:
        1-D, of the tensor's dtype.
    """
    flat = local_of(tensor.detach()).reshape(-1)
    stride = max(1, -(-flat.numel() // most))
    columns = tensor.shape[-1] if tensor.ndim else 1
    while stride > 1 and math.gcd(stride, columns) > 1:
        stride += 1
    return flat[::stride].clone()


def spread_on_cpu(tensor: Tensor) -> Tensor:
    """The copy that :func:`spread` makes, on the CPU; waits for a device."""
    return spread(tensor).cpu()


def whole_on_cpu(tensor: Tensor) -> Tensor:
    """A copy of all elements on the CPU, in place of :func:`spread_on_cpu`; 1-D."""
    return tensor.detach().reshape(-1).clone().cpu()


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter; ``None`` also where it is sparse, since its elements are at other places in each step."""
    gradient = parameter.grad
    return None if gradient is None or gradient.layout is not torch.strided else gradient


def random_signs(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Ones and minus ones, int8, drawn on the CPU so that every device has the same."""
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.int8) * 2 - 1


def sum_of_squares(tensor: Tensor) -> Tensor:
    """The sum of squares of this rank's part of a tensor, a float64 scalar."""
    values = local_of(tensor.detach())
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
    return norm.double().square()


@dataclass
class ParameterSample:
    """Some elements of one parameter around a step, on the CPU.

    Args:
        name: in the model.
        shape, dtype: of the whole parameter.
        settings: those of its group that the rule reads.
        weight, states: before the step, 1-D.
        gradient: as the rule receives it, after what our own optimizers do with it in their step; ``None`` where there was none.
        gradient_eps: the spacing at 1 of the format in which the loop holds the gradient; our own rules read it in float32.
        computed, computed_squares: the gradient as the backward passes left it, before it was unscaled or clipped, and the sum
            of squares of all its elements.
        previous: the gradient that the optimizer received one step earlier.
        weight_after, states_after: after the step.
        number, number_before: how many steps the optimizer has counted for it after this one, and before.
        group: the index of its group.
        shared_counts: what a counter would say that several parts of a step raise
            (:func:`narrowgauge.recompute.rules.other_counts.shared_counts`).
        listed: how often the groups list it.
        roundings: of the weight and the states that are stored in a narrower format than float32, by name.
        rule: of this parameter, where it is not the optimizer's: that of vectors under a rule for matrices.
        whole: the same with all elements, where the rule needs them and they are few enough.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    settings: dict[str, Any]
    weight: Tensor
    states: dict[str, Tensor]
    gradient: Tensor | None = None
    gradient_eps: float = 0.0
    computed: Tensor | None = None
    computed_squares: Tensor | None = None
    previous: Tensor | None = None
    weight_after: Tensor | None = None
    states_after: dict[str, Tensor] = field(default_factory=dict)
    number: int = 0
    number_before: int = 0
    group: int = 0
    shared_counts: tuple[tuple[str, int], ...] = ()
    requires_grad: bool = True
    listed: int = 1
    roundings: dict[str, Rounding] = field(default_factory=dict)
    rule: str = ""
    whole: ParameterSample | None = None

    def at(self, places: Tensor) -> ParameterSample:
        """The same sample with some of its elements.

        Args:
            places: bool ``[elements]``.
        """
        tensors = ("weight", "gradient", "computed", "previous", "weight_after")
        fewer: dict[str, Any] = {name: None if (t := getattr(self, name)) is None else t[places] for name in tensors}
        states, after = ({name: t[places] for name, t in of.items()} for of in (self.states, self.states_after))
        roundings = {name: each.at(places) for name, each in self.roundings.items()}
        return replace(self, **fewer, states=states, states_after=after, roundings=roundings)

    @property
    def nbytes(self) -> int:
        known = (self.weight, self.gradient, self.computed, self.previous, self.weight_after)
        tensors = [*known, *self.states.values(), *self.states_after.values()]
        own = sum(t.numel() * t.element_size() for t in tensors if t is not None)
        return own + (0 if self.whole is None else self.whole.nbytes)


def tokens_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first input of a forward pass that is of integers with two dims: batch, sequence."""
    given = [*args, *kwargs.values()]
    return next((t for t in given if isinstance(t, Tensor) and t.ndim == 2 and not t.is_floating_point()), None)


def has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an optimizer's step is given a closure, so that its gradients are computed within it."""
    return any(map(callable, [*args, *kwargs.values()]))


@dataclass
class ForwardCall:
    """A forward pass of the model that a backward pass followed.

    Args:
        args, kwargs: its inputs; tensors are copies.
        random: the states of the generators before it.
        autocast: the dtype of autocast, or ``None``.
        before: what the pass changed of the model.
        outputs: its floating-point outputs, detached, by their place, as far as they are kept whole.
        versions: how often each of those had been written to when the pass ended.
        gradients: what arrived at those outputs, together; filled in by the backward passes.
        settled: the outputs at which what arrived is of a backward pass that left gradients in parameters.
        sampled: those outputs that are too large, likewise.
        cross_entropy: the loss of sampled logits, where it is known.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomStates
    device: torch.device
    autocast: torch.dtype | None
    before: Before = field(default_factory=Before)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    sampled: dict[str, OutputSample] = field(default_factory=dict)
    cross_entropy: CrossEntropy | None = None

    def keep(self, outputs: Mapping[str, Tensor], room: int) -> None:
        """Keep outputs, and by hooks the gradients that will arrive at them.

        Args:
            outputs: of the pass, which require a gradient.
            room: bytes that all of it may take; of what does not fit numbers are kept, and samples of positions.
        """
        whole = 2 * sum(t.numel() * t.element_size() for t in outputs.values())  # gradients take as much as outputs
        for place, tensor in outputs.items():
            if whole <= room or tensor.ndim == 0:
                self.outputs[place], self.versions[place] = tensor.detach(), tensor._version
                tensor.register_hook(partial(self._arrived, place))
            else:
                sample = self.sampled[place] = OutputSample.of(tensor, room)
                tensor.register_hook(sample.arrived)

    def _arrived(self, place: str, gradient: Tensor) -> None:
        before, now = self.gradients.get(place), gradient.detach()
        # Parts of the loss may go back one by one; what autograd.grad computed before goes nowhere.
        self.gradients[place] = before + now if before is not None and place in self.settled else now

    def settle(self) -> None:
        """What has arrived until now is of a backward pass that left gradients."""
        self.settled.update(self.gradients)
        for sample in self.sampled.values():
            sample.is_settled = sample.has_gradient

    @property
    def has_gradients(self) -> bool:
        """Whether a backward pass followed."""
        return bool(self.gradients) or any(sample.has_gradient for sample in self.sampled.values())

    @property
    def reached(self) -> list[str]:
        """The outputs at which a gradient arrived."""
        return [*self.gradients, *(place for place, sample in self.sampled.items() if sample.has_gradient)]

    @property
    def why_values_moved(self) -> str:
        """Why its outputs are not known any more as they were when the loss was computed; empty where they are."""
        # A framework divides the loss in place, whose value nothing here reads.
        is_written = any(t.ndim and t._version != self.versions[place] for place, t in self.outputs.items())
        return "the loop wrote into an output of the model" if is_written else ""

    @property
    def why_not_again(self) -> str:
        """Why its backward pass cannot be taken again; empty where it can, as far as is known before it."""
        gone = [place for place in self.reached if place not in self.gradients]
        has_loss = any(self.outputs[place].ndim == 0 for place in self.gradients)  # through which all may have come
        if not gone or has_loss or (self.cross_entropy is not None and gone == [self.logits]):
            return ""
        return TOO_LARGE

    def logits_sample(self) -> OutputSample | None:
        """Positions of the logits, of at most :data:`narrowgauge.recompute.output_samples.POSITIONS`."""
        place = self.logits
        if place is None or place in self.sampled:
            return self.sampled.get(place or "")
        return OutputSample.of_whole(self.outputs[place], self.gradients[place])

    @property
    def seen(self) -> Tensor | None:
        """Which tokens the mask of attention lets be seen, bool; ``None`` without one, or where its convention is another.

        transformers has ones at tokens that are seen. PyTorch's own masks have them at padding, or are added to scores. Padding
        is one token again and again, so what a mask leaves out is padding only if it is that.
        """
        mask, tokens = self.kwargs.get("attention_mask"), self.tokens
        if not isinstance(mask, Tensor) or tokens is None or mask.shape != tokens.shape:
            return None
        if mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all()):
            return None
        is_seen = mask != 0
        left_out = tokens[~is_seen]
        return is_seen if bool((left_out == left_out[:1]).all()) else None

    @property
    def tokens(self) -> Tensor | None:
        """The first input of integers with two dims: batch, sequence."""
        return tokens_of(self.args, self.kwargs)

    @property
    def logits(self) -> str | None:
        """The place of the first output with dims (batch, sequence, vocabulary) to which a gradient arrived.

        Of several with three dims those with the longest last one, since hidden states are narrower than a vocabulary.
        """
        return next(iter(self._like_logits()), None)

    @property
    def number_of_logits(self) -> int:
        """How many outputs may be logits: more than one of a model that predicts several tokens ahead."""
        pointers = {place: self.outputs[place].data_ptr() for place in self.gradients}
        return len({pointers.get(place, place) for place in self._like_logits()})

    def _like_logits(self) -> list[str]:
        found = {place: self.outputs[place].shape for place in self.gradients if self.outputs[place].ndim == 3}
        found |= {p: each.shape for p, each in self.sampled.items() if each.has_gradient and len(each.shape) == 3}
        widest = max((shape[2] for shape in found.values()), default=0)
        return [place for place, shape in found.items() if shape[2] == widest]

    @property
    def sequence(self) -> str | None:
        """The place of the logits; without, of the first output with three dims: a framework may have cast it after the loss."""
        if self.logits is not None:
            return self.logits
        dims = {place: t.ndim for place, t in self.outputs.items()}
        dims |= {place: len(sample.shape) for place, sample in self.sampled.items()}
        return next((place for place, number in dims.items() if number == 3), None)

    @property
    def nbytes(self) -> int:
        """Of inputs and outputs, and of the gradients of outputs, which may still come."""
        held = [
            *tensors_in((self.args, self.kwargs, self.before.buffers)),
            *self.outputs.values(),
            *self.outputs.values(),
        ]
        return sum(t.numel() * t.element_size() for t in held) + sum(each.nbytes for each in self.sampled.values())


@dataclass
class StepCapture:
    """A step, as far as it was kept.

    Args:
        step: its number, from 1.
        rule: ``"adamw"``, ``"adam"``, ``"sgd"``, ``"lion"``, ``"muon"``; empty for an optimizer that is not computed again.
        parameters: by name.
        calls: its forward passes in order; empty where they were not kept.
        loss_scale: by which a ``GradScaler`` multiplied the loss.
        ranks: processes that train together.
        missing: why something was not kept, by piece.
        outside: samples of parameters that have a gradient and are in no group of the optimizer.
        embeddings: parameters of embeddings.
        norms_of_ranks: of each rank, where parameters are sharded, the norm of all gradients that it holds, and the factor by
            which it multiplied its parts since the backward passes.
    """

    step: int
    rule: str
    parameters: dict[str, ParameterSample] = field(default_factory=dict)
    calls: list[ForwardCall] = field(default_factory=list)
    loss_scale: float = 1.0
    ranks: int = 1
    missing: dict[str, str] = field(default_factory=dict)
    outside: dict[str, Tensor] = field(default_factory=dict)
    embeddings: tuple[str, ...] = ()
    norms_of_ranks: tuple[tuple[float, float], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.parameters.values()) + sum(call.nbytes for call in self.calls)


def rule_of(optimizer: torch.optim.Optimizer, parameter: Tensor | None = None) -> str:
    """The rule that an optimizer claims to be: that of its class, or of the class that it is derived from.

    Args:
        parameter: one of its own; ours may step vectors by another rule than matrices.

    Example:
        >>> rule_of(torch.optim.SGD([torch.zeros(1, dtype=torch.float32)]))
        'sgd'
    """
    for kind in type(optimizer).__mro__:
        if kind.__name__ in RULES and kind.__module__.partition(".")[0] in ("torch", "narrowgauge"):
            if parameter is not None and isinstance(optimizer, Optimizer) and optimizer.rule_of(parameter) == "adamw":
                return "adamw"
            return RULES[kind.__name__]
    return ""


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that rules read, as plain numbers."""
    return {name: _plain(group[name]) for name in SETTINGS if name in group}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else value


def weight_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """The stored weight: of our optimizers with what they keep beside it."""
    return optimizer.stored(parameter) if isinstance(optimizer, Optimizer) else parameter


def states_of(
    optimizer: torch.optim.Optimizer, parameter: Tensor, take: Callable[[Tensor], Tensor] = spread
) -> dict[str, Tensor]:
    """Samples of the states that rules read; empty before the first step."""
    if isinstance(optimizer, Optimizer):
        found: dict[str, Tensor] = {}
        if not optimizer.num_steps(parameter):
            return found
        for name in STATES:
            try:
                found[name] = take(optimizer.stored(parameter, name))
            except KeyError:
                continue
        return found
    state = optimizer.state.get(parameter, {})
    shape = parameter.shape
    kept = {name: state.get(name) for name in STATES}
    return {name: take(t) for name, t in kept.items() if isinstance(t, Tensor) and t.shape == shape}


def number_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    """The number of steps that an optimizer has counted for a parameter; 0 where it does not count."""
    if isinstance(optimizer, Optimizer):
        state = optimizer.packed_state(parameter)
        return 0 if state is None else state.step - state.begun
    return int(optimizer.state.get(parameter, {}).get("step", 0))
