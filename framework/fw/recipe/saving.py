"""Where checkpoints go, and which wishes about them cannot be fulfilled together."""

from __future__ import annotations

from fw.config import Config, TrainSection
from fw.errors import UserError
from fw.kinds.checkpoint import CheckpointOptions
from fw.kinds.offload import OffloadPolicy
from fw.place import place


def check_saving(config: Config, options: CheckpointOptions, train: TrainSection, offload: OffloadPolicy, starts_processes: bool) -> None:
    """Refuse what cannot be honoured.

    Args:
        starts_processes: whether more than this process takes part in the run.

    Raises:
        UserError: with the place and the way out.
    """

    def refuse(option: str, why: str) -> None:
        raise UserError(f"{config.origin(('checkpoint', option))}: checkpoint.{option}: {why}")

    if options.keep_best and options.metric == "val_loss":
        if not train.val_every:
            refuse("metric", "val_loss is never measured, since train.val_every is 0; set it, or checkpoint.metric=loss")
        if train.save_every % train.val_every:
            refuse(
                "metric",
                f"val_loss is not measured at every step that is saved: make train.save_every={train.save_every} a multiple of"
                f" train.val_every={train.val_every}, or set checkpoint.metric=loss",
            )
    if options.keep_best and options.metric == "loss" and train.save_every % train.log_every:
        refuse(
            "metric",
            f"the loss is not measured at every step that is saved: make train.save_every={train.save_every} a multiple of"
            f" train.log_every={train.log_every}",
        )
    on_disk = offload.optimizer == "nvme" or (offload.params == "nvme" and not offload.params_in_files)
    if options.asynchronous and on_disk:
        refuse("asynchronous", "copies to host memory what offload keeps on a disk (nvme); set checkpoint.asynchronous=false")
    if options.to:
        try:
            place(options.to)
        except UserError as error:
            refuse("to", str(error))
        if options.to.startswith("memory://") and starts_processes:
            refuse("to", "memory:// is one process's own, and this run has several; give a directory or an object store")
