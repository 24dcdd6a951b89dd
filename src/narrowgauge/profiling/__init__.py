"""What each linear layer of a model costs in each compute, and what the whole step then takes.

A narrow format makes matmuls faster and adds casts; attention, norms, the loss and the optimizer take the same time. So a layer
gains where its three matmuls save more than its casts cost, and a step gains by the layers' share of it.

``layer_plan`` lists what there is to compute and how. ``measurement`` times it on this machine, or ``prediction`` takes it from
the planner's roofline of a chip, without PyTorch. ``costs`` goes from there to a step, to memory and to the fastest recipe.
``cast_error`` measures what the casts lose. ``profiler`` calls them all, and ``profile_report`` prints.
"""
