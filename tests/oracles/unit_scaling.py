"""Llama in unit scaling's u-muP form, forward and backward by hand in numpy's float64.

Written from the formulas of Blake et al., arXiv 2303.11257 and 2407.17465 (residuals: its appendix G): no automatic
differentiation and no module. Every operation returns its output and a function from the output's gradient to those of
its inputs; gradients of weights go into a dictionary. Backward has the constants of the rules, not those of calculus.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Back = Callable[[Array], Array]


@dataclass
class Oracle:
    """One model and one batch.

    Args:
        weights: float64, by the names of Hugging Face's class; a tied head has none.
        num_layers, num_heads, num_kv_heads, eps, theta: of the model.
        tokens: by whose number the loss is divided; ``None`` for those of the batch.
        length: that attention's rule takes; ``None`` for that of the batch.
    """

    weights: dict[str, Array]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    eps: float
    theta: float = 10_000.0
    tokens: int | None = None
    length: int | None = None
    gradients: dict[str, Array] = field(default_factory=lambda: defaultdict(lambda: np.zeros(())))

    def gain(self, name: str, gradient: Array, factor: float) -> None:
        self.gradients[name] = self.gradients[name] + gradient * factor

    # -- one operation each

    def linear(self, x: Array, name: str, grad_x: float) -> tuple[Array, Back]:
        """``x wᵀ / √fan_in``; grad_x is the backward's factor."""
        w = self.weights[f"{name}.weight"]
        forward = 1 / math.sqrt(w.shape[1])

        def back(g: Array) -> Array:
            weight = 1 / math.sqrt(self.num_tokens)
            self.gradients[f"{name}.weight"] = np.einsum("bso,bsi->oi", g, x) * weight
            return g @ w * grad_x

        return x @ w.T * forward, back

    def norm(self, x: Array, name: str) -> tuple[Array, Back]:
        gain = self.weights[f"{name}.weight"]
        rate = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps)
        unit = x * rate

        def back(g: Array) -> Array:
            self.gain(f"{name}.weight", (g * unit).sum((0, 1)), self.num_tokens**-0.5)
            g = g * gain
            return rate * (g - unit * (g * unit).mean(-1, keepdims=True))

        return unit * gain, back

    def turn(self, x: Array, sign: float) -> Array:
        """Rotary positions: halves of each head as complex numbers, turned by position times frequency."""
        half = x.shape[-1] // 2
        angles = np.arange(x.shape[2])[:, None] * self.theta ** (-np.arange(half) / half)[None, :]
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * sign * angles)
        return np.concatenate([z.real, z.imag], -1)

    def attention(self, q: Array, k: Array, v: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
        """Causal, ``[batch, heads, tokens, width]``; logits over the width, output times ``√(s / log s)``, nearly."""
        s, d = q.shape[2], q.shape[3]
        shared = q.shape[1] // k.shape[1]
        wide_k, wide_v = np.repeat(k, shared, 1), np.repeat(v, shared, 1)
        logits = np.where(np.tril(np.ones((s, s), bool)), q @ wide_k.swapaxes(2, 3) / d, -np.inf)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        length = self.length or s
        alpha = 1 / (1 + 4 * d)
        out = 1 / math.exp((1 - alpha) * 0.5 * math.log(math.log(length) / length))

        def back(g: Array) -> tuple[Array, Array, Array]:
            g = g * out
            dp = g @ wide_v.swapaxes(2, 3)
            dl = p * (dp - (dp * p).sum(-1, keepdims=True)) / d
            grouped = (*k.shape[:2], shared, *k.shape[2:])
            dk = (dl.swapaxes(2, 3) @ q).reshape(grouped).sum(2)
            return dl @ wide_k, dk, (p.swapaxes(2, 3) @ g).reshape(grouped).sum(2)

        return p @ wide_v * out, back

    def residual(self, x: Array, branch: int, inside: Callable[[Array], tuple[Array, Back]]) -> tuple[Array, Back]:
        """``(x + τ f(x)) / √(1 + τ²)``; the branch's gradient gets its τ only where it leaves."""
        tau = 1 / math.sqrt(self.num_layers + branch)
        skip, share = 1 / math.sqrt(1 + tau**2), tau / math.sqrt(1 + tau**2)
        y, back_inside = inside(x)

        def back(g: Array) -> Array:
            return skip * g + share * back_inside(g)

        return skip * x + share * y, back

    def embedding(self, name: str, ids: Array, forward: float) -> tuple[Array, Back]:
        table = self.weights[f"{name}.weight"]

        def back(g: Array) -> Array:
            rows = np.zeros_like(table)
            np.add.at(rows, np.broadcast_to(ids, g.shape[:2]), g * forward)
            self.gain(f"{name}.weight", rows, math.sqrt(len(table) / self.num_tokens))
            return np.zeros(())

        return table[ids] * forward, back

    # -- the models

    def split(self, x: Array, heads: int) -> Array:
        return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)

    @staticmethod
    def join(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def llama_attention(self, x: Array, name: str) -> tuple[Array, Back]:
        x, back_norm = self.norm(x, f"{name}.input_layernorm")
        at, scale = f"{name}.self_attn", 1 / math.sqrt(x.shape[-1])
        (q, back_q), (k, back_k), (v, back_v) = (self.linear(x, f"{at}.{part}_proj", scale) for part in "qkv")
        heads, kv = self.num_heads, self.num_kv_heads
        mixed, back_mix = self.attention(
            self.turn(self.split(q, heads), 1), self.turn(self.split(k, kv), 1), self.split(v, kv)
        )
        y, back_o = self.linear(self.join(mixed), f"{at}.o_proj", 1 / math.sqrt(heads * mixed.shape[-1]))

        def back(g: Array) -> Array:
            dq, dk, dv = back_mix(self.split(back_o(g), heads))
            dq, dk = self.turn(dq, -1), self.turn(dk, -1)
            return back_norm(back_q(self.join(dq)) + back_k(self.join(dk)) + back_v(self.join(dv)))

        return y, back

    def llama_mlp(self, x: Array, name: str) -> tuple[Array, Back]:
        x, back_norm = self.norm(x, f"{name}.post_attention_layernorm")
        inner = len(self.weights[f"{name}.mlp.up_proj.weight"])
        gate, back_gate = self.linear(x, f"{name}.mlp.gate_proj", 1 / math.sqrt(inner))
        up, back_up = self.linear(x, f"{name}.mlp.up_proj", 1 / math.sqrt(inner))
        sigmoid = 1 / (1 + np.exp(-gate))
        scale = math.sqrt(2 * math.sqrt(2))
        y, back_down = self.linear(gate * sigmoid * up * scale, f"{name}.mlp.down_proj", 1 / math.sqrt(x.shape[-1]))

        def back(g: Array) -> Array:
            g = back_down(g) * scale
            slope = sigmoid * (1 + gate * (1 - sigmoid))
            return back_norm(back_gate(g * up * slope) + back_up(g * gate * sigmoid))

        return y, back

    def run(self, ids: Array) -> tuple[Array, float]:
        """Logits and the loss summed; afterwards ``gradients`` are those of the loss divided by the tokens."""
        inputs, targets = ids[:, :-1], ids[:, 1:]
        self.num_tokens = self.tokens or inputs.size
        x, back = self.embedding("model.embed_tokens", inputs, 1.0)
        backs: list[Back] = [back]
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}"
            for place, part in enumerate((self.llama_attention, self.llama_mlp)):
                x, back = self.residual(x, 2 * layer + place, lambda v, part=part, name=name: part(v, name))
                backs.append(back)
        x, back = self.norm(x, "model.norm")
        backs.append(back)
        g = self.readout(x, "lm_head" if "lm_head.weight" in self.weights else "model.embed_tokens", targets)
        for back in reversed(backs):
            g = back(g)
        return self.logits, self.loss

    def readout(self, x: Array, head: str, targets: Array) -> Array:
        """Logits over ``fan_in``, softmax cross-entropy, and the gradient of what went in."""
        w = self.weights[f"{head}.weight"]
        vocabulary, width = w.shape
        self.logits = x @ w.T / width
        shifted = self.logits - self.logits.max(-1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        hit = np.arange(vocabulary) == targets[..., None]
        self.loss = float(-(log_p * hit).sum())
        g = (np.exp(log_p) - hit) / self.num_tokens
        g = g * self.num_tokens * vocabulary / math.sqrt(vocabulary - 1)
        self.gain(f"{head}.weight", np.einsum("bsv,bsw->vw", g, x), self.num_tokens**-0.5)
        return g @ w / math.sqrt(vocabulary)
