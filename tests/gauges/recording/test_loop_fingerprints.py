"""A loop of one's own records hashes of its tensors and the formats it computes in, with the same bits as without."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import narrowgauge as ng
from narrowgauge.analysis.diagnosis.pairs.two_runs import TwoRuns, compare_two
from narrowgauge.gauges.recording import fingerprints
from narrowgauge.gauges.recording.loop_fingerprints import formats_of
from narrowgauge.runs.record import Run

STEPS = 6


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(29, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 29))


def tokens_at(step: int) -> Tensor:
    return torch.randint(0, 29, (4, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: Tensor, *, cast: bool = False) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        logits = model(tokens)
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def nothing(model: nn.Module, step: int) -> None:
    pass


def recorded(
    folder: Path,
    *,
    seed: int = 0,
    optimizer_of: Callable[[nn.Module], Any] = adamw,
    before_step: Callable[[nn.Module, int], None] = nothing,
    cast: bool = False,
    micro_batches: int = 1,
    **options: Any,
) -> tuple[Run, dict[str, Tensor]]:
    """Train, record, and return the record and the last weights."""
    model = model_of(seed)
    optimizer = optimizer_of(model)
    with ng.RunRecorder(folder, model, optimizer, **{"fingerprints_every": 1, **options}) as recorder:
        for step in range(1, STEPS + 1):
            tokens, losses = tokens_at(step), []
            for part in tokens.chunk(micro_batches):
                loss = loss_of(model, part, cast=cast) / micro_batches
                loss.backward()
                losses.append(loss.detach())
            before_step(model, step)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(torch.stack(losses).sum(), tokens=tokens.numel(), batch=tokens)
    return ng.read_run(folder), copy.deepcopy(model.state_dict())


def compared(one: Run, other: Run) -> TwoRuns:
    return compare_two(one, other)


def scaled(name: str, factor: float, at: int) -> Callable[[nn.Module, int], None]:
    def change(model: nn.Module, step: int) -> None:
        if step == at:
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            gradient.mul_(factor)

    return change


def test_every_tensor_of_a_step_is_recorded_and_no_bit_changes(tmp_path: Path) -> None:
    found, weights = recorded(tmp_path / "a")
    _, plain = recorded(tmp_path / "b", fingerprints_every=0)
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert ng.read_run(tmp_path / "b").fingerprints == []
    rows = {row["step"]: row["tensors"] for row in found.fingerprints}
    assert list(rows) == list(range(STEPS + 1))
    names = [name for name, _ in model_of().named_parameters()]
    assert list(rows[0]) == [f"weight:{name}" for name in names]
    modules = ["0", "1", "3", ""]
    assert [key for key in rows[2] if key.startswith(("tokens:", "output:"))] == [
        "tokens:batch",
        *(f"output:{name}" for name in modules if name),
    ]
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    assert [key for key in rows[2] if not key.startswith(("tokens:", "output:"))] == [
        *(f"grad:{name}" for name in reversed(names)),
        *(f"{kind}:{name}" for kind in kinds for name in names),
    ]
    assert rows[0]["weight:1.weight"][1] == pytest.approx(float(model_of()[1].weight.norm()))


def test_the_start_and_the_first_step_are_recorded_beside_every_so_many(tmp_path: Path) -> None:
    found = [recorded(tmp_path / str(every), fingerprints_every=every)[0] for every in (3, 1000)]
    assert [[row["step"] for row in run.fingerprints] for run in found] == [[0, 1, 3, 6], [0, 1]]


@pytest.mark.parametrize("options", [{}, {"audit_every": 1}, {"gauges_every": 1}], ids=["plain", "audit", "gauges"])
def test_what_else_reads_the_steps_is_not_taken_for_the_loop(tmp_path: Path, options: dict[str, Any]) -> None:
    ours, _ = recorded(tmp_path / "a", **options)
    plain, _ = recorded(tmp_path / "b")
    assert ours.fingerprints == plain.fingerprints


@pytest.mark.parametrize("audit_every", [0, 1])
def test_a_step_with_a_closure_has_the_same_fingerprints(tmp_path: Path, audit_every: int) -> None:
    plain, _ = recorded(tmp_path / "plain")
    model = model_of()
    optimizer = adamw(model)
    with ng.RunRecorder(tmp_path / "a", model, optimizer, fingerprints_every=1, audit_every=audit_every) as recorder:
        for step in range(1, STEPS + 1):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, tokens_at(step))
                loss.backward()
                return loss

            recorder.step(optimizer.step(closure))  # type: ignore[arg-type]
    assert ng.read_run(tmp_path / "a").fingerprints == plain.fingerprints


def test_micro_batches_are_parts_of_one_batch(tmp_path: Path) -> None:
    one, _ = recorded(tmp_path / "one")
    four, _ = recorded(tmp_path / "four", micro_batches=4)
    first = [run.fingerprints[1]["tensors"] for run in (one, four)]
    for key in ("tokens:batch", "output:0"):  # a lookup is the same row by row
        assert first[0][key] == first[1][key]


def test_the_tensor_and_the_step_of_a_change_are_named(tmp_path: Path) -> None:
    plain, _ = recorded(tmp_path / "plain")
    other, _ = recorded(tmp_path / "other", before_step=scaled("1.weight", 1.001, 4))
    found = compared(plain, other)
    difference = found.alignment.first_difference
    assert difference is not None
    assert (difference.step, difference.stage, difference.tensor) == (4, "grad", "grad:1.weight")


def written(folder: Path, at: Iterable[int], num_steps: int = 9) -> Run:
    """A run whose loop scales one weight after some of its steps."""
    model = model_of()
    optimizer = adamw(model)
    with ng.RunRecorder(folder, model, optimizer, fingerprints_every=1) as recorder:
        for step in range(1, num_steps + 1):
            loss = loss_of(model, tokens_at(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss, tokens=32, batch=tokens_at(step))
            if step in at:
                with torch.no_grad():
                    model.get_parameter("1.weight").mul_(0.999)
    return ng.read_run(folder)


@pytest.mark.parametrize(
    ("at", "num_steps", "reason", "said"),
    [
        (range(4, 9), 9, "written-between-steps", "again before each of the 4 later steps"),
        ((4, 8), 9, "written-between-steps", "again before 1 of the 4 later steps"),
        ((4,), 9, "silent-corruption", "again before none of the 4 later steps"),
        ((4,), 5, None, "next: record the steps after 5"),
    ],
    ids=["every step", "later again", "once", "not known"],
)
def test_a_weight_that_changes_between_steps_is_damaged_only_where_it_does_not_again(
    tmp_path: Path, at: Iterable[int], num_steps: int, reason: str | None, said: str
) -> None:
    found = compared(written(tmp_path / "plain", (), num_steps), written(tmp_path / "other", at, num_steps))
    difference = found.alignment.first_difference
    assert difference is not None and (difference.step, difference.tensor) == (5, "held:1.weight")
    assert (found.reason and found.reason.name) == reason, found.text()
    assert "other has 1.weight changed between steps 4 and 5" in found.text() and said in found.text()


def test_other_first_weights_are_seen_before_the_first_step(tmp_path: Path) -> None:
    found = compared(recorded(tmp_path / "a")[0], recorded(tmp_path / "b", seed=1)[0])
    difference = found.alignment.first_difference
    assert difference is not None and (difference.step, difference.stage) == (0, "start")
    assert found.reason is not None and found.reason.name == "other-start"


def test_states_of_any_optimizer_are_recorded(tmp_path: Path) -> None:
    def momentum(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    plain, _ = recorded(tmp_path / "plain", optimizer_of=momentum)
    assert "state:momentum_buffer:1.weight" in plain.fingerprints[1]["tensors"]

    model = model_of()
    optimizer = momentum(model)
    with ng.RunRecorder(tmp_path / "lost", model, optimizer, fingerprints_every=1) as recorder:
        for step in range(1, STEPS + 1):
            if step == 3:  # lost, as by a resume
                optimizer.state.clear()
            loss = loss_of(model, tokens_at(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss, tokens=32, batch=tokens_at(step))
    difference = compared(plain, ng.read_run(tmp_path / "lost")).alignment.first_difference
    assert difference is not None and (difference.step, difference.stage) == (3, "held")


# ── formats ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class Narrow(nn.Module):
    """A cast of the model's own, that no dtype of a parameter shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.half(), self.linear.weight.half()).float()


@pytest.mark.parametrize(
    ("make", "cast", "formats"),
    [
        (lambda: nn.Linear(8, 8), False, {"formats": "float32"}),
        (lambda: nn.Linear(8, 8), True, {"formats": "bfloat16, float32"}),
        (lambda: nn.Linear(8, 8).bfloat16(), False, {"formats": "bfloat16"}),
        (Narrow, False, {"formats": "float16, float32"}),
    ],
    ids=["float32", "autocast", "bfloat16", "own cast"],
)
def test_the_formats_are_those_of_the_results(make: Callable[[], nn.Module], cast: bool, formats: Any) -> None:
    model = make()
    x = torch.ones(2, 8, dtype=next(model.parameters()).dtype)
    with torch.autocast("cpu", torch.bfloat16) if cast else nullcontext():
        assert formats_of(model(x)) == formats


def test_a_function_that_no_graph_shows_is_said() -> None:
    doubled: Any = Doubled.apply(nn.Linear(8, 8)(torch.ones(2, 8)))
    assert formats_of((doubled,)) == {"formats": "float32", "unseen": True}
    assert formats_of(torch.ones(2)) == {}


def test_what_float32_matmuls_round_to_is_among_the_formats() -> None:
    y = nn.Linear(8, 8)(torch.ones(2, 8))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert formats_of(y) == {"formats": "bfloat16, float32"}
    finally:
        torch.set_float32_matmul_precision(before)


def test_one_run_under_autocast_is_another_format(tmp_path: Path) -> None:
    plain, _ = recorded(tmp_path / "plain")
    cast, _ = recorded(tmp_path / "cast", cast=True)
    assert [run.run["model"]["formats"] for run in (plain, cast)] == ["float32", "bfloat16, float32"]
    found = compared(plain, cast)
    assert found.reason is not None and found.reason.name == "format"
    assert "formats float32 and bfloat16, float32" in found.text()


@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
def test_a_difference_that_bfloat16_explains_is_a_bug_in_float32_alone(tmp_path: Path, cast: bool) -> None:
    """The losses differ by some 1e-5, which only the narrower of the two rounds to."""
    runs = []
    for name, factor in (("plain", 1.0), ("other", 1.1)):
        change = scaled("3.weight", factor, 2)
        options: dict[str, Any] = {
            "cast": cast,
            "before_step": change,
            "fingerprints_every": 0,
            "settings": {"seed": 0},
        }
        runs.append(
            recorded(tmp_path / name, optimizer_of=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), **options)[0]
        )
    found = compared(*runs)
    difference = found.alignment.first_difference
    assert difference is not None and difference.step == 3 and 1e-6 < difference.relative < 1e-3
    assert (found.reason.name if found.reason else "") == ("" if cast else "bug")


def test_other_orders_of_the_same_sums_are_no_bug(tmp_path: Path) -> None:
    """Four micro-batches sum in another order than one batch, and this record does not say that there were four."""
    one, _ = recorded(tmp_path / "one")
    four, _ = recorded(tmp_path / "four", micro_batches=4)
    found = compared(one, four)
    assert found.alignment.first_difference is not None
    assert found.reason is None


def test_a_resume_that_computes_in_another_format_is_noted(tmp_path: Path) -> None:
    recorded(tmp_path / "a", cast=True)
    (tmp_path / "a" / "summary.json").unlink()
    model = model_of()
    optimizer = adamw(model)
    with ng.RunRecorder(tmp_path / "a", model, optimizer, resume=True) as recorder:
        recorder.go_back(STEPS)
        loss = loss_of(model, tokens_at(STEPS + 1))
        loss.backward()
        optimizer.step()
        recorder.step(loss)
    run = ng.read_run(tmp_path / "a")
    said = [event["message"] for event in run.events if event["kind"] == "note"]
    assert said == ["the model computed in bfloat16, float32 when the run began, and now computes in float32"]
    assert run.run["model"]["formats"] == "bfloat16, float32"


# ── what a user's loop may do besides ───────────────────────────────────────────────────────────────────────────────


def test_a_model_is_compiled_whole_copied_and_pickled_as_without_a_recorder(tmp_path: Path) -> None:
    model = model_of()
    optimizer = adamw(model)
    with ng.RunRecorder(tmp_path / "a", model, optimizer, fingerprints_every=1) as recorder:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        loss = loss_of(compiled, tokens_at(1))  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        recorder.step(loss)
        twin, buffer = copy.deepcopy(model), io.BytesIO()
        torch.save(model, buffer)
        loss_of(twin, tokens_at(2))
        buffer.seek(0)
        read = torch.load(buffer, weights_only=False)
        loss_of(read, tokens_at(2)).backward()
    rows = ng.read_run(tmp_path / "a").fingerprints
    assert [row["step"] for row in rows] == [0, 1]
    assert "weight:1.weight" in rows[1]["tensors"] and "grad:1.weight" in rows[1]["tensors"]


def test_copies_and_pickles_of_an_audited_model_have_no_hooks(tmp_path: Path) -> None:
    model = model_of()
    optimizer = adamw(model)
    with ng.RunRecorder(tmp_path / "a", model, optimizer, audit_every=1, fingerprints_every=1) as recorder:
        for step in (1, 2):
            loss = loss_of(model, tokens_at(step))
            loss.backward()
            twin, buffer = copy.deepcopy(model), io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            for other in (twin, torch.load(buffer, weights_only=False)):
                with torch.no_grad():
                    loss_of(other, tokens_at(9))
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    plain, _ = recorded(tmp_path / "plain")
    mine = ng.read_run(tmp_path / "a")
    assert [row["tensors"] for row in mine.fingerprints] == [row["tensors"] for row in plain.fingerprints[:3]]
    assert not any(event["kind"] == "warning" and "evaluat" in event["message"] for event in mine.events)


def test_an_error_while_hashing_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("no bits")

    model = model_of()
    optimizer = adamw(model)
    with ng.RunRecorder(tmp_path / "a", model, optimizer, fingerprints_every=1) as recorder:
        for step in range(1, 4):
            if step == 2:
                monkeypatch.setattr(fingerprints, "fingerprints_whole_and_own", fails)
            loss = loss_of(model, tokens_at(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    run = ng.read_run(tmp_path / "a")
    assert [row["step"] for row in run.steps] == [1, 2, 3]
    assert [row["step"] for row in run.fingerprints] == [0, 1]
    said = [event["message"] for event in run.events if event["kind"] == "note"]
    assert said == ["no more fingerprints are recorded: ValueError: no bits"]


def test_a_forward_pass_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    plain, _ = recorded(tmp_path / "plain")
    model = model_of()
    optimizer = adamw(model)
    with ng.RunRecorder(tmp_path / "a", model, optimizer, fingerprints_every=1) as recorder:
        for step in range(1, STEPS + 1):
            with pytest.raises(IndexError):
                model(torch.tensor([[29]]))
            loss = loss_of(model, tokens_at(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert hooks == 0
    gradients = [
        [row["tensors"]["grad:1.weight"] for row in run.fingerprints[1:]]
        for run in (plain, ng.read_run(tmp_path / "a"))
    ]
    assert gradients[0] == gradients[1]


def test_one_group_with_another_rate_is_no_damaged_memory(tmp_path: Path) -> None:
    def in_groups(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
        def make(model: nn.Module) -> torch.optim.Optimizer:
            first, *rest = model.parameters()
            return torch.optim.AdamW([{"params": rest}, {"params": [first], "lr": rate}], lr=1e-2)

        return make

    runs = [
        recorded(tmp_path / str(rate), optimizer_of=in_groups(rate), fingerprints_every=100)[0] for rate in (1e-2, 1e-3)
    ]
    found = compared(*runs)
    difference = found.alignment.first_difference
    assert difference is not None and (difference.step, difference.tensor) == (1, "weight:0.weight")
    assert found.reason is not None and found.reason.name == "bug"
