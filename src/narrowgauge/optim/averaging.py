"""The average of a model's weights over training, with the bits that its optimizer keeps.

An average of bfloat16 weights stalls: at a decay of 0.999 a step changes it by a thousandth of a
change that is itself below an ulp. :class:`AveragedModel` averages in float32 what the optimizer
has stored.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel as TorchAveragedModel

from narrowgauge.errors import RecipeError
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.step.parameter_formats import cast_statistics


class AveragedModel(TorchAveragedModel):
    """Average a model's weights in float32, as ``torch.optim.swa_utils.AveragedModel`` does, from
    the optimizer's own.

    Call :meth:`update_parameters` after each step. The first call copies the weights. ``module`` is
    the averaged model, in float32. Buffers and integer weights are copied.

    Args:
        model: the model, before or after it is wrapped, whose parameters the optimizer steps.
        optimizer: ours. Weights that it does not step are averaged as they are.
        decay: the factor of the old average in each update; ``None`` averages all updates alike.

    Cost: four bytes per parameter.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = ng.cast_parameters(torch.nn.Linear(8, 8, bias=False), torch.bfloat16)
        >>> optimizer = ng.AdamW(model.parameters(), lr=1e-5)
        >>> average = ng.AveragedModel(model, optimizer, decay=0.99)
        >>> for _ in range(10):
        ...     model.weight.grad = torch.ones_like(model.weight)
        ...     optimizer.step()
        ...     average.update_parameters(model)
        >>> average.module.weight.dtype
        torch.float32
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, decay: float | None = 0.999) -> None:
        super().__init__(model, avg_fn=self._moved)  # type: ignore[arg-type]
        self.optimizer = optimizer
        self.decay = decay
        for average, parameter in zip(self.module.parameters(), model.parameters(), strict=True):
            average.data = self._stored(parameter)
            average.grad = None
        cast_statistics(self.module, torch.float32)  # PyTorch multiplies one format only

    def _stored(self, parameter: Any) -> Tensor:
        try:
            return self.optimizer.stored(parameter).float()
        except KeyError:  # the optimizer does not step it
            values = parameter.detach()
            dtype = torch.float32 if values.is_floating_point() else values.dtype
            return values.to(dtype, copy=True)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take the model's present weights into the average.

        Raises:
            RecipeError: the optimizer steps none of the model's parameters, such as after a copy of
                one of both.
        """
        if set(self.optimizer.parameter_names()).isdisjoint(model.parameters()):
            raise RecipeError(
                "Cannot average because the optimizer steps none of the model's parameters.",
                "Set average.optimizer to the one that does.",
            )
        weights = [self._stored(parameter) for parameter in model.parameters()]
        super().update_parameters(
            SimpleNamespace(parameters=lambda: weights, buffers=model.buffers)  # type: ignore[arg-type]
        )

    def _moved(self, average: Tensor, weight: Tensor, count: Tensor) -> Tensor:
        if not (average.is_floating_point() or average.is_complex()):
            return weight  # codes, as of a quantized base
        lerp_weight = 1 / (count.item() + 1) if self.decay is None else 1 - self.decay
        return average.lerp(weight, lerp_weight)
