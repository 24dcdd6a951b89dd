"""One step of all tensors: its definition, the layout of states, and two kernels of the same bits."""
