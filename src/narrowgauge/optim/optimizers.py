"""The named optimizers: a rule, its options, and their defaults.

Those with a matrix rule (:class:`Muon`, :class:`Adafactor`, :class:`GaLore`, :class:`GradNormLoRP`) step parameters of two
dims or more. AdamW steps those of fewer (gains, biases), with the same learning rate and the group's ``betas`` and ``eps``.
Embeddings and output heads are matrices by shape only: each row is a token, and a batch contains few of them. Give them a group
of their own with ``"rule": "adamw"``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.elementwise import ADAM, ADAMW, LION, Rule
from narrowgauge.optim.rules.elementwise import SGD as MOMENTUM_SGD
from narrowgauge.optim.rules.matrix import ADAFACTOR, GALORE, GRADNORM_LORP, MUON, MatrixRule
from narrowgauge.optim.rules.subspaces import USUAL_PROJECTION

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from narrowgauge.optim.optimizer import Options


class _Betas(Optimizer):
    """An optimizer with two decay rates."""

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
        lr: learning rate; a tensor is 0-d. A framework that has a rate of its own must pass it on.
        betas: decay rates of the two moments.
        eps: added to the denominator; 0 is allowed.
        weight_decay: decoupled decay, multiplied by ``lr``.
        options: ``storage`` (one of ``narrowgauge.spec.STORAGES``, or its name), ``max_grad_norm`` (clip to this L2 norm over
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
        params, lr, weight_decay: as in :class:`AdamW`; learning rates are 3 to 10 times smaller.
        betas: of the interpolation, and of the momentum that is kept.
        options: as in :class:`AdamW`.

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


# ── matrix rules ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _InSubspace(Optimizer):
    """An optimizer that steps in a low-rank subspace."""

    def __init__(
        self,
        params: Iterable[Any],
        rule: MatrixRule,
        lr: float | Tensor,
        subspace: tuple[int, int, float, str],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        options: Options,
    ) -> None:
        rank, update_proj_gap, scale, proj_type = subspace
        defaults: dict[str, Any] = {
            "lr": lr,
            "rank": rank,
            "update_proj_gap": update_proj_gap,
            "scale": scale,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        if proj_type != USUAL_PROJECTION:
            defaults["proj_type"] = proj_type
        super().__init__(params, rule, defaults, **options)


class Muon(Optimizer):
    """Muon: momentum whose singular values are all brought to about 1.

    Invariant: the published iteration, begun from float32; only what is stored is cut. Scaling all gradients changes nothing, so
    clipping does not either; a step with zero gradients is no step. The whole matrix is needed: bits that do not depend on
    how it is sharded are not promised.

    Args:
        params: as in ``torch.optim``: parameters, ``(name, parameter)`` pairs, or groups; a group with ``"rule": "adamw"``
            is stepped by AdamW, as are parameters of fewer than two dims. More than two dims are flattened to columns.
        lr, weight_decay: as in :class:`AdamW`.
        momentum: decay rate of the average of gradients.
        nesterov: look one step ahead of that average.
        ns_steps: iterations of the orthogonalisation.
        adjust_lr_fn: names and default as in ``torch.optim.Muon``. ``None`` or ``"original"`` multiplies ``lr`` by
            ``sqrt(max(1, rows / cols))``; ``"match_rms_adamw"`` by ``0.2 · sqrt(max(rows, cols))``, so that steps are as
            large as AdamW's and one rate serves both: take it where vectors and embeddings share the optimizer.
        ns_dtype: operands of its products: ``"bfloat16"``, as published, or ``"float32"``.
        betas, eps: AdamW's, for what is no matrix.
        options: as in :class:`narrowgauge.AdamW`; the momentum takes its code for first moments.

    Cost: one state instead of AdamW's two. For a matrix with the shorter side ``s``, ``ns_steps · (2 s · rows · cols +
        s³)`` multiply-adds a step, and transient memory for three copies of the matrix.

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
        Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al. 2025 (2502.16982).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: str = "bfloat16",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(params, MUON, defaults, **options)


class Adafactor(Optimizer):
    """Adafactor: second moments stored as one value per row and one per column.

    Invariant: the second moment of an element is its row's mean square times its column's, over the mean of all. Its decay rate
    at step ``t`` is ``1 - t^beta2_decay``, so it needs no bias correction. A step whose root mean square is above
    ``clip_threshold`` is scaled down to it.

    As it stands, ``lr`` bounds a relative step: as in the paper, with the defaults of ``torch.optim.Adafactor`` but for
    ``eps``, which there is a bound of another quantity (below). For a rate
    and schedule of your own, as often with ``transformers.Adafactor``, give ``scale_parameter=False, relative_step=False``
    and an AdamW's rate. The first moment, where requested, averages clipped steps *before* the rate is multiplied in: the
    same under a constant rate, and a schedule is obeyed at once.

    Args:
        params, weight_decay: as in :class:`Muon`.
        lr: learning rate, or its bound where ``relative_step``.
        beta2_decay: exponent of the second moments' decay rate, below 0.
        eps: a pair as in transformers: what is added to every squared gradient (``None`` is 1e-30), and the least
            root mean square that a weight is taken to have where ``scale_parameter``. ``torch.optim.Adafactor`` adds nothing: its
            first is the least root of a second moment, by default the machine epsilon of the weight's format.
        clip_threshold: largest root mean square of a step; torch's ``d``.
        beta1: decay rate of a first moment; ``None`` keeps none.
        scale_parameter: multiply ``lr`` by the weight's root mean square.
        relative_step: bound ``lr`` by ``1 / sqrt(t)``.
        betas, adam_eps: AdamW's ``betas`` and ``eps``, for what is no matrix.
        options: as in :class:`narrowgauge.AdamW`; row and column values are float32 in all.

    Cost: ``4 · (rows + cols)`` bytes of second moments: 0.002 a parameter at 4096 × 4096.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
        >>> optimizer = ng.Adafactor([weight], lr=1e-3, scale_parameter=False, relative_step=False, storage="word")
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> round(optimizer.stored(weight).mean().item(), 5)
        -0.001

    Source:
        Shazeer & Stern, ICML 2018 (1804.04235).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        *,
        beta1: float | None = None,
        scale_parameter: bool = True,
        relative_step: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "weight_decay": weight_decay,
            "beta1": beta1,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "betas": betas,
            "adam_eps": adam_eps,
        }
        super().__init__(params, ADAFACTOR, defaults, **options)


class GaLore(_InSubspace):
    """GaLore: AdamW on the coordinates of each gradient in a low-rank subspace.

    Invariant: gradients are projected on the ``rank`` leading singular vectors of the shorter side, found anew every
    ``update_proj_gap`` steps; Adam's step is taken there and lifted back. Decay acts on the whole weight. A gradient of
    zeros never chooses a subspace: while there is none, the weight only decays.

    Args:
        params, lr, weight_decay: as in :class:`Muon`.
        rank: of the subspace; a matrix with a shorter side uses that.
        update_proj_gap: steps between two subspaces.
        scale: multiplies the step (not the decay).
        betas, eps: decay rates of the moments and what is added to the denominator, also AdamW's for what is no matrix.
        proj_type: ``"std"``, a basis on the shorter side, or ``"full"``, one on each: ``rank²`` coordinates instead of
            ``rank · longer side``. In the latter the first gradient is diagonal, and Adam makes whole steps of what rounding
            leaves beside the diagonal, unless ``eps`` is well above it.
        options: as in :class:`narrowgauge.AdamW`; bases and projected moments are stored in the storage's codes for moments,
            too.

    Cost: ``rank · (shorter + 2 · longer side)`` values of states, with ``"full"`` ``rank · (shorter + longer side + 2 · rank)``.
        At 4096 × 4096 and rank 1024 that is 3 bytes a parameter in float32, 1.5 with ``word``, 0.75 with ``states8`` (0.63 with
        ``"full"``), against AdamW's 8, 3 and 2. Every ``update_proj_gap`` steps the eigenvectors of a float64 matrix of the
        shorter side (0.15 s for 768 × 3072 on one CPU thread); between them two thin products, and on a GPU one short wait
        per matrix.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
        >>> optimizer = ng.optim.GaLore([weight], lr=1e-3, rank=1, scale=1.0, storage="word")
        >>> weight.grad = torch.ones_like(weight)
        >>> optimizer.step()
        >>> round(optimizer.stored(weight).mean().item(), 5)  # lr, spread over 8 columns: lr / sqrt(8)
        -0.00035

    Source:
        Zhao et al., ICML 2024 (2403.03507).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        proj_type: str = "std",
        **options: Unpack[Options],
    ) -> None:
        subspace = (rank, update_proj_gap, scale, proj_type)
        super().__init__(params, GALORE, lr, subspace, betas, eps, weight_decay, options)


class GradNormLoRP(_InSubspace):
    """GradNormLoRP: lengths and directions of a weight's columns trained apart, directions in a low-rank subspace.

    The paper trains a length ``M`` per column and thin factors ``I``, ``J`` in ``W = M (W0 + I J) / ‖W0 + I J‖_col``. This
    is its dense form, in which the direction is the weight itself (``W = M V / ‖V‖_col`` with ``V = W`` at every step):
    there are no factors to add to a model, neither ``M`` nor ``V`` is stored, and the change is not held to one
    rank for the whole run.

    Invariant: a gradient along a column changes its length alone, one across it its direction alone; decay acts on lengths. A
    length that passes through zero comes out with its direction turned round, and a column of zeros takes its first step
    as it comes.

    The authors' release (commit 66c8e76) has two optimizers under that name. ``LowRankWeightNormAdamW`` of its fine-tuning
    command trains: it writes the weight back (``LowRankWeightNormAdamW.py``, line 171). Its lengths are of rows, and begin each
    step as those of the directions (lines 101 to 104), so that their steps do not add up. ``WeightNormGaLoreAdamW`` of its
    pre-training command trains copies: the line that would rebuild the weight is a comment (``wadamw.py``, line 126), and only
    decay changes it.

    Args:
        params, weight_decay: as in :class:`Muon`.
        lr: of lengths and directions.
        rank, update_proj_gap: of the directions' subspace, as in :class:`GaLore`.
        scale: multiplies the directions' step.
        betas, eps, proj_type: as in :class:`GaLore`; the paper's formula has ``"full"``, its released code ``"std"``.
        options: as in :class:`GaLore`.

    Cost: that of :class:`GaLore`, and ``8 · cols`` bytes.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.eye(8).bfloat16())
        >>> optimizer = ng.optim.GradNormLoRP([weight], lr=1e-2, rank=2, weight_decay=0.0, storage="split")
        >>> weight.grad = torch.eye(8).bfloat16()  # along the columns: they become shorter by lr
        >>> optimizer.step()
        >>> round(optimizer.stored(weight).diagonal().mean().item(), 4)
        0.99

    Source:
        Huang et al., AAAI 2025 (2412.19616).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        proj_type: str = "std",
        **options: Unpack[Options],
    ) -> None:
        subspace = (rank, update_proj_gap, scale, proj_type)
        super().__init__(params, GRADNORM_LORP, lr, subspace, betas, eps, weight_decay, options)
