"""Flags of the command line: one per setting of a training run, and the flags that several commands share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import click

from narrowgauge.spec import notation
from narrowgauge.spec.recipes import Recipe


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """A parameter parsed by ``read``. The user sees the advice of its RecipeErrors.

    click would replace the ValueErrors of a plain function by its own error.
    """

    name = "text"

    def __init__(self, read: Callable[[str], Any]) -> None:
        self.read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse text; a value of another type was parsed before."""
        return self.read(value) if isinstance(value, str) else value


def combined(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that gives a command these options, in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


json_object = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
json_list = click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects.")

RECIPE, RECIPES = Parsed(notation.parse), Parsed(notation.parse_names)
RECIPES_OR_ALL = Parsed(lambda text: "all" if text.strip() == "all" else notation.parse_names(text))


model_and_recipes = combined(
    click.option(
        "--model", required=True, metavar="TEXT",
        help="A preset (narrowgauge show models) or a folder with a config.json.",
    ),
    click.option(
        "--recipe", "--recipes", "recipes", required=True, metavar="A,B,…", type=RECIPES,
        help="Recipes to compare with bfloat16 (narrowgauge show recipes).",
    ),
)  # fmt: skip
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
    "Monitoring": "audit_every gauges_every fingerprints_every on_spike log_every",
    "Several ranks": "nproc shard replicas offload narrow_gather threads verify_every",
}
"""The settings by the sections of a help page, in the order in which users look for them."""


class SettingsCommand(click.Command):
    """A command whose help lists its own options first, then the shared settings in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section at a time."""
        options = (option for option in self.get_params(ctx) if isinstance(option, click.Option) and option.name)
        records_by_name = {option.name: record for option in options if (record := option.get_help_record(ctx))}
        sections = {
            title: [records_by_name.pop(name) for name in names.split() if name in records_by_name]
            for title, names in SECTIONS.items()
        }
        for title, records in {"Options": list(records_by_name.values()), **sections}.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def of_settings(*, compared: bool = False) -> list[click.Parameter]:
    """Return a flag per setting. Flags default to ``None``, so that a file can set them.

    Those of ``compared`` runs lack the settings of a single run.
    """
    # Imported late, because the command line's top-level imports never need torch.
    from narrowgauge.trainer.config import OF_A_RUN, TrainConfig, kind_of

    flags: list[click.Parameter] = []
    for field in dataclasses.fields(TrainConfig):
        if compared and field.name in OF_A_RUN:
            continue
        name, kind, help = field.name.replace("_", "-"), kind_of(field), field.metadata["help"]
        default = field.default.to_value() if isinstance(field.default, Recipe) else field.default
        flags.append(
            click.Option(
                [f"--{name}/--no-{name}" if kind is bool else f"--{name}", field.name],
                type=RECIPE if kind is Recipe else kind,
                default=None,
                help=help + ("" if default is None else f"  [default: {str(default).lower()}]"),
                metavar={bool: None, str: "TEXT", Recipe: "TEXT", int: "N", float: "X"}[kind],
            )
        )
    return flags


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were named on the command line."""
    return {name: value for name, value in settings.items() if value is not None}
