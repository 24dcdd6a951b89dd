from .cast_cache import cached_weights as cached_weights
from .inference import find_outlier_columns as find_outlier_columns
from .inference import inference_bytes as inference_bytes
from .inference import missed_outliers as missed_outliers
from .swapping import NarrowLayers as NarrowLayers
from .swapping import linears_of as linears_of
