"""A model shared out over ranks is the model of one process: its weights, its groups, and what is refused.

Every rank has the same data where bits are compared with one process, so that an average over ranks is exact; ranks with
data of their own must end with equal weights.
"""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.distributed import sharding
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.checksums import fingerprint_all
from narrowgauge.numerics.update_metrics import HOST_SUMS, KERNEL_SUMS
from narrowgauge.optim.audit import joined_over_ranks
from narrowgauge.spec.notation import parse_table
from ranks import run_ranks

RECIPES: dict[str, Any] = {
    "word": "bfloat16/word",
    "float32": "float32/float32",
    "autocast": "bfloat16/float32",
    "int8": "int8-row/compact",
    "kept head": {"recipe": "bfloat16/word", "keep": ["lm_head"]},
    "kept norms": {"recipe": "bfloat16/word", "keep": ["*norm"]},
}
TINY = {
    "vocab_size": 40, "max_position_embeddings": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def llama(tied: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=tied))


def recipe_of(case: str) -> Any:
    found = RECIPES[case]
    return parse_table(found) if isinstance(found, dict) else found


def prepared(case: str, **options: Any) -> tuple[nn.Module, ng.AdamW]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ng.prepare(
            llama(tied=case != "kept head"), recipe_of(case), lr=1e-2, max_grad_norm=1.0, compile=False, **options
        )


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(seed))


def learn(model: nn.Module, optimizer: ng.AdamW, own_data: int = 0) -> list[Any]:
    """The weights' fingerprint before, and after each step its loss, norm and the weights' fingerprint."""
    seen: list[Any] = [print_of(model, optimizer)]
    for step in range(3):
        inputs = tokens(10 * step + own_data)
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((float(loss.detach()), float(optimizer.grad_norm), print_of(model, optimizer)))  # type: ignore[arg-type]
    return seen


def print_of(model: nn.Module, optimizer: ng.AdamW) -> str:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return sharding.fingerprint_whole({name: optimizer.stored(p) for name, p in trained.items()})


# ── what ranks do ───────────────────────────────────────────────────────────────────────────────────────────────────


def shard_and_learn(rank: int) -> dict[str, Any]:
    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    hybrid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {case: learn(*prepared(case, mesh=line)) for case in RECIPES}
    found["none"] = learn(*prepared("word", mesh=line, shard="none"))
    found["hybrid"] = learn(*prepared("word", mesh=hybrid))
    found["offload"] = learn(*prepared("word", mesh=line, offload=True))
    found["own data"] = {
        how: whole_values(*prepared("kept norms", mesh=line, shard=how), rank) for how in sharding.SHARDINGS
    }
    found["groups"] = {case: shapes(prepared(case, mesh=line)[0]) for case in RECIPES}
    found["unequal"] = learn(*unequal(rank, line))
    found["frozen"] = learn(*frozen(line))
    found["by the caller"] = {case: learn(*sharded_by_the_caller(case, line)) for case in ("word", "float32")}
    found["refusals"] = refusals(line)
    found["fingerprints"] = fingerprints(line, hybrid)
    found["by columns"] = fingerprint_by_columns(line)
    found["audited"] = audited(rank, line)
    return found


def whole_values(model: nn.Module, optimizer: ng.AdamW, rank: int) -> dict[str, Tensor]:
    learn(model, optimizer, own_data=rank)
    values = {name: optimizer.stored(p) for name, p in model.named_parameters()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}


def shapes(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of modules with a group of their own, and of parameters that are whole."""
    units = {id(unit) for unit in sharding.fsdp_modules(model)}
    whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    return [name for name, module in model.named_modules() if id(module) in units], whole


def unequal(rank: int, mesh: Any) -> tuple[nn.Module, ng.AdamW]:
    """Models that differ from rank to rank until they are prepared."""
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + rank)
    return ng.prepare(model, "float32/float32", lr=1e-2, max_grad_norm=1.0, compile=False, mesh=mesh)


def frozen(mesh: Any = None) -> tuple[nn.Module, ng.AdamW]:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)  # type: ignore[union-attr]
    model.model.layers[0].self_attn.requires_grad_(False)  # type: ignore[union-attr, index]
    return ng.prepare(model, "float32/float32", lr=1e-2, max_grad_norm=1.0, compile=False, mesh=mesh)


def sharded_by_the_caller(case: str, mesh: Any) -> tuple[nn.Module, ng.AdamW]:
    model = llama()
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ng.prepare(model, recipe_of(case), lr=1e-2, max_grad_norm=1.0, compile=False)


def refusals(mesh: Any) -> dict[str, str]:
    sharded, unnamed = llama(), init_device_mesh("cpu", (1, dist.get_world_size()))
    fully_shard(sharded, mesh=mesh)
    parallel = DistributedDataParallel(llama())
    tries: dict[str, Any] = {
        "twice": lambda: ng.prepare(sharded, "float32/float32", mesh=mesh),
        "mixed": lambda: ng.prepare(sharded, recipe_of("kept norms")),
        "unnamed": lambda: ng.prepare(llama(), "float32/float32", mesh=unnamed),
        "word": lambda: ng.prepare(llama(), "float32/float32", mesh=mesh, shard="half"),
        "wrapped": lambda: ng.prepare(parallel, "bfloat16/word"),
        "replicas": lambda: sharding.make_mesh(dist.get_world_size(), "cpu", replicas=3),
    }
    said = {}
    for name, attempt in tries.items():
        with pytest.raises(RecipeError) as error:
            attempt()
        said[name] = str(error.value)
    return said


def fingerprints(line: Any, hybrid: Any) -> list[str]:
    """Of tensors cut evenly, unevenly and into nothing, over both meshes, and of a model that is whole."""
    found = []
    for mesh in (line, hybrid):
        net = nn.Module()
        for name, value in cut_tensors().items():
            net.register_parameter(name, nn.Parameter(value))
        fully_shard(net, mesh=mesh)
        found.append(sharding.fingerprint_whole(dict(net.named_parameters())))
    return found


def fingerprint_by_columns(line: Any) -> str:
    """As the matrices of tensor parallelism may be cut."""
    matrices = {name: value for name, value in cut_tensors().items() if value.ndim > 1}
    return sharding.fingerprint_whole({n: distribute_tensor(value, line, [Shard(1)]) for n, value in matrices.items()})


def audited(rank: int, line: Any) -> dict[str, tuple[list[float], tuple[float, ...]]]:
    """What an audit adds up where each rank noted ``rank + 1`` in every sum and count, and of ``lone`` the first alone."""
    net = nn.Module()
    for name, value in cut_tensors().items():
        net.register_parameter(name, nn.Parameter(value))
    fully_shard(net, mesh=line)
    names = {parameter: name for name, parameter in net.named_parameters()}
    mine = torch.full((len(KERNEL_SUMS),), rank + 1.0, dtype=torch.float64)
    counts = (rank + 1.0,) * len(HOST_SUMS)
    noted = [(parameter, mine, counts) for parameter, name in names.items() if rank == 0 or name != "lone"]
    joined = joined_over_ranks(list(names))(noted)
    return {names[parameter]: (sorted(set(sums.tolist())), counts) for parameter, sums, counts in joined}


def cut_tensors() -> dict[str, Tensor]:
    shapes = {"even": (8, 3), "uneven": (7, 2, 2), "lone": (1, 5), "vector": (9,)}
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in shapes.items()}


# ── what is found ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found; whichever worker of a session comes first starts them for all."""
    root = tmp_path_factory.getbasetemp()
    place = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "sharding"
    place.mkdir(exist_ok=True)
    with FileLock(place / "lock"):
        if not (place / "found").exists():
            (place / "found").write_bytes(pickle.dumps(run_ranks(shard_and_learn, 2, place / "ranks")))
    result: list[dict[str, Any]] = pickle.loads((place / "found").read_bytes())
    return result


@pytest.mark.parametrize("case", RECIPES)
def test_a_sharded_model_has_the_bits_of_one_process(case: str, found: list[Any], one_thread: None) -> None:
    expected = learn(*prepared(case))
    assert all(result[case] == expected for result in found)


@pytest.mark.parametrize("how", ["none", "hybrid", "offload"])
def test_replicas_and_offloaded_states_have_the_bits_of_one_process(
    how: str, found: list[Any], one_thread: None
) -> None:
    expected = learn(*prepared("word"))
    assert all(result[how] == expected for result in found)


@pytest.mark.parametrize("how", sharding.SHARDINGS)
def test_ranks_with_data_of_their_own_have_equal_weights(how: str, found: list[Any]) -> None:
    one, other = (result["own data"][how] for result in found)
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_is_in_another_format_has_a_group_of_its_own_or_stays_whole(found: list[Any]) -> None:
    layers = ["model.layers.0", "model.layers.1"]
    groups = found[0]["groups"]
    assert groups["word"] == groups["float32"] == (["", *layers], [])
    assert groups["kept head"] == (["", *layers, "lm_head"], [])
    units, whole = groups["kept norms"]
    assert units == ["", *layers] and len(whole) == 5 and all("norm" in name for name in whole)


def test_ranks_begin_with_the_weights_of_the_first(found: list[Any], one_thread: None) -> None:
    assert all(result["unequal"] == learn(*prepared("float32")) for result in found)


def test_frozen_parameters_are_sharded_and_stay(found: list[Any], one_thread: None) -> None:
    assert all(result["frozen"] == learn(*frozen()) for result in found)


@pytest.mark.parametrize("case", ["word", "float32"])
def test_a_model_that_the_caller_sharded_is_honoured(case: str, found: list[Any], one_thread: None) -> None:
    expected = learn(*prepared(case))
    assert all(result["by the caller"][case] == expected for result in found)


def test_what_cannot_be_is_refused_with_advice(found: list[Any]) -> None:
    said = found[0]["refusals"]
    assert "sharded already" in said["twice"] and "with mesh=" in said["mixed"]
    assert "mesh_dim_names" in said["unnamed"] and "full, none" in said["word"]
    assert "DistributedDataParallel" in said["wrapped"] and "divisor" in said["replicas"]


def test_fingerprints_of_shards_are_those_of_the_whole(found: list[Any]) -> None:
    expected = fingerprint_all(cut_tensors())
    assert all(result["fingerprints"] == [expected, expected] for result in found)


def test_fingerprints_of_tensors_cut_by_columns_are_those_of_the_whole(found: list[Any]) -> None:
    expected = fingerprint_all({name: value for name, value in cut_tensors().items() if value.ndim > 1})
    assert all(result["by columns"] == expected for result in found)


def test_an_audit_adds_up_what_the_ranks_saw_of_each_tensor(found: list[Any]) -> None:
    both, first = ([3.0], (3.0, 3.0)), ([1.0], (1.0, 1.0))
    for result in found:
        assert result["audited"] == {"even": both, "uneven": both, "lone": first, "vector": both}


def test_layers_that_share_parameters_with_others_are_left_to_the_root() -> None:
    model = llama()
    first, second = model.model.layers  # type: ignore[union-attr, misc]
    assert sharding.layers_of(model) == [first, second]
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    assert not sharding._owns_its_parameters(first, model)


def test_layers_of_any_model_are_members_of_its_lists() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=2, n_head=2))
    assert sharding.layers_of(gpt2) == list(gpt2.transformer.h)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3)
    assert sharding.layers_of(encoder) == list(encoder.layers)
    assert sharding.layers_of(nn.Sequential(nn.Linear(2, 2))) == []


def delayed(rank: int, how: str) -> str:
    """Weights after three steps of six micro-batches whose largest values differ, in a loop of one's own."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    size = dist.get_world_size()
    batches = torch.randn(3, 6, 4, 16) * torch.arange(1.0, 7.0).view(1, 6, 1, 1)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = "float8-delayed/word/reproducible"
        model, optimizer = ng.prepare(model, recipe, mesh=mesh, shard=how, average=False, compile=False)
    for leaves in batches.bfloat16():
        for turn, leaf in enumerate(leaves[rank::size]):
            with optimizer.reduction.micro_batch(is_last=turn == 6 // size - 1):
                (model(leaf).float().square().mean() / 6).backward()
        optimizer.step()
        optimizer.zero_grad()
    return print_of(model, optimizer)


@pytest.mark.parametrize("how", sharding.SHARDINGS)
def test_delayed_scales_are_those_of_all_ranks(how: str, tmp_path: Path) -> None:
    """In a loop of one's own too: the maximum over all micro-batches, whoever computed them."""
    assert len({bits for size in (1, 3) for bits in run_ranks(delayed, size, tmp_path, how)}) == 1
