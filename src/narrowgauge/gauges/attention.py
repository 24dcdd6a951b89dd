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
    width = next(
        (
            n
            for name in ("head_dim", "attention_head_size")
            if isinstance(n := getattr(module, name, None), int)
        ),
        0,
    )
    heads = next(
        (
            n
            for name in ("num_heads", "n_head")
            if isinstance(n := getattr(module, name, None), int)
        ),
        0,
    )
    if pairs and not width and heads and hasattr(pairs[0][0], "out_features"):
        query, key = pairs[0]
        width = query.out_features // heads // (3 if query is key else 1)
    if not pairs or not width:
        return None
    scale = getattr(module, "scaling", None)
    return Heads(*pairs[0], width, scale if isinstance(scale, float) else width**-0.5)
