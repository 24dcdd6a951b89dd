"""``ng.diagnose`` and ``ng.compare``: read records without PyTorch.

``laws`` runs the laws of ``gradient_laws``, ``update_laws`` and ``loss_laws`` over the steps of a run;
``first_difference`` and ``settings_diff`` compare two runs, ``comparison`` several.
"""
