"""``ng.same`` and ``ng.check_resume``: compare two models, two sets of weights, and a resumed run with
the one that went on.
"""
