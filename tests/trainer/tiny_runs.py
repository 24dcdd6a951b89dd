"""Trainings of a tiny model, for tests: their settings, the same as a command line, and when two
are the same run.
"""

import multiprocessing
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

import narrowgauge
from narrowgauge.cli.main import main
from narrowgauge.runs.record import Run
from narrowgauge.trainer.settings import Settings

SHAPE = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
JITTERING = {
    **SHAPE, "model_type": "phimoe", "num_hidden_layers": 1, "num_local_experts": 4, "router_jitter_noise": 0.5,
    "input_jitter_noise": 0.5,
}  # fmt: skip
"""Of a model that draws random numbers in its forward pass."""
TIMINGS = {
    "tokens_per_second", "seconds", "wall_seconds", "step_seconds", "loader_seconds", "communication_seconds", "wait_seconds",
    "kept",
}  # fmt: skip
"""Columns of the clock, and of what one process remembers."""
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(narrowgauge.__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
}
_CONTEXT = multiprocessing.get_context("forkserver")


def settings(place: Path, out: Path, **changes: Any) -> Settings:
    defaults = {
        "steps": 8, "batch_size": 4, "sequence_length": 16, "lr": 3e-3, "eval_every": 3, "eval_sequences": 8,
        "checkpoint_every": 2,
    }  # fmt: skip
    model = str(place / changes.pop("model", "model"))
    where = {"model": model, "data": str(place / "tokens"), "out": str(out)}
    return Settings(**{**defaults, **where, **changes})


def trained(place: Path, out: Path, *, is_verbose: bool = True, **changes: Any) -> Path:
    """Train a run, or go on with it, and return its folder."""
    from narrowgauge.trainer import train as loop

    return loop.train(vars(settings(place, out, **changes)), is_verbose=is_verbose)


def words_of(chosen: Settings, *command: str, but: Collection[str] = ()) -> list[str]:
    """The command line that says the same."""
    words = [*(command or ["train"])]
    for name, value in vars(chosen).items():
        if name not in but:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), prog_name="narrowgauge")


def refused(*words: str, status: int = 2) -> str:
    """Return the one line of a command that is refused."""
    result = call(*words)
    assert (result.exit_code, result.stderr.count("\n")) == (status, 1), result.output
    return result.stderr


def _command(words: list[str]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    main(words, prog_name="narrowgauge")


def kill(words: list[str], steps: Path, rows: int) -> None:
    """Run a command in a process, and kill it once a file has so many rows."""
    process = _CONTEXT.Process(target=_command, args=(words,))
    process.start()
    while process.is_alive() and (not steps.exists() or steps.read_bytes().count(b"\n") < rows):
        time.sleep(0.005)
    process.kill()
    process.join()


def bytes_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lasting(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in TIMINGS}


def assert_same_run(first: Run, second: Run) -> None:
    """Losses, norms, evaluations and the summary are equal, bit for bit."""
    for kind in ("steps", "evals"):
        rows = [[lasting(row) for row in getattr(run, kind)] for run in (first, second)]
        assert rows[0] == rows[1]
    assert lasting(first.summary) == lasting(second.summary)


CASES = {
    "word, accumulated": {"recipe": "bfloat16/word", "gradient_accumulation_steps": 2},
    "naive": {"recipe": "bfloat16/naive"},
    "autocast": {"recipe": "bfloat16/float32", "warmup_steps": 3},
    "float8, accumulated": {
        "recipe": "float8-tensor/split", "gradient_accumulation_steps": 2,
    },
    "random numbers": {"model": "jittering", "gradient_accumulation_steps": 2},
}  # fmt: skip
