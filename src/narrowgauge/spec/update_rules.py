"""The update rules by name: each rule's optimizer, AdamW's settings that it takes, and its own
options.

The checks of options, ``narrowgauge plan --rule`` and ``narrowgauge show rules`` read this table. A
new rule is a row, and a class in :mod:`narrowgauge.optim.optimizers`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.spec.require import require_choice, require_number
from narrowgauge.spec.storages import Storage
from narrowgauge.spec.toml import load_rows


@dataclass(frozen=True)
class UpdateRule:
    """One update rule.

    Args:
        optimizer: its class in ``narrowgauge.optim.optimizers``.
        purpose: one line.
        settings: those of ``beta1``, ``beta2``, ``eps`` and ``weight_decay`` that it takes, as
            language models are trained.
        source: the paper.
        options: its own, with their usual values for language models.
        is_matrix: it steps whole matrices. AdamW steps vectors, embeddings and output heads.
        moments: its states for each element of a matrix, with the storage's code for each.
            (A momentum of SGD is extra.)
    """

    name: str
    optimizer: str
    purpose: str
    settings: Mapping[str, float]
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    is_matrix: bool = False
    moments: Mapping[str, str] = field(default_factory=dict)

    @property
    def option_names(self) -> tuple[str, ...]:
        """Return the names of a param group's options."""
        names = ["lr", "weight_decay", "seed"]
        if "beta1" in self.settings:
            names.append("betas")
        if "eps" in self.settings:
            names.append("eps")
        return (*names, *self.options)

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that an option of a param group does not take."""
        if name == "betas":
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                raise RecipeError(
                    f"Cannot use betas = {value!r}: it must be two numbers, each at least 0 and below 1."
                )
            require_number("beta1", value[0], below=1)
            require_number("beta2", value[1], below=1)
        elif name == "adjust_lr_fn":
            require_choice(name, value, ("original", "match_rms_adamw", None))
        elif isinstance(self.options.get(name), bool):
            require_choice(name, value, (False, True))
        elif name in ("rank", "update_proj_gap", "ns_steps"):
            require_number(name, value, 1, is_whole=True)
        elif name == "dampening":
            require_number(name, value, -math.inf, is_open=True)
        else:  # momentum of SGD may be more than 1
            is_mean = name == "momentum" and self.is_matrix
            require_number(name, value, below=1 if is_mean else math.inf)


UPDATE_RULES = load_rows(UpdateRule, "update_rules")
"""The rules by name."""


def refuse_pair(rule: str, storage: Storage, *, is_matrix: bool, is_adamw: bool) -> None:
    """Refuse a rule, by name, with a storage that cannot hold its states.

    The storage has the rule's states.

    Raises:
        RecipeError: Collage's arithmetic is published for AdamW alone. Matrix rules compute in
            float32. Scales by block beside a weight must be known before the step, and a matrix
            rule's result is not.
    """
    reason = ""
    if is_matrix and storage.scaled:
        state = storage.scaled[0]
        reason = (
            f"its '{state}' has scales by block, which a matrix rule does not know before the step"
        )
    elif is_matrix and storage.arithmetic == "float64":
        reason = "matrix rules compute in float32"
    elif storage.arithmetic == "expansion" and not is_adamw:
        reason = "its arithmetic is published for AdamW alone"
    if reason:
        raise RecipeError(
            f"Cannot step rule '{rule}' in storage '{storage.name}' because {reason}.",
            "Take a storage such as 'split' or 'master'.",
        )
