"""Read a measured run as its program wrote it: our run folder, a configuration and log of torchtitan, a
folder of the Hugging Face Trainer, or the arguments of :class:`~narrowgauge.planner.next.MeasuredRun`.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median_high
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.planner.layouts import read_layout, read_values
from narrowgauge.planner.next import MeasuredRun
from narrowgauge.runs.atomic_io import damaged
from narrowgauge.runs.foreign_logs import SOURCE
from narrowgauge.runs.record import Run, read_run
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.toml import load_data, read_file

_ADVICE = (
    "Name a run folder, a log or a TOML file, or write in quotes what they do not say: "
    "'log=train.log model=llama-8b chip=H100-SXM chips=8', or tokens_per_second=53336 for a log."
)
_PLACES: dict[str, dict[str, list[str]]] = load_data("logs", "planner")["torchtitan"]
Asked = dict[str, Any]
"""Arguments of :class:`MeasuredRun`."""


def read_measured(text: str) -> MeasuredRun:
    """Read a measured run: a run folder, a log, a TOML file with the arguments of
    :class:`MeasuredRun`, or these arguments themselves, ``NAME=VALUE`` between spaces.

    Among the arguments ``log`` names a log, and ``config`` a configuration of torchtitan. What the
    arguments say counts before what is read there.
    """
    path = Path(text)
    folder = path.parent
    asked: Asked = {"log": path.name}
    if path.suffix == ".toml" and path.exists():
        asked = read_file(path, "measured run", _ADVICE)
    elif "=" in text and not path.exists():
        asked = read_values(text.split())
        folder = Path()
    elif not path.exists():
        raise DataError(f"Cannot plan from {text!r} because it is not there.", _ADVICE)
    config, log = str(asked.pop("config", "")), str(asked.pop("log", ""))
    if config:
        table = of_torchtitan(read_file(folder / config, "configuration", _ADVICE))
        layout = {**table["layout"], **read_layout(asked.get("layout", ""))}
        asked = {**table, **asked, "layout": layout}
    if log:
        asked = {**of_log(folder / log, asked), **asked}
    for name in ("model", "chip"):
        if not asked.get(name):
            raise DataError(
                f"Cannot plan from {text!r} because it does not say its {name}.", _ADVICE
            )
    return MeasuredRun(**asked)


def _written(table: Asked, places: dict[str, list[str]]) -> Asked:
    """Return the values at places of a table by name, the last that is there."""
    values: Asked = {}
    for name, keys in places.items():
        for place in keys:
            value: Any = table
            for key in place.split("."):
                value = isinstance(value, dict) and value.get(key)
            if value:
                values[name] = value
    return values


def of_torchtitan(table: Asked) -> Asked:
    """Return the arguments that a configuration of torchtitan says."""
    said = _written(table, _PLACES["run"])
    length = said.get("sequence_length", 2048)
    layout = {"data": 1, "tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "zero": 3,
              "micro_batch": 1, "recompute": "selective", **_written(table, _PLACES["layout"])}  # fmt: skip
    if layout["pipeline"] > 1:
        layout["zero"] = 2
    asked = {"sequence_length": length, "layout": layout, "program": "torchtitan"}
    if said.get("sequences", 0) > 0:
        asked["tokens_per_step"] = said["sequences"] * length
    else:
        layout["micro_batches"] = 1
    if "is_compiled" not in said:
        asked["program"] = "torchtitan,kernels=eager,loss=whole"
    compute = "bfloat16"
    if "float8" in str(said.get("converters")):
        compute = "float8-row" if "row" in str(said.get("float8")) else "float8-tensor"
    asked["recipes"] = f"{compute}/float32"
    if "model" in said and "flavor" in said:
        size = str(said["flavor"]).lower().partition("_")[0]
        asked["model"] = f"{said['model']}-{size}".replace("llama3", "llama")
    return asked


def of_log(path: Path, asked: Asked) -> Asked:
    """Return what a run folder, or the log of another program, says of a run that was asked so."""
    run = read_run(path)
    rates = [row["tokens_per_second"] for row in run.steps if row.get("tokens_per_second")]
    peaks = [row["peak_memory_bytes"] for row in run.steps if row.get("peak_memory_bytes")]
    said: Asked = {"peak_gb": max(peaks, default=0) / 1e9}
    source = run.run.get(SOURCE, {"file": "", "of_one_chip": False})
    if rates:
        name = "tokens_per_second_per_chip" if source["of_one_chip"] else "tokens_per_second"
        said[name] = median_high(rates)
    file = Path(source["file"])
    if not run.is_foreign:
        said |= _of_ours(run)
    elif file.suffix == ".json":
        said |= _of_trainer(file, asked)
    return said


_ASKED = {"model", "recipe", "sequence_length", "batch_size", "gradient_accumulation_steps"}
"""Settings of narrowgauge train that are a question."""


def _of_ours(run: Run) -> Asked:
    """Return what the record of a run says; of narrowgauge train, also its question."""
    machine = run.run.get("machine", {})
    asked: Asked = {"chips": machine.get("ranks", 1)}
    for name, chip in CHIPS.items():
        if chip.device and chip.device == machine.get("device"):
            asked["chip"] = name
    config = run.config
    if config.keys() >= _ASKED:
        batches = config["gradient_accumulation_steps"]
        asked |= {
            "program": "narrowgauge", "model": config["model"], "recipes": config["recipe"],
            "sequence_length": config["sequence_length"],
        }  # fmt: skip
        asked["layout"] = {
            "micro_batch": config["batch_size"] // batches,
            "micro_batches": max(1, batches // asked["chips"]),
            "recompute": "none",
        }
    return asked


def _of_trainer(file: Path, asked: Asked) -> Asked:
    """Return what the Hugging Face Trainer wrote: its state, and beside it the configurations of the
    model and its adapters. Its rate is of all chips and of the whole run, the first step included.
    """
    state = json.loads(file.read_bytes())
    total = state["log_history"][-1]
    said: Asked = {"program": "hf-trainer"}
    if state.get("train_batch_size"):
        said["layout"] = {"micro_batch": state["train_batch_size"]}
    config = file.with_name("config.json")
    adapters = file.with_name("adapter_config.json")
    if config.is_file():
        said["model"] = str(config)
    if adapters.is_file():
        try:
            said["lora"] = json.loads(adapters.read_bytes())["r"]
        except (ValueError, LookupError, TypeError) as error:
            raise damaged(adapters, error) from error
    tokens, seconds = state.get("num_input_tokens_seen"), total.get("train_runtime")
    samples = total.get("train_samples_per_second")
    steps = total.get("train_steps_per_second")
    length = asked.get("sequence_length", 0)
    if tokens and seconds:
        said["tokens_per_second"] = tokens / seconds
    elif samples and length:
        said["tokens_per_second"] = samples * length
    elif samples:
        raise DataError(
            f"Cannot plan from {file} because it counts samples, and no tokens.",
            "Name the tokens of a sample: sequence_length=2048.",
        )
    if samples and steps and length:
        said["tokens_per_step"] = round(samples / steps) * length
    return said
