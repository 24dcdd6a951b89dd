"""What this package needs of PyTorch's and other compilers: below the arithmetic, above nothing.

======================  ============================================================================
``printer``             prints a traced function of pointwise operations as lines of a language
``cpp``                 the language of CPUs: C++ with vector types; builds and loads its files
``triton``              the language of GPUs: Triton; loads its functions
======================  ============================================================================
"""
