"""Sum the gradients of micro-batches in float32 or float64.

Autograd adds the gradients of micro-batches in the gradient's own format. In bfloat16 a sum of
equal gradients stops at 256 of them, since 257 rounds back to 256. A :class:`GradientAccumulator`
keeps the sum in a *buffer*, and rounds it at the end.

Let A be the sum of the k gradients' *magnitudes*. Let r be the most that one addition loses,
relative to its result: 2^-24 in float32, 2^-53 in float64. The first gradient is copied. Each of
the other k - 1 adds an error of r:

    |sum - exact|  <=  ((1 + r)^(k-1) - 1) · A   (about (k-1) · r · A)

The last rounding adds half an ulp if the sum has more bits than the gradient: 2^-8 of the sum for
bfloat16, 2^-11 for float16. A float64 is first rounded to float32. No accumulation removes the
rounding of each micro-batch's gradient to 16 bits: 2^-8 · A.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.chunks import flat_chunks
from narrowgauge.numerics.dtensor import gradient_of, local_of, placed_like
from narrowgauge.optim.validation import check_gradient
from narrowgauge.torch_support.machine import require_float64
from narrowgauge.torch_support.torch_names import is_captured

_FORMATS = (torch.float32, torch.bfloat16, torch.float16)
"""Formats of the parameters whose gradients are summed."""


class GradientAccumulator:
    """Sum micro-batch gradients in float32 or float64.

    Call :meth:`accumulate` after each backward pass: it adds the gradients and sets ``p.grad`` to
    ``None``. Call :meth:`finish` after the last one: it puts the sums into ``p.grad``, as a
    backward pass over the whole batch would.

    Invariant: the sum of an element depends only on its gradients in order. Its error has the bound
    above. One micro-batch comes back bit for bit. An infinity or a NaN stays not finite, so the
    optimizer skips the step.

    Args:
        parameters: the parameters. Tied ones count once. Frozen ones and those without a gradient
            are skipped. Autograd itself sums gradients of ``dtype`` and of higher precision.
        dtype: ``torch.float32`` or ``torch.float64``.

    Raises:
        RecipeError: another dtype.

    Cost: the bytes of ``dtype`` per parameter from the first call until :meth:`finish`, and under
    16 MiB more during a call.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        >>> accumulator = GradientAccumulator([weight])
        >>> for _ in range(300):
        ...     weight.sum().backward()
        ...     accumulator.accumulate()
        >>> accumulator.finish()
        >>> weight.grad
        tensor([300., 300., 300.], dtype=torch.bfloat16)
    """

    def __init__(self, parameters: Iterable[Tensor], dtype: torch.dtype = torch.float32) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise RecipeError(
                f"Cannot sum gradients in {dtype!r}.", "Take torch.float32 or torch.float64."
            )
        self.dtype = dtype
        self.parameters = list(dict.fromkeys(parameters))
        require_float64(self.parameters)
        # The parameters whose gradients are summed here, not by autograd.
        self._summed = [
            p for p in self.parameters if p.dtype in _FORMATS and p.dtype.itemsize < dtype.itemsize
        ]
        # Between the first micro-batch of a step and finish.
        self._buffers: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients of one micro-batch and set ``p.grad`` to ``None``.

        Gradients that autograd sums stay.

        Raises:
            RecipeError: a gradient is sparse. Nothing was added then.
        """
        if is_captured():
            raise RecipeError(
                "Cannot accumulate while a CUDA graph is captured: each replay would repeat this "
                "step's random bits.",
                "Capture the forward and backward passes alone.",
            )
        gradients: dict[Tensor, Tensor] = {}
        for parameter in self._summed:
            if parameter.grad is None:  # Megatron adds up main_grad itself
                continue
            gradient = gradient_of(parameter)
            assert gradient is not None
            check_gradient(parameter, gradient)
            gradients[parameter] = local_of(gradient.detach())
        for parameter, gradient in gradients.items():
            if parameter in self._buffers:
                for total, chunk in flat_chunks(self._buffers[parameter], gradient):
                    total += chunk
            else:
                # A copy: others may hold a gradient of this dtype, as a bucket does.
                self._buffers[parameter] = gradient.to(
                    self.dtype, copy=True, memory_format=torch.contiguous_format
                )
            parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Round each sum, put it into ``p.grad``, and reset.

        Without any gradient ``p.grad`` stays ``None``.

        Add a pending gradient first.
        """
        if any(p.grad is not None for p in self._summed):
            self.accumulate()
        for parameter in list(self._buffers):
            buffer = self._buffers[parameter]
            # A parameter may ask for float32 gradients, which lose nothing.
            dtype = parameter.grad_dtype or parameter.dtype
            gradient = torch.empty(buffer.shape, dtype=dtype, device=buffer.device)
            for chunk, total in flat_chunks(gradient, buffer):
                chunk.copy_(total.float())
            parameter.grad = placed_like(parameter, gradient)
            del self._buffers[parameter]  # once its gradient exists

    def discard(self) -> None:
        """Discard the gradients since the last :meth:`finish`."""
        for parameter in self.parameters:
            parameter.grad = None
        self._buffers.clear()

    def bytes_per_param(self) -> float:
        """Return the bytes per parameter of the buffers."""
        size = sum(
            self.dtype.itemsize * local_of(p).numel() for p in self._summed if p.requires_grad
        )
        return size / max(1, sum(local_of(p).numel() for p in self.parameters))
