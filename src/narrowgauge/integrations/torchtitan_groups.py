"""torchtitan's parameter groups: the options that each parameter gets from the first pattern that matches its name.

What a group leaves out is as in ``torch.optim.AdamW``, under its own name and under :data:`NAME`. So a config that was written
for torchtitan's own optimizer keeps its meaning to the letter.
"""

from __future__ import annotations

import narrowgauge.integrations.torchtitan_packages  # noqa: F401, says what is missing

# isort: split
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torchtitan.components.optimizer import ParamGroupConfig

from narrowgauge._torch import plain_name
from narrowgauge.assembly.preparation import DEFAULTS
from narrowgauge.errors import RecipeError

NAME = "NarrowgaugeAdamW"
"""The ``optimizer_name`` of the groups that :func:`narrowgauge_adamw` makes."""
SETTINGS = ("lr", "betas", "eps", "weight_decay")
_IGNORED = {"fused", "foreach"}  # what torchtitan chooses between implementations of torch.optim by


SETTING_DEFAULTS = {name: DEFAULTS[name] for name in SETTINGS}
"""What a group takes where it leaves a setting out: as in ``torch.optim.AdamW``."""
_NAMES = ("AdamW", NAME)  # the optimizers that a group can name


class ParamGroups:
    """The options of each parameter, as a config's groups give them.

    Args:
        groups: the config's; of several patterns that match a name, the first counts.
    Raises:
        RecipeError: a group of another optimizer, without a learning rate, or with a setting that AdamW does not have.

    Example:
        >>> row = ParamGroupConfig(pattern="norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
        >>> ParamGroups([row]).options_of("norm.weight")["weight_decay"]
        0.01
    """

    def __init__(self, groups: Sequence[ParamGroupConfig]) -> None:
        self.groups = [(re.compile(group.pattern), group.optimizer_name, _options(group)) for group in groups]

    def pattern_of(self, name: str) -> str:
        """The pattern that gives a parameter its options; ``""`` is also the answer where none does."""
        place = self._place(name)
        return "" if place is None else self.groups[place][0].pattern

    def options_of(self, name: str) -> dict[str, Any]:
        """``lr``, ``betas``, ``eps`` and ``weight_decay`` of a parameter."""
        place = self._place(name)
        assert place is not None, name
        return self.groups[place][2]

    def require_cover(self, parts: Iterable[nn.Module]) -> None:
        """Require that each trainable parameter has a group, and each group a parameter.

        Raises:
            RecipeError: naming the parameter or the pattern.
        """
        names = [name for part in parts for name, p in part.named_parameters() if p.requires_grad]
        places = {name: self._place(name) for name in names}
        for name, place in places.items():
            if place is None:
                raise RecipeError(
                    f"parameter '{plain_name(name)}' is trained, and no parameter group's pattern matches it.",
                    "Add a last group of pattern '.*'.",
                )
        for place, (pattern, _, _) in enumerate(self.groups):
            if place not in places.values():
                raise RecipeError(
                    f"the pattern {pattern.pattern!r} of a parameter group matched no parameters that another had not taken.",
                    f"Names look like '{plain_name(names[0])}'." if names else "",
                )

    def _place(self, name: str) -> int | None:
        plain = plain_name(name)
        return next((i for i, (pattern, _, _) in enumerate(self.groups) if pattern.search(plain)), None)


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
