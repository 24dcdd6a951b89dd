"""What is put beside the operations of a step: their values without roundings, and the first value
that is not finite.
"""
