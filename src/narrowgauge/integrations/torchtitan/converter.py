"""The model half of a recipe in torchtitan, requested where the model is configured.

torchtitan 0.3 converts a model's *config*, before the model exists, and binds each layer's ``forward`` when it parallelizes the
model, before the weights are there. So the converter only puts layers into the config that can be swapped later, and
``NarrowgaugeAdamW`` (:mod:`narrowgauge.integrations.torchtitan.optimizers_container`) prepares the model once it is initialized.
A converted model that no such optimizer has prepared refuses to run, since half of the recipe would be missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.config.override import derive, override
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.linear import DeferredLinear
from narrowgauge.spec.notation import parse


class RequestedLinear(DeferredLinear, Linear):
    """torchtitan's linear layer, with the recipe that was requested for it; it runs once the model is prepared."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """torchtitan's, and the recipe's name or ``.toml`` file."""

        recipe: str = ""

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self.requested_recipe = config.recipe
        self.refusal: Any = self.register_forward_pre_hook(_refuse)


class NarrowgaugeConverter(ModelConfigConverter):
    """Request a recipe for a model: ``model_registry("8B", converters=[NarrowgaugeConverter.Config(recipe="float8-row/word")])``.

    The optimizer is then ``narrowgauge_adamw(lr=…)``, which needs no recipe of its own.

    Raises:
        RecipeError: there is no such recipe.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """The recipe: its name or ``.toml`` file."""

        recipe: str = "bfloat16/word"

    def __init__(self, config: Config) -> None:
        parse(config.recipe)
        self.recipe = config.recipe

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Replace the linear layers of a model's config by ones that can be swapped, in place; returns it.

        Raises:
            RecipeError: the model has no linear layers of torchtitan's.
        """
        found = [each for each in model_config.traverse(Linear.Config) if type(each[1]) is Linear.Config]
        if not found:
            raise RecipeError(f"recipe '{self.recipe}' was requested of a model without linear layers of torchtitan's.")
        for _, plain, parent, place in found:
            requested = derive(plain, RequestedLinear.Config, recipe=self.recipe)
            if isinstance(parent, list):
                parent[place] = requested
            else:
                setattr(parent, str(place), requested)
        return model_config


@override(target=Linear.Config, exact=True, description="compute in a recipe of Narrowgauge")  # type: ignore[untyped-decorator]
def linears(config: Linear.Config, *, recipe: str) -> RequestedLinear.Config:
    """For ``--override.imports``: what :class:`NarrowgaugeConverter` does, over any config."""
    parse(recipe)
    requested: RequestedLinear.Config = derive(config, RequestedLinear.Config, recipe=recipe)
    return requested


def take_request(model: nn.Module) -> set[str]:
    """The recipes that were requested for a model; from now on its layers no longer refuse to run."""
    requested = [module for module in model.modules() if isinstance(module, RequestedLinear)]
    for module in requested:
        module.refusal.remove()
    return {module.requested_recipe for module in requested}


def _refuse(module: Any, *_: Any) -> None:
    raise RecipeError(
        f"recipe '{module.requested_recipe}' was requested of the model, and the optimizer is not NarrowgaugeAdamW.",
        "Set config.optimizer = narrowgauge_adamw(lr=…).",
    )
