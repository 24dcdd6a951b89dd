"""What a run leaves on disk, written so that a crash costs at most the line being written.

``record`` is the run folder, ``events`` the things worth a word, ``files`` the few ways this package writes to a disk.
Nothing here needs torch, so a report on a finished run starts at once.
"""
