"""The seed and the step of random bits: those of the optimizer that steps a layer's weight.

The count of steps is in the optimizer's first param group, so it is saved and loaded with the
optimizer. A hook after the steps of all optimizers adds one, and writes the count to the layers
whose weights this optimizer steps: into each layer's own words, in place. So a forward pass that is
recomputed while some optimizers have stepped already has its first bits. A layer whose weight
nothing trains follows the first optimizer that steps another parameter of its model.

The place of a micro-batch in the step is an index that the training loop sets. Where it sets none,
a hash of the gradient itself takes its part, see ``operand.draw``. So no two micro-batches of a
step round alike, on one rank or on several. Nothing counts calls, and nothing knows ranks.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.torch_support.torch_hooks import (
    OwnHook,
    after_every_step,
    announced_optimizers,
    hear_of_optimizers,
)
from narrowgauge.torch_support.torch_names import callers_of_step, calls_of_step

KEY = "matmul_step"
"""The entry of an optimizer's first param group that counts its steps."""


class Draw(NamedTuple):
    """What keys the random bits of a layer.

    Attributes:
        seed, step: of the optimizer that steps its weight.
        first_sequence, first_token: the index in the step's batch of the micro-batch's first
            sequence or token; one is 0.
        is_placed: whether the training loop sets these indices.
    """

    seed: int = 0
    step: int = 0
    first_sequence: int = 0
    first_token: int = 0
    is_placed: bool = False

    def words(self) -> list[int]:
        """Return the int32 words that casts read, see ``operand.Keys``."""
        seed = step_seed(self.seed, self.step)
        return [seed, self.first_sequence, self.first_token, int(self.is_placed)]


class Swap:
    """The layers that were swapped together, and their model.

    A layer has ``draw``, a :class:`Draw`, and ``clock_words``, a tensor of its words, or ``None``
    if no cast takes random bits.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model: Any = (lambda: None) if model is None else weakref.ref(model)
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.leader: Any = lambda: None
        _SWAPS.add(self)
        after_every_step(_after_step)
        _before_every_step(_before_step)

    def __deepcopy__(self, memo: dict[int, Any]) -> Swap:
        swap = Swap(memo.get(id(self.model())))
        memo[id(self)] = swap
        return swap

    def __reduce__(self) -> tuple[type[Swap], tuple[()]]:
        return Swap, ()

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Return the layers that an optimizer steps, or leads: those whose weights are frozen."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        model = self.model()
        named: list[tuple[str, Tensor]] = []
        for module in list(self.layers) if model is None else [model]:
            named.extend(module.named_parameters())
        by_name = dict(named)
        layers: list[Any] = []
        frozen: list[Any] = []
        for layer in self.layers:
            parameters = [p for name, p in layer.named_parameters() if name != "bias"]
            stack = by_name.get(layer.names[0].rpartition(".")[0])
            if not parameters and stack is not None:  # experts, whose weights the model holds
                parameters = [stack]
            if any(id(parameter) in stepped for parameter in parameters):
                layers.append(layer)
            elif not any(parameter.requires_grad for parameter in parameters):
                frozen.append(layer)
        if not frozen or not any(id(parameter) in stepped for _, parameter in named):
            return layers
        if self.leader() is None:
            self.leader = weakref.ref(optimizer)
        if self.leader() is optimizer:
            layers += frozen
        return layers


class _Followed(NamedTuple):
    """The layers of an optimizer, and the numbers of parameters and layers when they were found."""

    size: tuple[int, int]
    layers: weakref.WeakSet[Any]


_SWAPS: weakref.WeakSet[Swap] = weakref.WeakSet()
_FOLLOWED: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Followed]
_FOLLOWED = weakref.WeakKeyDictionary()
_before_every_step = cache(register_optimizer_step_pre_hook)


def write(layers: Iterable[Any]) -> None:
    """Write the words of layers, with one copy for each device and value."""
    targets: dict[tuple[Any, ...], list[Tensor]] = {}
    for layer in layers:
        if layer.clock_words is not None and not layer.clock_words.is_meta:
            key = (layer.clock_words.device, *layer.draw.words())
            targets.setdefault(key, []).append(layer.clock_words)
    with torch.inference_mode(False):
        for (device, *words), tensors in targets.items():
            source = torch.tensor(words, dtype=torch.int32, device="cpu")
            torch._foreach_copy_(tensors, [source.to(device, non_blocking=True)] * len(tensors))


def set_draw(layers: Iterable[Any], **numbers: Any) -> None:
    """Set some of the numbers that key the random bits of layers."""
    layers = list(layers)
    for layer in layers:
        # Not through nn.Module's own assignment, which takes 1 µs a layer.
        vars(layer)["draw"] = layer.draw._replace(**numbers)
    write(layers)


def layers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the layers that an optimizer steps or leads."""
    swaps = list(_SWAPS)
    num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    size = num_parameters, sum(len(swap.layers) for swap in swaps)
    followed = _FOLLOWED.get(optimizer)
    if followed is not None and followed.size == size:
        return list(followed.layers)
    layers = [layer for swap in swaps for layer in swap.stepped_by(optimizer)]
    if layers and (followed is None or not followed.layers):
        optimizer.register_load_state_dict_post_hook(OwnHook(_after_load))
    _FOLLOWED[optimizer] = _Followed(size, weakref.WeakSet(layers))
    return layers


def follow(optimizer: torch.optim.Optimizer, steps: int = 0) -> None:
    """Give the layers of an optimizer its count, plus ``steps``.

    An optimizer without a count takes theirs.
    """
    layers = layers_of(optimizer)
    if not layers:
        return
    group = optimizer.param_groups[0]
    step = group.get(KEY, max(layer.draw.step for layer in layers)) + steps
    if any(layer.clock_words is not None for layer in layers):
        group[KEY] = step
    if "seed" in group:
        set_draw(layers, step=step, seed=group["seed"])
    else:
        set_draw(layers, step=step)


def set_step(layers: Iterable[Any], step: int) -> None:
    """Continue layers, and the optimizers that step them, at a step."""
    layers = list(layers)
    set_draw(layers, step=step)
    for optimizer, followed in list(_FOLLOWED.items()):
        if KEY in optimizer.param_groups[0] and not followed.layers.isdisjoint(layers):
            optimizer.param_groups[0][KEY] = step


def serve(model: nn.Module, layers: Iterable[Any], seed: int) -> None:
    """Give layers that were swapped together a seed, and the optimizers that were made before."""
    swap = Swap(model)
    layers = list(layers)
    for layer in layers:
        layer.join(swap)
    set_draw(layers, seed=seed)
    hear()


def hear() -> None:
    """Give all layers the counts of the optimizers that were made before."""
    for optimizer in {*announced_optimizers(), *_FOLLOWED}:
        follow(optimizer)


def _before_step(optimizer: Any, *_: Any) -> None:
    """Refuse the first step of an optimizer whose loaded count is not its layers'."""
    count = optimizer.param_groups[0].get(KEY)
    if count is None or optimizer in _FOLLOWED:
        return
    for layer in layers_of(optimizer):
        if layer.clock_words is not None and layer.draw.step != count:
            del _FOLLOWED[optimizer]
            raise RecipeError(
                f"Cannot step a loaded {type(optimizer).__name__} at step {count} because the "
                f"random bits of '{layer.names[0]}' were those of step {layer.draw.step}.",
                "Call linears.follow(optimizer) before the first forward pass: swap_linears "
                "returns linears.",
            )


def _after_step(optimizer: Any, *_: Any) -> None:
    for caller in callers_of_step(optimizer):  # a container, whose members step the weights
        layers_of(caller)
        _FOLLOWED[caller].layers.difference_update(layers_of(optimizer))
    if calls_of_step(optimizer) == 1:
        follow(optimizer, steps=1)


def _after_load(optimizer: torch.optim.Optimizer) -> None:
    is_keyed = any(layer.clock_words is not None for layer in layers_of(optimizer))
    if is_keyed and KEY not in optimizer.param_groups[0]:
        warnings.warn(
            f"the loaded optimizer state lacks {KEY}, so training continues with other bits. Save "
            "optimizer.state_dict() unedited.",
            stacklevel=5,
        )
    follow(optimizer)


hear_of_optimizers(follow)
