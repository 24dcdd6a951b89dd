"""Named optimizers with element-wise rules: a rule, its options, and their defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.elementwise import ADAM, ADAMW, LION, Rule
from narrowgauge.optim.rules.elementwise import SGD as MOMENTUM_SGD

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowgauge.optim.optimizer import Options


class _Betas(Optimizer):
    """An optimizer with two decay rates: the options they share."""

    def __init__(
        self,
        params: Iterable[Any],
        rule: Rule,
        lr: float | Tensor,
        betas: tuple[float, float],
        weight_decay: float,
        eps: float | None,
        options: Options,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        if eps is not None:
            defaults["eps"] = eps
        super().__init__(params, rule, defaults, **options)


class AdamW(_Betas):
    """AdamW (decoupled weight decay, bias correction) whose weights and moments are stored in the formats of a storage.

    Invariant: the papers' equations in float32 registers; only what is stored is cut.

    Its defaults are those of ``torch.optim.AdamW``, so that replacing one by the other changes what is stored and nothing
    else: ``betas`` (0.9, 0.999), decay 0.01 of every parameter, no clipping. :func:`narrowgauge.prepare` takes the same.

    Args:
        params: as in ``torch.optim``: parameters, ``(name, parameter)`` pairs, or groups.
        lr: learning rate; a float or a 0-d tensor. Left out it is 1e-3, as in torch: a framework that has a learning rate of
            its own must pass it on.
        betas: decay rates of the two moments.
        eps: added to the denominator; 0 is allowed.
        weight_decay: decoupled decay, multiplied by ``lr``.
        options: ``storage`` (one of ``narrowgauge.STORAGES``, or its name), ``max_grad_norm`` (clip to this L2 norm over
            all parameters, and skip steps whose norm is not finite), ``seed``, ``audit_every``, ``compile``, ``maximize``
            and ``loss_scaler``, as in :class:`Optimizer`.

    Raises:
        RecipeError: an option out of range, an unknown storage, or parameters in another format than its visible one.

    Cost: one fused pass over weight, gradient and states.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
        >>> optimizer = ng.AdamW([weight], lr=1e-3, storage="word")
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> round(optimizer.stored(weight).mean().item(), 5)
        -0.001

    Source:
        Kingma & Ba, ICLR 2015 (1412.6980); Loshchilov & Hutter, ICLR 2019 (1711.05101).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, ADAMW, lr, betas, weight_decay, eps, options)


class Adam(_Betas):
    """Adam: as :class:`AdamW`, with weight decay as an L2 penalty, added to the gradient.

    Args:
        params, lr, betas, eps: as in :class:`AdamW`.
        weight_decay: of the penalty ``weight_decay / 2 * weight**2``.
        options: as in :class:`AdamW`.

    Raises:
        RecipeError: as in :class:`AdamW`.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        >>> weight.grad = torch.ones_like(weight)
        >>> ng.Adam([weight], lr=0.5, storage="compact").step()
        >>> weight[0, 0].item()
        0.5

    Source:
        Kingma & Ba, ICLR 2015 (1412.6980).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, ADAM, lr, betas, weight_decay, eps, options)


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum and Nesterov's form of it, as in ``torch.optim``.

    Args:
        params, lr: as in :class:`AdamW`.
        momentum: decay of the ``momentum_buffer``. With 0 none is kept; it is made when a group or a schedule sets one.
        dampening: what of each gradient but the first does not enter the buffer.
        weight_decay: of the L2 penalty.
        nesterov: step along the gradient and what the buffer will be; needs momentum and no dampening.
        options: as in :class:`AdamW`.

    Raises:
        RecipeError: as in :class:`AdamW`, or Nesterov's form without momentum or with dampening.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        >>> weight.grad = torch.ones_like(weight)
        >>> ng.SGD([weight], lr=0.25, momentum=0.9, storage="split").step()
        >>> weight[0, 0].item()
        0.75

    Source:
        Sutskever et al., ICML 2013.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if nesterov and (momentum == 0 or dampening != 0):
            raise RecipeError(
                f"nesterov was requested with momentum = {momentum} and dampening = {dampening}.",
                "It needs momentum above 0 and no dampening.",
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, MOMENTUM_SGD, defaults, **options)


class Lion(_Betas):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay.

    Args:
        params, lr: as in :class:`AdamW`; rates are 3 to 10 times smaller.
        betas: of the interpolation, and of the momentum that is kept.
        weight_decay: decoupled decay, multiplied by ``lr``.
        options: as in :class:`AdamW`.

    Raises:
        RecipeError: as in :class:`AdamW`.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        >>> weight.grad = torch.full_like(weight, 1e-3)
        >>> ng.Lion([weight], lr=0.25, storage="states8").step()
        >>> weight[0, 0].item()
        0.75

    Source:
        Chen et al., NeurIPS 2023 (2302.06675).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, LION, lr, betas, weight_decay, None, options)
