"""The named optimizers: a rule, its options, and their defaults.

:class:`Muon` and :class:`GaLore` step matrices. A
parameter of three dims is a stack of matrices, such as the experts of a mixture: each matrix steps
as if it were a parameter of its own, one after the other. More dims (``nn.Conv2d``) are flattened
to columns. AdamW steps parameters of fewer than two dims, with the same learning rate and the
group's ``betas`` and ``eps``.

Put embeddings and output heads into a group with ``"rule": "adamw"``: each of their rows is a
token, and a batch contains few tokens. Put ``nn.Conv1d`` there too: its weight ``[out, in,
kernel]`` is not a stack of matrices.
"""

from typing import Any

from torch import Tensor

from narrowgauge.optim.kernel_choice import Group
from narrowgauge.optim.optimizer import Optimizer, Params
from narrowgauge.optim.rules.elementwise import ADAM, ADAMW, LION, PLAIN_SGD
from narrowgauge.optim.rules.matrix import GALORE, MUON

Betas = tuple[float, float]
"""The decay rates of two averages."""


class AdamW(Optimizer):
    """AdamW, computed in float32. Weights and moments are stored in the formats of a storage.

    Args:
        params: as in ``torch.optim``: parameters, ``(name, parameter)`` pairs, or groups; or a
            module, whose batch norms then stay float32.
        lr: learning rate, a number or a 0-d tensor on the CPU: the host reads it at each step.
        betas: decay rates of the two moments.
        eps: added to the denominator; 0 is allowed.
        weight_decay: decoupled decay, multiplied by ``lr``.
        options: as in :class:`Optimizer`: ``storage``, ``max_grad_norm``, ``seed``,
            ``audit_every``, ``compile`` …

    Raises:
        RecipeError: an option is out of range, the storage is unknown, or parameters are not in its
            visible format.

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
        self, params: Params, lr: float | Tensor = 1e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.01, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            params,
            ADAMW,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps},
            **options,
        )


class Adam(Optimizer):
    """Adam: like :class:`AdamW`, but weight decay is an L2 penalty, added to the gradient.

    Args:
        params, lr, betas, eps, options: as in :class:`AdamW`.
        weight_decay: factor of the penalty ``weight_decay / 2 * weight**2``.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
        >>> weight.grad = torch.ones_like(weight)
        >>> ng.Adam([weight], lr=0.5, storage="compact").step()
        >>> weight[0, 0].item()
        -0.5

    Source:
        Kingma & Ba, ICLR 2015 (1412.6980).
    """

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            params,
            ADAM,
            {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps},
            **options,
        )


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, optionally Nesterov's, as in ``torch.optim``.

    Args:
        params, lr, options: as in :class:`AdamW`.
        momentum: decay rate of the ``momentum_buffer``; a param group may set its own. If all are
            0, nothing is stored.
        dampening: fraction of each gradient, except the first, that does not enter the buffer.
        weight_decay: factor of the L2 penalty.
        nesterov: step along the gradient plus the next buffer. It needs momentum and no dampening.

    Raises:
        RecipeError: as in :class:`AdamW`, or Nesterov's form without momentum or with dampening.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
        >>> weight.grad = torch.ones_like(weight)
        >>> ng.SGD([weight], lr=0.25, momentum=0.9, storage="split").step()
        >>> weight[0, 0].item()
        -0.25

    Source:
        Sutskever et al., ICML 2013.
    """

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
        }  # fmt: skip
        super().__init__(params, PLAIN_SGD, defaults, **options)  # a momentum takes its rule


class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay.

    Args:
        params, lr, weight_decay, options: as in :class:`AdamW`. Use a 3 to 10 times smaller
            learning rate.
        betas: decay rates of the interpolation and of the stored momentum.

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
        self, params: Params, lr: float | Tensor = 1e-4, betas: Betas = (0.9, 0.99),
        weight_decay: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            params, LION, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **options
        )


class Muon(Optimizer):
    """Muon: bring all singular values of the momentum to about 1.

    Scaling or clipping all gradients changes nothing. The products' operands are bfloat16, as
    published.

    Args:
        params: as in :class:`AdamW`. Three dims are a stack of matrices; more are flattened to
            columns.
        lr, weight_decay, options: as in :class:`AdamW`. The momentum uses the storage's code for
            first moments.
        momentum: decay rate of the average of gradients.
        nesterov: look one step ahead of that average.
        ns_steps: iterations of the orthogonalisation.
        adjust_lr_fn: as in ``torch.optim.Muon``. ``None`` or ``"original"`` multiplies ``lr`` by
            ``sqrt(max(1, rows / cols))``, ``"match_rms_adamw"`` by ``0.2 · sqrt(max(rows, cols))``:
            steps as large as AdamW's, which can share the rate.
        betas, eps: AdamW's, for parameters of fewer than two dims.

    Cost: ``ns_steps · (2 s · rows · cols + s³)`` multiply-adds a step; ``s`` is the shorter side. Transient memory holds four
        float32 copies of the matrix, five on a CPU without bfloat16 products.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
        >>> optimizer = ng.Muon([weight], lr=1e-3, adjust_lr_fn="match_rms_adamw", storage="word")
        >>> weight.grad = torch.eye(8).bfloat16()
        >>> optimizer.step()
        >>> stepped = optimizer.stored(weight).diagonal()
        >>> bool((stepped < -3.5e-4).all() and (stepped > -7e-4).all())  # lr · 0.2 · sqrt(8) · (0.68 … 1.21)
        True

    Source:
        Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al.
        2025 (2502.16982).
    """

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True, ns_steps: int = 5, adjust_lr_fn: str | None = None,
        betas: Betas = (0.9, 0.999), eps: float = 1e-8, **options: Any,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn, "betas": betas, "eps": eps,
        }  # fmt: skip
        super().__init__(params, MUON, defaults, **options)
        del self.defaults["betas"]  # or OneCycleLR would cycle them, and leave the momentum

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, as in :class:`Optimizer`.

        A later group takes the ``betas`` of the first.
        """
        if "betas" not in {**self.defaults, **param_group}:
            param_group["betas"] = self.param_groups[0]["betas"]
        super().add_param_group(param_group)


class GaLore(Optimizer):
    """GaLore: AdamW on the coordinates of each gradient in a low-rank subspace.

    Gradients are projected on the ``rank`` leading singular vectors of the shorter side. Weight
    decay acts on the whole weight.

    Args:
        params, lr, weight_decay: as in :class:`Muon`.
        rank: rank of the subspace, at most the shorter side.
        update_proj_gap: steps between two subspaces.
        scale: factor of the step, but not of the decay.
        betas, eps: as in :class:`AdamW`.
        options: as in :class:`AdamW`. Bases and moments use the storage's codes for moments, of 8
            bits in ``states8``.

    Cost: ``rank · (shorter + 2 · longer side)`` values of states. Transient memory holds four float32 copies of the matrix, and
        every ``update_proj_gap`` steps eight of the square of the shorter side.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
        >>> optimizer = GaLore([weight], lr=1e-3, rank=1, scale=1.0, storage="word")
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> round(optimizer.stored(weight).mean().item(), 5)  # lr, spread over 8 columns: lr / sqrt(8)
        -0.00035

    Source:
        Zhao et al., ICML 2024 (2403.03507).
    """

    def __init__(
        self, params: Params, lr: float | Tensor = 1e-3, rank: int = 128, update_proj_gap: int = 200, scale: float = 0.25,
        betas: Betas = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01, **options: Any,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "rank": rank, "update_proj_gap": update_proj_gap, "scale": scale, "betas": betas, "eps": eps,
            "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, GALORE, defaults, **options)
