"""Attention: a bound of its logits under any mask and in any kernel.

A logit is a product of a query and a key, so the largest norms of both bound it. Rotary embeddings
keep norms. The norms are read where queries and keys leave their projections, or the norms after
them.

Attention modules are known by the name of their class. Not seen are modules that do not state the
width of a head, as ``head_dim`` or ``num_heads``, and those that never call their projections, such
as ``nn.MultiheadAttention``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

PAIRS = (
    ("q_norm", "k_norm"),
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("q_lin", "k_lin"),
    ("to_q", "to_k"),
    ("wq", "wk"),
)
"""Names of the modules that give queries and keys, in libraries and models; what comes last in the
forward pass first.
"""
FUSED = ("qkv", "c_attn", "qkv_proj", "query_key_value")
"""Names of projections to queries, keys and values of equal widths."""


class Heads(NamedTuple):
    """The modules whose outputs are queries and keys, the width of a head, and the factor of the
    logits.
    """

    query: nn.Module
    key: nn.Module
    width: int
    scale: float

    def largest_norm(self, x: Tensor, kind: str) -> Tensor:
        """Return the largest norm of a head in ``[..., heads × width]``, the output of the module
        of ``query`` or ``key``.
        """
        if self.query is self.key:
            x = x.chunk(3, -1)[kind == "key"]
        norms: Tensor = x.float().unflatten(-1, (-1, self.width)).norm(dim=-1)
        return norms.amax()


def heads_of(module: Any) -> Heads | None:
    """Return where a module's queries and keys are; ``None`` if it is not attention or does not
    say.
    """
    if "attention" not in type(module).__name__.lower():
        return None
    children = dict(module.named_children())
    pairs = [(children[q], children[k]) for q, k in PAIRS if q in children and k in children]
    pairs += [(children[name], children[name]) for name in FUSED if name in children]
    if not pairs:
        return None
    query, key = pairs[0]
    width = _whole_number(module, "head_dim", "attention_head_size")
    count = _whole_number(module, "num_heads", "n_head")
    if not width and count and hasattr(query, "out_features"):
        width = query.out_features // count // (3 if query is key else 1)
    if not width:
        return None
    scale = getattr(module, "scaling", None)
    return Heads(query, key, width, scale if isinstance(scale, float) else width**-0.5)


def _whole_number(module: Any, *names: str) -> int:
    """Return the first attribute that is a whole number, else 0."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
    return 0
