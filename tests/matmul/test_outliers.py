"""Outlier features: which columns they are, and that int8 plus the thin 16-bit product is the whole
one.
"""

import pytest
import torch

from matmul.scenarios import exact, expected, gaussian, make_layer, passed, quantized
from narrowgauge.matmul.layer_matmuls import outlier_columns
from narrowgauge.spec.computes import COMPUTES

ROW = COMPUTES["int8-outlier-codes"]


def with_outliers(columns: tuple[int, ...] = (3, 40), rows: int = 33) -> torch.Tensor:
    """Activations whose named columns are large in every row."""
    x = gaussian(rows, 65).clamp(-5, 5)
    for place, column in enumerate(columns):
        x[:, column] = x[:, column].sign() * (60.0 + place) + x[:, column]
    return x


def test_a_column_with_one_magnitude_at_the_threshold_is_an_outlier():
    x = torch.zeros(4, 6)
    x[0, 1] = 6.0
    x[3, 2] = -6.0
    x[1, 3] = 5.99
    x[2, 4] = torch.nan
    x[2, 5] = torch.inf
    assert outlier_columns(x, 6.0).tolist() == [False, True, True, False, True, True]


@pytest.mark.parametrize("columns", [(), (3,), (3, 40), tuple(range(65))], ids=len)
def test_the_output_is_int8_plus_the_thin_product_in_16_bits(columns):
    for dtype, bound in ((torch.float32, 2.0**-20), (torch.bfloat16, 2.0**-7)):
        layer, _ = make_layer(ROW, dtype=dtype)
        x = with_outliers(columns).to(dtype)
        grad = gaussian(33, 17, dtype=dtype)
        output = passed(layer, x, grad).output.double()
        codes = exact(quantized(layer.weight, ROW.output.right, 1)).to(dtype).double()
        thin = x[:, list(columns)].double() @ codes[:, list(columns)].t()
        value = expected(layer, x, grad)["output"] + thin
        assert (output - value).norm() <= bound * value.norm()
