"""fw's own kernels, and whether they are there: of attention, losses, AdamW, changes of low rank, products with codes and of matrices, and
elementwise ones, with gradients or for generation; products of one number of rows; and copies beside what computes."""

from fw.kernels import adamw, causal, differentiable, elementwise, fixed_rows, gpu, linear, loss, lowrank, matrix, squares
from fw.kernels.attention import Rows, attend_blocks, available, keep
from fw.kernels.copies import Copy, Lane
from fw.kernels.grouped import GroupedCodes
from fw.kernels.of_cpu import of_cpu
from fw.kernels.twice import by_torch

__all__ = [
    "Copy",
    "GroupedCodes",
    "Lane",
    "Rows",
    "adamw",
    "attend_blocks",
    "available",
    "by_torch",
    "causal",
    "differentiable",
    "elementwise",
    "fixed_rows",
    "gpu",
    "keep",
    "linear",
    "loss",
    "lowrank",
    "matrix",
    "of_cpu",
    "squares",
]
