"""Named optimizers: a rule, its options, and their defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from narrowgauge.optim.checks import check_range
from narrowgauge.optim.elementwise import ADAMW
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.storages import Storage


class AdamW(Optimizer):
    """AdamW (decoupled weight decay, bias correction) whose weights and moments are kept in a storage.

    Law: the papers' equations in float32 registers; only what is kept is cut.

    Args:
        params: as in ``torch.optim``: parameters, ``(name, parameter)`` pairs, or groups.
        lr: learning rate; a float or a 0-d tensor.
        betas: decay rates of the two moments.
        eps: added to the denominator; 0 is allowed.
        weight_decay: decoupled decay, multiplied by ``lr``.
        storage: a row of ``narrowgauge.STORAGES``, or its name.
        max_grad_norm: clip to this L2 norm over all parameters (exact, in no order), and skip steps whose norm is not
            finite; ``None`` does neither.
        seed, audit_every, compile: as in :class:`Optimizer`.

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
        *,
        storage: str | Storage = "word",
        max_grad_norm: float | None = None,
        seed: int = 0,
        audit_every: int = 10,
        compile: bool | None = None,
    ) -> None:
        check_range("lr", float(lr), 0)
        check_range("beta1", betas[0], 0, 1)
        check_range("beta2", betas[1], 0, 1)
        check_range("eps", eps, 0)
        check_range("weight_decay", weight_decay, 0)
        super().__init__(
            params,
            ADAMW,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            storage=storage,
            max_grad_norm=max_grad_norm,
            seed=seed,
            audit_every=audit_every,
            compile=compile,
        )
