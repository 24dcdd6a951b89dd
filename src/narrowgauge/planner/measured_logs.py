"""Read a measured run as its program wrote it: our run folder, a log of torchtitan, a folder of the
Hugging Face Trainer, or the arguments of :class:`~narrowgauge.planner.measured_run.MeasuredRun`.
"""

import json
from pathlib import Path
from statistics import median_high
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.planner.layouts import read_values
from narrowgauge.planner.measured_run import MeasuredRun
from narrowgauge.runs.atomic_io import damaged
from narrowgauge.runs.foreign_logs import SOURCE
from narrowgauge.runs.record import Run, read_run
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.toml import read_file

_ADVICE = (
    "Name a run folder, a log or a TOML file, or write in quotes what they do not say: "
    "'log=train.log model=llama-8b chip=H100-SXM chips=8', or tokens_per_second=53336 for a log."
)
Asked = dict[str, Any]
"""Arguments of :class:`MeasuredRun`."""


def read_measured(text: str) -> MeasuredRun:
    """Read a measured run: a run folder, a log, a TOML file with the arguments of
    :class:`MeasuredRun`, or these arguments themselves, ``NAME=VALUE`` between spaces.

    Among the arguments ``log`` names a log. What the arguments say counts before what is read there.
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
    log = str(asked.pop("log", ""))
    if log:
        asked = {**of_log(folder / log, asked), **asked}
    for name in ("model", "chip"):
        if not asked.get(name):
            raise DataError(
                f"Cannot plan from {text!r} because it does not say its {name}.", _ADVICE
            )
    return MeasuredRun(**asked)


def of_log(path: Path, asked: Asked) -> Asked:
    """Return what a run folder, or the log of another program, says of a run that was asked so."""
    run = read_run(path)
    rates = [row["tokens_per_second"] for row in run.steps if row.get("tokens_per_second")]
    peaks = [row["peak_memory_bytes"] for row in run.steps if row.get("peak_memory_bytes")]
    said = {"peak_gb": max(peaks, default=0) / 1e9}
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
    asked = {"chips": machine.get("ranks", 1)}
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
