"""torchtitan: a converter for the model's linear layers, and an optimizer config.

torchtitan 0.3 converts a model's *config*, and binds each layer's ``forward`` before the weights
exist. So the converter puts layers into the config that can be swapped later: once the model is
sharded and initialized, and torchtitan builds its optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config.override import derive
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import linear
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.optim import optimizers
from narrowgauge.spec.parse import get_compute


class SwappableLinear(Linear):
    """torchtitan's linear layer with the requested compute, which is active once the layer is
    swapped.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        compute: str = ""

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self.compute_name = config.compute
        self.refusal: Any = self.register_forward_pre_hook(_refuse)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply ``[..., in]`` to ``[..., out]``, narrowly once the layer is swapped."""
        if isinstance(self, linear.Linear):
            return linear.Linear.forward(self, input)
        return nn.Linear.forward(self, input)

    forward.is_linear = True  # type: ignore[attr-defined]  # torchtitan binds it before the swap


def _refuse(module: Any, *_: Any) -> None:
    raise RecipeError(
        f"Cannot compute in '{module.compute_name}' because the optimizer is torchtitan's, which "
        "swaps no layers.",
        "Set config.optimizer = narrowgauge_adamw(lr=…).",
    )


class NarrowgaugeConverter(ModelConfigConverter):
    """Let a model's linear layers compute in a compute:
    ``converters=[NarrowgaugeConverter.Config(compute="float8-row")]``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        compute: str = "float8-row"

    def __init__(self, config: Config) -> None:
        self.compute = get_compute(config.compute).name

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Replace the linear layers of a model's config in place; return it."""
        num_layers = 0
        for _, plain, parent, place in list(model_config.traverse(Linear.Config)):
            if type(plain) is Linear.Config:
                num_layers += 1
                swappable = derive(plain, SwappableLinear.Config, compute=self.compute)
                if isinstance(parent, list):
                    parent[place] = swappable
                else:
                    setattr(parent, str(place), swappable)
        if not num_layers:
            raise RecipeError(
                f"Cannot compute in '{self.compute}': the model has no linear layers of "
                "torchtitan's."
            )
        return model_config


class NarrowgaugeOptimizers(OptimizersContainer):
    """torchtitan's container, in which ``optimizer_name`` is a class of Narrowgauge such as
    ``AdamW`` or ``Lion``.

    ``optimizer_factory_kwargs_by_name`` has the options of the whole optimizer: ``storage``,
    ``max_grad_norm``, ``seed``, ``audit_every``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        for part in model_parts:
            layers = [module for module in part.modules() if isinstance(module, SwappableLinear)]
            for layer in layers:
                layer.refusal.remove()
            if layers:
                swap_linears(part, layers[0].compute_name)
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return getattr(optimizers, name)

    @staticmethod
    def _build_impl_kwargs(config: OptimizersContainer.Config) -> dict[str, Any]:
        return {}  # fused and foreach are torch.optim's

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer in self.optimizers:
            saved = optimizer.state_dict()
            for group in saved["param_groups"]:
                names = group["param_names"]
                for number, name in zip(group["params"], names, strict=True):
                    for key in saved["state"].setdefault(number, {}):
                        saved["state"][number][key] = state_dict[f"state.{name}.{key}"]
                for key in group.keys() - {"params", "param_names"}:
                    group[key] = state_dict[f"param_groups.{names[0]}.{key}"]
            optimizer.load_state_dict(saved)


def narrowgauge_adamw(lr: float = 8e-4, **options: Any) -> NarrowgaugeOptimizers.Config:
    """Return the value of ``config.optimizer``, as torchtitan's ``default_adamw`` does, for weights
    in the storage's format.

    Args:
        lr: the peak learning rate; torchtitan's scheduler multiplies it.
        options: of :class:`narrowgauge.AdamW`. With ``max_grad_norm``, which clips in float32, set
            ``training.max_norm`` to ``inf``.
    """
    group = ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": lr})
    return NarrowgaugeOptimizers.Config(
        param_groups=[group], optimizer_factory_kwargs_by_name={"AdamW": options}
    )
