from narrowgauge.matmul.cast_cache import cached_weights as cached_weights
from narrowgauge.matmul.inference import inference_bytes as inference_bytes
from narrowgauge.matmul.outlier_search import find_outlier_columns as find_outlier_columns
from narrowgauge.matmul.outlier_search import missed_outliers as missed_outliers
from narrowgauge.matmul.swapping import Linears as Linears
from narrowgauge.matmul.swapping import NarrowLayers as NarrowLayers
from narrowgauge.matmul.swapping import linears_of as linears_of
from narrowgauge.matmul.swapping import swap_experts as swap_experts
