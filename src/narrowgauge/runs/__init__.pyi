from .writer import RunWriter as RunWriter
