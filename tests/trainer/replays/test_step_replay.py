"""A replayed step names the cast that was put into it, and nothing in a step of float32."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.analysis.diagnosis.replay_findings import REPLAY_VARIANTS, ReplayedStep
from narrowgauge.trainer import loop
from narrowgauge.trainer.replays.step_replay import replay_step
from narrowgauge.trainer.session import Session
from trainer.tiny_runs import call, settings

pytestmark = pytest.mark.usefixtures("one_thread")

DOWN = "model.layers.1.mlp.down_proj"
ATTENTION = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def runs(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trained runs by recipe and settings, each trained once."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def of(recipe: str, **changes: Any) -> Path:
        key = repr((recipe, changes))
        if key not in made:
            given = {
                "steps": 3,
                "eval_every": 0,
                "checkpoint_every": 2,
                "keep_checkpoints": 9,
                "recipe": recipe,
                **changes,
            }
            made[key] = loop.train(settings(place, folder / str(len(made)), **given))
        return made[key]

    return of


def narrow_inputs(session: Session) -> None:
    """A module whose inputs are cast to e4m3."""

    def enter(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].to(torch.float8_e4m3fn).to(args[0].dtype), *args[1:])

    session.model.get_submodule(DOWN).register_forward_pre_hook(enter)


def test_a_step_in_float32_differs_by_nothing_and_an_injected_cast_is_named(runs: Callable[..., Path]) -> None:
    folder = runs("float32/float32")
    plain = replay_step(folder, 3)
    assert plain.started == 2 and not plain.mismatch and plain.is_order and plain.cause is plain.cause_of_update is None
    struck = replay_step(folder, 3, prepared=narrow_inputs)
    assert struck.mismatch and struck.cause is not None and struck.cause.name == "own-casts", struck.lines()
    assert struck.share_of("own-casts") > 0.99 and not struck.is_order
    assert not ng.diagnose(folder, replay=plain).findings
    # A run whose own code has the cast repeats it, and does not part.
    found = ng.diagnose(folder, replay=dataclasses.replace(struck, mismatch=None)).findings
    assert "cast-inputs" in [each.cause.name for each in found], found


CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "casts of operands": ("float8-delayed/float32", {}, "inputs weights output-gradients", ""),
    "a sum of micro-batches": (
        "float32/split", {"batch_size": 16, "gradient_accumulation_steps": 16, "accumulation_dtype": "bfloat16"},
        "accumulation", "",
    ),
    "a storage that loses updates": ("bfloat16/naive", {"lr": 1e-5}, "", "storage"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_widening_that_removes_most_is_named(case: str, runs: Callable[..., Path]) -> None:
    recipe, changes, cause, of_update = CASES[case]
    found = replay_step(runs(recipe, **changes), 3)
    assert not found.mismatch and not found.is_order
    first = max(found.variants, key=lambda row: row.gradient_share or 0.0)
    assert not cause or first.name in cause.split(), found.lines()
    assert not of_update or (found.cause_of_update is not None and found.cause_of_update.name == of_update), (
        found.lines()
    )
    assert (found.lost_share or 0.0) > 0.5 if of_update else (found.lost_share or 0.0) < 0.1
    assert found.unexplained is not None and found.unexplained < 0.4, "the emulated roundings are those of the run"
    assert {row.name for row in found.variants} <= set(REPLAY_VARIANTS)
    assert found.watched is not None and f"input:{DOWN}" in found.watched["tensors"]


def test_a_step_that_is_not_finite_in_float16_alone(runs: Callable[..., Path]) -> None:
    """Values between two layers exceed float16's largest; float32 holds them."""

    def amplify(session: Session) -> None:
        mlp = session.model.get_submodule("model.layers.0.mlp")
        mlp.register_forward_hook(lambda module, args, output: output * 1e12)

    found = replay_step(runs("float16/split"), 3, prepared=amplify)
    as_run = found.variant("as-run")
    assert not math.isfinite(found.loss) and found.bad_value and as_run is not None and not as_run.is_finite
    wide = found.variant("float32")
    assert wide is not None and wide.is_finite
    assert any(line.startswith("  the step is finite in float32, and") for line in found.lines()), found.lines()


def test_the_command_replays_a_step_and_refuses_what_cannot_be(runs: Callable[..., Path], tmp_path: Path) -> None:
    folder = runs("float32/float32")
    said = call("diagnose", str(folder), "--replay", "3")
    assert said.exit_code == 0 and "replay of step 3 from checkpoint 2" in said.stdout, said.output
    value = json.loads(call("diagnose", str(folder), "--replay", "3", "--json").stdout)["replay"]
    assert value["is_the_run"] and value["order_explains_it"] and value["step"] == 3
    page = tmp_path / "page.html"
    assert call("diagnose", str(folder), "--replay", "3", "--html", str(page)).exit_code == 0
    assert "other-order-float32" in page.read_text(encoding="utf-8")
    for words, message in (
        ((str(folder), "--replay", "4"), "steps 1 to 3"),
        ((str(folder), str(folder), "--replay", "3"), "two were named"),
        ((str(tmp_path), "--replay", "3"), "No run in"),
    ):
        refused = call("diagnose", *words)
        assert refused.exit_code == 2 and message in refused.stderr and len(refused.stderr.splitlines()) == 1, (
            refused.stderr
        )
    (folder / "data").rename(tmp_path / "data")
    refused = call("diagnose", str(folder), "--replay", "3")
    assert refused.exit_code == 2 and "holds no data" in refused.stderr, refused.stderr
    (tmp_path / "data").rename(folder / "data")


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("bfloat16/word", {"gradient_accumulation_steps": 2}),
        ("float8-row/states8", {}),
        ("float16/master", {"max_grad_norm": math.inf}),
        ("bfloat16/master", {"rule": "muon"}),
    ],
    ids=["micro-batches", "float8", "loss scale", "muon"],
)
def test_the_pieces_of_a_healthy_step_are_the_same_to_rounding(
    recipe: str, changes: dict[str, Any], runs: Callable[..., Path]
) -> None:
    found = replay_step(runs(recipe, **changes), 3)
    assert found.departures == ()
    assert {"loss", "gradient", "update"} <= set(found.checked)
    assert set(found.checked) | set(found.unchecked or {}) >= {"loss", "forward", "gradient", "clip", "update"}
    assert "what model and loss compute" in ng.diagnose(runs(recipe, **changes), replay=found).checked


def sees_future(session: Session) -> None:
    """A layer that adds the next token's values, as a wrong mask or shift would."""
    session.model.get_submodule(DOWN).register_forward_hook(lambda module, args, out: out + out.roll(-1, dims=1))


def decays_twice(session: Session) -> None:
    """A step that decays all matrices once more."""
    weights = [p for p in session.model.parameters() if p.ndim > 1]

    @torch.no_grad()
    def again(*_: Any) -> None:
        for p in weights:
            p.mul_(1 - 0.1)

    session.optimizer.register_step_post_hook(again)


@pytest.mark.parametrize(("patch", "name"), [(sees_future, "sees-future"), (decays_twice, "weights-scaled")])
def test_what_departs_of_a_replayed_step_is_named(patch: Any, name: str, runs: Callable[..., Path]) -> None:
    found = replay_step(runs("float32/float32"), 2, prepared=patch)
    assert name in [each.name for each in found.departures], found.departures
    assert any(name in line for line in found.every_line())
    row = found.to_dict()
    assert name in [each["name"] for each in row["departures"]] and json.dumps(row)


def test_a_step_of_which_nothing_is_recorded_is_not_called_the_same(runs: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(runs("float32/float32"), folder)
    rows = (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "steps.jsonl").write_text("".join(rows[:1] + rows[2:]), encoding="utf-8")
    found = replay_step(folder, 2)
    assert found.is_the_run is None and "the record holds nothing of it to compare with" in found.lines()[0]


def test_the_text_of_a_replay_has_at_most_ten_lines() -> None:
    notes = tuple(f"note {number}" for number in range(20))
    lines = ReplayedStep("run", 1, 0, None, 1.0, None, reasons=("another machine",), notes=notes).lines()
    assert len(lines) == 10 and "another machine" in lines[1] and lines[-1] == "  and 13 more (--json)"
