"""What this package needs of PyTorch's insides and of compilers: below the arithmetic, above
nothing.

======================  ============================================================================
``torch_names``         the private names of PyTorch that we use, each with its reason and alternative
``torch_hooks``         hooks on modules and optimizers that are ours, and leave nothing behind
``preserve``            runs a model and puts back what the run changed
``model_parts``         blocks, routers, experts and adapters of a model, by its structure
``extension``           classes that add methods to a user's module
``machine``             what this processor and its compilers can do; needs no PyTorch
``compile``             compiles a function of tensors, and proves its bits before the first use
``cpp``                 builds and loads libraries of C++, for CPUs
``triton``              loads kernels of Triton, for GPUs
``proof``               where kernels run, and which have the bits of their definitions
======================  ============================================================================
"""
