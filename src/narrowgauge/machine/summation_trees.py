"""In which order does a function add its terms? Revealed from outside, by terms that swallow others.

Floating-point addition is not associative: two machines that add the same terms in another order get other bits. The order is a
*summation tree*: leaves are terms, inner nodes are additions. Nothing documents it, yet it shows in the results. Make term ``i``
a large ``M``, term ``j`` its negative, and all others 1. Each 1 that is added to ``M`` before ``-M`` arrives disappears in the
rounding; those that arrive later are counted by the result. So the result is the number of terms *outside* the smallest subtree
that holds both ``i`` and ``j``, and from these sizes the tree follows.

Where terms cannot be negative (the exponentials of a softmax), a triple tells as much: beside a term of 1, two terms of 0.4 units
in its last place disappear one by one, and count if they were added to each other first.

Nothing here knows PyTorch. Source: Xie, Gao, Wang, Xue, *Revealing Floating-Point Accumulation Orders in Software/Hardware
Implementations* (FPRev), arXiv 2411.00442; the triples are ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, islice
from typing import TypeAlias

Tree: TypeAlias = int | tuple["Tree", ...]
"""A term's number, or the trees whose sums are added at once: two for an addition, more for a fused sum."""
Pair: TypeAlias = tuple[int, int]
Sizes: TypeAlias = Callable[[list[Pair]], list[float]]
"""For each pair of terms, the number of terms in the smallest subtree that holds both."""

_NUM_CHECKS = 16


def reveal(num_terms: int, sizes: Sizes) -> Tree | None:
    """The summation tree of a function.

    Args:
        num_terms: at least 2.
        sizes: measures pairs; called once for each level of the tree, and once to check.
    Returns:
        The tree in canonical form, the subtree with the lowest term first; ``None`` where the measurements belong to no tree:
        the terms are scaled as they are added, or added in a format too wide for a term to disappear.
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
        positions: where the terms stand among those that are really added, ascending; as numbered where empty.
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
    """The name of a tree that has one, or an empty text."""
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
    """The tree of a loop: ``((0 + 1) + 2) + 3``.

    Args:
        terms: how many, or their numbers in the order of the loop.
    """
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
    """A tree with each of these subtrees replaced by its number."""
    numbers = {frozenset(leaves(part)): number for number, part in enumerate(parts)}
    built: dict[frozenset[int], Tree] = {**{frozenset({t}): t for t in leaves(tree)}, **numbers}
    for node in _inner_nodes(tree):
        terms = frozenset(leaves(node))
        if terms not in numbers:
            built[terms] = tuple(built[frozenset(leaves(child))] for child in node)
    return built[frozenset(leaves(tree))]


def _renumbered(tree: Tree, terms: list[int]) -> Tree:
    """A subtree with its terms numbered from 0."""
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
