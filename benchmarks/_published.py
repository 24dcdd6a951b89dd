"""Reads the published training runs, and brings what each source printed to one number: tokens per
second per chip.

The runs are in ``published_runs.toml`` and, set aside for one use at the end, in
``published_runs_held_out.toml``; a second round is in ``published_runs_later.toml`` and
``published_runs_later_held_out.toml``. The heads of the first files say what the fields are, and
how each source counts FLOPs.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
SECONDS_PER_HOUR = 3600.0
SECONDS_PER_DAY = 86_400.0


@dataclass(frozen=True)
class Shape:
    """A dense decoder: what the FLOP conventions and the other planners ask of a model.

    Attributes:
        layers, hidden, intermediate, heads, kv_heads, vocabulary, positions: counts; 0 positions
            are rotary or ALiBi.
        gated: three matrices in the MLP instead of two.
        biases: biases in the linear layers and in the norms.
        tied: the input embedding is also the output head.
        head_dim: of an attention's head; 0 for the width over the heads.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    positions: int
    gated: bool
    biases: bool
    tied: bool
    head_dim: int = 0

    @property
    def attention(self) -> int:
        """Heads times their size."""
        if self.head_dim:
            return self.heads * self.head_dim
        return self.hidden

    @property
    def matmul_parameters(self) -> int:
        """Weights of the layers' matmuls, without the output head."""
        attention = 2 * self.hidden * self.attention * (1 + self.kv_heads / self.heads)
        return self.layers * round(
            attention + (3 if self.gated else 2) * self.hidden * self.intermediate
        )

    @property
    def parameters(self) -> int:
        """Every parameter; a tied embedding counts once."""
        per_layer = 2 * self.hidden
        if self.biases:
            per_layer += 2 * self.hidden + 5 * self.hidden + self.intermediate
        outside = (
            self.vocabulary * (1 if self.tied else 2) + self.positions + (2 if self.biases else 1)
        ) * self.hidden
        return self.matmul_parameters + self.layers * per_layer + outside


@dataclass(frozen=True)
class Run:
    """One published training run; absent fields were not stated.

    Attributes:
        name, source, note: what it is called, where it is published, what was assumed.
        model: the model's name; config: its Hugging Face config.
        machine, layout, step, measured: the tables of the file.
        held_out: belongs to what is used once.
        speed: the program of the planner whose speed the source's words suggest; empty if none.
    """

    name: str
    source: str
    model: str
    config: dict[str, Any]
    machine: dict[str, Any]
    layout: dict[str, Any]
    step: dict[str, Any]
    measured: dict[str, Any]
    note: str = ""
    held_out: bool = False
    speed: str = ""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return int(self.step["global_batch"] * self.step["sequence_length"])


def load(held_out: bool = False, later: bool = False) -> list[Run]:
    """The published runs, in the order of their file; what is held out only when asked for.

    Args:
        held_out: what is set aside instead of what is in view.
        later: the second round instead of the first.
    """
    path = HERE / f"published_runs{'_later' * later}{'_held_out' * held_out}.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    runs = []
    for row in table["run"]:
        runs.append(Run(**row, config=table["models"][row["model"]]["config"]))
    return [replace(run, speed=run.speed or _speed_of(run.name)) for run in runs]


_SPEEDS = (
    ("megatron-2021-zero3", "deepspeed"),
    ("megatron-20", "megatron-core"),
    ("mt-nlg", "deepspeed"),
    ("mcore", "megatron-core"),
    ("llama3-", "megatron-core"),
    ("deepseek-v3", "dualpipe"),
    ("torch", "compiled"),
    ("mosaic", "compiled"),
    ("bridge-25", "megatron-core"),
    ("bridge-26", "megatron-core-deepep"),
)


def _speed_of(name: str) -> str:
    """Of the first round, by the publication that a run's name begins with; empty for others."""
    return next((speed for start, speed in _SPEEDS if name.startswith(start)), "")


def is_held_out(name: str, later: bool = False) -> bool:
    """The rule that sets a third aside, of the second round a half: it looks at the name and at
    nothing else.
    """
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % (2 if later else 3) == 0


def shape(run: Run) -> Shape:
    """The run's dense decoder.

    Raises:
        KeyError: the model is a mixture of experts, which these formulas do not cover.
    """
    config = run.config
    kind = run.config["model_type"]
    if kind == "llama":
        keys = (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
        )
        sizes = [config[key] for key in keys]
        head_dim = config.get("head_dim", 0)
        return Shape(
            *sizes, config["vocab_size"], 0, True, False, config["tie_word_embeddings"], head_dim
        )
    if kind == "gpt_neox":
        layers, width, heads = (
            config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
        )
        return Shape(
            layers, width, 4 * width, heads, heads, config["vocab_size"], 0, False, True, False
        )
    hidden, layers, heads = {
        "gpt2": ("n_embd", "n_layer", "n_head"),
        "mpt": ("d_model", "n_layers", "n_heads"),
    }[kind]
    width = config[hidden]
    return Shape(
        config[layers], width, 4 * width, config[heads], config[heads], config["vocab_size"],
        run.step["sequence_length"], False, True, config["tie_word_embeddings"],
    )  # fmt: skip


def _megatron_2021(s: Shape, length: int) -> float:
    attention = length / (6 * s.hidden)
    head = s.vocabulary / (16 * s.layers * s.hidden)
    return 96 * s.layers * s.hidden**2 * (1 + attention + head)


def _megatron_2022(s: Shape, length: int) -> float:
    attention = length / (6 * s.hidden)
    head = s.vocabulary / (12 * s.layers * s.hidden)
    return 72 * s.layers * s.hidden**2 * (1 + attention + head)


def _palm(s: Shape, length: int) -> float:
    return 6 * s.parameters + 12 * s.layers * s.hidden * length


def _bridge(s: Shape, length: int) -> float:
    return 6 * (s.matmul_parameters + s.vocabulary * s.hidden) + 6 * s.layers * s.hidden * length


def _maxtext(s: Shape, length: int) -> float:
    return 6 * s.parameters + 12 * s.layers * s.attention * length


FLOPS_PER_TOKEN: dict[str, Callable[[Shape, int], float]] = {
    "megatron-2021": _megatron_2021,
    "megatron-2022": _megatron_2022,
    "palm": _palm,
    "bridge": _bridge,
    "maxtext": _maxtext,
}


def flops_per_token(run: Run) -> float:
    """FLOPs per token of a training step, counted as the run's source counts them."""
    return FLOPS_PER_TOKEN[run.measured["flop_convention"]](shape(run), run.step["sequence_length"])


def rates(run: Run) -> dict[str, float]:
    """Tokens per second per chip by every quantity that the source printed, the most direct first."""
    printed = run.measured
    rate_of = {}
    if "tokens_per_second_per_chip" in printed:
        rate_of["tokens_per_second_per_chip"] = float(printed["tokens_per_second_per_chip"])
    if "iteration_seconds" in printed:
        rate_of["iteration_seconds"] = (
            run.tokens_per_step / printed["iteration_seconds"] / run.machine["chips"]
        )
    if "chip_hours" in printed:
        rate_of["chip_hours"] = printed["tokens"] / (printed["chip_hours"] * SECONDS_PER_HOUR)
    if run.config["model_type"] in ("llama", "gpt2", "mpt", "gpt_neox"):
        for key in ("model_tflops_per_chip", "hardware_tflops_per_chip"):
            if key in printed:
                rate_of[key] = printed[key] * 1e12 / flops_per_token(run)
        if "mfu_percent" in printed:
            rate_of["mfu_percent"] = (
                printed["mfu_percent"] / 100 * printed["peak_tflops"] * 1e12 / flops_per_token(run)
            )
    if "days_for_300e9_tokens" in printed:
        seconds = printed["days_for_300e9_tokens"] * SECONDS_PER_DAY
        rate_of["days_for_300e9_tokens"] = 300e9 / seconds / run.machine["chips"]
    return rate_of


def measured_tokens_per_second(run: Run) -> float:
    """Tokens per second per chip, from the most direct quantity that the source printed."""
    return next(iter(rates(run).values()))


def measured_step_seconds(run: Run) -> float:
    """Seconds of one step; only of runs whose batch and number of chips are published."""
    return run.tokens_per_step / measured_tokens_per_second(run) / run.machine["chips"]
