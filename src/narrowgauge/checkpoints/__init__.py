"""The format of checkpoints: which files there are, their checksums, and the tensors in them, whole or as ranks' shards.

One reader takes what one process wrote and what many wrote; ``trainer`` writes checkpoints of runs in it and ``conversion``
those of other storages.
"""
