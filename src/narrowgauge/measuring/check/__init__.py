"""``ng.check``: read a training set-up, and compare one step with float64, before a run.

``training_setup`` reads the model and its optimizers; ``predicted_update`` says which part of an update
the formats will store. ``passes`` runs a step, leaves no trace, and ``dispatch`` shows each operation to
``policies``. Of the gradients, ``rounding_sites`` reads the roundings, ``structure`` compares them with the
plain loss, and ``slope`` with the change of the loss.
"""
