"""One Linear for every format: three matmuls, six casts, and the tensors saved for backward.

A narrow linear layer is an ``nn.Linear`` (or transformers' ``Conv1D``) whose matmuls follow a
compute of :mod:`narrowgauge.spec.computes`. Parameters, names and ``state_dict`` are the plain
layer's. :func:`narrowgauge.matmul.swapping.swap_linears` swaps a model's layers in place.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import layer_matmuls
from narrowgauge.matmul.operand import layer_keys
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.float32_matmul import linear
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.extension import extended_class


class Computed(nn.Module):
    """Base of layers that multiply as a compute says.

    Attributes:
        compute: the active compute.
        registered_name: its name for operators and graphs.
    """

    compute: Compute
    registered_name: str

    def compute_as(self, compute: Compute) -> None:
        self.compute = compute
        self.registered_name = layer_matmuls.register(compute)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.compute_as(self.compute)  # another process does not know it yet

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, compute={self.compute.name!r}"


class NarrowLayer(Computed):
    """Base of linear layers and experts in training: a compute, and keys of random bits.

    Attributes:
        is_plain: whether its casts are those of a plain layer in the compute's dtype.
        names: the layer's name, or one for each expert.
        seed: of stochastic casts.
        key: int32 ``[names]``: keys of the layer's random bits, from seed and name.
    """

    names: tuple[str, ...]
    is_stochastic: bool
    is_plain: bool
    seed: int
    key: Tensor

    def begin(
        self, names: Sequence[str], device: torch.device | None, compute: Compute, seed: int
    ) -> None:
        """Set a compute, and the keys that belong to the names and the seed."""
        self.names = tuple(names)
        self.seed = seed
        self.register_buffer("key", layer_keys(names, seed, device), persistent=False)
        self.compute_as(compute)
        self.is_plain = {cast.format for cast in compute.casts.values()} == {compute.dtype}
        # Here, since a compiler breaks its graph where a property is computed first.
        self.is_stochastic = compute.is_stochastic

    def entered(self, x: Tensor, weight: Tensor) -> tuple[Tensor, bool]:
        """Return ``x`` in its dtype, or autocast's, and whether its products are a plain layer's.

        Raise if the dtype is not the compute's: float16 needs a loss scale.
        """
        dtype = x.dtype
        is_cast = torch.is_autocast_enabled(x.device.type)
        if is_cast:
            dtype = torch.get_autocast_dtype(x.device.type)
        is_own = dtype is getattr(torch, self.compute.dtype)
        is_other = not is_own and (is_cast or dtype is torch.float16)
        is_mixed = not is_cast and weight.dtype is torch.float32 and dtype is not torch.float32
        if is_other or is_mixed:
            raise RecipeError(
                f"Cannot call layer '{self.names[0]}' of compute '{self.compute.name}' in "
                f"{dtype_name(dtype)} with a weight in {dtype_name(weight.dtype)}.",
                f"Use float32 weights with torch.autocast(…, torch.{self.compute.dtype}), or "
                f"{self.compute.dtype} weights and inputs.",
            )
        return x.to(dtype), self.is_plain and is_own

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Multiply ``[..., in]``, in its dtype or autocast's, by a weight ``[out, in]``."""
        x, is_plain = self.entered(x, weight)
        if not x.numel() or is_plain:
            return linear(x, weight, bias)
        if key is None:
            key = self.key
        call = layer_matmuls.Call(self.registered_name, key if self.is_stochastic else None)
        multiply: Any = layer_matmuls.LayerProduct.apply
        y = multiply(x.reshape(-1, x.shape[-1]), weight, bias, call)
        return y.view(*x.shape[:-1], weight.shape[0])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        had_memory = not self.key.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not had_memory:  # to_empty() does not set values
            self.key = layer_keys(self.names, self.seed, self.key.device)
        return self


class Linear(NarrowLayer, nn.Linear):
    """A linear layer in the arithmetic of a compute; made by :func:`swap_linears`.

    Invariant: the output and both gradients are the compute's matmuls of its casts, with equal bits
    eager and compiled. Backward keeps ``Compute.kept_bytes`` per input element.
    """

    # Whether the weight is [in, out], as in transformers' Conv1D.
    is_transposed: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``[..., in]`` to ``[..., out]``."""
        weight: Any = self.weight
        if self.is_transposed:
            weight = weight.t()
        if not is_sharded(weight):
            return self.product(input, weight, self.bias)
        if self.is_plain:
            return F.linear(input, weight, self.bias)
        raise RecipeError(
            f"Cannot multiply layer '{self.names[0]}' in {self.compute.name} because a rank has a part "
            f"of its weight alone ({weight.placements}).",
            "Keep layers that parallelize_module splits wide with keep=…. Under FSDP2, call the module "
            "that fully_shard was given.",
        )


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that can be swapped.

    A subclass of ``nn.Linear`` counts if it has ``nn.Linear``'s own product: a framework's, or one
    that FSDP2 has wrapped. So does transformers' ``FalconLinear``, which writes it as ``x @ w.T``.
    """
    if not isinstance(module, nn.Linear):
        return type(module).__name__ == "Conv1D"
    forward = type(module).forward
    names = [base.__name__ for base in type(module).__mro__]
    has_its_product = forward in (nn.Linear.forward, Linear.forward) or "FalconLinear" in names
    has_its_product |= getattr(forward, "is_linear", False)
    return has_its_product and not isinstance(module, NonDynamicallyQuantizableLinear)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear layer's weight is ``[in, out]``."""
    return type(module).__name__ == "Conv1D" or bool(getattr(module, "is_transposed", False))


def matrix_of(module: Any) -> Tensor:
    """Return the weight of a linear layer as ``[out, in]``."""
    weight = module.weight
    if is_transposed(module):
        return weight.t()
    return weight


def keep_from_fused_kernels(model: nn.Module) -> None:
    """Make PyTorch's encoders call their linear layers in evaluation too, on padded tensors, and
    not one kernel on the weights.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def refuse_replaced_forward(name: str, module: nn.Module, compute: Compute) -> None:
    """Raise RecipeError for a layer whose forward a framework has replaced: it would not multiply
    as the compute says.
    """
    forward = type(module).forward
    is_bound = isinstance(module, Linear) or getattr(forward, "is_linear", False)
    if "forward" in vars(module) and not is_bound:
        raise RecipeError(
            f"Cannot compute layer '{name}' as '{compute.name}' because a framework has replaced "
            "its forward.",
            "Prepare the model before the framework gets it; in torchtitan, use "
            "NarrowgaugeConverter.",
        )


def make_narrow(name: str, module: Any, compute: Compute, seed: int) -> None:
    """Make a linear layer a :class:`Linear`.

    It stays the same object, so hooks and references stay valid.
    """
    transposed = is_transposed(module)
    kind: Any = type(module)
    if kind is nn.Linear or not isinstance(module, nn.Linear):
        kind = Linear
    elif not issubclass(kind, Linear):  # keep the additions of a subclass, such as FSDP2's methods
        kind = extended_class(cast(Any, Linear), kind)
    module.__class__ = kind
    module.is_transposed = transposed
    module.out_features, module.in_features = matrix_of(module).shape
    module.begin([name], module.weight.device, compute, seed)
