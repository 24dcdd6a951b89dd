"""Flags of the command line: one per setting of a training run, and their shell completion.

Recipes are completed part by part (``fp8-row/`` is followed by its storages), also in comma-separated lists; models, chips and
formats by name. Everything else may be a file, which the shell completes.

Source: click's ``shell_complete``; ``docs/start.md`` shows how to enable it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar

import click
from click.shell_completion import CompletionItem

from narrowgauge.spec import formats, notation
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import ALIASES, SPELLINGS, compute_name
from narrowgauge.spec.recipe_sets import RECIPE_SETS
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.sums import ACCUMULATIONS
from narrowgauge.spec.update_rules import UPDATE_RULES


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """A parameter parsed by ``read``, whose RecipeErrors reach the user with their advice.

    click would replace the ValueErrors of a plain function by its own error.
    """

    name = "text"

    def __init__(self, read: Callable[[str], Any]) -> None:
        self.read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse text; a value of another type was parsed before."""
        return self.read(value) if isinstance(value, str) else value


SETTINGS = "NARROWGAUGE_SETTINGS"
"""The variable that names the file of a rank's settings, JSON: Linux limits a variable to 128 KiB."""


class ParsedOnce(Parsed):
    """A recipe, whose file is not read again by the ranks that ``--nproc`` starts: they have the settings."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse text, unless this process is such a rank."""
        return value if SETTINGS in os.environ else super().convert(value, param, ctx)


def combined(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decorator that gives a command these options, in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


json_object = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
json_list = click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects.")


def _names_here(names: str) -> list[Recipe]:
    """The recipes of a comparison on this machine."""
    return notation.parse_names(names, _is_native_here)


def _is_native_here(recipe: Recipe) -> bool:
    # Imported here: PyTorch takes seconds to load, and only sets with such recipes ask.
    import torch

    from narrowgauge.matmul.gemm import emulated_formats

    return not emulated_formats(recipe.compute, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


RECIPE, RECIPES, RECIPES_HERE = ParsedOnce(notation.parse), ParsedOnce(notation.parse_names), ParsedOnce(_names_here)

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def recipes(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a recipe: a compute or an alias, and after a slash the storages that the compute supports."""
    head, slash, rest = incomplete.partition("/")
    if not slash:
        # A compute that is no recipe alone is offered with the slash of its storage.
        computes = {f"{name}/" if name in ALIASES else name: compute.purpose for name, compute in COMPUTES.items()}
        aliases = {name: f"as {alias.recipe}" for name, alias in ALIASES.items() if alias.is_taken}
        spellings = {
            f"{short}/" if full in ALIASES else short: f"as {full}"
            for short, full in SPELLINGS.items()
            if full in COMPUTES and short not in ALIASES
        }
        return _items({**spellings, **aliases, **computes}, incomplete, "file")
    own = compute_name(head)
    if own not in COMPUTES:
        return [CompletionItem(incomplete, type="file")]
    stored = [name.partition("/")[2] for name in notation.full_names() if name.startswith(f"{own}/")]
    return [CompletionItem(f"{head}/{name}") for name in stored if name.startswith(rest)]


def many_recipes(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the last recipe of a comma-separated list."""
    before, comma, last = incomplete.rpartition(",")
    sets = [CompletionItem(name, help=row.question) for name, row in RECIPE_SETS.items() if name.startswith(last)]
    found = [*(sets if last else ()), *recipes(context, parameter, last)]
    return [CompletionItem(f"{before}{comma}{item.value}", item.type, item.help) for item in found]


def of(table: Iterable[str] | Mapping[str, str], otherwise: str = "plain") -> Complete:
    """Complete a name of a table; without a match, a ``file`` or ``dir``."""
    names = table if isinstance(table, Mapping) else dict.fromkeys(table, "")

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return _items(names, incomplete, otherwise)

    return complete


def _items(names: Mapping[str, str], incomplete: str, otherwise: str) -> list[CompletionItem]:
    found = [
        CompletionItem(name, help=help or None)
        for name, help in names.items()
        if name.lower().startswith(incomplete.lower())
    ]
    return found or ([] if otherwise == "plain" else [CompletionItem(incomplete, type=otherwise)])


models = of({name: f"{model.num_parameters:,} parameters" for name, model in MODELS.items()}, "dir")
chips = of({name: f"{chip.memory_gb:g} GB" for name, chip in CHIPS.items()})
number_formats = of([*formats.FORMATS, *formats.FORMAT_ALIASES])

model_and_recipes = combined(
    click.option(
        "--model",
        required=True,
        metavar="TEXT",
        shell_complete=models,
        help="A preset (narrowgauge show models) or a folder with a config.json.",
    ),
    click.option(
        "--recipe",
        "--recipes",
        "recipes",
        required=True,
        metavar="A,B,…",
        type=RECIPES,
        shell_complete=many_recipes,
        help="Recipes to compare with bfloat16 (narrowgauge show recipes).",
    ),
)
batch_shape = combined(
    click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Sequences per step."),
    click.option(
        "--sequence-length", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens per sequence."
    ),
)


SECTIONS = {
    "The run": "recipe model data steps batch_size sequence_length seed out",
    "Optimizer": "rule rule_options lr schedule warmup_steps min_lr_ratio beta1 beta2 eps weight_decay max_grad_norm",
    "Text and validation": "tokenizer held_out eval_every eval_batches",
    "Memory and speed": "gradient_accumulation_steps accumulation_dtype activation_checkpointing compile",
    "Checkpoints": "checkpoint_every keep_checkpoints stop_after",
    "Monitoring": "audit_every gauges_every fingerprints_every on_spike max_rollbacks log_every log_to tensorboard",
    "Several ranks": "nproc shard replicas offload narrow_gather threads verify_every max_restarts timeout",
}
"""The settings by the sections of a help page, in the order in which one would look for them."""


class SettingsCommand(click.Command):
    """A command whose help shows its settings in sections, after the options that it does not share."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section at a time."""
        options = (option for option in self.get_params(ctx) if isinstance(option, click.Option) and option.name)
        left = {option.name: record for option in options if (record := option.get_help_record(ctx))}
        sections = {
            title: [left.pop(name) for name in names.split() if name in left] for title, names in SECTIONS.items()
        }
        for title, records in {"Options": list(left.values()), **sections}.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def of_settings(without: Collection[str] = (), defaults: Mapping[str, str] | None = None) -> list[click.Parameter]:
    """A flag per setting of a training run, except ``without``; ``None`` if not given, so that a file can set it.

    The help shows the default from ``defaults``, else the run's own.
    """
    # Imported here: at the top, the command line imports only rooms that never need torch.
    from narrowgauge.trainer.config import SCHEDULES, SPIKE_ACTIONS, TrainConfig, kind_of

    completed = {
        "model": models, "recipe": recipes, "data": of(["stdlib"], "file"), "tokenizer": of([], "file"), "out": of([], "dir"),
        "schedule": of(SCHEDULES), "on_spike": of(SPIKE_ACTIONS), "accumulation_dtype": of(ACCUMULATIONS),
        "rule": of({name: row.purpose for name, row in UPDATE_RULES.items()}),
    }  # fmt: skip
    flags: list[click.Parameter] = []
    for field in dataclasses.fields(TrainConfig):
        if field.name in without:
            continue
        name = field.name.replace("_", "-")
        default = (defaults or {}).get(field.name, field.default)
        default = default.to_value() if isinstance(default, Recipe) else default
        shown = "" if default is None else f"  [default: {str(default).lower()}]"
        # A setting that a rule fills in says so in its help; another default takes the rule's place.
        help = field.metadata["help"]
        if field.name in (defaults or {}):
            help = help.partition("  [default")[0]
        kind = kind_of(field)
        switch = kind is bool
        flags.append(
            click.Option(
                [f"--{name}/--no-{name}" if switch else f"--{name}", field.name],
                type=RECIPE if kind is Recipe else kind,
                default=None,
                help=help + shown,
                metavar=None if switch else {str: "TEXT", Recipe: "TEXT", int: "N", float: "X"}[kind],
                shell_complete=completed.get(field.name),
            )
        )
    return flags


def of_comparisons() -> list[click.Parameter]:
    """The flags of settings that all runs of a comparison share."""
    from narrowgauge.trainer.config import COMPARED, OF_A_RUN

    return of_settings(without=OF_A_RUN, defaults=COMPARED)


def of_resumes() -> list[click.Parameter]:
    """The flags of settings that may be chosen anew on resume."""
    from narrowgauge.trainer.config import CHANGEABLE_ON_RESUME, TrainConfig

    others = [field.name for field in dataclasses.fields(TrainConfig) if field.name not in CHANGEABLE_ON_RESUME]
    return of_settings(without=others, defaults=dict.fromkeys(CHANGEABLE_ON_RESUME, "as in run.toml"))


class Size(click.ParamType):  # type: ignore[type-arg]  # as above
    """A number of bytes, as ``5GB`` or ``500MB``, powers of 1000 as for ``save_pretrained``; or a plain number."""

    name = "size"
    _UNITS: ClassVar = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) *([KMGT]?B|)", value.strip(), re.IGNORECASE | re.ASCII)
        size = 0 if match is None else int(float(match[1]) * self._UNITS[match[2].upper()])
        if not 0 < size < 2**63:
            self.fail(f"{value!r} is no size, such as 5GB or 500MB.", param, ctx)
        return size
