"""What a script changes, moves or removes between two steps is seen by the next one.

A step keeps the checks of the last one (:mod:`narrowgauge.optim.roster`). Beside it steps an
optimizer that forgets them before each step. Both have the same outcome: bits, refusals, audits.
"""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import RecipeError
from narrowgauge.spec.storages import STATE_NAMES, STORAGES
from optim.pairs import parameters
from tensors import parameters_of, set_gradients, take_steps

EDITS = tomllib.loads(Path(__file__).with_name("edits.toml").read_text())
ROWS = [(kind, name) for kind, edits in EDITS.items() for name in edits]
FIRST_EDITED = 4
"""By then the checks are kept."""


def build(storage: str) -> ng.Optimizer:
    params = parameters(storage, [(8, 8), (17,), (8, 6), (8, 8)])
    for param in params:
        param.grad_dtype = None
    groups = [{"params": params[:2], "lr": 1e-2}, {"params": params[2:]}]
    return ng.AdamW(groups, storage=storage, max_grad_norm=0.5, audit_every=3)


def edit(optimizer: ng.Optimizer, statement: str) -> None:
    """Run a statement of ``edits.toml``."""
    first, *_, last = parameters_of(optimizer)
    state = optimizer.state[first]
    name = next((name for name in state if name not in ("step", "window")), "step")
    names = {"o": optimizer, "g": optimizer.param_groups[0], "p": first, "q": last, "s": state}
    exec(statement, {**names, "n": name, "torch": torch, "nn": nn, "copy": copy})


def outcome(storage: str, kind: str, name: str, *, forgets: bool) -> list[Any]:
    """What a script sees: refusals, the norm, bits, counts, the audit."""
    optimizer = build(storage)
    last = FIRST_EDITED + (kind == "gradients")  # in the first step with it the checks are new
    seen = []
    for step in range(FIRST_EDITED + 4):
        set_gradients(parameters_of(optimizer), step, 0.1)
        if forgets:
            optimizer._roster = None
        try:
            if FIRST_EDITED <= step <= last:
                edit(optimizer, EDITS[kind][name])
            optimizer.step()
        except Exception as error:  # a refusal, which is to be the same
            seen.append(f"{step}: {error!r}")
        seen.append(repr(optimizer.grad_norm))
    for param in parameters_of(optimizer):
        for value in (param.detach(), *optimizer.state.get(param, {}).values()):
            if isinstance(value, Tensor):
                value = value.contiguous().view(-1).view(torch.uint8).tolist()
            seen.append(value)
    return [*seen, optimizer.num_skipped, repr(ng.audit(optimizer))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("storage", STORAGES)
def test_what_a_script_does_between_two_steps_is_seen(monkeypatch, storage):
    """Every edit in ``word``, and a tenth of them in each other storage."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # states may share memory
    place = [*STORAGES].index(storage)
    for row in ROWS if storage == "word" else ROWS[place % 10 :: 10]:
        assert outcome(storage, *row, forgets=False) == outcome(storage, *row, forgets=True), row


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int16]


@pytest.mark.parametrize("storage", STORAGES)
def test_another_moment_takes_effect_or_is_refused_in_one_line(storage):
    for name, dtype in itertools.product(STATE_NAMES, DTYPES):
        optimizer = build(storage)
        optimizer.param_groups[0]["betas"] = 0.9, 0.9
        take_steps(optimizer, range(FIRST_EDITED))
        weight = parameters_of(optimizer)[0]
        moment = torch.arange(1, 65).view(8, 8).to(dtype)
        optimizer.state[weight][name] = moment.clone()  # which the step writes
        weight.grad.zero_()
        try:
            optimizer.step()
        except RecipeError as error:
            assert name in str(error) and "\n" not in str(error)
        else:
            stored = optimizer.stored(weight, name).double()
            assert torch.allclose(stored, 0.9 * moment.double(), rtol=2**-7)


@pytest.mark.parametrize("storage", ["word", "compact", "kahan", "float32"])
def test_checks_are_kept_when_two_steps_agree(storage):
    optimizer = build(storage)
    rosters = []
    for step in range(7):
        for place, param in enumerate(parameters_of(optimizer)):
            has_gradient = step not in (3, 4) or place > 1
            param.grad = torch.ones_like(param) if has_gradient else None
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()
        rosters.append(optimizer._roster)
    kept = [after is before for before, after in itertools.pairwise(rosters)]
    assert kept == [False, True, False, False, False, False]
