"""Will it pay? What each linear layer of a model costs in each row of computes, and what the whole step then takes.

A narrow format makes matmuls faster and adds casts; attention, norms, the loss and the optimizer take what they took. So a
layer gains where its three matmuls save more than its casts cost, and a step gains by the layers' share of it.

``linears`` and ``settings`` say what there is to compute and in which rows; ``measuring`` times it on this machine (``parts`` of
a layer, ``blocks`` and steps of the model), or ``predicting`` counts it from a chip's figures, without PyTorch; ``costs`` is the
arithmetic from there to a step, to memory and to the fastest recipe; ``numerics`` reads what the casts lose; ``profiler`` asks
them all, and ``report`` says what came out.
"""
