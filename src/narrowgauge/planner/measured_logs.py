"""Read a measured run as its program wrote it: our run folder, a configuration and log of torchtitan, a
folder of the Hugging Face Trainer, or the arguments of :class:`~narrowgauge.planner.next.MeasuredRun`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median_high
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.planner.layouts import read_layout, read_values
from narrowgauge.planner.next import MeasuredRun
from narrowgauge.runs.foreign_logs import SOURCE
from narrowgauge.runs.record import read_run
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.toml import read_file

_TEXTS = [
    "model",
    "chip",
    "cluster",
    "recipes",
    "program",
    "layout",
    "optimizer",
    "base",
    "experts",
    "log",
    "config",
]
_ADVICE = (
    "Name a run folder, a log, a TOML file, or write the run in quotes: "
    "'model=llama-8b chip=H100-SXM chips=8 tokens_per_second=53336'."
)
_TITAN = {
    "length": "training.seq_len",
    "micro_batch": "training.batch_size training.local_batch_size",
    "batch": "training.global_batch_size",
    "data": "parallelism.data_parallel_replicate_degree",
    "tensor": "parallelism.tensor_parallel_degree",
    "pipeline": "parallelism.pipeline_parallel_degree",
    "context": "parallelism.context_parallel_degree",
    "recompute": "activation_checkpoint.mode",
    "is_compiled": "training.compile compile.enable",
    "converters": "model.converters",
    "float8": "float8.recipe_name quantize.linear.float8.recipe_name",
}
"""Places of a value in torchtitan's configuration (config/job_config.py), the newest last."""
_DEVICE = re.compile(r"(?:GPU|CUDA) capacity: (.+?) (?:\(\d+\) )?with [\d.]+GiB")


def read_question(words: Iterable[str]) -> dict[str, Any]:
    """Read ``NAME=VALUE``: arguments of :class:`MeasuredRun`."""
    asked = read_values(words)
    return {name: str(value) if name in _TEXTS else value for name, value in asked.items()}


def read_measured(text: str) -> MeasuredRun:
    """Read a measured run: a run folder, a log, a TOML file with the arguments of
    :class:`MeasuredRun`, or these arguments themselves, ``NAME=VALUE`` between spaces.

    Among the arguments ``log`` names a log, and ``config`` a configuration of torchtitan. What the
    arguments say counts before what is read there.
    """
    path = Path(text)
    folder = path.parent
    asked: dict[str, Any] = {"log": path.name}
    if path.suffix == ".toml" and path.exists():
        asked = read_file(path, "measured run", _ADVICE)
    elif "=" in text and not path.exists():
        asked = read_question(text.split())
        folder = Path()
    elif not path.exists():
        raise DataError(f"Cannot plan from {text} because it is not there.", _ADVICE)
    config = asked.pop("config", "")
    log = asked.pop("log", "")
    if config:
        table = of_torchtitan(read_file(folder / config, "configuration", _ADVICE))
        layout = {**table["layout"], **read_layout(asked.get("layout", ""))}
        asked = {**table, **asked, "layout": layout}
    if log:
        asked = {**of_log(folder / log, asked), **asked}
    if not asked.get("model"):
        raise DataError(f"Cannot plan from {text} because it does not say its model.", _ADVICE)
    return MeasuredRun(**asked)


def of_torchtitan(table: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a configuration of torchtitan says."""
    said: dict[str, Any] = {"length": 2048, "micro_batch": 1, "recompute": "selective"}
    for name, places in _TITAN.items():
        for place in places.split():
            *tables, key = place.split(".")
            value = table
            for part in tables:
                value = value.get(part, {})
            said[name] = value.get(key, said.get(name))
    layout = {"expert": 1, "recompute": said["recompute"], "micro_batch": said["micro_batch"]}
    for axis in ("data", "tensor", "pipeline", "context"):
        layout[axis] = said[axis] or 1
    layout["zero"] = 2 if layout["pipeline"] > 1 else 3
    asked = {"sequence_length": said["length"], "program": "torchtitan", "layout": layout}
    if (said["batch"] or 0) > 0:
        asked["tokens_per_step"] = said["batch"] * said["length"]
    else:
        layout["micro_batches"] = 1
    if not said["is_compiled"]:
        asked["program"] = "torchtitan,kernels=eager,loss=whole"
    compute = "bfloat16"
    if "float8" in str(said["converters"]):
        compute = "float8-row" if "row" in str(said["float8"]) else "float8-tensor"
    model = table.get("model", {})
    flavor = str(model.get("flavor", "")).lower().partition("_")[0]
    name = f"{model.get('name', '')}-{flavor}".replace("llama3", "llama")
    return {**asked, "model": name, "recipes": f"{compute}/float32"}


def of_log(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what a run folder, or the log of another program, says of a run that was asked so."""
    run = read_run(path)
    rates = [row["tokens_per_second"] for row in run.steps if row.get("tokens_per_second")]
    peaks = [row["peak_memory_bytes"] for row in run.steps if row.get("peak_memory_bytes")]
    said: dict[str, Any] = {"peak_gb": max(peaks, default=0) / 1e9}
    if run.is_foreign:
        source = run.run[SOURCE]
        file = Path(source["file"])
        if rates:
            name = "tokens_per_second_per_chip" if source["of_one_chip"] else "tokens_per_second"
            said[name] = median_high(rates)
        if file.suffix == ".json":
            return {**said, **_of_trainer(file, asked)}
        text = file.read_text(encoding="utf-8", errors="replace")
        for device in _DEVICE.findall(text)[:1]:
            said |= _of_device(device)
        return said
    if rates:
        said["tokens_per_second"] = median_high(rates)
    config = run.config
    machine = run.run.get("machine", {})
    said["chips"] = machine.get("ranks", 1)
    said |= _of_device(machine.get("device", ""))
    if "gradient_accumulation_steps" in config:  # of narrowgauge train
        batches = config["gradient_accumulation_steps"]
        batch = config["batch_size"] // batches, max(1, batches // said["chips"])
        said["layout"] = "fsdp2,micro_batch={},micro_batches={},recompute=none".format(*batch)
        said |= {"program": "narrowgauge", "recipes": config["recipe"], "model": config["model"]}
        said["sequence_length"] = config["sequence_length"]
    return said


def _of_device(device: str) -> dict[str, str]:
    """Return the chip whose driver reports this name."""
    names = [name for name, chip in CHIPS.items() if chip.device and chip.device == device]
    return {"chip": names[0]} if names else {}


def _of_trainer(file: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what the Hugging Face Trainer wrote: its state, and beside it the configurations of the
    model and its adapters. Its rate is of all chips and of the whole run, the first step included.
    """
    state = json.loads(file.read_bytes())
    total = state["log_history"][-1]
    length = asked.get("sequence_length", 0)
    samples = total.get("train_samples_per_second", 0.0)
    said: dict[str, Any] = {"program": "hf-trainer"}
    config = file.with_name("config.json")
    adapters = file.with_name("adapter_config.json")
    if config.is_file():
        said["model"] = str(config)
    if adapters.is_file():
        said["lora"] = json.loads(adapters.read_bytes())["r"]
    if state.get("train_batch_size"):
        said["layout"] = f"micro_batch={state['train_batch_size']}"
    if state.get("num_input_tokens_seen") and total.get("train_runtime"):
        said["tokens_per_second"] = state["num_input_tokens_seen"] / total["train_runtime"]
    elif samples and not length:
        raise DataError(
            f"Cannot plan from {file} because it counts samples, and no tokens.",
            "Name the tokens of a sample: sequence_length=2048.",
        )
    elif samples:
        said["tokens_per_second"] = samples * length
    if total.get("train_steps_per_second") and length:
        said["tokens_per_step"] = round(samples / total["train_steps_per_second"]) * length
    return said
