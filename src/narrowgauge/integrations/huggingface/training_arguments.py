"""From ``TrainingArguments`` to an optimizer of Narrowgauge's: its class, rate and decay, and what is refused.

``TrainingArguments(optim=…)`` is a closed list of names. Those in :data:`OPTIMS` are rules that Narrowgauge has, in the storage
of the recipe. Any other name requests another library's formats, which contradicts a recipe, and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import check_target_module_exists

from narrowgauge.assembly.preparation import class_of, prepare
from narrowgauge.assembly.resumption import carry_state_and_audit
from narrowgauge.distributed.sharding import begin_alike
from narrowgauge.errors import RecipeError
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.update_rules import UPDATE_RULES, UpdateRule


@dataclass(frozen=True)
class Optim:
    """How a name of ``TrainingArguments(optim=…)`` is understood.

    Args:
        rule: the update rule that it means; its own options are the names in ``optim_args``.
        words: further such names, and how the value of each is read.
        in_targets: whether the rule steps only ``optim_target_modules``, and AdamW the rest.
    """

    rule: UpdateRule
    words: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)
    in_targets: bool = False

    @property
    def optimizer(self) -> type[Optimizer]:
        return class_of(self.rule.name)

    @property
    def readers(self) -> dict[str, Callable[[str], Any]]:
        """The names in ``optim_args``, and how the value of each is read."""
        return {**{option.name: option.read for option in self.rule.options}, **self.words}

    @property
    def fixed(self) -> dict[str, Any]:
        """Options that the name implies: a Trainer has a rate and a schedule of its own, as ``narrowgauge train`` has."""
        return {option.name: option.trained for option in self.rule.options if option.trained is not None}


_MORE: dict[str, dict[str, Any]] = {
    "sgd": {"words": {"weight_decay": float}},  # as transformers reads it
    "galore_adamw": {"in_targets": True},
}
OPTIMS = {name: Optim(rule, **_MORE.get(name, {})) for rule in UPDATE_RULES.values() for name in rule.huggingface}
"""Names of ``TrainingArguments(optim=…)`` that a recipe can be combined with."""

Chosen = tuple[Any, Mapping[str, Any]]


def refuse_contradictions(args: TrainingArguments, recipe: Recipe) -> None:
    """Refuse training arguments that contradict a recipe."""
    for found, asked, reason, advice in _contradictions(args, recipe):
        if found:
            raise RecipeError(f"{asked} was requested with recipe '{recipe.name}', {reason}.", advice)


def _contradictions(args: TrainingArguments, recipe: Recipe) -> list[tuple[bool, str, str, str]]:
    """``(whether it was asked, what, why not, what to do)``."""
    storage = recipe.storage.name
    is_xla = bool(args.fsdp) and isinstance(args.fsdp_config, dict) and bool(args.fsdp_config.get("xla"))
    return [
        (
            args.fp16 and recipe.dtype != "float16", "fp16=True", f"which computes in {recipe.dtype}",
            f"Leave fp16 out, or take a recipe that computes in float16, such as 'float16/{storage}'.",
        ),
        (
            args.bf16 and recipe.dtype != "bfloat16", "bf16=True", f"which computes in {recipe.dtype}",
            f"Set bf16=False, or take a recipe that computes in bfloat16, such as 'bfloat16/{storage}'.",
        ),
        (
            args.fp16_full_eval, "fp16_full_eval=True", "which says how evaluation computes",
            "Leave fp16_full_eval out.",
        ),
        (
            args.bf16_full_eval, "bf16_full_eval=True", "which says how evaluation computes",
            "Leave bf16_full_eval out.",
        ),
        (
            recipe.compute.transform == "unit", "a Trainer",
            "whose unit scaling redraws the weights: a folder of save_pretrained would mean another function",
            "Train it with 'narrowgauge train', which exports it.",
        ),
        (
            bool(args.deepspeed), "deepspeed", "which shards nothing by DeepSpeed",
            "Start ranks with torchrun, without DeepSpeed.",
        ),
        (
            is_xla, "FSDP of XLA", "which it would shard first", "Leave xla out of fsdp_config, which means FSDP2.",
        ),
        (
            args.n_gpu > 1, f"one process for {args.n_gpu} GPUs", "and DataParallel copies a model at every step",
            "Start it with torchrun, or show it one GPU.",
        ),
        (
            recipe.reduction.name != "native", f"reduction '{recipe.reduction.name}'",
            "whose reduction needs a loop that hands it each micro-batch",
            "Leave the reduction out: DDP averages gradients.",
        ),
    ]  # fmt: skip


def require_whole_weights(plugin: Any, recipe: Recipe) -> None:
    """Refuse settings of Accelerate's FSDP that shard a model, or leave it unloaded, before it is prepared.

    The plugin comes from the training arguments or from ``accelerate launch``.
    """
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        raise RecipeError(
            f"FSDP1 was requested with recipe '{recipe.name}', and it shards a model before there is an optimizer.",
            "Take FSDP2: leave version out of fsdp_config, or set fsdp_version: 2 for accelerate launch.",
        )
    if plugin.cpu_ram_efficient_loading:
        raise RecipeError(
            f"FSDP's cpu_ram_efficient_loading was requested with recipe '{recipe.name}', whose tails each rank takes from the "
            "whole float32 weights; only the first would have them.",
            "Leave it out: each rank loads the model, then shards it.",
        )


def chosen_optimizer(args: TrainingArguments, given: Chosen | None = None) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class of optimizer that training arguments name, and its options from them, ``lr`` and ``weight_decay`` among them.

    ``given`` is a class of Narrowgauge's instead of ``args.optim``, with options that replace those of ``args``.

    Raises:
        RecipeError: a name, class or option that Narrowgauge does not have.
    """
    if given is not None:
        made, options = given
        if not isinstance(made, type) or not issubclass(made, Optimizer):
            name = getattr(made, "__name__", type(made).__name__)
            raise RecipeError(
                f"optimizer_cls_and_kwargs names {name}, which keeps weights and states in formats of its own.",
                "Name an optimizer of Narrowgauge's, or leave it out for AdamW.",
            )
        if taken := {"params", "storage"} & options.keys():
            raise RecipeError(
                f"optimizer_cls_and_kwargs gives {' and '.join(sorted(taken))}, which the recipe decides.",
                "Leave it out.",
            )
        return made, {**_from_arguments(made, args), **options}
    name = _optim_name(args)
    if name not in OPTIMS:
        raise RecipeError(
            f"optim='{name}' was requested; it keeps weights and states as another library does, and not as the recipe says.",
            f"Leave optim out for AdamW, or take one of {', '.join(OPTIMS)}.",
        )
    optim = OPTIMS[name]
    if args.optim_target_modules is not None and not optim.in_targets:
        raise RecipeError(
            f"optim_target_modules was given to optim='{name}', which steps all modules alike.",
            "It goes with optim='galore_adamw'.",
        )
    words = _read_words(args.optim_args or "", name, optim)
    return optim.optimizer, {**_from_arguments(optim.optimizer, args), **optim.fixed, **words}


def _optim_name(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _from_arguments(made: type[Optimizer], args: TrainingArguments) -> dict[str, Any]:
    """The options of training arguments that an optimizer takes."""
    options: dict[str, Any] = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    names = inspect.signature(made).parameters
    if "betas" in names:
        options["betas"] = (args.adam_beta1, args.adam_beta2)
    epsilon = "adam_eps" if "adam_eps" in names else "eps"
    if epsilon in names:
        options[epsilon] = args.adam_epsilon
    return options


def _read_words(text: str, name: str, optim: Optim) -> dict[str, Any]:
    """``optim_args`` such as ``"rank=64, scale=0.25"``."""
    read: dict[str, Any] = {}
    for word in text.replace(" ", "").split(",") if text else ():
        key, _, value = word.partition("=")
        try:
            read[key] = optim.readers[key](value)
        except (KeyError, ValueError):
            known = ", ".join(optim.readers) or "none"
            raise RecipeError(
                f"optim_args gives '{word}' to optim='{name}', whose names are: {known}.", "Each is NAME=NUMBER."
            ) from None
    return read


def make_optimizer(
    model: nn.Module,
    args: TrainingArguments,
    recipe: Recipe,
    *,
    decays: Callable[[str, Tensor], bool],
    given: Chosen | None = None,
    **options: Any,
) -> Optimizer:
    """Prepare a model, in place, with a recipe and the optimizer that training arguments name.

    ``given`` is as for :func:`chosen_optimizer`, ``options`` as for :func:`narrowgauge.prepare`. The optimizer's
    ``state_dict()`` holds all that a resumed run needs besides the weights.
    """
    refuse_contradictions(args, recipe)
    made, settings = chosen_optimizer(args, given)
    is_partial = given is None and OPTIMS[_optim_name(args)].in_targets
    targets = _targets(model, args.optim_target_modules) if is_partial else None
    begin_alike(model)
    optimizer: Optimizer
    _, optimizer = prepare(
        model,
        recipe,
        optimizer=made,
        decays=decays,
        options_of=lambda name: {} if targets is None or name in targets else {"rule": "adamw"},
        **{**options, **settings},
    )
    carry_state_and_audit(optimizer, model)
    return optimizer


def _targets(model: nn.Module, patterns: str | list[str] | None) -> set[str]:
    """The weights of the linear layers that ``optim_target_modules`` names."""
    if patterns is None:
        raise RecipeError("optim='galore_adamw' was requested without optim_target_modules.", "'all-linear' is one.")
    everywhere = isinstance(patterns, str) and patterns.replace("_", "-") == "all-linear"
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = {f"{name}.weight" for name in linears if everywhere or check_target_module_exists(patterns, name)}
    if not found:
        raise RecipeError(
            f"optim_target_modules={patterns!r} matches no linear layer of {type(model).__name__}.",
            f"Its names look like '{linears[0]}'." if linears else "",
        )
    return found


class OptimizerFactory:
    """The class that :func:`optimizer_factory` gives a ``Trainer``, which instantiates it and calls it with the model."""

    def __call__(self, model: nn.Module, *, args: TrainingArguments, recipe: Recipe, **options: Any) -> Optimizer:
        """Prepare the model with the recipe; returns its optimizer."""
        # A method of Trainer that reads nothing of the trainer.
        decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
        return make_optimizer(model, args, recipe, decays=lambda name, _: name in decayed, **options)


def optimizer_factory(
    args: TrainingArguments,
    recipe: str | Recipe = "bfloat16/word",
    *,
    max_grad_norm: float | None = None,
    seed: int | None = None,
    audit_every: int = 10,
    compile: bool | None = None,
) -> tuple[type[OptimizerFactory], dict[str, Any]]:
    """A recipe for a plain ``Trainer``, which prepares the model and makes its optimizer when training begins.

    Use it if the class of the trainer cannot be changed. :class:`NarrowgaugeTrainer` does more: it clips in float32, scales
    losses, and sums micro-batches in float32.

    Args:
        args: the ``TrainingArguments``: ``learning_rate``, ``weight_decay``, ``adam_beta1``, ``adam_beta2``,
            ``adam_epsilon``, ``optim``, ``optim_args`` and ``optim_target_modules`` are taken.
        recipe: a name such as ``"bfloat16/word"``, a ``.toml`` file, or a :class:`narrowgauge.Recipe`.
        max_grad_norm: clip in the optimizer, in float32; then ``args.max_grad_norm`` must be 0, since the Trainer would clip
            first, and round bfloat16 gradients.
        seed: of stochastic rounding; ``None`` takes ``args.seed``.
        audit_every, compile: as for :func:`narrowgauge.prepare`.
    Returns:
        The value of ``Trainer(optimizer_cls_and_kwargs=…)``.
    Raises:
        RecipeError: the arguments contradict the recipe, or gradients would be clipped twice.

    Example:
        >>> from transformers import TrainingArguments
        >>> args = TrainingArguments("out", learning_rate=1e-3, max_grad_norm=0, report_to="none")
        >>> make, settings = optimizer_factory(args, "bfloat16/word", max_grad_norm=1.0)
        >>> settings["recipe"].name
        'bfloat16/word'
    """
    policy = parse(recipe)
    refuse_contradictions(args, policy)
    chosen_optimizer(args)
    if policy.changes_compute:
        raise RecipeError(
            f"recipe '{policy.name}' has phases or another compute for evaluation, and a plain Trainer does not say when.",
            "Use NarrowgaugeTrainer, or leave them out of the recipe.",
        )
    if args.fsdp:
        raise RecipeError(
            f"fsdp was requested of a plain Trainer with recipe '{policy.name}', whose loss scale and delayed scales its "
            "checkpoints would leave out.",
            "Use NarrowgaugeTrainer, or leave fsdp out.",
        )
    if args.max_grad_norm and args.max_grad_norm > 0:
        raise RecipeError(
            f"TrainingArguments(max_grad_norm={args.max_grad_norm:g}) makes a plain Trainer clip gradients in their own "
            "format, which rounds them.",
            f"Set max_grad_norm=0 there and pass max_grad_norm={args.max_grad_norm:g} here, or use NarrowgaugeTrainer.",
        )
    if args.bf16 and policy.storage.visible != "float32":
        raise RecipeError(
            f"bf16=True makes a plain Trainer autocast over the {policy.storage.visible} weights of '{policy.name}'.",
            "Leave bf16 out, the recipe computes in bfloat16 itself; or use NarrowgaugeTrainer.",
        )
    settings = {"max_grad_norm": max_grad_norm, "audit_every": audit_every, "compile": compile}
    return OptimizerFactory, {"args": args, "recipe": policy, "seed": args.seed if seed is None else seed, **settings}
