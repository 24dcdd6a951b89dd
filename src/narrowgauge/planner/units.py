"""Write figures and layouts of a plan as text; 1 GB is 10^9 bytes."""

from __future__ import annotations

from narrowgauge.planner.layouts import AXES, Layout

_UNITS: dict[str, tuple[tuple[float, float, str], ...]] = {
    # 480 GB is easier to compare with a chip's memory than 0.48 TB. So terabytes begin at ten.
    "bytes": ((1e13, 1e12, "TB"), (1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (0.0, 1e3, "kB")),
    "s": ((1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "µs")),
    "time": (
        (1.75 * 86_400, 86_400.0, "d"), (7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (1.0, 1.0, "s"),
        (0.0, 1e-3, "ms"),
    ),
    "count": ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e3, 1e3, "k"), (0.0, 1.0, "")),
}  # fmt: skip
"""Units of each quantity: the least value, the size and the name."""


def unit_of(value: float, quantity: str) -> tuple[float, str]:
    """Return the size and name of the largest unit of a quantity that suits a value."""
    rows = _UNITS[quantity]
    return next((size, unit) for least, size, unit in rows if abs(value) >= least)


def bytes_text(num_bytes: float) -> str:
    """Write bytes in a suitable unit.

    Example:
        >>> bytes_text(26.25e9), bytes_text(480e9), bytes_text(-3.2e6)
        ('26.3 GB', '480 GB', '-3.2 MB')
    """
    scale, unit = unit_of(num_bytes, "bytes")
    # Round halves up, as people do.
    number = num_bytes / scale * (1 + 1e-12)
    if abs(number) >= 100:
        return f"{number:,.0f} {unit}"
    return f"{f'{number:.1f}'.removesuffix('.0')} {unit}"


def duration_text(seconds: float) -> str:
    """Write a time in the largest unit with a value of at least two, to three digits.

    Example:
        >>> duration_text(864000), duration_text(93600), duration_text(5.5 * 86400), duration_text(0.0123)
        ('10 d', '26 h', '5.5 d', '12.3 ms')
    """
    size, unit = unit_of(seconds or 1.0, "time")
    value = seconds / size
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


def count_text(number: float) -> str:
    """Write a count of parameters or tokens.

    Example:
        >>> count_text(32.5e9), count_text(10e9), count_text(1_331_200_000), count_text(128)
        ('32.5B', '10B', '1.33B', '128')
    """
    size, unit = unit_of(number, "count")
    return f"{number / size:.3g}{unit}"


def layout_text(layout: Layout) -> str:
    """Write a layout and its batch in a few words.

    Example:
        >>> layout_text(Layout(shard=8, micro_batch=2, micro_batches=4, recompute="full"))
        'shard 8, micro-batch 2 × 4, recompute full'
    """
    parts = [axes_text(layout), f"micro-batch {layout.micro_batch} × {layout.micro_batches}"]
    if layout.recompute != "none":
        parts.append(f"recompute {layout.recompute}")
    if layout.accumulation_dtype != "float32":
        parts.append(f"gradients summed in {layout.accumulation_dtype}")
    return ", ".join(parts)


def axes_text(layout: Layout) -> str:
    """Write the division of a model and its state among chips.

    Example:
        >>> axes_text(Layout(shard=4, zero=1, tensor=2, pipeline=4)), axes_text(Layout())
        ('shard 4 (ZeRO-1), tensor 2, pipeline 4', 'one chip')
    """
    parts = []
    for name in (*AXES, "expert"):
        size = getattr(layout, name)
        if size > 1:
            parts.append(f"{name} {size}")
            if name == "shard" and layout.zero != 3:
                parts[-1] += f" (ZeRO-{layout.zero})"
    if layout.interleave > 1:
        parts.append(f"interleaved {layout.interleave}")
    return ", ".join(parts) or "one chip"
