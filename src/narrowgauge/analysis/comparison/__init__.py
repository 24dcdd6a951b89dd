"""Compare runs: statistics of each run, a classification of each recipe, and a verdict in
sentences.
"""
