"""Shares: every chip has them, each with an interval and a source."""

from __future__ import annotations

import pytest

from narrowgauge.errors import ChipError
from narrowgauge.planner.shares import GENERAL, Share, shares_of, sources_of
from narrowgauge.spec.chips import CHIPS, get_chip


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_every_chip_has_every_share_with_a_source(chip: object) -> None:
    shares = shares_of(chip)  # type: ignore[arg-type]
    assert set(GENERAL) <= set(shares.rows)
    for format in chip.peak_tflops:  # type: ignore[attr-defined]
        assert 0.3 < shares.matmul(format).value < 1
    assert all(share.source and share.low <= share.value <= share.high for share in shares.rows.values())
    assert len(sources_of(shares, shares.rows)) == len(shares.rows)


def test_own_measurements_are_preferred_and_others_are_wider() -> None:
    h100, l40s = shares_of(get_chip("H100-SXM")), shares_of(get_chip("L40S"))
    assert h100.matmul("float8_e5m2") is h100.matmul("float8_e4m3fn")
    widths = [s.matmul("bfloat16").high / s.matmul("bfloat16").low for s in (h100, l40s)]
    assert widths[0] < widths[1]


def test_rows_are_replaced_and_the_rest_stays() -> None:
    shares = shares_of(get_chip("H100-SXM"))
    here = shares.replaced({"link": Share(0.5, 0.4, 0.6, "measured here")})
    assert (here["link"].value, here["network"]) == (0.5, shares["network"])
    assert shares["link"].value != 0.5


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="does not lie within"):
        Share(0.5, 0.6, 0.7, "nowhere")
    with pytest.raises(ChipError, match="bfloat16"):
        shares_of(get_chip("V100")).matmul("bfloat16")
