"""One step of all tensors: its definition, the layout of states, and two kernels of the same bits.

======== =========================================================================================
plane    a tensor of a state: one word for each element, in the parameter's shape and order
word     the bits of an element in a plane: one field or several
field    the bits of a word that one code takes
code     how a float32 is rounded to a field
window   the magnitudes that a code in few exponent bits holds
block    256 elements of a row that share a scale
bound    the largest magnitude of a state in a block: its code's window ends there
visible  the stored weight rounded to the model's format: what the model computes with
cell     the float32 values that round to one visible weight
tail     the signed rest of a stored weight below its visible bits
master   a whole copy of the weight beside the visible one
lane     the inputs of a step: of some elements in the definition, of 32 bits of a vector in C++
chunk    some rows of a state, which the definition steps together
batch    the states that one launch steps: of a param group, a kernel and a number of steps
table    what a launch reads: for each tensor a row of addresses and sizes
program  a part of a tensor that one thread of a CPU, or one block of threads of a GPU, steps
tile     the elements of a program
roster   what a step has checked, kept for the next one
======== =========================================================================================
"""
