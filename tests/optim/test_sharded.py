"""The same bits on one process, one rank and two: every rank steps the rows it holds, and a checkpoint is cut anew.

Gradients are known and shared out, so that nothing but the optimizer can differ. All
storages go through one process group, since starting ranks is what costs: they give back what they found, whole, and tests
compare it with the optimizer of one process.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from filelock import FileLock  # torch's own dependency
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge.spec.storages import STORAGES
from ranks import run_ranks
from tensors import assert_same_bits

# Over two ranks: 5 and 5 rows, 4 and 3, 1 and none; vectors and more dims likewise.
SHAPES = {"even": (10, 6), "uneven": (7, 6), "lone": (1, 8), "gain": (10,), "bias": (5,), "deep": (3, 4, 2)}
RULES: dict[str, Callable[..., ng.Optimizer]] = {
    "adamw": ng.AdamW,
    "lion": ng.Lion,
    "muon": ng.Muon,
    "galore": ng.optim.GaLore,
}
# Other rules than AdamW, odd storages, and ranks without a row; the rest is in equivalence/.
CASES = ["adamw word", "adamw float8/collage-light", "lion states8", "muon word", "galore states8"]
FIRST, LATER = range(3), range(3, 5)


class Weights(nn.Module):
    """Parameters of ``SHAPES``, and nothing to compute."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))


def start(case: str, mesh: Any = None) -> tuple[nn.Module, ng.Optimizer]:
    """A fresh model and its optimizer; its rows shared out where there is a mesh."""
    rule, storage = case.split()
    model: nn.Module = Weights(getattr(torch, STORAGES[storage].visible))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    options: dict[str, Any] = {"lr": 0.05, "max_grad_norm": 3.0, "audit_every": 2, "compile": False}
    if rule == "galore":
        options |= {"rank": 2, "update_proj_gap": 2}
    return model, RULES[rule](model.named_parameters(), storage=storage, **options)


def take_steps(model: nn.Module, optimizer: ng.Optimizer, steps: range, bad: tuple[str, int] | None = None) -> None:
    """Steps with known gradients; ``bad`` says in which row of which parameter one value is infinite."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for name, p in model.named_parameters():
            gradient = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
            if bad is not None and name == bad[0]:
                gradient[bad[1], -1] = math.inf
            if isinstance(p, DTensor):
                gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = gradient
        optimizer.step()


def whole(value: Tensor) -> Tensor:
    value = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach().clone()
    # Shards hand out 16-bit integers as int32: neither gloo nor NCCL sends them as they are.
    return value.int() if value.dtype is torch.int16 else value


def everything(model: nn.Module, optimizer: ng.Optimizer) -> dict[str, Tensor]:
    """Visible weights and all that is kept, gathered; only float tensors of 2 and 4 bytes are compared by their bits."""
    result = {f"{name} visible": whole(p) for name, p in model.named_parameters()}
    state = optimizer.state_dict()["state"]
    for k, (name, p) in enumerate(model.named_parameters()):
        result[f"{name} weight"] = whole(optimizer.stored(p))
        result |= {f"{name} {what}": whole(value) for what, value in state[k].items()}
    return {name: value.float() if value.element_size() == 1 else value for name, value in result.items()}


def saved(model: nn.Module, optimizer: ng.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def restore(model: nn.Module, optimizer: ng.Optimizer, place: Path, **options: Any) -> None:
    state = saved(model, optimizer)
    dcp.load(state, checkpoint_id=place, **options)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def misplaced(model: nn.Module, optimizer: ng.Optimizer) -> list[str]:
    """Return the states of a parameter's shape, or with a value for each row, that are not placed like the parameter."""
    state, names = optimizer.state_dict()["state"], []
    for k, (name, p) in enumerate(model.named_parameters()):
        for key, value in {"weight": optimizer.stored(p), **state[k]}.items():
            # Every rank has the whole of a subspace.
            is_sharded = "project" not in key and (value.shape == p.shape or key.endswith("_bound"))
            if is_sharded and not (isinstance(value, DTensor) and value.placements == p.placements):
                names.append(f"{name} {key}")
    return names


def gathered(model: nn.Module, optimizer: ng.Optimizer) -> dict[str, Tensor] | str:
    """The optimizer's whole state on the first rank, as torch gathers it; or why it could not."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    try:
        state = get_optimizer_state_dict(model, optimizer, options=options).get("state", {})
    except RuntimeError as error:
        return str(error)
    return {f"{name} {what}": value for name, entry in state.items() for what, value in entry.items()}


# ── what ranks do ───────────────────────────────────────────────────────────────────────────────────────────────────


def step_save_and_load(rank: int, own: Path, others: Path) -> dict[str, Any]:
    """Every case: steps, saved under ``own``; and the checkpoint of ``others``, gone on with."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results: dict[str, Any] = {}
    for case in CASES:
        model, optimizer = start(case, mesh)
        take_steps(model, optimizer, FIRST)
        heard = {name: reading.edq for name, reading in ng.audit(optimizer).items()}
        results[case] = {
            "first": everything(model, optimizer),
            "rows": [p.to_local().shape[0] for p in model.parameters()],
            "misplaced": misplaced(model, optimizer),
            "gathered": gathered(model, optimizer),
            "audit": heard,
        }
        dcp.save(saved(model, optimizer), checkpoint_id=own / case)
        model, optimizer = start(case, mesh)
        restore(model, optimizer, others / case)
        take_steps(model, optimizer, LATER)
        results[case]["later"] = everything(model, optimizer)
    model, optimizer = start("adamw word", mesh)
    take_steps(model, optimizer, FIRST)
    take_steps(model, optimizer, range(9, 10), bad=("even", 9))
    results["overflow"] = (everything(model, optimizer), optimizer.num_skipped, optimizer.last_overflow)
    results["computed"] = directions_here(mesh)
    ranks = mesh.size()
    for layout, grid, placements in (
        ("replicated", (ranks,), [Replicate()]),
        ("replicas of shards", (ranks, 1), [Replicate(), Shard(0)]),
        ("columns", (ranks,), [Shard(1)]),
    ):
        results[layout] = muon_in_float32(init_device_mesh("cpu", grid), placements)
    return results


def directions_here(mesh: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices whose step this rank computes."""
    model, optimizer = start("galore word", mesh)
    shapes, rule = [], optimizer.rule

    def direction(gradient: Tensor, *rest: Any) -> Any:
        shapes.append(tuple(gradient.shape))
        return rule.direction(gradient, *rest)

    optimizer.rule = dataclasses.replace(rule, direction=direction)
    take_steps(model, optimizer, range(1))
    return shapes


def muon_in_float32(mesh: Any, placements: Any = None) -> dict[str, Tensor]:
    """Train matrices with Muon, whose products are float32, laid out in some way; whole without a mesh."""
    torch.manual_seed(0)
    weights = [torch.randn(shape).bfloat16() for shape in ((8, 6), (6, 8), (4, 2, 6))]
    laid_out = [w if mesh is None else distribute_tensor(w, mesh, placements, src_data_rank=None) for w in weights]
    model = nn.ParameterList([nn.Parameter(w) for w in laid_out])
    optimizer = ng.Muon(list(model), lr=0.05, ns_dtype="float32", storage="word", audit_every=2, compile=False)
    take_steps(model, optimizer, FIRST)
    return everything(model, optimizer)


# ── what is found ───────────────────────────────────────────────────────────────────────────────────────────────────


Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a session: whichever comes first starts the ranks for all."""
    root = tmp_path_factory.getbasetemp()
    return (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "sharded"


@pytest.fixture(scope="module")
def found(place: Path) -> Found:
    """What one rank and two ranks found; the one goes on from a single process, the two from the one."""
    place.mkdir(exist_ok=True)
    with FileLock(place / "lock"):
        if not (place / "found").exists():
            (place / "found").write_bytes(pickle.dumps(_find(place)))
    found: Found = pickle.loads((place / "found").read_bytes())
    return found


def _find(place: Path) -> Found:
    for case in CASES:
        model, optimizer = start(case)
        take_steps(model, optimizer, FIRST)
        dcp.save(saved(model, optimizer), checkpoint_id=place / "0" / case, no_dist=True)
    one = run_ranks(step_save_and_load, 1, place / "ranks1", place / "1", place / "0")
    two = run_ranks(step_save_and_load, 2, place / "ranks2", place / "2", place / "1")
    return {1: one, 2: two}


@functools.lru_cache
def expected(case: str, num_steps: int) -> dict[str, Tensor]:
    """What one process has after so many steps."""
    model, optimizer = start(case)
    take_steps(model, optimizer, range(num_steps))
    return everything(model, optimizer)


EVERY = pytest.mark.parametrize("case", CASES)
RANKS = pytest.mark.parametrize("num_ranks", [1, 2])
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@EVERY
@RANKS
def test_ranks_have_the_bits_of_one_process(case: str, num_ranks: int, found: Found) -> None:
    for result in found[num_ranks]:
        assert_same_bits(expected(case, 3), result[case]["first"])


@EVERY
@RANKS
def test_a_checkpoint_of_other_ranks_goes_on_with_the_same_bits(case: str, num_ranks: int, found: Found) -> None:
    for result in found[num_ranks]:
        assert_same_bits(expected(case, 5), result[case]["later"])


@EVERY
def test_states_are_placed_like_their_parameter(case: str, found: Found) -> None:
    assert [result[case]["misplaced"] for result in found[2]] == [[], []]


def test_one_rank_computes_the_step_of_a_matrix(found: Found) -> None:
    """Each of four matrices is decomposed on one rank, and the largest ones on different ranks."""
    computed = [result["computed"] for result in found[2]]
    assert sorted(computed[0] + computed[1]) == sorted([(10, 6), (7, 6), (1, 8), (3, 8)])
    assert (10, 6) in computed[0] and (7, 6) in computed[1]
    assert len(found[1][0]["computed"]) == 4


@pytest.mark.parametrize("layout", ["replicated", "replicas of shards", "columns"])
@RANKS
def test_matrices_laid_out_in_other_ways_have_the_bits_of_one_process(
    layout: str, num_ranks: int, found: Found
) -> None:
    for result in found[num_ranks]:
        assert_same_bits(muon_in_float32(None), result[layout])


@EVERY
def test_the_whole_state_is_gathered_on_the_first_rank(case: str, found: Found) -> None:
    whole, others = (result[case]["gathered"] for result in found[2])
    assert not isinstance(whole, str), whole
    wanted = expected(case, 3)
    assert others == {} and whole.keys() == {n for n in wanted if n.split()[1] not in ("visible", "weight")}
    assert all(torch.equal(value.float(), wanted[name].float()) for name, value in whole.items())


def test_an_overflow_on_one_rank_skips_the_step_on_all(found: Found) -> None:
    for rank, result in enumerate(found[2]):
        kept, num_skipped, named = result["overflow"]
        assert num_skipped == 1
        assert_same_bits(expected("adamw word", 3), kept)
        assert named == (["even"] if rank == 1 else [])  # the rows of the last one are not here
