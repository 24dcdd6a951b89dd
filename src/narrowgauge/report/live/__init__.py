"""The live page: the report of runs that are being written, served to a browser on this machine."""
