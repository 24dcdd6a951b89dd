"""Read a measured run as its program wrote it: our run folder, a configuration and log of torchtitan, a
folder of the Hugging Face Trainer, or the arguments of :class:`~narrowgauge.planner.next.MeasuredRun`.

A row of ``_TITAN`` names the places of a value in torchtitan's configuration, the newest first
(torchtitan, config/job_config.py).
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
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.runs.foreign_logs import SOURCE
from narrowgauge.runs.record import read_run
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.toml import read_file

_NUMBERS = ("chips", "sequence_length", "tokens_per_step", "tokens_per_second", "tokens_per_second_per_chip",
            "peak_gb", "lora")  # fmt: skip
_ADVICE = (
    "Name a run folder, a log, a TOML file, or write the run in quotes: "
    "'model=llama-8b chip=H100-SXM chips=8 tokens_per_second=53336'."
)
_TITAN = {
    "model": ("model.name",),
    "flavor": ("model.flavor",),
    "length": ("training.seq_len",),
    "micro_batch": ("training.local_batch_size", "training.batch_size"),
    "batch": ("training.global_batch_size",),
    "data": ("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree"),
    "tensor": ("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree"),
    "pipeline": ("parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree"),
    "context": ("parallelism.context_parallel_degree", "experimental.context_parallel_degree"),
    "recompute": ("activation_checkpoint.mode",),
    "is_compiled": ("compile.enable", "training.compile"),
    "converters": ("model.converters",),
    "float8": ("quantize.linear.float8.recipe_name", "float8.recipe_name"),
}  # fmt: skip
_DEVICE = re.compile(r"(?:GPU|CUDA) capacity: (.+?) (?:\(\d+\) )?with [\d.]+GiB")
_MESH = re.compile(r"device mesh with \[.*?\], \[([\d, ]+)\]")


def read_question(words: Iterable[str]) -> dict[str, Any]:
    """Read ``NAME=VALUE``: arguments of :class:`MeasuredRun`."""
    asked = read_values(words)
    return {name: value if name in _NUMBERS else str(value) for name, value in asked.items()}


def read_measured(text: str) -> MeasuredRun:
    """Read a measured run: a run folder, a log, a TOML file with the arguments of
    :class:`MeasuredRun`, or these arguments themselves, ``NAME=VALUE`` between spaces.

    Among the arguments ``log`` names a log, and ``config`` a configuration of torchtitan. What the
    arguments say counts before what is read there.
    """
    path = Path(text)
    asked: dict[str, Any] = {}
    if path.suffix == ".toml" and path.exists():
        asked = read_file(path, "measured run", _ADVICE)
        if "training" in asked:
            asked = of_torchtitan(asked)
    elif path.exists():
        asked = {"log": path.name}
    elif "=" in text:
        asked = read_question(text.split())
        path = Path()
    else:
        raise DataError(f"Cannot plan from {text} because it is not there.", _ADVICE)
    folder = path.parent
    config = asked.pop("config", "")
    log = asked.pop("log", "")
    if config:
        table = of_torchtitan(read_file(folder / config, "configuration", _ADVICE))
        layout = {**table["layout"], **read_layout(asked.get("layout", ""))}
        asked = {**table, **asked, "layout": layout}
    if log:
        asked = {**of_log(folder / log, asked), **asked}
    if not (asked.get("tokens_per_second") or asked.get("tokens_per_second_per_chip")):
        raise DataError(
            f"Cannot plan from {text} because it does not say its tokens_per_second.", _ADVICE
        )
    if not asked.get("model"):
        raise DataError(f"Cannot plan from {text} because it does not say its model.", _ADVICE)
    return MeasuredRun(**asked)


def of_torchtitan(table: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a configuration of torchtitan says."""
    said: dict[str, Any] = {}
    for name, places in _TITAN.items():
        for place in reversed(places):
            value: Any = table
            for key in place.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                said[name] = value
    flavor = str(said.get("flavor", "")).lower().partition("_")[0]
    family = (
        str(said.get("model", "")).replace("llama3", "llama").replace("deepseek_v3", "deepseek")
    )
    layout = {"micro_batch": said.get("micro_batch", 1), "micro_batches": 1, "expert": 1}
    for axis in ("data", "tensor", "pipeline", "context"):
        layout[axis] = max(1, said.get(axis, 1))
    layout["zero"] = 2 if layout["pipeline"] > 1 else 3
    layout["recompute"] = said.get("recompute", "selective")
    length = said.get("length", 2048)
    asked = {
        "model": f"{family}-{flavor}".replace("deepseek-671b", "deepseek-v3"),
        "sequence_length": length,
    }
    if said.get("batch", -1) > 0:
        del layout["micro_batches"]
        asked["tokens_per_step"] = said["batch"] * length
    asked["program"] = "torchtitan"
    if not said.get("is_compiled"):
        asked["program"] = "torchtitan,kernels=eager,loss=whole"
    compute = "bfloat16"
    if "float8" in str(said.get("converters", "")):
        compute = "float8-row" if "row" in str(said.get("float8", "")) else "float8-tensor"
    return {**asked, "recipes": f"{compute}/float32", "layout": layout}


def of_log(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what a run folder, or the log of another program, says of a run that was asked so."""
    with disk_errors(path):
        state = path / "trainer_state.json" if path.is_dir() else path
        if state.suffix == ".json" and state.is_file():
            return _of_trainer(state, asked)
    run = read_run(path)
    rates = [row["tokens_per_second"] for row in run.steps if row.get("tokens_per_second")]
    peaks = [row["peak_memory_bytes"] for row in run.steps if row.get("peak_memory_bytes")]
    said: dict[str, Any] = {"peak_gb": max(peaks, default=0) / 1e9}
    if run.is_foreign:
        source = run.run[SOURCE]
        if rates:
            said["tokens_per_second_per_chip" if source["of_one_chip"] else "tokens_per_second"] = (
                median_high(rates)
            )
        return {**said, **_of_titan_text(Path(source["file"]))}
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
        said["program"] = "narrowgauge"
        said["recipes"] = config["recipe"]
        for name in ("model", "sequence_length"):
            said[name] = config[name]
    return said


def _of_device(device: str) -> dict[str, str]:
    """Return the chip whose driver reports this name."""
    for name, chip in CHIPS.items():
        if chip.device and chip.device == device:
            return {"chip": name}
    return {}


def _of_titan_text(file: Path) -> dict[str, Any]:
    """Return the chip and the number of chips that the first lines of torchtitan's log name."""
    said: dict[str, Any] = {}
    if file.suffix not in (".log", ".txt"):
        return said
    text = file.read_text(encoding="utf-8", errors="replace")
    device = _DEVICE.search(text)
    if device:
        said |= _of_device(device[1])
    mesh = _MESH.search(text)
    if mesh:
        chips = 1
        for size in mesh[1].split(","):
            chips *= int(size)
        said["chips"] = chips
    return said


def _of_trainer(file: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what the Hugging Face Trainer wrote: its state, and beside it the configurations of the
    model and its adapters. Its rate is of all chips and of the whole run, the first step included.
    """
    folder = file.parent
    state = _json_of(file)
    said: dict[str, Any] = {"program": "hf-trainer"}
    if (folder / "config.json").is_file():
        said["model"] = str(folder / "config.json")
    if (folder / "adapter_config.json").is_file():
        said["lora"] = _json_of(folder / "adapter_config.json")["r"]
    if state.get("train_batch_size"):
        said["layout"] = f"micro_batch={state['train_batch_size']}"
    rows = state.get("log_history") or [{}]
    total = rows[-1]
    length = asked.get("sequence_length", 0)
    samples = total.get("train_samples_per_second", 0.0)
    if state.get("num_input_tokens_seen") and total.get("train_runtime"):
        said["tokens_per_second"] = state["num_input_tokens_seen"] / total["train_runtime"]
    elif total.get("train_tokens_per_second"):
        said["tokens_per_second"] = total["train_tokens_per_second"]
    elif samples and length:
        said["tokens_per_second"] = samples * length
    elif samples:
        raise DataError(
            f"Cannot plan from {file} because it counts samples, and no tokens.",
            "Name the tokens of a sample: sequence_length=2048.",
        )
    if total.get("train_steps_per_second") and length:
        said["tokens_per_step"] = round(samples / total["train_steps_per_second"]) * length
    return said


def _json_of(file: Path) -> dict[str, Any]:
    """Return the table of a JSON file."""
    try:
        return {**json.loads(file.read_bytes())}
    except (TypeError, ValueError) as error:
        raise DataError(f"Cannot read {file}: {error}.", _ADVICE) from error
