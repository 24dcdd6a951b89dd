"""Count shapes that hide how code works: what is too large to read at once, and what outlives a
call.
"""

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "narrowgauge"
# The most that the source may hold of each. Lower a ceiling whenever a change allows it.
CEILINGS = {
    "functions above 400 nodes": 18,
    "files above 3,500 nodes": 2,
    "registries at module level": 2,
}
EMPTY = re.compile(
    r"\{\}|\[\]|(dict|list|set)\(\)|[\w.]*\b(defaultdict|Counter|OrderedDict|Weak\w+)(\[.*\])?\(\w*\)"
)
"""A container that only later code can fill."""


def size(tree: ast.AST) -> int:
    return sum(1 for _ in ast.walk(tree))


def test_no_shape_is_above_its_ceiling():
    places = {name: [] for name in CEILINGS}
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if size(tree) > 3500:
            places["files above 3,500 nodes"].append(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and size(node) > 400:
                places["functions above 400 nodes"].append(f"{module}: {node.name}")
        for node in tree.body:
            is_assignment = isinstance(node, ast.Assign | ast.AnnAssign) and node.value
            if is_assignment and EMPTY.fullmatch(ast.unparse(node.value)):
                places["registries at module level"].append(f"{module}:{node.lineno}")
    print({name: len(names) for name, names in places.items()})
    for name, ceiling in CEILINGS.items():
        assert len(places[name]) <= ceiling, f"{name}: {places[name]}"
