"""The parts of a model, read from its modules and their shapes: no forward pass, no names of classes.

* A **run** is an outermost list of modules, or the longest row of one class in a ``ModuleDict`` or
  ``Sequential``. Its members are blocks if one holds two matrices or more: a list of heads is no
  run of blocks. The **blocks** are the run that stands nearest to the tokens' embedding, as a
  language model behind a tower does; of equally near ones the longest, and of those the last, since
  a decoder stands behind its encoder.
* **Experts** are stacked matrices, or modules of one class in a list, that something scores: a
  **router** is a matrix with a row for each expert, in the smallest module around them.
* **Adapters** are what PEFT's layers name.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from typing import NamedTuple

from torch import Tensor, nn


class Experts(NamedTuple):
    """The experts of one mixture.

    Attributes:
        owner: the module that holds them.
        stacks: names of the owner's weights ``[experts, …, …]``; none if each expert is a module.
    """

    owner: nn.Module
    stacks: list[str]


class Parts(NamedTuple):
    """The parts of a model.

    Attributes:
        blocks: empty if no run holds blocks.
        inside: all modules inside runs of blocks.
    """

    blocks: list[nn.Module]
    runs: list[list[nn.Module]]
    routers: list[nn.Module]
    experts: list[Experts]
    adapters: set[nn.Module]
    inside: set[nn.Module]


def parts(model: nn.Module) -> Parts:
    """Return the parts of a model. Wrappers (compilers, DDP, PEFT) may stay around it.

    Example:
        >>> body = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        >>> model = nn.ModuleDict({"embed": nn.Embedding(100, 8), "body": body, "out": nn.Linear(8, 100)})
        >>> parts(model).blocks == [*body]
        True
    """
    adapters = _adapters(model)
    runs = _runs(model, adapters)
    holders = _holders_of_tokens(model)
    words = max([len(table.weight) for table in holders], default=0)
    block_runs = [run for run in runs if _is_of_blocks(run, words)]
    places = list(chain.from_iterable(runs))
    experts = []
    routers: dict[nn.Module, None] = {}
    for place in places or [model]:
        for mixture, scorers in _mixtures(place):
            experts.append(mixture)
            routers |= dict.fromkeys(scorers)
    blocks = _blocks(model, block_runs, holders)
    inside = _with_children(chain.from_iterable(block_runs))
    return Parts(blocks, runs, list(routers), experts, adapters, inside)


# ── sets of modules ───────────────────────────────────────────────────────────────────────────────


def _with_children(modules: Iterable[nn.Module]) -> set[nn.Module]:
    result: set[nn.Module] = set()
    for module in modules:
        result.update(module.modules())
    return result


def _adapters(model: nn.Module) -> set[nn.Module]:
    adapters: set[nn.Module] = set()
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):
            holder = getattr(module, name, None)
            if name != "modules_to_save" and isinstance(holder, nn.Module):
                adapters.update(holder.modules())
    return adapters


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own weights by name. For a weight that is stored as codes stands a tensor of
    its shape and dtype, without memory: the module's ``stored_weights()``.

    Whatever asks for a model's weights asks here, so a model has the same parts in every form.
    """
    weights = dict[str, Tensor](module.named_parameters(recurse=False))
    stored = getattr(module, "stored_weights", dict)
    weights.update(stored())
    return weights


def _matrices(module: nn.Module) -> list[Tensor]:
    if isinstance(module, nn.Embedding):
        return []
    return [p for p in weights_of(module).values() if p.ndim == 2]


def _num_rows(module: nn.Module) -> int:
    """Return the outputs of a module that is one matrix ``[out, in]``; 0 for another module."""
    matrices = _matrices(module)
    return len(matrices[0]) if len(matrices) == 1 else 0


# ── runs ───────────────────────────────────────────────────────────────────────────


def _members(module: nn.Module) -> list[nn.Module]:
    """Return a container's longest row of members of one class that hold matrices.

    All members of a list count: blocks of attention and of Mamba take turns.
    """
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return []
    members = list(module.children())
    if not isinstance(module, nn.ModuleList):
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
    members = _members(module)
    if members:
        return [members]
    runs = []
    for child in module.children():
        runs.extend(_runs(child, skipped))
    return runs


def _blocks(
    model: nn.Module, runs: list[list[nn.Module]], holders: set[nn.Embedding]
) -> list[nn.Module]:
    """Return the run of blocks nearest to the tokens' embedding; empty without such a run."""
    parents = _parents(model)
    blocks = []
    best = (-len(parents), 0)
    owner = None
    for run in runs:
        steps = 0
        scope = parents[run[0]]
        while holders and scope in parents and holders.isdisjoint(scope.modules()):
            scope = parents[scope]
            steps += 1
        rank = (-steps, len(run))
        # Runs of one module take turns, and the first of them leads.
        if rank > best or (rank == best and scope is not owner):
            best = rank
            blocks = run
            owner = scope
    return blocks


def _parents(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the module that holds each module."""
    parents = {}
    for module in model.modules():
        for child in module.children():
            parents[child] = module
    return parents


def _holders_of_tokens(model: nn.Module) -> set[nn.Embedding]:
    """Return the embeddings of the tokens' table, the largest."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    most = max([len(table.weight) for table in tables], default=0)
    return {table for table in tables if len(table.weight) == most}


def _is_of_blocks(run: list[nn.Module], words: int) -> bool:
    """Return whether a member of a run holds two matrices or more, and does not end in one with a
    row for each word, as a head does.
    """
    for member in run:
        weights = [w for module in member.modules() for w in weights_of(module).values()]
        matrices = [w for w in weights if w.ndim > 1]
        if len(matrices) > 1:
            return len(matrices[-1]) != words
    return False


# ── mixtures ──────────────────────────────────────────────────────────────────────────────────────


def stacked(module: nn.Module) -> dict[str, int]:
    """Return the number of matrices of each parameter ``[matrices, …, …]`` of a module's own."""
    counts: dict[str, int] = {}
    if isinstance(module, nn.modules.conv._ConvNd | nn.Bilinear):
        return counts
    for name, parameter in weights_of(module).items():
        if parameter.ndim == 3 and min(parameter.shape) > 1 and parameter.is_floating_point():
            counts[name] = len(parameter)
    return counts


def _mixtures(block: nn.Module) -> Iterator[tuple[Experts, list[nn.Module]]]:
    """Yield the experts below a block, and what scores them.

    Without scores, stacks are experts where nothing else has a matrix: experts alone.
    """
    is_alone = not any(map(_matrices, block.modules()))
    parents = _parents(block)
    for owner in block.modules():
        stacks = stacked(owner)
        members = _members(owner)
        for count in {*stacks.values(), len(members)} - {0}:
            scorers = _scorers(owner, members, count, parents)
            if scorers or (stacks and is_alone):
                names = [name for name, number in stacks.items() if number == count]
                yield Experts(owner, names), scorers


def _scorers(
    owner: nn.Module, members: list[nn.Module], count: int, parents: dict[nn.Module, nn.Module]
) -> list[nn.Module]:
    """Return the matrices with a row for each expert in the smallest module around the experts,
    and the gates of one output beside them.
    """
    experts = _with_children(members) | {owner}
    scope: nn.Module | None = owner
    while scope is not None:
        scorers: list[nn.Module] = []
        gates: list[nn.Module] = []
        for module in scope.modules():
            if module in experts:
                continue
            if _num_rows(module) == count:
                scorers.append(module)
            elif isinstance(module, nn.Linear) and module.out_features == 1:
                gates.append(module)
        if scorers:
            return scorers + gates
        scope = parents.get(scope)
    return []
