from .cast_cache import cached_weights as cached_weights
from .swapping import NarrowLayers as NarrowLayers
from .swapping import linears_of as linears_of
