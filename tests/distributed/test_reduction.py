"""Gradients summed exactly across ranks: FSDP2 with replicas and without, replicated, one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import expectations
import narrowgauge as ng
from distributed.models import Leaf, full_tensor_of, gradients_of, mesh_of
from narrowgauge.distributed.reduction import GradientReduction
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.hashing import fingerprint_all
from narrowgauge.spec.reductions import REDUCTIONS
from ranks import run_ranks
from text.refusals import refused

KINDS = ("sharded", "replicas", "replicated")


def placed(kind: str) -> nn.Module:
    """The model of tests, on the ranks of the default process group."""
    model = Leaf()
    if kind in ("sharded", "replicas", "shards of one"):
        mesh = mesh_of(kind)
        vectors = {model.gain, model.unused}
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=vectors)
    return model


def all_gradients(model: nn.Module) -> dict[str, Tensor]:
    """All gradients."""
    gradients = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            gradients[name] = full_tensor_of(p.grad)
    return gradients


def step(reduction: GradientReduction, model: nn.Module, leaves: list[int | None]) -> None:
    """One step of these micro-batches; ``None``: an absent one."""
    for place, leaf in enumerate(leaves):
        with reduction.micro_batch(is_last=place == len(leaves) - 1, is_absent=leaf is None):
            model(gradients_of(leaf or 0)).backward()


def expected(leaves: range) -> dict[str, Tensor]:
    sums = {}
    for name in gradients_of(0):
        sums[name] = sum(gradients_of(leaf)[name].double() for leaf in leaves)
    return sums


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_dtype=False)


def test_every_reduction_has_its_figures():
    figures = {}
    for name, row in REDUCTIONS.items():
        figures[name] = (
            tuple(map(row.bytes_per_element, ("float32", "bfloat16"))),
            row.order_invariant,
        )
    expected = {}
    for name, row in expectations.REDUCTIONS.items():
        expected[name] = (row.wire_bytes, row.order_invariant)
    assert figures == expected, "tests/expectations.py states each reduction a second time"


def every_kind(rank: int):
    """Five leaves on four ranks, two rounds: the gradients of each kind, and averaged ones."""
    results = []
    for kind in KINDS:
        model = placed(kind)
        reduction = ng.reduce_gradients_with(model, average=False)
        step(reduction, model, [rank, 4 if rank == 0 else None])
        results.append(all_gradients(model))
        model = placed(kind)
        step(ng.reduce_gradients_with(model), model, [rank])
        results.append(all_gradients(model))
    return results


def on_four(rank: int) -> dict[str, Any]:
    return {
        "kinds": every_kind(rank),
        "float32": in_float32(rank),
        "restored": restored(rank),
        "replaced": replaced(rank),
        "refusal": refusal(),
        "in ddp": in_ddp(),
        "other experts": other_experts(rank),
    }


class Experts(nn.ModuleList):
    def forward(self, expert: int) -> Tensor:
        return self[expert](torch.ones(1, 8))


def in_ddp() -> str:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(RecipeError) as error:
        ng.reduce_gradients_with(wrapped)
    return str(error.value)


def other_experts(rank: int) -> str:
    """What is said where ranks use experts of unequal size in one group of FSDP2."""
    model = Experts(nn.Linear(8, 8 * size) for size in (1, 5, 2, 3))
    fully_shard(model, mesh=mesh_of("sharded"))
    reduction = ng.reduce_gradients_with(model, average=False)
    with pytest.raises(RecipeError) as error, reduction.micro_batch():
        model(rank).sum().backward()
    return str(error.value)


def test_what_ranks_cannot_sum_is_refused_on_each_before_it_is_sent(
    four_ranks,
):
    for result in four_ranks:
        assert "a sharded parameter of a group got none" in result["other experts"]
        assert "Give the model that it wraps" in result["in ddp"]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory):
    return run_ranks(on_four, 4, tmp_path_factory.mktemp("four"))


def test_every_kind_of_model_gets_the_sum_or_the_average(four_ranks):
    average = {name: total / 4 for name, total in expected(range(4)).items()}
    for result_of_rank in four_ranks:
        results = result_of_rank["kinds"]
        for first, wanted in enumerate((expected(range(5)), average)):
            for result in results[first::2]:
                assert_close(result, wanted, 1e-6)
            assert len({fingerprint_all(result) for result in results[first::2]}) == 1


def in_float32(rank: int) -> dict[str, Tensor]:
    """The gradients of bfloat16 weights that autograd adds in float32, where ranks have none."""
    model = Leaf(torch.bfloat16)
    reduction = ng.reduce_gradients_with(model, average=False)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    step(reduction, model, [0 if rank == 0 else None])
    return all_gradients(model)


def test_ranks_without_a_gradient_send_zeros_in_its_format(
    four_ranks,
):
    for result in four_ranks:
        assert {value.dtype for value in result["float32"].values()} == {torch.float32}
        assert_close(result["float32"], expected(range(1)), 1e-2)


def restored(rank: int):
    """The gradients of FSDP2's own average, without a reduction, and after one was closed."""
    results = []
    for closes in (False, True):
        for kind in ("sharded", "replicas"):
            model = placed(kind)
            if closes:
                ng.reduce_gradients_with(model, "reproducible").close()
            model(gradients_of(rank)).backward()
            results.append(
                {name: value for name, value in all_gradients(model).items() if name != "gain"}
            )
    return results


def test_a_closed_reduction_leaves_fsdp_as_it_was(
    four_ranks,
):
    for result in four_ranks:
        results = result["restored"]
        for plain, closed in zip(results[:2], results[2:], strict=True):
            assert plain
            assert_close(closed, plain, 0.0)


def replaced(rank: int):
    """Gradients where a shard was replaced, as ``load_state_dict(assign=True)`` does, before the
    first pass and after it.
    """
    results = []
    for is_used in (False, True):
        model = placed("sharded")
        if is_used:
            model(gradients_of(0)).backward()
            model.zero_grad()
        value = distribute_tensor(Leaf().head.detach(), mesh_of("sharded"), [Shard(0)])
        model.head = model.tied = nn.Parameter(value)
        step(ng.reduce_gradients_with(model, average=False), model, [rank])
        results.append(all_gradients(model))
    return results


def refusal() -> str:
    """What is said of a shard that nobody could sum."""
    sharded_by_hand = placed("sharded")
    sharded_by_hand.extra = nn.Parameter(
        distribute_tensor(torch.ones(4), mesh_of("sharded"), [Shard(0)])
    )
    with pytest.raises(RecipeError) as error:
        ng.reduce_gradients_with(sharded_by_hand)
    return str(error.value)


def test_shards_that_were_replaced_are_summed_and_others_refused(
    four_ranks,
):
    """Once parameters that FSDP2 did not know yet were taken for whole ones, shards of different
    elements were added up.
    """
    for result in four_ranks:
        for gradients in result["replaced"]:
            assert_close(gradients, expected(range(4)), 1e-6)
        assert "Cannot sum the gradient of 'extra'" in result["refusal"]


def test_a_failure_discards_the_step():
    model = Leaf()
    reduction = ng.reduce_gradients_with(model, "reproducible")
    with reduction.micro_batch(is_last=False):
        model(gradients_of(3)).backward()
    with pytest.raises(KeyError), reduction.micro_batch(is_last=False):
        raise KeyError
    step(reduction, model, [0, 1])
    assert_close(all_gradients(model), expected(range(2)), 1e-6)


def test_what_cannot_be_done_is_refused():
    model = Leaf()
    with refused("a sum by float32"):
        ng.reduce_gradients_with(model, "float32")
    with refused("running statistics"):
        ng.reduce_gradients_with(nn.Sequential(nn.BatchNorm1d(2)))
    reduction = ng.reduce_gradients_with(model, "reproducible")
    step(reduction, model, [0, 1])
    with refused("gradients of an earlier step"):
        step(reduction, model, [0])
    model.zero_grad()
    with refused("gradients that were cleared"), reduction.micro_batch():
        model(gradients_of(0)).backward()
        model.zero_grad()  # as a step in the backward pass does
    with (
        pytest.raises(RuntimeError),
        reduction.micro_batch(),
        reduction.micro_batch(),
    ):
        pass


def test_a_parameter_that_nobody_sums_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    reduction = ng.reduce_gradients_with(model, "reproducible")
    model[0].requires_grad_(True)
    with refused("parameters that were added"), reduction.micro_batch():
        pass


def test_a_closed_reduction_is_refused_and_gives_way_to_another():
    model = nn.Linear(2, 2, bias=False)
    first = ng.reduce_gradients_with(model, "reproducible", average=False)
    first.close()
    with pytest.raises(RuntimeError), first.micro_batch():
        pass
    second = ng.reduce_gradients_with(model, "reproducible", average=False)
    with second.micro_batch():
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.unique().tolist() == [1.0]
