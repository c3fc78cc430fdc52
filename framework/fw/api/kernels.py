"""fw's own kernels, and whether they are there: of attention to blocks of keys and values, of products with codes, and elementwise ones;
and copies beside what computes."""

from fw.kernels import elementwise, gpu
from fw.kernels.attention import Rows, attend_blocks, available, keep
from fw.kernels.copies import Copy, Lane
from fw.kernels.grouped import GroupedCodes

__all__ = ["Copy", "GroupedCodes", "Lane", "Rows", "attend_blocks", "available", "elementwise", "gpu", "keep"]
