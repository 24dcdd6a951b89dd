"""The page: figures and tables of runs as one document that opens from a disk."""
