"""Fingerprints of a loop that is not the trainer's, and the formats it computes in, by hooks on its model and its optimizer.

The trainer calls :class:`~narrowgauge.gauges.recording.fingerprints.Fingerprints` at each place of a step. Here hooks do: the
model's first and last moment of a forward pass with gradients is a micro-batch, and the optimizer's step has the gradients
before it and the states behind it. On several ranks hooks on the parameters see what this rank's backward passes compute, before
``DistributedDataParallel`` sums it. Hooks read and change nothing, and a compiler that traces the model passes them over.

In which formats the model computes, no dtype of a parameter says: autocast, a framework's wrapper or a cast in the model's code
may narrow what lies between. The graph that autograd builds in the first forward pass has the dtype of every result, whoever
asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import torch_names
from narrowgauge.distributed.ranks import Ranks
from narrowgauge.gauges.recording.fingerprints import Fingerprints
from narrowgauge.runs.schema import Row
from narrowgauge.spec.formats import FORMATS
from narrowgauge.torch_hooks import OwnHook, follow_steps


class LoopFingerprints:
    """Follows the steps of a loop.

    Args:
        model: whose tensors are recorded.
        called: the model as the loop calls it, or the part of it that it calls.
        optimizer: that steps it, without wrappers.
        every: steps between fingerprints; the start and the first step have some, too. 0 for none.
        here: the ranks, all of which make all calls.
        on_formats: called once, with what :func:`formats_of` says of the first forward pass.
        on_failure: called with a sentence where no more can be recorded; on several ranks, which wait for each other, the
            error is raised instead.

    Attributes:
        prints: what was recorded last.
    """

    def __init__(
        self,
        model: nn.Module,
        called: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        here: Ranks,
        on_formats: Callable[[Row], object],
        on_failure: Callable[[str], object],
    ) -> None:
        self.here = here
        self.prints = Fingerprints(torch_names.unwrapped_model(model), optimizer, every, here, first=1)
        self._on_formats, self._on_failure = on_formats, on_failure
        self._has_formats = self._passes_over = False
        self._has_begun = True
        self._num_sequences = self._step = 0
        self._pass = ExitStack()
        self._on_gradients: list[Any] = []
        self._handles: list[Any] = [
            called.register_forward_pre_hook(OwnHook(self._before_forward), with_kwargs=True),
            called.register_forward_hook(OwnHook(self._after_forward)),
            follow_steps(optimizer, self._before_step, self._after_step),
        ]

    def begin(self, step: int) -> None:
        """Begin the step that ends as number ``step``; what the loop changes before its first pass was changed between steps."""
        self._pass.close()
        self._pass_over_gradients()
        self._step, self._num_sequences, self._passes_over, self._has_begun = step, 0, False, False

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._guarded(lambda: self.prints.begin(self._step))
            if self.prints.is_on and self.here.size > 1:
                self._see_gradients()

    def _see_gradients(self) -> None:
        """Hook the gradients of this step; behind what the loop hooked there itself, which may change them.

        FSDP2 sums gradients of other tensors than the parameters, where no hook sees them.
        """
        trained = [p for p in self.prints.model.parameters() if p.requires_grad]
        self._on_gradients = [
            p.register_hook(OwnHook(partial(self._gradient, place))) for place, p in enumerate(trained, 1)
        ]

    def _gradient(self, place: int, gradient: Tensor) -> None:
        if not torch.compiler.is_compiling():
            self._guarded(lambda: self.prints.computed(gradient, place))

    def _pass_over_gradients(self) -> None:
        for handle in self._on_gradients:
            handle.remove()
        self._on_gradients = []

    def start(self, step: int) -> None:
        """Record what a process starts from after ``step`` steps: the first weights, or a checkpoint's."""
        self._guarded(lambda: self.prints.before_first(step))

    def remove(self) -> None:
        """Remove every hook."""
        self._pass.close()
        self._pass_over_gradients()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _follows(self) -> bool:
        return not torch.compiler.is_compiling() and torch.is_grad_enabled() and not self._passes_over

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._follows():
            return
        self._begin()
        if self.prints.is_on:
            self._pass.close()  # one that raised
            self._guarded(lambda: self._begin_pass(_tokens_of(args, kwargs)))

    def _begin_pass(self, tokens: Tensor | None) -> None:
        self.prints.sees_outputs = not torch_names.is_compiled_model(self.prints.model)
        self._pass.enter_context(self.prints.micro_batch(tokens, self._num_sequences))
        self._num_sequences += 0 if tokens is None else len(tokens)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._follows():
            return
        self._pass.close()
        if not self._has_formats:
            self._guarded(lambda: self._tell_formats(formats_of(output)))

    def _tell_formats(self, formats: Row) -> None:
        if formats:
            self._has_formats = True
            self._on_formats(formats)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._begin()
        self._guarded(self._end_passes)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._guarded(lambda: self.prints.states(self._step))

    def _end_passes(self) -> None:
        """The gradients of the step are complete. What is computed from here on is none of the loop's passes."""
        self._pass.close()
        self._pass_over_gradients()
        self._passes_over = True
        self.prints.gradients()

    def _guarded(self, function: Callable[[], object]) -> None:
        try:
            with torch.no_grad():
                function()
        except Exception as error:
            if self.here.size > 1:
                raise
            self._pass.close()
            self.prints.every, self.prints.is_on, self.prints.last = 0, False, None
            self._has_formats = True
            self._on_failure(f"no more fingerprints are recorded: {type(error).__name__}: {error}"[:300])


def _tokens_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first input of a forward pass that is of integers with two dims: batch, sequence."""
    inputs = [*args, *kwargs.values()]
    return next((t for t in inputs if isinstance(t, Tensor) and t.ndim == 2 and not t.is_floating_point()), None)


def _float_outputs(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a model's output: of a tensor, a tuple, or a mapping (``ModelOutput``)."""
    outputs = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else [output]
    )
    yield from (t for t in outputs if isinstance(t, Tensor) and t.is_floating_point())


def formats_of(output: Any) -> Row:
    """In which formats a forward pass computed what its outputs were made of; nothing where no output has a graph.

    Args:
        output: of a model: a tensor, or tensors in a tuple or a mapping.
    Returns:
        ``formats``, the dtypes of all results as names with commas; float32 has the format its matmuls round to beside it.
        ``unseen`` is true where functions outside PyTorch, or a compiled part, computed something whose formats no graph shows.

    Example:
        >>> formats_of(nn.Linear(4, 2)(torch.ones(1, 4)))
        {'formats': 'float32'}
    """
    outputs = [tensor for tensor in _float_outputs(output) if tensor.grad_fn is not None]
    dtypes, is_unseen = torch_names.graph_dtypes(outputs)
    if not dtypes:
        return {}
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    if "float32" in names:
        names |= _float32_matmuls(outputs[0])
    formats = ", ".join(sorted(name for name in names if name in FORMATS))
    return {"formats": formats, **({"unseen": True} if is_unseen else {})}


def _float32_matmuls(x: Tensor) -> set[str]:
    """Return what float32 matmuls may round their operands to."""
    precision = torch.get_float32_matmul_precision()
    found = {"high": {"tfloat32"}, "medium": {"bfloat16"}}.get(precision, set())
    on_tensor_cores = x.is_cuda and getattr(torch.backends.cuda.matmul, "fp32_precision", "") == "tf32"
    return found | ({"tfloat32"} if on_tensor_cores else set())
