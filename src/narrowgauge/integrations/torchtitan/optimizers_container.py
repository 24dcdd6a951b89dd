"""torchtitan's optimizers container, which prepares the model with a recipe.

torchtitan 0.3 builds the optimizers after it has sharded and initialized the model, and before it loads a checkpoint. That is
the moment for :func:`narrowgauge.prepare`: the weights are float32, already initialized, and each rank holds its shards. The
layers come from :mod:`narrowgauge.integrations.torchtitan.converter`. A run gets a recipe in one of three ways:

* in a config function: ``with_recipe(llama3_8b(), "float8-row/word")``;
* with ``NarrowgaugeConverter`` among the model's converters, and ``config.optimizer = narrowgauge_adamw(lr=3e-4)``;
* on the command line, over any config, by two overrides: see ``docs/integrations/torchtitan.md``.

Each parameter gets its options from the first group whose pattern matches its name. What a group leaves out is as in
``torch.optim.AdamW``, so a config that was written for torchtitan's own optimizer keeps its meaning.

torchtitan's schedules apply. It clips gradients, unless ``max_grad_norm`` lets the optimizer clip, which does not round the
gradients a second time; :func:`with_recipe` moves the limit there.

Private names of torchtitan 0.3.0 that are used: ``OptimizersContainer._validate_params``, ``_log_optimizer`` and ``_post_init``,
which its own subclasses call too.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config.override import derive, override
from torchtitan.trainer import Trainer

from narrowgauge._torch import fsdp_dtypes, plain_name
from narrowgauge.assembly.amax_sync import sync_no_amax
from narrowgauge.assembly.preparation import prepare
from narrowgauge.assembly.resumption import carry_nothing
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.sharding import fsdp_modules, mesh_of
from narrowgauge.errors import RecipeError
from narrowgauge.integrations.torchtitan.converter import NarrowgaugeConverter, take_request
from narrowgauge.matmul.swapping import NarrowLayers, linears_of
from narrowgauge.numerics.shards import is_sharded
from narrowgauge.optim.optimizers import AdamW
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

NAME = "NarrowgaugeAdamW"
"""The ``optimizer_name`` of the groups that :func:`narrowgauge_adamw` makes."""
SETTINGS = ("lr", "betas", "eps", "weight_decay")
_IGNORED = {"fused", "foreach"}  # what torchtitan chooses between implementations of torch.optim by
SETTING_DEFAULTS = {name: inspect.signature(AdamW).parameters[name].default for name in SETTINGS}
"""What a group takes where it leaves a setting out: as in ``torch.optim.AdamW``."""
_NAMES = ("AdamW", NAME)  # the optimizers that a group can name
_STEP, _HISTORY = "narrowgauge.step", "narrowgauge.amax_history"


class NarrowgaugeAdamW(OptimizersContainer):
    """torchtitan's container of one :class:`narrowgauge.AdamW` for each part of the model.

    Invariant: with torchtitan's clipping off (or ``max_grad_norm`` here) a step has the bits of :func:`narrowgauge.prepare`'s
    optimizer in a plain loop, sharded or not; a run resumed from torchtitan's checkpoint continues with the same bits.

    Args:
        config: the recipe and AdamW's settings; :func:`narrowgauge_adamw` makes one.
        model_parts: the model, or its pipeline stages, sharded and initialized by torchtitan; prepared in place.
    Raises:
        RecipeError: no recipe, or two; settings or parallelism that a recipe cannot be combined with.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's, and the recipe."""

        recipe: str = ""
        """A recipe's name or ``.toml`` file; empty takes the converter's."""
        max_grad_norm: float | None = None
        """Clip here, without rounding; then set ``training.max_norm`` to ``inf``. ``None`` leaves clipping to torchtitan."""
        seed: int = 0
        """Of stochastic rounding."""
        audit_every: int = 10
        """Steps between audits; 0 never."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        groups = _groups_of(config, model_parts)
        recipe = _recipe_of(config, model_parts)
        if config.max_grad_norm is not None and _is_staged(model_parts):
            raise RecipeError(
                f"max_grad_norm was requested of {NAME} for a pipeline stage, and the norm of the others is not seen there.",
                "Set the pipeline's degree before with_recipe; or leave max_grad_norm out, and set training.max_norm.",
            )
        self.recipe, self.model_parts, self.optimizers = recipe, model_parts, []
        for place, part in enumerate(model_parts):
            _require_suitable(part, recipe)
            # torchtitan divides each loss by the tokens of the whole step, so gradients are added up: without a multiplication
            # by the factor 1 on the way, which gloo does not have.
            for module in fsdp_modules(part):
                module.set_force_sum_reduction_for_comms(True)
            optimizer = _optimizer_of(part, recipe, groups, config)
            self.optimizers.append(optimizer)
            patterns = [groups.pattern_of(group["param_names"][0]) for group in optimizer.param_groups]
            self._log_optimizer(optimizer, place, [f"{recipe.name}, {pattern}" for pattern in patterns])
        everything = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        self._validate_params(everything)
        self._post_init(everything)

    def state_dict(self) -> dict[str, Any]:
        """torchtitan's flat state by parameter name, with the step and the delayed scales of narrow layers."""
        return {**super().state_dict(), **_state_of_layers(self.model_parts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, bit for bit."""
        super().load_state_dict(state_dict)
        for place, linears in _layers(self.model_parts).items():
            linears.step = int(state_dict[f"{_STEP}.{place}"])
            prefix = f"{_HISTORY}.{place}."
            names = {plain_name(name): name for name in linears.layers}
            linears.load_histories(
                {names[k.removeprefix(prefix)]: v for k, v in state_dict.items() if k.startswith(prefix)}
            )


def narrowgauge_adamw(recipe: str = "", lr: float = 8e-4, **settings: Any) -> NarrowgaugeAdamW.Config:
    """The counterpart of torchtitan's ``default_adamw``: a config of the container with a recipe.

    Args:
        recipe: a recipe's name or ``.toml`` file; empty where the model's converter names it.
        lr: the peak learning rate; torchtitan's scheduler multiplies it.
        settings: ``betas``, ``eps`` and ``weight_decay``, left out as in ``torch.optim.AdamW``; and fields of
            :class:`NarrowgaugeAdamW.Config`. To decay vectors differently, add a group with a pattern such as ``"norm|bias"``.
    Returns:
        The value of ``config.optimizer``.
    """
    fields = {name: settings.pop(name) for name in ("max_grad_norm", "seed", "audit_every") if name in settings}
    given = {**SETTING_DEFAULTS, "lr": lr, **settings}
    group = ParamGroupConfig(pattern=r".*", optimizer_name=NAME, optimizer_kwargs=given)
    return NarrowgaugeAdamW.Config(param_groups=[group], recipe=recipe, **fields)


def with_recipe(config: Trainer.Config, recipe: str, **fields: Any) -> Trainer.Config:
    """Let a config of torchtitan's train in a recipe: its model, its optimizer and its clipping.

    Args:
        config: changed in place. Its AdamW settings, group by group, and its schedule are kept: what torch's AdamW would decay is
            decayed, vectors included. Its ``training.max_norm`` becomes the optimizer's ``max_grad_norm``, unless it has pipeline
            stages, whose one norm only torchtitan sees.
        recipe: a recipe's name or ``.toml`` file.
        fields: of :class:`NarrowgaugeAdamW.Config`.
    Returns:
        The same config.
    Raises:
        RecipeError: there is no such recipe, or the model has no linear layers of torchtitan's.
    """
    assert config.model_spec is not None
    config.model_spec.model = NarrowgaugeConverter.Config(recipe=recipe).build().convert(config.model_spec.model)
    if config.parallelism.pipeline_parallel_degree == 1:
        fields = {"max_grad_norm": config.training.max_norm, **fields}
        if fields["max_grad_norm"] is not None:
            config.training.max_norm = math.inf
    config.optimizer = derive(config.optimizer, NarrowgaugeAdamW.Config, **fields)
    return config


@override(target=OptimizersContainer.Config, exact=True, description="a recipe of Narrowgauge")  # type: ignore[untyped-decorator]
def optimizer(config: OptimizersContainer.Config, **fields: Any) -> NarrowgaugeAdamW.Config:
    """For ``--override.imports``: the configured AdamW in the model's recipe, with fields of :class:`NarrowgaugeAdamW.Config`."""
    replaced: NarrowgaugeAdamW.Config = derive(config, NarrowgaugeAdamW.Config, **fields)
    return replaced


def _groups_of(config: NarrowgaugeAdamW.Config, model_parts: list[nn.Module]) -> ParamGroups:
    """The config's parameter groups, each of which has parameters in the model."""
    if config.implementation == "fused_opt_states_bf16":
        raise RecipeError(
            f"implementation 'fused_opt_states_bf16' was requested of {NAME}, whose recipe says how states are stored.",
            "Leave it out.",
        )
    if config.optimizer_factory_kwargs_by_name:
        raise RecipeError(f"{NAME} has no optimizer_factory_kwargs_by_name.", "Leave them out.")
    groups = ParamGroups(config.param_groups)
    groups.require_cover(model_parts)
    return groups


def _optimizer_of(part: nn.Module, recipe: Recipe, groups: ParamGroups, config: NarrowgaugeAdamW.Config) -> AdamW:
    """Prepare a part of the model with the recipe; returns its optimizer."""
    _, optimizer = prepare(
        part,
        recipe,
        options_of=groups.options_of,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        audit_every=config.audit_every,
        average=False,
    )
    for group in optimizer.param_groups:
        group["param_names"] = [plain_name(name) for name in group["param_names"]]
    carry_nothing(optimizer)  # state_dict() above does, under torchtitan's flat names
    if mesh_of(part) is None:
        sync_no_amax(optimizer)  # the ranks of an unsharded part are not known
    return optimizer


def _is_staged(model_parts: list[nn.Module]) -> bool:
    """Whether this rank holds pipeline stages: several parts, or one that other ranks do not share."""
    meshes = [mesh for part in model_parts if (mesh := mesh_of(part)) is not None]
    return len(model_parts) > 1 or any(mesh.size() < all_ranks().size for mesh in meshes)


def _recipe_of(config: NarrowgaugeAdamW.Config, model_parts: list[nn.Module]) -> Recipe:
    """The one recipe that was requested: of the optimizer, or of the model's converter."""
    requested = {recipe for part in model_parts for recipe in take_request(part)} | ({config.recipe} - {""})
    if len(requested) != 1:
        found = " and ".join(repr(name) for name in sorted(requested)) or "none"
        raise RecipeError(
            f"{NAME} needs one recipe, and {found} was requested.",
            'Name it once: with_recipe(config, "bfloat16/word"), or a converter.',
        )
    return parse(requested.pop())


def _require_suitable(model: nn.Module, recipe: Recipe) -> None:
    """Refuse recipes that torchtitan's loop or parallelism cannot obey."""
    if any(compute.scales_loss for compute in recipe.computes):
        raise RecipeError(
            f"recipe '{recipe.name}' scales the loss, and torchtitan's loop does not pass the loss through a scaler.",
            "Choose a bfloat16 or float8 compute.",
        )
    if recipe.changes_compute:
        raise RecipeError(
            f"recipe '{recipe.name}' has phases or another compute for evaluation, and torchtitan's loop does not say when.",
            "Leave them out of the recipe.",
        )
    if recipe.reduction.name != "native":
        raise RecipeError(
            f"reduction '{recipe.reduction.name}' was requested of a recipe, and torchtitan's loop neither hands it each "
            "micro-batch nor saves its state.",
            "Leave the reduction out: FSDP2 sums gradients.",
        )
    parameter: Any
    for parameter in model.parameters():
        axes = set(parameter.device_mesh.mesh_dim_names or ()) if is_sharded(parameter) else set()
        if taken := sorted(axes & {"tp", "ep"}):
            raise RecipeError(
                f"recipe '{recipe.name}' was requested of a model with parallel axis '{taken[0]}', whose layers hold parts of "
                "matrices.",
                "Use data, context or pipeline parallelism.",
            )
    computed = {dtype_name(dtype) for dtype in fsdp_dtypes(model)}
    if computed - {recipe.dtype}:
        raise RecipeError(
            f"recipe '{recipe.name}' computes in {recipe.dtype}, and FSDP2 casts weights to {', '.join(sorted(computed))}.",
            f"Set training.mixed_precision_param to {recipe.dtype}.",
        )


def _layers(model_parts: list[nn.Module]) -> dict[int, NarrowLayers]:
    found = {place: linears_of(part) for place, part in enumerate(model_parts)}
    return {place: linears for place, linears in found.items() if linears is not None}


def _state_of_layers(model_parts: list[nn.Module]) -> dict[str, Any]:
    """The step of each part's narrow layers and their delayed scales, under flat names."""
    state: dict[str, Any] = {}
    for place, linears in _layers(model_parts).items():
        state[f"{_STEP}.{place}"] = torch.tensor(linears.step, dtype=torch.int64)
        histories: Mapping[str, Any] = linears.histories()
        state |= {f"{_HISTORY}.{place}.{plain_name(name)}": value for name, value in histories.items()}
    return state


# ── parameter groups ──────────────────────────────────────────────────────────────────────────────────────────────────


class ParamGroups:
    """The options of each parameter, as a config's groups give them: those of the first group whose pattern matches its name.

    Example:
        >>> row = ParamGroupConfig(pattern="norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
        >>> ParamGroups([row]).options_of("norm.weight")["weight_decay"]
        0.01
    """

    def __init__(self, groups: Sequence[ParamGroupConfig]) -> None:
        self.groups = [(re.compile(group.pattern), _options(group)) for group in groups]

    def pattern_of(self, name: str) -> str:
        """The pattern that gives a parameter its options; ``""`` if none does."""
        place = self._place(name)
        return "" if place is None else self.groups[place][0].pattern

    def options_of(self, name: str) -> dict[str, Any]:
        """``lr``, ``betas``, ``eps`` and ``weight_decay`` of a parameter."""
        place = self._place(name)
        assert place is not None, name
        return self.groups[place][1]

    def require_cover(self, parts: Iterable[nn.Module]) -> None:
        """Require that each trainable parameter has a group, and each group a parameter."""
        names = [name for part in parts for name, p in part.named_parameters() if p.requires_grad]
        places = {name: self._place(name) for name in names}
        for name, place in places.items():
            if place is None:
                raise RecipeError(
                    f"parameter '{plain_name(name)}' is trained, and no parameter group's pattern matches it.",
                    "Add a last group of pattern '.*'.",
                )
        for place, (pattern, _) in enumerate(self.groups):
            if place not in places.values():
                raise RecipeError(
                    f"the pattern {pattern.pattern!r} of a parameter group matched no parameters that another had not taken.",
                    f"Names look like '{plain_name(names[0])}'." if names else "",
                )

    def _place(self, name: str) -> int | None:
        plain = plain_name(name)
        return next((i for i, (pattern, _) in enumerate(self.groups) if pattern.search(plain)), None)


def _options(group: ParamGroupConfig) -> dict[str, Any]:
    """A group's settings with the defaults of its optimizer."""
    if group.optimizer_name not in _NAMES:
        raise RecipeError(f"{NAME} is AdamW, and the optimizer '{group.optimizer_name}' was requested of it.")
    if strange := sorted(group.optimizer_kwargs.keys() - set(SETTINGS) - _IGNORED):
        raise RecipeError(f"{NAME} has no setting '{strange[0]}'; it has {', '.join(sorted(SETTINGS))}.")
    if "lr" not in group.optimizer_kwargs:
        raise RecipeError(f"{NAME} was given no learning rate.", 'Put "lr" into its optimizer_kwargs.')
    options = {**SETTING_DEFAULTS, **group.optimizer_kwargs}
    return {name: tuple(options[name]) if name == "betas" else options[name] for name in SETTINGS}
