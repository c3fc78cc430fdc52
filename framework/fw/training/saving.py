"""When a checkpoint is written, and what training waits for."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping

from fw.checkpointing.staging import Copying, Stage
from fw.errors import RunError
from fw.kinds.checkpoint import Ranks, Snapshot
from fw.launching.stacks import Watch
from fw.place import Place
from fw.recipe import Recipe
from fw.training.module import TrainingModule
from fw.training.snapshot import snapshot, tensors


class Saver:
    """Saves a run, at once or while training goes on. All methods but :meth:`report` are collective.

    A save that fails ends nothing: the run is worth more than this checkpoint, and the next one may succeed.

    Args:
        parent: name of the checkpoint of this directory that the run goes on from, if it does.
        say: prints a line, on the first rank.
    """

    def __init__(self, recipe: Recipe, ranks: Ranks, watch: Watch, parent: str | None, say: Callable[[str], None]) -> None:
        self.failed = ""
        """Why the last checkpoint was not written; empty where it was."""
        self.saved: Place | None = None
        """The last checkpoint that this run has written."""
        self.times: list[tuple[float, float]] = []
        """For each checkpoint: seconds it took, and for how many of them training waited."""
        self._recipe, self._ranks, self._watch, self._say = recipe, ranks, watch, say
        self._options = recipe.checkpoint.config
        self._parent = parent
        self._stage = Stage(ranks) if self._options.asynchronous else None
        self._pending: _Pending | None = None
        self._last_step = -1

    def has_saved(self, step: int) -> bool:
        """Whether the run as it stands after ``step`` is saved, or about to be."""
        return self._last_step == step and not self.failed

    def prepare(self, module: TrainingModule) -> None:
        """Get the memory that saving in the background needs, once optimizer state is there."""
        if self._stage is not None:
            self._stage.reserve(tensors(module.assembly))

    def save(self, module: TrainingModule, metrics: Mapping[str, float], last: bool) -> None:
        """Save the run as it stands.

        Args:
            last: nothing comes after it; it is neither left out nor left to the background.
        """
        step = module.global_step
        begun = time.monotonic()
        if not self._is_free(step, module, last):
            return
        self._watch.rest()
        try:
            made = snapshot(self._recipe, module, metrics, self._parent)
            if self._stage is None or last:
                self._pending = _Pending(step, lambda: self._write(made))
                self._pending.run()
            else:
                copying = self._stage.plan(made.tensors)
                self._pending = pending = _Pending(step, lambda: self._write(self._copied(copying, made, pending)))
                self._pending.start()
        finally:
            self._watch.beat()
            self._last_step = step
        self._pending.stall_seconds = time.monotonic() - begun
        self.report()

    def before_update(self) -> None:
        """Weights and optimizer state are about to change: wait until what is to be saved of them has been copied. Not collective.

        Between two updates a step only reads them, so that copying goes on beside its forward and backward.
        """
        pending = self._pending
        if pending is not None and not pending.copied.is_set():
            begun = time.monotonic()
            pending.copied.wait()
            pending.stall_seconds += time.monotonic() - begun

    def _copied(self, copying: Copying, made: Snapshot, pending: _Pending) -> Snapshot:
        found: list[Snapshot] = []
        try:
            self._ranks.together(f"checkpoint of step {made.step} not written", lambda beat: found.append(copying.run(made)))
        finally:
            pending.copied.set()
        return found[0]

    def _is_free(self, step: int, module: TrainingModule, last: bool) -> bool:
        """Whether there is nothing being written any more, waiting for it if that is the policy."""
        pending = self._pending
        (busy,) = module.strategy.max_on_host([float(pending is not None and pending.is_running())])
        if busy:  # perhaps on another rank alone, which removes older ones yet
            if self._options.when_busy == "skip" and not last:
                self._say(f"step {step}: not saved, step {self._last_step} is still being written (checkpoint.when_busy=skip)")
                return False
            begun = time.monotonic()
            self._watch.rest()
            if pending is not None:
                pending.wait()
            self._watch.beat()
            if not last:
                self._say(f"step {step}: waited {time.monotonic() - begun:.1f} s for the checkpoint of step {self._last_step}")
        self.report()
        return True

    def _write(self, made: Snapshot) -> Place:
        recipe, directory = self._recipe, self._recipe.checkpoints
        place = recipe.checkpoint.save(directory, made, self._ranks)
        self._parent = place.name
        if self._ranks.rank == 0:
            try:
                recipe.checkpoint.prune(directory, self._options)
            except OSError as error:
                print(f"fw: warning: older checkpoints in {directory} were not removed: {error.strerror or error}", file=sys.stderr)
        return place

    def report(self) -> None:
        """Say how a save ended, once it has."""
        pending = self._pending
        if pending is None or pending.is_running():
            return
        self._pending = None
        if isinstance(pending.error, RunError):
            self.failed = str(pending.error)
            if self._ranks.rank == 0:
                print(f"fw: warning: {pending.error}", file=sys.stderr)
        elif pending.error is not None:
            raise pending.error
        else:
            self.failed, self.saved = "", pending.place
            self.times.append((pending.seconds, pending.stall_seconds))
            waited = f" (training waited {pending.stall_seconds:.2f} of {pending.seconds:.2f} s)" if self._stage is not None else ""
            self._say(f"step {pending.step}: saved {pending.place}{waited}")

    def settle(self) -> None:
        """Wait until nothing is being written any more."""
        if self._pending is not None:
            self._watch.rest()
            self._pending.wait()
            self._watch.beat()
            self.report()

    def close(self) -> None:
        """Finish what is being written; nothing is watched any more."""
        if self._pending is not None:
            self._watch.rest()
            self._pending.wait()
            self.report()


class _Pending:
    """A save that is done here, or in a thread."""

    def __init__(self, step: int, write: Callable[[], Place]) -> None:
        self.step = step
        self.place: Place | None = None
        self.error: Exception | None = None
        self.copied = threading.Event()
        """What is to be saved does not depend on the tensors any more."""
        self.stall_seconds = 0.0
        """For which training waited."""
        self.seconds = 0.0
        """From the beginning to the end."""
        self._write = write
        self._done = threading.Event()

    def run(self) -> None:
        """Here and now."""
        begun = time.monotonic()
        try:
            self.place = self._write()
        except Exception as error:
            self.error = error
        finally:
            self.seconds = time.monotonic() - begun
            self.copied.set()
            self._done.set()

    def start(self) -> None:
        """In a thread that the end of the process waits for."""
        threading.Thread(target=self.run, name=f"save step {self.step}").start()

    def is_running(self) -> bool:
        """Whether it is not over yet."""
        return not self._done.is_set()

    def wait(self) -> None:
        """Until it is over."""
        self._done.wait()
