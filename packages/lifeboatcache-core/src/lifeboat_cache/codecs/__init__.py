"""Codecs: how the bytes of a block are stored.

A block's layout says which tensors it holds; a codec chooses a coder for each of them
(see ``docs/codecs.md``). Every coder exists twice with the same results: as a kernel and,
until kernels are there, in numpy.
"""
