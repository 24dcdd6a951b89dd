"""What a run leaves on disk and what is read from it, written so that a crash costs at most the line being written.

``record`` is the run folder, ``events`` the things worth a word, ``readings`` what gauges saw, ``files`` the few ways this
package writes to a disk. ``watching`` reads a run while it goes on, ``comparing`` several beside each other, ``pages`` shows
them. Nothing here needs torch, so a report on a finished run starts at once.
"""
