"""A run goes on on another number of ranks, from and to one process, and is the same run to the
last bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer import export, loop, session
from ranks import run_ranks
from tensors import assert_same_bits
from trainer.tiny_runs import lasting, settings

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
CASES: dict[str, dict[str, Any]] = {
    "rows, random bits, replicated": {"recipe": "int8-row/compact/reproducible", "shard": "none"},
    "loss scale": {"recipe": "float16/split/reproducible"},
}
BASE: dict[str, Any] = {
    "steps": 3, "batch_size": 4, "gradient_accumulation_steps": 4, "audit_every": 1, "eval_every": 3, "eval_sequences": 1,
}  # fmt: skip


def go_on(rank: int, place: Path, runs: dict[Path, dict[str, Any]]) -> None:
    """One rank of some trainings, each started or resumed."""
    for out, changes in runs.items():
        if (out / "run.toml").exists():
            loop.resume(out)
        else:
            loop.train(settings(place, out, **BASE, **changes))


def copies(stopped: dict[str, Path], tmp_path: Path, where: str) -> dict[Path, dict[str, Any]]:
    for name, folder in stopped.items():
        shutil.copytree(folder, tmp_path / where / name)
    return {tmp_path / where / name: {} for name in stopped}


@pytest.fixture(scope="module")
def runs(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Run]]:
    """Every case, whole on one process; stopped on two and on one; and gone on with on one, two and
    three.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    for name, changes in CASES.items():
        for part, more in (("whole", {}), ("one", {"stop_after": 2})):
            go_on(0, place, {folder / part / name: {**changes, **more}})
    stopped = {}
    for start in ("one", "two"):
        stopped[start] = {name: folder / start / name for name in CASES}
    on_two = copies(stopped["one"], folder, "one, then two")
    for name, changes in CASES.items():
        on_two[stopped["two"][name]] = {**changes, "stop_after": 2}
    run_ranks(go_on, 2, folder / "a", place, on_two)
    go_on(0, place, copies(stopped["two"], folder, "two, then one"))
    run_ranks(go_on, 3, folder / "b", place, copies(stopped["two"], folder, "two, then three"))
    ways = ("whole", "two, then one", "two, then three", "one, then two")
    results = {}
    for way in ways:
        results[way] = {name: read_run(folder / way / name) for name in CASES}
    return results


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["two, then one", "two, then three", "one, then two"])
def test_it_is_the_same_run(way: str, case: str, runs: dict[str, dict[str, Run]]) -> None:
    run = runs[way][case]
    uninterrupted = runs["whole"][case]
    assert run.summary["weights_fingerprint"] == uninterrupted.summary["weights_fingerprint"]
    assert [(row["loss"], row["grad_norm"]) for row in run.steps] == [
        (r["loss"], r["grad_norm"]) for r in uninterrupted.steps
    ]
    assert [lasting(row) for row in run.evals] == [lasting(row) for row in uninterrupted.evals]


@pytest.mark.parametrize("case", CASES)
def test_one_process_exports_what_three_wrote(
    case: str, runs: dict[str, dict[str, Run]], tmp_path: Path
) -> None:
    single, three = (runs[way][case].path for way in ("whole", "two, then three"))
    assert any((three / "checkpoints").glob("*/shard-00003-*.safetensors"))
    out = []
    for k, folder in enumerate((single, three)):
        out.append(export.export(folder, tmp_path / str(k)))
    assert_same_bits(
        *(dict(AutoModelForCausalLM.from_pretrained(folder).state_dict()) for folder in out)
    )
    assert session.load(three).weights_fingerprint() == session.load(single).weights_fingerprint()
