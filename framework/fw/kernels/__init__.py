"""Kernels of fw's own for the CPU, in C++, compiled by the machine's compiler when they are first used.

Each has a way in torch's operators beside it, for machines without a compiler, and against which it is tested.
"""
