"""What earlier versions wrote can be opened: run folders, checkpoints, comparisons and optimizer states.

Each folder of ``golden/older`` is named after the version whose code wrote it, with ``golden/older/make.py``. It holds a
finished run, two runs stopped in the middle, a comparison, the states of four optimizers, and in ``expected.json`` the
losses with which that version continued. A release adds a folder and never replaces one: only files that an earlier
version wrote prove that its users can continue.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from golden_files import TOLERANCE, deviation, digest, machine_key
from narrowgauge._moved import DOCUMENTED, PICKLED, RENAMED
from tensors import same_bits
from trainer.tiny_runs import call

pytestmark = pytest.mark.usefixtures("one_thread")

OLDER = Path(__file__).parent / "golden" / "older"
VERSIONS = sorted(path.name for path in OLDER.iterdir() if path.is_dir())
STOPPED = ("stopped", "stopped-compact")
STATES = ("AdamW-word", "AdamW-compact", "AdamW-collage-plus", "Muon-split")


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> Path:
    return OLDER / str(request.param)


def unpack(version: Path, name: str, folder: Path) -> Path:
    """A folder as the earlier version wrote it, except that the paths of model and text are new."""
    moved = {"model": folder / "model", "data": folder / "text"}
    for place in moved.values():
        place.mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_bytes((version / "config.json").read_bytes())
    (folder / "text" / "a.txt").write_text("The prepared tokens are used; this text is not read.")
    with zipfile.ZipFile(version / f"{name}.zip") as packed:
        packed.extractall(folder / name)
    for file in (folder / name).rglob("*.toml"):
        text = file.read_text(encoding="utf-8")
        for key, place in moved.items():
            text = re.sub(rf'(?m)^{key} = ".*"$', lambda _, key=key, place=place: f"{key} = '{place}'", text)
        file.write_text(text, encoding="utf-8")
    return folder / name


def expected(version: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((version / "expected.json").read_text(encoding="utf-8"))
    return found


def losses_of(run: ng.Run) -> list[float]:
    return [row["loss"] for row in run.steps]


def assert_as_recorded(found: list[float], version: Path, name: str) -> None:
    """Equal bits on the same kind of processor, within the tolerance on any other."""
    known = expected(version)
    recorded = [float.fromhex(loss) for loss in known["losses"][name]]
    if known["key"] == machine_key():
        assert found == recorded
    assert deviation(recorded, found) <= TOLERANCE


def test_the_first_version_is_kept() -> None:
    assert "0.1.0" in VERSIONS


def test_a_finished_run_is_read(version: Path, tmp_path: Path) -> None:
    run = ng.read_run(unpack(version, "finished", tmp_path))
    assert losses_of(run) == [float.fromhex(loss) for loss in expected(version)["losses"]["finished"]]
    assert [row["step"] for row in run.evals] == [5, 10] and run.evals[-1]["val_loss"] > 0
    assert {"start", "lost_updates", "finish"} <= {event["kind"] for event in run.events}
    assert [row["step"] for row in run.gauges] == [2, 4, 6, 8, 10]
    assert {"tensors", "updates", "moments", "histograms"} <= set(run.gauges[-1])
    assert all("edq" in row and "lost_fraction" in row for row in run.steps)
    assert run.summary is not None and run.summary["recipe"] == "bfloat16/naive" and run.summary["steps"] == 10
    assert run.config["recipe"] == "bfloat16/naive" and run.data_fingerprint


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_run_goes_on(version: Path, name: str, tmp_path: Path) -> None:
    folder = unpack(version, name, tmp_path)
    refused = call("resume", str(folder))
    assert refused.exit_code == 2 and "--accept-changes" in refused.stderr  # the model has moved
    resumed = call("resume", str(folder), "--accept-changes")
    assert resumed.exit_code == 0, resumed.output
    run = ng.read_run(folder)
    assert_as_recorded(losses_of(run), version, name)
    assert run.summary is not None and run.summary["steps"] == 10
    assert "resume" in [event["kind"] for event in run.events]


def test_a_finished_run_is_exported(version: Path, tmp_path: Path) -> None:
    folder = unpack(version, "finished", tmp_path)
    exported = call("export", str(folder), str(tmp_path / "exported"), "--dtype", "float32")
    assert exported.exit_code == 0, exported.output
    assert digest(tmp_path / "exported") == expected(version)["exported"]


def test_a_stopped_run_is_converted(version: Path, tmp_path: Path) -> None:
    folder, out = unpack(version, "stopped", tmp_path), tmp_path / "converted"
    converted = call("convert", str(folder), "--recipe", "float8-delayed/exact", "--out", str(out))
    assert converted.exit_code == 0, converted.output
    assert call("resume", str(out), "--accept-changes").exit_code == 0
    assert deviation(losses_of(ng.read_run(folder)), losses_of(ng.read_run(out))[:5]) == 0


NEW_COLUMNS = {"step_seconds", "state_bytes", "activation_bytes", "peak_tensor_bytes"}
"""Columns of ``compare.json`` that 0.1.0 did not have."""


def without_new(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the columns of 0.1.0, all others of which must be new ones; memory was not counted then."""
    assert row["step_seconds"] > 0 and {row[name] for name in NEW_COLUMNS - {"step_seconds"}} == {None}
    return {name: value for name, value in row.items() if name not in NEW_COLUMNS}


def test_a_comparison_is_read_and_goes_on(version: Path, tmp_path: Path) -> None:
    folder = unpack(version, "compared", tmp_path)
    recorded = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    rows = ng.compare_runs([ng.read_run(file.parent) for file in sorted(folder.glob("*/run.toml"))]).rows
    assert sorted(map(without_new, rows), key=str) == sorted(recorded, key=str)
    again = call("compare", "--out", str(folder), "--json")
    assert again.exit_code == 0, again.output
    assert [without_new(row) for row in json.loads(again.stdout)] == recorded


@pytest.mark.parametrize("name", ["finished", "stopped", "compared"])
def test_a_page_is_made(version: Path, name: str, tmp_path: Path) -> None:
    folder, page = unpack(version, name, tmp_path), tmp_path / "page.html"
    made = call("report", str(folder), "--out", str(page))
    assert made.exit_code == 0, made.output
    text = page.read_text(encoding="utf-8")
    for run in folder.rglob("run.toml"):
        assert ng.read_run(run.parent).config["recipe"] in text


@pytest.mark.parametrize("name", STATES)
def test_an_optimizer_state_is_loaded(version: Path, name: str, tmp_path: Path) -> None:
    saved = torch.load(unpack(version, "states", tmp_path) / f"{name}.pt", weights_only=True)
    kind, _, storage = name.partition("-")
    parameters = [torch.nn.Parameter(weight) for weight in saved["weights"]]
    optimizer = getattr(ng, kind)(parameters, lr=1e-2, storage=storage)
    optimizer.load_state_dict(saved["state"])
    again = optimizer.state_dict()
    assert again["param_groups"] == saved["state"]["param_groups"]
    for index, entry in saved["state"]["state"].items():
        assert set(again["state"][index]) == set(entry)
        for key, value in entry.items():
            assert same_bits(again["state"][index][key], value), (index, key)
    assert all(map(same_bits, map(optimizer.stored, parameters), saved["stored"]))
    for parameter, gradient in zip(parameters, saved["gradients"], strict=True):
        parameter.grad = gradient
    optimizer.step()
    for parameter, weight in zip(parameters, saved["next"], strict=True):
        if (
            kind != "Muon" or expected(version)["key"] == machine_key()
        ):  # the order of its matmuls' sums depends on the processor
            assert same_bits(optimizer.stored(parameter), weight)
        torch.testing.assert_close(optimizer.stored(parameter), weight, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["float8-delayed-split8", "bfloat16-collage-plus"])
@pytest.mark.filterwarnings("error::DeprecationWarning:narrowgauge")
def test_pickled_model_and_optimizer_continue_with_the_same_bits(version: Path, name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(version / "objects.zip") as packed:
        packed.extractall(tmp_path)
    saved = torch.load(tmp_path / f"{name}.pt", weights_only=False)
    parameters = list(saved["model"].parameters())
    saved["model"](torch.ones(16, 32, dtype=parameters[0].dtype))
    for parameter in parameters:
        parameter.grad = ((torch.arange(parameter.numel()) % 7 - 3) / 8).view_as(parameter).to(parameter.dtype)
    saved["optimizer"].step()
    for parameter, known in zip(parameters, torch.load(tmp_path / f"{name}-next.pt"), strict=True):
        assert same_bits(parameter.detach(), known)


@pytest.mark.parametrize(
    ("former", "name", "present"),
    [
        ("transforms.unit_export", "plain_state_dict", "transforms.unit_scaling"),
        ("distributed.replicas", "Verifier", "distributed.replica_verification"),
        ("loggers.available", "Logger", "runs.loggers.logger"),
        ("loggers.available", "LOGGERS", "runs.loggers.logger"),
        ("spec.toml_text", "load_toml", "spec.toml"),
    ],
)
def test_former_module_forwards_with_one_warning(
    former: str, name: str, present: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"narrowgauge.{former}", raising=False)
    with pytest.warns(DeprecationWarning, match=re.escape(f"is now narrowgauge.{present}.")) as said:
        found = getattr(import_module(f"narrowgauge.{former}"), name)
    assert found is getattr(import_module(f"narrowgauge.{present}"), name) and len(said) == 1


def test_every_former_module_names_a_module() -> None:
    present = {**DOCUMENTED, **PICKLED}
    source = Path(str(ng.__file__)).parent
    places = [source / name.replace(".", "/") for name in present.values()]
    assert all(place.is_dir() or place.with_suffix(".py").is_file() for place in places)
    for former, names in RENAMED.items():
        assert all(hasattr(import_module(f"narrowgauge.{present[former]}"), name) for name in names.values())
