"""The order in which PyTorch adds, as summation trees: revealed from outside, by terms that swallow others.

Floating-point addition is not associative: two machines that add the same terms in another order get other bits. The order is a
*summation tree*: leaves are terms, inner nodes are additions. Nothing documents it, yet it shows in the results. Make term ``i``
a large ``M``, term ``j`` its negative, and all others 1. Each 1 that is added to ``M`` before ``-M`` arrives disappears in the
rounding; those that arrive later are counted by the result. So the result is the number of terms *outside* the smallest subtree
that holds both ``i`` and ``j``, and from these sizes the tree follows.

Where terms cannot be negative (the exponentials of a softmax), a triple tells as much: beside a term of 1, two terms of 0.4
units in its last place disappear one by one, and count if they were added to each other first.

Source: Xie, Gao, Wang, Xue, *Revealing Floating-Point Accumulation Orders in Software/Hardware Implementations* (FPRev), arXiv
2411.00442; the triples are ours.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, islice
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.gauges.probes.roundings import between, bits_of

Tree: TypeAlias = int | tuple["Tree", ...]
"""A term's number, or the trees whose sums are added at once: two for an addition, more for a fused sum."""
Pair: TypeAlias = tuple[int, int]
Sizes: TypeAlias = Callable[[list[Pair]], list[float]]
"""For each pair of terms, the number of terms in the smallest subtree that holds both."""

_NUM_CHECKS = 16


def reveal(num_terms: int, sizes: Sizes) -> Tree | None:
    """The summation tree of a function of at least two terms, in canonical form: the subtree with the lowest term first.

    ``sizes`` is called once for each level of the tree, and once to check. Returns ``None`` where its measurements belong to no
    tree: the terms are scaled as they are added, or added in a format too wide for a term to disappear.

    Cost: between ``num_terms`` and its square pairs.
    Example:
        >>> def sizes(pairs):  # of (0 + 1) + (2 + 3)
        ...     return [2 if set(pair) in ({0, 1}, {2, 3}) else 4 for pair in pairs]
        >>> reveal(4, sizes)
        ((0, 1), (2, 3))
    """
    measured: dict[Pair, float] = {}
    pending = [list(range(num_terms))]
    while pending:
        pairs = [(group[0], other) for group in pending for other in group[1:]]
        measured |= zip(pairs, sizes(pairs), strict=True)
        pending = [part for group in pending for _, part in _parts(group, measured) if len(part) > 1]
    tree, _ = _built(list(range(num_terms)), measured)
    # Pairs beyond those from which the tree is built.
    every = max(1, num_terms * (num_terms - 1) // 2 // _NUM_CHECKS)
    checks = list(islice(combinations(range(num_terms), 2), 0, None, every))
    measured |= zip(checks, sizes(checks), strict=True)
    return tree if subtree_sizes(tree, list(measured)) == list(measured.values()) else None


def _parts(group: list[int], measured: dict[Pair, float]) -> list[tuple[float, list[int]]]:
    """The other terms of a group by the size of the subtree in which each meets the first term, the smallest first."""
    first, *others = group
    by_size: dict[float, list[int]] = {}
    for other in others:
        by_size.setdefault(measured[first, other], []).append(other)
    return sorted(by_size.items())


def _built(group: list[int], measured: dict[Pair, float]) -> tuple[Tree, float]:
    """The tree of a group's terms, and the size measured at its root."""
    tree: Tree = group[0]
    root = 1.0
    for size, part in _parts(group, measured):
        below, size_below = _built(part, measured)
        # Terms that meet each other where they meet the first one are added there all at once.
        joined = below if size_below == size and isinstance(below, tuple) else (below,)
        tree, root = (tree, *joined), size
    return tree, root


def leaves(tree: Tree) -> list[int]:
    """The terms of a tree.

    Example:
        >>> leaves(((0, 2), 1))
        [0, 2, 1]
    """
    found, pending = [], [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, int):
            found.append(node)
        else:
            pending.extend(reversed(node))
    return found


def subtree_sizes(tree: Tree, pairs: Iterable[Pair]) -> list[int]:
    """For each pair of terms, the number of terms in the smallest subtree that holds both.

    Example:
        >>> subtree_sizes(((0, 2), 1), [(0, 2), (0, 1), (1, 2)])
        [2, 3, 3]
    """
    sizes: dict[int, int] = {}
    above: dict[int, list[int]] = {term: [] for term in leaves(tree)}
    for node in _inner_nodes(tree):
        terms = leaves(node)
        sizes[id(node)] = len(terms)
        for term in terms:
            above[term].append(id(node))
    return [next(sizes[node] for node in above[one] if node in set(above[other])) for one, other in pairs]


def _inner_nodes(tree: Tree) -> Iterator[tuple[Tree, ...]]:
    """All additions, those deeper in the tree first."""
    ordered, pending = [], [tree]
    while pending:
        node = pending.pop()
        if not isinstance(node, int):
            ordered.append(node)
            pending.extend(node)
    return reversed(ordered)


def notation(tree: Tree) -> str:
    """A tree in brackets, the subtree with the lowest term first: equal for equal trees.

    Example:
        >>> notation((2, (1, 0)))
        '((0 1) 2)'
    """
    texts: dict[int, tuple[int, str]] = {}

    def text_of(node: Tree) -> tuple[int, str]:
        return (node, str(node)) if isinstance(node, int) else texts[id(node)]

    for node in _inner_nodes(tree):
        ordered = sorted(map(text_of, node))
        texts[id(node)] = (ordered[0][0], f"({' '.join(text for _, text in ordered)})")
    return text_of(tree)[1]


def signature(tree: Tree) -> str:
    """A short hash of the notation, equal for equal trees."""
    return hashlib.sha256(notation(tree).encode()).hexdigest()[:8]


def describe(tree: Tree, positions: Sequence[int] = ()) -> str:
    """The order of a sum in words.

    Args:
        tree: of terms numbered from 0.
        positions: where the terms stand among those that are really added, ascending; empty if they are all of those.
    Returns:
        ``sequential``, ``pairwise``, ``fused``; ``4 strided sums (…), joined …`` where the term at ``i`` goes into sum
        ``i mod 4``, as the lanes of a vector do; ``blocks of 8 (…), joined …``; or the depth of any other tree.
    Example:
        >>> describe((((0, 1), 2), 3)), describe(((0, 1), (2, 3))), describe((0, 1, 2, 3))
        ('sequential', 'pairwise', 'fused')
        >>> describe((((0, 4), (2, 6)), ((1, 5), (3, 7))))
        '4 strided sums, joined by 2 strided sums'
    """
    positions = positions or range(len(leaves(tree)))
    if named := _name(tree):
        return named
    clades = {frozenset(leaves(node)): node for node in _inner_nodes(tree)} | {frozenset({t}): t for t in leaves(tree)}
    for words, groups, stride in _groupings(positions):
        nodes = [clades.get(frozenset(group)) for group in groups]
        found = [node for node in nodes if node is not None]
        if len(found) == len(groups):
            inner = {
                describe(_renumbered(node, group), [positions[term] // stride for term in group])
                for node, group in zip(found, groups, strict=True)
                if len(group) > 2
            }
            each = f" ({inner.pop()})" if len(inner) == 1 else ""
            outer = _quotient(tree, found)
            return f"{words}{each}" + ("" if len(found) == 2 else f", joined {_by(describe(outer))}")
    return f"irregular, depth {depth(tree)}"


def _name(tree: Tree) -> str:
    canonical, num_terms = notation(tree), len(leaves(tree))
    named = [words for words, built in _NAMED.items() if canonical == notation(built(num_terms))]
    blocks = _consecutive_blocks(tree)
    return named[0] if named else f"{blocks} consecutive blocks (sequential), joined sequential" if blocks else ""


def _consecutive_blocks(tree: Tree) -> int:
    """How many blocks of any length, each summed in order, are added one after the other; 0 where it is no such sum."""
    blocks, node = 1, tree
    while not isinstance(node, int):
        ordered = sorted(node, key=lambda child: min(leaves(child)))
        below = leaves(ordered[-1])
        if len(ordered) != 2 or max(leaves(ordered[0])) > min(below):
            return 0
        if len(below) > 1:
            blocks += 1
            if notation(ordered[1]) != notation(sequential(sorted(below))):
                return 0
        node = ordered[0]
    return blocks


def depth(tree: Tree) -> int:
    """The largest number of additions that a term goes through.

    Example:
        >>> depth((((0, 1), 2), 3))
        3
    """
    depths: dict[int, int] = {}
    for node in _inner_nodes(tree):
        depths[id(node)] = 1 + max(0 if isinstance(child, int) else depths[id(child)] for child in node)
    return 0 if isinstance(tree, int) else depths[id(tree)]


def sequential(terms: int | Iterable[int]) -> Tree:
    """The tree of a loop, ``((0 + 1) + 2) + 3``, over so many terms, or over these numbers in the order of the loop."""
    first, *others = range(terms) if isinstance(terms, int) else terms
    tree: Tree = first
    for term in others:
        tree = (tree, term)
    return tree


def pairwise(terms: int | Sequence[int]) -> Tree:
    """The tree of a sum by halves: ``(0 + 1) + (2 + 3)``."""
    terms = range(terms) if isinstance(terms, int) else terms
    if len(terms) == 1:
        return terms[0]
    middle = (len(terms) + 1) // 2
    return (pairwise(terms[:middle]), pairwise(terms[middle:]))


_NAMED: dict[str, Callable[[int], Tree]] = {
    "sequential": sequential,
    "sequential, last term first": lambda num_terms: sequential(reversed(range(num_terms))),
    "pairwise": pairwise,
    "fused": lambda num_terms: tuple(range(num_terms)),
}


def _groupings(positions: Sequence[int]) -> Iterator[tuple[str, list[list[int]], int]]:
    """Ways to share terms among partial sums: in words, as lists of terms, and the distance of two terms of a sum.

    Many strided sums first, then long blocks; only where most partial sums have several terms.
    """
    powers = [2**power for power in reversed(range(1, (positions[-1] + 1).bit_length()))]
    for stride in powers:
        yield from _grouping(f"{stride} strided sums", [position % stride for position in positions], stride)
    for size in powers:
        yield from _grouping(f"blocks of {size}", [position // size for position in positions], 1)


def _grouping(words: str, keys: list[int], stride: int) -> Iterator[tuple[str, list[list[int]], int]]:
    groups: dict[int, list[int]] = {}
    for term, key in enumerate(keys):
        groups.setdefault(key, []).append(term)
    if 2 <= len(groups) <= len(keys) // 2:
        yield words, list(groups.values()), stride


def _quotient(tree: Tree, parts: Sequence[Tree]) -> Tree:
    numbers = {frozenset(leaves(part)): number for number, part in enumerate(parts)}
    built: dict[frozenset[int], Tree] = {**{frozenset({t}): t for t in leaves(tree)}, **numbers}
    for node in _inner_nodes(tree):
        terms = frozenset(leaves(node))
        if terms not in numbers:
            built[terms] = tuple(built[frozenset(leaves(child))] for child in node)
    return built[frozenset(leaves(tree))]


def _renumbered(tree: Tree, terms: list[int]) -> Tree:
    places = {term: place for place, term in enumerate(terms)}
    if isinstance(tree, int):
        return places[tree]
    built: dict[int, Tree] = {}
    for node in _inner_nodes(tree):
        built[id(node)] = tuple(places[child] if isinstance(child, int) else built[id(child)] for child in node)
    return built[id(tree)]


def _by(words: str) -> str:
    """The order of the joins, as it follows ``joined``."""
    if words.startswith("irregular"):
        return words.replace("irregular", "irregularly", 1)
    if words == "fused":
        return "at once"
    return f"by {words}" if words[0].isdigit() or words.startswith("blocks") else words


# ── sums of PyTorch as functions of rows of terms ──────────────────────────────────────────────────────────────────────
#
# A row of ``length`` values holds the terms at some positions and zeros elsewhere, so the tree of 64 terms out of 1,024 is the
# tree of all 1,024 with the others left out. Many rows are measured at a time, as the rows of a matmul or the values of a head;
# the measurement also checks that all of them are added alike.


_LARGE = 2.0**100  # swallows ones in float32 and float64, and is a value of bfloat16
_LOST = 0.4 * 2.0**-23  # of a sum of 1: one such term is rounded away, two added to each other are not


@dataclass(frozen=True)
class Sum:
    """A function that adds.

    Args:
        add: from rows, float32 ``(rows, length)``, to their sums ``(rows,)``; of a positive sum, to whether each is above its
            largest term, which stands at the given positions.
        positions: of the terms in a row, ascending.
        num_rows: rows in a call; always so many, since the shape may decide the order.
        is_positive: terms are exponentials.
    """

    add: Callable[..., Tensor]
    length: int
    positions: tuple[int, ...]
    num_rows: int
    is_positive: bool = False


def measure_sum(name: str, device: torch.device, until: float = math.inf) -> str:
    """The order of a sum of :data:`SUMS` in words, and a hash of its tree; where it has none, a hash of its bits.

    Gives up with a ``TimeoutError`` at ``until``, by ``time.perf_counter``.

    Cost: 1 to 100 ms on a CPU.
    """
    found = SUMS[name]
    sizes = _sizes_of_positive if found.is_positive else _sizes_of_signed
    tree = reveal(len(found.positions), partial(sizes, found, device, until))
    if tree is not None:
        return f"{describe(tree, found.positions)} #{signature(tree)}"
    rows = between(-1.0, 1.0, found.num_rows * found.length).view(found.num_rows, found.length).to(device)
    bits = rows.softmax(-1) if found.is_positive else found.add(rows)
    return f"no tree of additions, bits #{bits_of(bits)}"


def _sizes_of_signed(found: Sum, device: torch.device, until: float, pairs: list[Pair]) -> list[float]:
    """Sizes of subtrees, from a large term, its negative and ones."""
    places = torch.tensor(found.positions, dtype=torch.int64)
    row = torch.zeros(found.length, dtype=torch.float32)
    row[places] = 1.0
    terms = torch.tensor([_LARGE, -_LARGE], dtype=torch.float32)
    counted = _evaluated(found, row, places[torch.tensor(pairs, dtype=torch.int64)], terms, device, until)
    return [len(places) - outside for outside in counted.tolist()]


def _sizes_of_positive(found: Sum, device: torch.device, until: float, pairs: list[Pair]) -> list[float]:
    """Sizes of subtrees, from a term of 1 and two that disappear unless they are added to each other first.

    A third term to which they come one by one joins below their sum: it is inside their subtree.
    """
    terms = range(len(found.positions))
    triples = [(third, *pair) for pair in pairs for third in terms if third not in pair]
    row = torch.full((found.length,), -math.inf, dtype=torch.float32)
    values = torch.tensor([0.0, math.log(_LOST), math.log(_LOST)], dtype=torch.float32)
    places = torch.tensor(found.positions, dtype=torch.int64)[torch.tensor(triples, dtype=torch.int64)]
    outside = _evaluated(found, row, places, values, device, until).view(len(pairs), -1).sum(1)
    return [len(terms) - number for number in outside.tolist()]


def _evaluated(found: Sum, row: Tensor, places: Tensor, values: Tensor, device: torch.device, until: float) -> Tensor:
    """The sums, ``(rows,)`` on the CPU, of rows that hold the same values at different places.

    ``places`` is ``(rows, values)``; the first of the values is the largest. Everywhere else the rows are equal to ``row``.
    """
    results = []
    row, places, values = row.to(device), places.to(device), values.to(device)
    rows = row.repeat(found.num_rows, 1)
    lines = torch.arange(found.num_rows, dtype=torch.int64, device=device)[:, None]
    for part in places.split(found.num_rows):
        if time.perf_counter() > until:
            raise TimeoutError
        # Unused rows repeat the last one. Only what changes is written: large copies would share the work among threads.
        at = torch.cat([part, part[-1:].expand(found.num_rows - len(part), -1)])
        rows[lines, at] = values
        sums = found.add(rows, at[:, 0]) if found.is_positive else found.add(rows)
        results.append(sums.float().cpu()[: len(part)])
        rows[lines, at] = row[at]
    return torch.cat(results)


# ── the sums ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _columns(rows: Tensor) -> Tensor:
    return rows.t().contiguous().sum(0)


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(-1) * rows.shape[1]


def _layer_norm(rows: Tensor) -> Tensor:
    return torch.native_layer_norm(rows, [rows.shape[1]], None, None, 1e-5)[1].flatten() * rows.shape[1]


def _softmax(rows: Tensor, largest: Tensor) -> Tensor:
    return rows.softmax(-1).gather(1, largest[:, None])[:, 0] < 1


def _log_softmax(rows: Tensor, largest: Tensor) -> Tensor:
    return rows.log_softmax(-1).gather(1, largest[:, None])[:, 0] < 0


def _linear(rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.ones(rows.shape[0], rows.shape[1], dtype=dtype, device=rows.device)
    return F.linear(rows.to(dtype), weight)[:, 0]


def _weight_gradient(rows: Tensor) -> Tensor:
    grad, inputs = (
        rows.t().contiguous(),
        torch.ones(rows.shape[1], rows.shape[0], dtype=torch.float32, device=rows.device),
    )
    return (grad.t() @ inputs)[:, 0]


def _batched(rows: Tensor) -> Tensor:
    left = rows.view(8, -1, rows.shape[1])
    return torch.bmm(left, torch.ones(8, rows.shape[1], left.shape[1], dtype=torch.float32, device=rows.device))[
        :, :, 0
    ].flatten()


def _attention(rows: Tensor) -> Tensor:
    """Attention with equal weights over the keys, so that each value of a head is a mean over its keys."""
    heads, keys = 8, rows.shape[1]
    values = rows.view(heads, -1, keys).transpose(1, 2)[None].contiguous()
    queries = torch.zeros(1, heads, 16, values.shape[3], dtype=torch.float32, device=rows.device)
    same = torch.zeros(1, heads, keys, values.shape[3], dtype=torch.float32, device=rows.device)
    return F.scaled_dot_product_attention(queries, same, values)[0, :, 0].flatten() * keys


def _whole(rows: Tensor) -> Tensor:
    return torch.stack([row.sum() for row in rows])


def _sampled(number: int, length: int) -> tuple[int, ...]:
    """Half of the terms side by side, half spread over the rest at uneven distances."""
    side_by_side, step = number // 2, (length - number // 2) // (number - number // 2)
    spread = [side_by_side + place * step + place * place % step for place in range(number - side_by_side)]
    return (*range(side_by_side), *spread)


_OF_1024 = _sampled(64, 1024)
_ALL_64 = tuple(range(64))

SUMS: dict[str, Sum] = {
    "sum of rows": Sum(lambda rows: rows.sum(-1), 128, tuple(range(128)), 128),
    "sum of columns": Sum(_columns, 64, _ALL_64, 128),
    "mean of rows": Sum(_mean, 1024, _OF_1024, 16),
    "layer norm": Sum(_layer_norm, 1024, _OF_1024, 16),
    "softmax": Sum(_softmax, 512, _sampled(32, 512), 512, is_positive=True),
    "log softmax": Sum(_log_softmax, 4096, _sampled(24, 4096), 64, is_positive=True),
    "linear float32": Sum(_linear, 1024, _OF_1024, 256),
    "small linear float32": Sum(_linear, 64, _ALL_64, 16),
    "weight gradient float32": Sum(_weight_gradient, 1024, _OF_1024, 256),
    "batched matmul float32": Sum(_batched, 64, _ALL_64, 256),
    "linear bfloat16": Sum(partial(_linear, dtype=torch.bfloat16), 1024, _OF_1024, 64),
    "attention": Sum(_attention, 1024, _OF_1024, 512),
    "sum of a tensor": Sum(_whole, 65536, tuple(4096 * place + 5 * place for place in range(16)), 4),
}
