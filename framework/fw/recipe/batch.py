"""How a global batch divides into micro-batches on ranks."""

from __future__ import annotations

from fw.config import Config, TrainSection
from fw.errors import UserError


def micro_batch_size(train: TrainSection, replicas: int, config: Config) -> int:
    """Sequences of ``train.sequence_length`` per forward on one rank; where the user gave none, the whole share of a rank at once.

    With ``train.max_tokens_per_batch`` it is the most: micro-batches are as few as the tokens allow and equally many on each rank, and the
    batch is spread over them evenly.

    Raises:
        UserError: the batch does not divide, with the nearest values that do.
    """
    batch = train.global_batch_size
    if train.max_tokens_per_batch is not None:
        sequences = train.max_tokens_per_batch // train.sequence_length
        micro_batches = -(-batch // (sequences * replicas)) * replicas
        return -(-batch // micro_batches)
    place = config.origin(("train", "global_batch_size"))
    if batch % replicas:
        raise UserError(
            f"{place}: train.global_batch_size={batch} does not divide over {replicas} ranks;"
            f" the nearest that do: {_around(batch, replicas)}"
        )
    share = batch // replicas
    micro = share if train.micro_batch_size is None else train.micro_batch_size
    if share % micro:
        divisors = [d for d in range(1, share + 1) if share % d == 0]
        near = sorted(sorted(divisors, key=lambda d: abs(d - micro))[:2])
        raise UserError(
            f"{place}: train.global_batch_size={batch} is not a multiple of micro_batch_size {micro} × {replicas} ranks;"
            f" the nearest that are: {_around(batch, micro * replicas)}"
            f" (or train.micro_batch_size {' or '.join(map(str, near))})"
        )
    return micro


def _around(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} and {below + unit}" if below else str(unit)
