"""The parts of a model, read from its modules and their shapes: no forward pass, no names of classes.

* A **run** is an outermost list of modules, or the longest row of one class in a ``ModuleDict`` or
  ``Sequential``. The **blocks** are the run on the path to the head.
* A **head** is a matrix of the vocabulary or of the labels outside all runs.
* **Experts** are stacked matrices, or modules of one class in a list, that something scores: a
  **router** is a matrix with a row for each expert, in the smallest module around them.
* **Adapters** are what PEFT's layers name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from torch import Tensor, nn


class Experts(NamedTuple):
    """The experts of one mixture.

    Attributes:
        owner: the module that holds them.
        number: of them.
        stacks: names of the owner's weights ``[experts, …, …]``; none if each expert is a module.
    """

    owner: nn.Module
    number: int
    stacks: list[str]


class Parts(NamedTuple):
    """The parts of a model. ``blocks`` is empty if it is unclear which run leads to the head."""

    blocks: list[nn.Module]
    runs: list[list[nn.Module]]
    heads: list[nn.Module]
    routers: list[nn.Module]
    experts: list[Experts]
    adapters: set[nn.Module]

    def stacks(self) -> dict[nn.Module, list[str]]:
        """Return the names of stacked weights of experts by the module that owns them."""
        by_owner: dict[nn.Module, list[str]] = {}
        for experts in self.experts:
            if experts.stacks:
                by_owner.setdefault(experts.owner, []).extend(experts.stacks)
        return by_owner


def parts(model: nn.Module) -> Parts:
    """Return the parts of a model. Wrappers (compilers, DDP, PEFT) may stay around it.

    Example:
        >>> class Gpt(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed, self.out = nn.Embedding(100, 8), nn.Linear(8, 100)
        ...         self.body = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> gpt = Gpt()
        >>> parts(gpt).heads == [gpt.out], parts(gpt).blocks == [*gpt.body]
        (True, True)
    """
    adapters = _adapters(model)
    named_heads = _named_heads(model)
    runs = _runs(model, adapters | named_heads)
    heads = _heads(model, runs, adapters, named_heads)
    blocks: list[nn.Module] = []
    if heads or len(runs) == 1:
        blocks = _run_before_head(model, heads, adapters | named_heads)
    places: list[nn.Module] = [block for run in runs for block in run]
    if not heads and not _embeddings(model):
        places = [model]  # a part of a model, such as a mixture alone
    experts: list[Experts] = []
    routers: dict[nn.Module, None] = {}
    for place in places or [model]:
        for mixture, scorers in _mixtures(place):
            experts.append(mixture)
            routers |= dict.fromkeys(scorers)
    return Parts(blocks, runs, heads, list(routers), experts, adapters)


def moving_statistics(model: nn.Module) -> dict[str, nn.Module]:
    """Return batch norms whose weights are frozen, and whose statistics follow the batches, by name."""
    moving: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or module.running_mean is None:
            continue
        if module.training and module.momentum != 0:
            trains = {p.requires_grad for p in module.parameters()}
            if trains == {False}:
                moving[name] = module
    return moving


# ── sets of modules ───────────────────────────────────────────────────────────────────────────────


def _with_children(modules: Iterable[Any]) -> set[nn.Module]:
    result: set[nn.Module] = set()
    for module in modules:
        if isinstance(module, nn.Module):
            result.update(module.modules())
    return result


def _adapters(model: nn.Module) -> set[nn.Module]:
    adapters: list[Any] = []
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):
            if name != "modules_to_save":
                adapters.append(getattr(module, name, None))
    return _with_children(adapters)


def _embeddings(model: nn.Module) -> list[nn.Embedding]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def _matrices(module: nn.Module) -> list[Tensor]:
    if isinstance(module, nn.Embedding):
        return []
    return [p for p in module.parameters(recurse=False) if p.ndim == 2]


def _num_rows(module: nn.Module) -> int:
    """Return the outputs of a module that is one matrix ``[out, in]``; 0 for another module."""
    matrices = _matrices(module)
    return len(matrices[0]) if len(matrices) == 1 else 0


# ── runs, blocks, heads ───────────────────────────────────────────────────────────────────────────


def _members(module: nn.Module, of_one_class: bool) -> list[nn.Module]:
    """Return a container's longest row of members of one class that hold matrices.

    Without ``of_one_class``, all members of a list count: blocks of attention and of Mamba take
    turns.
    """
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return []
    members = list(module.children())
    if of_one_class or not isinstance(module, nn.ModuleList):
        rows = [list(row) for _, row in groupby(members, type)]
        members = max(rows, key=len, default=[])
        if len(members) < 2:
            return []
    with_matrices = []
    for member in members:
        if any(map(_matrices, member.modules())):
            with_matrices.append(member)
    return with_matrices


def _runs(module: nn.Module, skipped: set[nn.Module]) -> list[list[nn.Module]]:
    """Return the outermost runs below a module."""
    if module in skipped:
        return []
    members = _members(module, of_one_class=False)
    if members:
        return [members]
    runs = []
    for child in module.children():
        runs.extend(_runs(child, skipped))
    return runs


def _run_before_head(
    module: nn.Module, heads: list[nn.Module], skipped: set[nn.Module]
) -> list[nn.Module]:
    """Return the run nearest to the head.

    Go to the child that holds both the head and a run. Where none does, take the longest run of the
    module itself, else the last child with a run: an encoder stands before its decoder, and a tower
    before its language model.
    """
    members = _members(module, of_one_class=False)
    children = [child for child in module.children() if _runs(child, skipped)]
    if members or not children:
        return members
    around_head = []
    for child in children:
        if not _with_children([child]).isdisjoint(heads):
            around_head.append(child)
    if around_head:
        nearest = around_head[-1]
    else:
        nearest = children[-1]
        longest = 0
        for child in children:
            length = len(_members(child, of_one_class=False))
            if length > longest:
                nearest = child
                longest = length
    return _run_before_head(nearest, heads, skipped)


def _named_heads(model: nn.Module) -> set[nn.Module]:
    heads: list[Any] = []
    for module in model.modules():
        named: Any = getattr(module, "get_output_embeddings", None)
        if named is not None:
            heads.append(named())
    return _with_children(heads)


def _heads(
    model: nn.Module, runs: list[list[nn.Module]], adapters: set[nn.Module], named: set[nn.Module]
) -> list[nn.Module]:
    """Return the linear layers that the model names or ties to an embedding.

    Else the last one with an output for each token, else with one for each label.
    """
    candidates: list[nn.Linear] = []
    inside = adapters | _with_children(block for run in runs for block in run)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module not in inside:
            candidates.append(module)
    tables = [embedding.weight for embedding in _embeddings(model)]
    is_tied = {id(table) for table in tables}
    heads: list[nn.Module] = []
    for linear in candidates:
        if linear in named or id(linear._parameters.get("weight")) in is_tied:
            heads.append(linear)
    if heads:
        return heads
    config = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    sizes = [len(table) for table in tables]
    # A table of positions may be larger than that of tokens, which stands first.
    tokens = {*sizes[:1], max(sizes, default=0), getattr(config, "vocab_size", 0)}
    for counts in (tokens, {getattr(config, "num_labels", 0)}):
        matches: list[nn.Module] = [m for m in candidates if m.out_features in counts]
        if matches:
            return matches[-1:]
    return []


# ── mixtures ──────────────────────────────────────────────────────────────────────────────────────


def stacked(module: nn.Module) -> dict[str, int]:
    """Return the number of matrices of each parameter ``[matrices, …, …]`` of a module's own."""
    counts: dict[str, int] = {}
    if isinstance(module, nn.modules.conv._ConvNd | nn.Bilinear):
        return counts
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3 and min(parameter.shape) > 1 and parameter.is_floating_point():
            counts[name] = len(parameter)
    return counts


def _mixtures(block: nn.Module) -> Iterator[tuple[Experts, list[nn.Module]]]:
    """Yield the experts below a block, and what scores them.

    Without scores, stacks are experts where a module says how many it holds, as ``num_experts``, or
    where nothing else has a matrix: experts alone.
    """
    is_alone = not any(map(_matrices, block.modules()))
    parents = {child: module for module in block.modules() for child in module.children()}
    for owner in block.modules():
        stacks = stacked(owner)
        members = _members(owner, of_one_class=True)
        declared = set()
        for name, value in vars(owner).items():
            if "expert" in name and type(value) is int:
                declared.add(value)
        for count in {*stacks.values(), len(members)} - {0}:
            scorers = _scorers(owner, members, count, parents)
            if scorers or (stacks and (is_alone or count in declared)):
                names = [name for name, number in stacks.items() if number == count]
                yield Experts(owner, count, names), scorers


def _scorers(
    owner: nn.Module, members: list[nn.Module], count: int, parents: dict[nn.Module, nn.Module]
) -> list[nn.Module]:
    """Return the matrices with a row for each expert in the smallest module around the experts,
    and the gates of one output beside them.
    """
    experts = _with_children(members) | {owner}
    scope: nn.Module | None = owner
    while scope is not None:
        beside = [module for module in scope.modules() if module not in experts]
        scorers = [module for module in beside if _num_rows(module) == count]
        if scorers:
            for module in beside:
                if isinstance(module, nn.Linear) and module.out_features == 1:
                    scorers.append(module)
            return scorers
        scope = parents.get(scope)
    return []
