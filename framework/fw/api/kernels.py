"""fw's own kernels, and whether they are there: of attention to blocks of keys and values, of products with codes, and elementwise ones."""

from fw.kernels import elementwise, gpu
from fw.kernels.attention import Rows, attend_blocks, available, keep
from fw.kernels.grouped import GroupedCodes

__all__ = ["GroupedCodes", "Rows", "attend_blocks", "available", "elementwise", "gpu", "keep"]
