"""What makes a micro-batch an addend of an exact sum, a leaf: held while a model trains.

The sum of a step is a function of its leaves alone, if each leaf's gradient is a function of its sequences alone and enters the
sum by itself. So no forward pass may draw from a generator whose state tells what this rank has computed before, and no gradients
may be added up on a rank before they are sent.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import _torch
from narrowgauge.distributed.sharding import fsdp_modules
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.shards import local_of

IN_MICRO_BATCHES = (
    "Surround each backward pass of a step with micro_batch(is_last=…) of the reduction, which sums them exactly, and call "
    "zero_grad() after each step."
)


def require_first(before: Iterable[Tensor]) -> None:
    """Refuse gradients from before a backward pass, that its own would be added to.

    Args:
        before: what ``p.grad`` of the pass's parameters held; zeros are as good as ``None``.
    Raises:
        RecipeError: they are not zeros.
    Cost: none without them; else one read, for which the host waits.
    """
    if any(map(is_filled, before)):
        refuse_second()


def is_filled(gradient: Tensor) -> bool:
    """Whether this rank's part of a gradient has a value that is not zero."""
    return bool(local_of(gradient.detach()).any())


def refuse_second() -> None:
    """Refuse a backward pass whose gradients would be added to sums of an earlier one.

    Raises:
        RecipeError: always.
    """
    raise RecipeError(
        "a second backward pass was met in one step: its gradients would be added to those of the first, each sum rounded by "
        "itself, and so other bits come out on another number of ranks.",
        IN_MICRO_BATCHES,
    )


def refuse_unsent(how: str) -> None:
    """Refuse a backward pass whose gradients are added up on this rank.

    Args:
        how: what keeps them.
    Raises:
        RecipeError: always.
    """
    raise RecipeError(
        f"{how} adds up the gradients of micro-batches on each rank before they are sent, and so other bits come out on another "
        "number of ranks.",
        IN_MICRO_BATCHES,
    )


def generator_state(device: torch.device) -> tuple[bytes, ...]:
    """The state of the default generators that a forward pass draws from: the host's, and the device's.

    Args:
        device: of the model.
    Returns:
        Nothing while CUDA records a graph, which must not ask.
    Cost: 5 µs.
    """
    states = [torch.default_generator.get_state()]
    if device.type not in ("cpu", "meta"):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return ()
        states.append(torch.get_device_module(device.type).get_rng_state(*([] if device.type == "mps" else [device])))
    # Not as tensors: a forward pass may run in a mode that takes no real ones.
    return tuple(ctypes.string_at(state.data_ptr(), state.numel()) for state in states)


class ForwardPasses:
    """Watches the forward passes of a model in training.

    Args:
        device: on which it computes, asked anew each time.
        check: called as one begins; raises where its gradients could not be summed.
    """

    def __init__(self, device: Callable[[], torch.device], check: Callable[[], None]) -> None:
        self._device, self._check = device, check
        self._outermost: object = None
        self._before: tuple[bytes, ...] = ()

    def install(self, model: nn.Module) -> list[Callable[[], None]]:
        """Watch a model and the parts of it that loops call by themselves; returns what ends it.

        What a graph of ``torch.compile`` contains is not watched: whoever calls it can surround the call with :meth:`watched`.
        """
        undo: list[Callable[[], None]] = []
        for module in dict.fromkeys([model, *_called(model), *fsdp_modules(model)]):
            undo.append(module.register_forward_pre_hook(_Hook(self._enter), prepend=True).remove)
            undo.append(module.register_forward_hook(_Hook(self._leave), always_call=True).remove)
        return undo

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch what is computed within: a forward pass that no module of the model's stands for."""
        self.begin(self)
        try:
            yield
        except BaseException:
            self.discard()
            raise
        self.end(self)

    @property
    def is_under_way(self) -> bool:
        """Whether a forward pass has begun that will be differentiated."""
        return self._outermost is not None

    def begin(self, part: object) -> None:
        """Note the state of the generators, unless a forward pass has begun already.

        Args:
            part: what computes it.
        """
        if self._outermost is None:
            is_trained = part.training if isinstance(part, nn.Module) else True
            self._outermost, self._before = part, generator_state(self._device()) if is_trained else ()
            self._check()

    def end(self, part: object) -> None:
        """Compare the state of the generators, where ``part`` has begun the forward pass.

        Raises:
            RecipeError: it is another.
        """
        if self._outermost is not part:
            return
        self._outermost = None
        if self._before and self._before != (generator_state(self._device()) or self._before):
            raise RecipeError(
                f"a forward pass{f' of {type(part).__name__}' if isinstance(part, nn.Module) else ''} drew random numbers from "
                "PyTorch's default generator (dropout, sampling, layers left out at random), whose state depends on what this "
                "rank has computed before: other bits come out on another number of ranks.",
                "Set the probabilities of dropout to 0, in attention too; or draw within torch.random.fork_rng(), seeded there "
                "by the step and the micro-batch's own number; or take another reduction.",
            )

    def discard(self) -> None:
        """Forget a forward pass that has failed."""
        self._outermost = None

    def _enter(self, module: nn.Module, *_: Any) -> None:
        """Begin, unless the forward pass belongs to no leaf: nothing is differentiated, or a checkpoint repeats it."""
        if torch.is_grad_enabled() and not _torch.runs_backward():
            self.begin(module)

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if output is not None:
            self.end(module)
        elif self._outermost is module:  # it has failed
            self._outermost = None


class _Hook:
    """A module's hook, which a copy of the module does not have: an average of weights is no leaf."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._call(*args)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(_nothing)

    def __reduce__(self) -> tuple[type[_Hook], tuple[Any]]:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module, and of containers that cannot be called themselves their members."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)
        else:
            yield child
