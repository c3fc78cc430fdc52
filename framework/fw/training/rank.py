"""A rank's run, from joining the others to the summary."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytorch_lightning as pl
import torch

from fw.assemble import check
from fw.config import to_yaml
from fw.errors import EXIT_FAILED, EXIT_OK, EXIT_REQUEUE, FwError, RunError
from fw.kernels.build import set_threads
from fw.kernels.fp32_products import in_place_of_torch
from fw.kinds.data import Corpus
from fw.launching import outcome
from fw.launching.cores import threads_of_rank
from fw.launching.membership import leave
from fw.launching.network import use_interface
from fw.launching.peers import peer_error
from fw.launching.stacks import Watch, answer_when_asked
from fw.meter.earlier import Earlier
from fw.meter.energy import Energy
from fw.meter.flops import peak_flops
from fw.meter.memory import take_workspaces
from fw.recipe import Recipe, World
from fw.training import environment, finish, out_of_memory, resume, run_dir
from fw.training.batches import Batches
from fw.training.between_steps import BetweenSteps
from fw.training.determinism import deterministic, prevented
from fw.training.hang_watch import HangWatch
from fw.training.host_allocator import keep_freed_memory
from fw.training.inputs import check_files, device_of, note, note_codes, note_kernels, open_data, say, say_nothing
from fw.training.loading import loader
from fw.training.loggers import build as build_loggers, flat
from fw.training.module import TrainingModule
from fw.training.nonfinite import Nonfinite
from fw.training.progress import Progress
from fw.training.release import Release
from fw.training.rng import seed_all
from fw.training.same_run import begun_by_this_torchrun, check_same_data, check_same_kernels, check_same_run, held_by, note_starter
from fw.training.saving import Saver
from fw.training.stop import StopRequest
from fw.training.strategy import MeshStrategy
from fw.training.undisturbed import undisturbed

Ending = tuple[int, dict[str, Any]]
"""Exit code and summary."""


def train_rank(recipe: Recipe, world: World, files: Mapping[str, str]) -> Ending:
    """Train as one of the ranks; the exit code, and what ``summary.json`` holds, empty where the run did not come that far.

    Args:
        files: names and texts, for the run directory, of a rank that makes it.

    Raises:
        UserError: the input is wrong.
        RunError: the run failed.
    """
    with nullcontext() if world.launched else undisturbed():
        return _train_rank(recipe, world, files)


def _train_rank(recipe: Recipe, world: World, files: Mapping[str, str]) -> Ending:
    earlier = Earlier()
    _quiet()
    _end_with_parent()
    device = device_of(recipe, world)
    _prepare_network(recipe, world, device)
    says = world.is_first and not outcome.launched_by_fw()  # else the launching process has done so
    corpus, batches, vocab_size = open_data(recipe, say if says else say_nothing)
    if not outcome.launched_by_fw():
        check(recipe, vocab_size, device, batches.rows)
        if world.is_first:
            note(recipe, device)
    if world.local_rank == 0:
        note_kernels(world, device)
    timeout = recipe.launch.timeout
    strategy = MeshStrategy(world, recipe.mesh_shape, device, timeout, recipe.checkpoint.config.timeout or timeout)
    try:
        strategy.join()
        check_same_run(recipe, strategy.ranks)
        check_same_data(corpus, strategy.ranks)
        if device.type == "cpu":
            check_same_kernels(strategy.ranks)
        holds = world.is_first and not outcome.launched_by_fw()  # else the launching process does
        in_fp32 = device.type == "cpu" and torch.float32 in recipe.step_spec(device).computes_in
        with (
            held_by(recipe) if holds else nullcontext(),
            deterministic(recipe.train.deterministic, device),
            in_place_of_torch() if in_fp32 else nullcontext(),
        ):
            return _train_joined(recipe, world, strategy, earlier, corpus, batches, vocab_size, files)
    finally:
        leave()


def _train_joined(
    recipe: Recipe,
    world: World,
    strategy: MeshStrategy,
    earlier: Earlier,
    corpus: Corpus,
    batches: Batches,
    vocab_size: int,
    files: Mapping[str, str],
) -> Ending:
    device = strategy.root_device
    checkpoint = resume.find(recipe, corpus, strategy.ranks, say if world.is_first else say_nothing)
    if not outcome.launched_by_fw():  # else the launching process has done so
        check_files(recipe, vocab_size, checkpoint, strategy.ranks)
        if world.is_first:
            note_codes(recipe, vocab_size)
    seed_all(recipe.train.seed * 1_000_003 + world.rank)
    _share_processors(recipe, world)
    if checkpoint is not None and checkpoint.state()["step"] >= recipe.train.max_steps:
        if world.is_first:
            say(f"{checkpoint.place} is at step {checkpoint.state()['step']}, train.max_steps is {recipe.train.max_steps}: nothing to do")
        return EXIT_OK, {}
    start_step = checkpoint.state()["step"] if checkpoint is not None else 0
    older = strategy.gather(resume.identities(recipe) if world.is_first else None)[0]
    if world.is_first:
        if not outcome.launched_by_fw():
            again = outcome.restarted_by_another() and begun_by_this_torchrun(recipe.run_dir)
            run_dir.make(recipe.run_dir, run_dir.continues(recipe, checkpoint) or again, files)
            run_dir.make_room(recipe, checkpoint)
            if not again:
                note_starter(recipe.run_dir, older)
        run_dir.describe(recipe, recipe.run_dir)
        environment.note(recipe.run_dir, recipe, corpus.fingerprint)
        (recipe.run_dir / out_of_memory.FILE).unlink(missing_ok=True)

    if device.type == "cpu":
        keep_freed_memory()  # from here on: what data preparation frees is better given back
    progress = Progress(recipe.train.max_steps, shown=world.is_first)
    watch = Watch(recipe.launch.timeout, ends_process=world.launched)
    parent = checkpoint.place.name if checkpoint is not None and run_dir.is_among(recipe.checkpoints, checkpoint.place) else None
    saver = Saver(recipe, strategy.ranks, watch, parent, progress.say)
    stop = StopRequest(recipe.checkpoint.config.grace, lambda: _give_up(recipe, saver, world.is_first))
    answer_when_asked()
    module = TrainingModule(recipe, corpus, batches.rows, vocab_size, checkpoint, stop)
    module.earlier = earlier
    module.before_update = saver.before_update
    module.nonfinite = Nonfinite(recipe, saver, strategy.ranks, progress.say, checkpoint, older)
    if not outcome.launched_by_fw() and world.local_rank == 0:  # else the launching process has prepared this host
        module.prepare = lambda: recipe.sharding.prepare(recipe.step_spec(device), say)
    fastest = max(peak_flops(device, dtype) for dtype in recipe.step_spec(device).computes_in)
    energy = Energy(device, host=world.local_rank == 0)
    between = BetweenSteps(recipe, progress, fastest * world.size, saver, Release(device, recipe.memory.release), energy.joules)
    named = list(zip(recipe.names["logger"], recipe.loggers, strict=True)) if world.is_first else []
    loggers = build_loggers(named, recipe.run_dir, recipe.config.name, start_step, progress.say)
    for logger in loggers:
        logger.log_hyperparams({key: _public(value) for key, value in flat(recipe.tree)})
        logger.text("config", environment.without_secrets(to_yaml(recipe.tree)), start_step)
    trainer = pl.Trainer(
        accelerator=device.type,
        devices=world.local_size,
        num_nodes=max(1, world.size // world.local_size),
        strategy=strategy,
        logger=loggers or False,
        callbacks=[between, HangWatch(watch)],
        max_steps=recipe.train.max_steps,
        max_epochs=-1,
        val_check_interval=recipe.train.val_every or None,
        check_val_every_n_epoch=None,
        limit_val_batches=None if recipe.train.val_every else 0,
        num_sanity_val_steps=0,
        log_every_n_steps=recipe.train.log_every,
        inference_mode=False,  # FSDP would keep tensors made in it
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=recipe.run_dir,
    )
    if checkpoint is not None and world.is_first:
        say(f"resuming from {checkpoint.place} at step {start_step}")
    replica = world.rank * recipe.replicas // recipe.world_size
    take_workspaces(device)
    try:
        train_batches = loader(batches.train, batches.train_plans(module.samples_seen, replica), recipe.loader, device)
        module.waited_seconds = lambda: train_batches.waited_seconds
        with _interrupted():
            trainer.fit(module, train_batches, loader(batches.val, batches.val_plans(replica), recipe.loader, device))
        code, summary = stop.exit_code, {}
        if not stop.decided:
            summary = finish.finish(recipe, module, between, device)
        elif not recipe.train.save_every and code == EXIT_REQUEUE:  # which would say that it was saved
            raise RunError(f"stopped after step {module.global_step}; nothing was saved, since train.save_every is 0")
        elif world.is_first and not saver.failed:
            say(_stopped(recipe, module.global_step))
        if saver.failed:
            ended = "stopped" if stop.decided else "finished"
            raise RunError(f"training {ended}, but its last checkpoint was not written ({saver.failed})")
    except Exception as error:
        failure: Exception = error
        if out_of_memory.is_out_of_memory(error) and module.is_assembled:
            report = out_of_memory.report(error, module)
            report.write(recipe.run_dir)
            say("\n".join(report.lines()))
            failure = out_of_memory.OutOfMemory(report.sentence())
            saver.close()
        elif lost := peer_error(error, recipe.launch.timeout):
            lost.__cause__ = error
            failure = lost
        elif differs := prevented(error, device):
            failure = differs
            saver.close()
        else:
            saver.close()  # what was whole before the failure is worth keeping
        if outcome.launched_by_fw():  # before the process group is left, which may take its time
            code = error.exit_code if isinstance(error, FwError) else EXIT_FAILED
            outcome.leave_failure(failure, outcome.describe(failure), code)
        if failure is not error:
            raise failure from error
        raise
    finally:
        module.close()
        for logger in loggers:
            logger.close()
        watch.rest()
    return _leave_outcome(code), summary


@contextmanager
def _interrupted() -> Iterator[None]:
    """Ctrl-C that nobody handles is a KeyboardInterrupt, of which Lightning makes an end of the process that hears no other."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
        raise error.__context__ from None


def _share_processors(recipe: Recipe, world: World) -> None:
    """Torch's threads are what was asked for; of a rank that is alone on its host no more than the processors' time it may have."""
    asked, own = recipe.launch.threads, torch.get_num_threads()
    if asked is None and world.local_size > 1:
        return  # as who started them said
    threads = threads_of_rank(world.local_size, asked, own)
    if asked is None and threads < own:
        say(f"torch's threads: {threads} instead of {own}, as many cores' time this process may use; launch.threads says otherwise")
    if threads != own:
        set_threads(threads)


def _public(value: Any) -> Any:
    return environment.without_secrets(value) if isinstance(value, str) else value


def _stopped(recipe: Recipe, step: int) -> str:
    if not recipe.train.save_every:
        return f"stopped after step {step}; nothing was saved, since train.save_every is 0"
    return f"stopped after step {step}; go on with resume=auto"


def _give_up(recipe: Recipe, saver: Saver, says: bool) -> None:
    """The time a preempted run had is over: end, with what is whole."""
    saved = saver.saved
    if saved is None and (found := recipe.checkpoint.found(recipe.checkpoints)):
        saved = recipe.checkpoints / found[0]
    if says:
        went_on = f"the newest checkpoint is {saved}; go on with resume=auto" if saved is not None else "there is no checkpoint"
        say(f"not saved within checkpoint.grace={recipe.checkpoint.config.grace} s; {went_on}")
    os._exit(_leave_outcome(EXIT_REQUEUE if saved is not None else EXIT_FAILED))


def _leave_outcome(code: int) -> int:
    """Tell fw's own launcher of a stop by file, since an elastic agent takes any other exit code than 0 for a failure."""
    if outcome.launched_by_fw() and code not in (EXIT_OK, EXIT_FAILED):
        outcome.leave_stop(code)
        return EXIT_OK
    return code


def _prepare_network(recipe: Recipe, world: World, device: torch.device) -> None:
    """Settle what gloo and NCCL read from the environment; what the config sets wins, what it leaves out yields to the environment."""
    launch, config = recipe.launch, recipe.config
    if launch.port and "SLURM_STEP_ID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ["MASTER_PORT"] = str(launch.port)
    use_interface(launch, not world.on_one_host, config.origin(("launch", "interface")))
    for option, variable, value in (
        ("nccl_async_errors", "TORCH_NCCL_ASYNC_ERROR_HANDLING", str(int(launch.nccl_async_errors))),
        ("nccl_heartbeat", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(launch.nccl_heartbeat)),
    ):
        if device.type == "cuda" and (config.was_set("launch", option) or variable not in os.environ):
            os.environ[variable] = value


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM if fw's launcher dies, so that its ranks save and end instead of training on unseen (Linux)."""
    if outcome.launched_by_fw() and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _quiet() -> None:
    """Lightning's advice is for people who write its Trainer's arguments; fw has written them."""
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # how a checkpoint gathers a parameter
    warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric|lightning_utilities")
    warnings.filterwarnings("ignore", message=".*`configure_optimizers` returned `None`.*")
