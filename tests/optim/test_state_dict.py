"""What an optimizer refuses, and that a refusal costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import narrowgauge as ng
from covering import whole
from narrowgauge.optim import compilation
from narrowgauge.spec.storages import STORAGES, TAIL16
from optim.scenarios import kept, parameters
from tensors import assert_same_bits, take_steps

SHAPES = [(20, 30), (7,)]


def trained(storage: str, seed: int = 0) -> ng.AdamW:
    optimizer = ng.AdamW(parameters(storage, SHAPES), storage=storage, compile=False, seed=seed)
    take_steps(optimizer, range(5), scale=0.01)
    return optimizer


@pytest.mark.parametrize(
    ("saved", "mine"),
    [("naive", "word"), ("word", "naive"), ("split", "exact"), ("compact", "states8"), ("kahan", "collage-light")],
)
def test_a_state_of_another_storage_is_refused_and_nothing_is_lost(saved: str, mine: str) -> None:
    optimizer = trained(mine)
    before = kept(optimizer)
    with pytest.raises(ng.errors.RecipeError, match=f"storage '{saved}' was given to an optimizer of storage '{mine}'"):
        optimizer.load_state_dict(trained(saved).state_dict())
    assert_same_bits(before, kept(optimizer))


@pytest.mark.parametrize(
    ("storage", "place", "damaged"),
    [("word", 1, "exp_avg"), ("word", 0, "packed"), ("compact", 0, "tail"), ("compact", 0, "exp_avg_sq_bound"),
     ("collage-plus", 1, "exp_avg_sq_low")],
)  # fmt: skip
@pytest.mark.parametrize("how", ["shape", "missing"])
def test_a_damaged_state_is_refused_and_nothing_is_lost(storage: str, place: int, damaged: str, how: str) -> None:
    optimizer = trained(storage)
    before, state = kept(optimizer), trained(storage).state_dict()
    assert damaged in state["state"][place]
    if how == "missing":
        del state["state"][place][damaged]
    else:
        state["state"][place][damaged] = torch.zeros(3, dtype=state["state"][place][damaged].dtype)
    with pytest.raises(ng.errors.RecipeError, match="shape" if how == "shape" else f"needs '{damaged}'"):
        optimizer.load_state_dict(state)
    assert_same_bits(before, kept(optimizer))
    take_steps(optimizer, range(5, 7), scale=0.01)
    straight = trained(storage)
    take_steps(straight, range(5, 7), scale=0.01)
    assert_same_bits(kept(straight), kept(optimizer))


def test_the_seed_travels_with_the_state() -> None:
    first, second = trained("word", seed=3), trained("word", seed=4)
    with torch.no_grad():
        for mine, theirs in zip(second.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
            mine.copy_(theirs)
    second.load_state_dict(first.state_dict())
    for optimizer in (first, second):
        take_steps(optimizer, range(5, 10), scale=0.01)
    assert_same_bits(kept(first), kept(second))


def test_a_row_of_ones_own_is_obeyed_and_an_impostor_refused() -> None:
    longer = replace(STORAGES["word"], name="word16", weight=TAIL16, exp_avg=STORAGES["split"].exp_avg)
    optimizer = ng.AdamW(parameters("word", SHAPES), storage=longer, compile=False)
    take_steps(optimizer, range(3), scale=0.01)
    assert set(optimizer.state_dict()["state"][0]) == {"step", "tail", "exp_avg", "exp_avg_sq"}
    assert "word16" not in STORAGES
    with pytest.raises(ng.errors.RecipeError, match="name of its own"):
        ng.AdamW(parameters("word", SHAPES), storage=replace(longer, name="word"))


@pytest.mark.parametrize(
    "options",
    [
        {"lr": float("inf")},
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": float("nan")},
        {"audit_every": -1},
        {"storage": "wrod"},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ng.errors.RecipeError):
        ng.AdamW(parameters("word", SHAPES), **options)


@pytest.mark.parametrize("storage", ["word", "compact", "float16/split"])
def test_grad_scaler_unscales_and_skips(storage: str) -> None:
    plain, scaled = (ng.AdamW(parameters(storage, SHAPES), storage=storage, compile=False) for _ in range(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
    for step in range(4):
        take_steps(plain, range(step, step + 1), scale=0.01)
        params = [p for group in scaled.param_groups for p in group["params"]]
        for p, q in zip(params, [p for g in plain.param_groups for p in g["params"]], strict=True):
            assert q.grad is not None
            p.grad = q.grad * 1024  # what a loss scaled by 1024 would have given
        scaler._per_optimizer_states.clear()
        scaler.scale(torch.zeros(()))
        scaler.step(scaled)
    assert_same_bits(kept(plain), kept(scaled))
    before = kept(scaled)
    params[0].grad.fill_(float("inf"))
    scaler._per_optimizer_states.clear()
    scaler.step(scaled)
    assert scaled.num_skipped == (storage == "float16/split")  # others are not even asked for a step
    assert_same_bits(before, kept(scaled))
    take_steps(plain, range(4, 6), scale=0.01)
    scaler._per_optimizer_states.clear()
    take_steps(scaled, range(4, 6), scale=0.01)  # bounds of rows were not touched either
    assert_same_bits(kept(plain), kept(scaled))


def test_the_kernels_name_depends_on_every_file_they_are_made_from() -> None:
    code = (
        "import sys, narrowgauge.optim.kernel\n"
        "print(*[m.__file__ for n, m in sys.modules.items() if n.startswith('narrowgauge.')], sep='\\n')"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    hashed = {str(path.resolve()) for path in compilation.source_files()}
    assert {str(Path(path).resolve()) for path in loaded if not path.endswith("__init__.py")} <= hashed


def test_an_unusable_cache_leaves_the_definition_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWGAUGE_CACHE", "/dev/null/nowhere")
    monkeypatch.setattr(compilation, "_KERNELS", {})
    compilation._warn_once.cache_clear()
    optimizer = ng.AdamW(parameters("word", [(80, 80)]), storage="word", compile=True)
    with pytest.warns(UserWarning, match="/dev/null/nowhere.* failed"):
        take_steps(optimizer, range(2), scale=0.01)


LAYOUTS = {
    "contiguous": "torch.ones(side, side).bfloat16()",
    "crossed": "torch.ones(side, side).bfloat16().t()",
    "expanded": "torch.ones(1).bfloat16().expand(side * side)",
}


@whole
def test_a_step_needs_little_memory() -> None:
    """Nothing like a copy of 2^23 bfloat16, which is 16 MiB; in a process of its own, whose freed memory goes back at once."""
    code = f"""
import torch, narrowgauge as ng
def memory(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what))
torch.set_num_threads(1)
side = 2896
for layout, storage in (("contiguous", "word"), ("crossed", "word"), ("expanded", "word"), ("crossed", "compact")):
    weight = torch.nn.Parameter(torch.zeros((side * side,) if layout == "expanded" else (side, side)).bfloat16())
    optimizer = ng.AdamW([{{"params": [weight], "storage": storage}}], compile=False, max_grad_norm=1.0, audit_every=1)
    optimizer.adopt({{weight: weight.detach()}})
    weight.grad = eval({LAYOUTS}[layout])
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = memory("VmRSS")
    optimizer.step()
    print(memory("VmHWM") - before)
"""
    give_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | give_back
    )
    needed = [int(line) for line in result.stdout.split()]
    assert len(needed) == 4 and max(needed) <= 15 * 1024, needed  # KiB; the chunks alone are 11 MiB
