"""What the launching process settles before the ranks start, the first time and after a failure: directory, logs, checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from fw.checkpointing.ranks import OneRank
from fw.errors import UserError
from fw.kinds.checkpoint import Reader
from fw.launching.outcome import RESUME_FROM
from fw.launching.rank_log import LOG_DIR
from fw.place import Place
from fw.recipe import Recipe
from fw.training import resume, run_dir
from fw.training.same_run import held_by


class Attempts(ExitStack):
    """The attempts at one run, of which each but the first goes on where the last one left off.

    A context, at whose end the run directory is anyone's again. Of several hosts only the one that prepares holds it: they may share it.

    Args:
        start: the checkpoint the run begins from, if any.
        say: prints a line.
        files: names and texts, for the run directory.
    """

    def __init__(self, recipe: Recipe, start: Reader | None, say: Callable[[str], None], files: Mapping[str, str]) -> None:
        super().__init__()
        self._recipe, self._start, self._say, self._files = recipe, start, say, files
        self._older: frozenset[str] = frozenset()

    def prepare(self, attempt: int) -> dict[str, str]:
        """Make the run directory and the attempt's log directory; returns environment variables for the ranks.

        Raises:
            UserError: the run directory cannot be used, or another run is writing it.
        """
        recipe = self._recipe
        if attempt == 0:
            self.enter_context(held_by(recipe))
            if recipe.resume == resume.AUTO:
                self._start = self._found_again()
            run_dir.make(recipe.run_dir, run_dir.continues(recipe, self._start), self._files)
            run_dir.make_room(recipe, self._start)
            self._older = resume.identities(recipe)
        # Those of before this run are another future's.
        reader = (resume.newest(recipe, OneRank(), self._say, self._older) if attempt else None) or self._start
        if attempt:
            recipe.checkpoint.clean(recipe.checkpoints)
            where = f"from {reader.place if reader else 'the beginning'}: attempt {attempt + 1} of {recipe.launch.max_restarts + 1}"
            self._say(f"starting the ranks again {where}")
        return {LOG_DIR: str(_new_log_dir(recipe.run_dir)), RESUME_FROM: "" if reader is None else absolute(reader.place)}

    def _found_again(self) -> Reader | None:
        """What `resume=auto` means now that nobody else writes there: the run that did may have gone on since it was looked for."""
        plugin, directory = self._recipe.checkpoint, self._recipe.checkpoints
        names = plugin.found(directory)
        if not names or self._start is None:
            return self._start
        with suppress(UserError):
            if plugin.open(directory / names[0]).identity == self._start.identity:
                return self._start
        return resume.newest(self._recipe, OneRank(), self._say)


def absolute(place: Place) -> str:
    """As another process finds it."""
    return str(place if place.local is None else place.local.absolute())


def _new_log_dir(directory: Path) -> Path:
    """``logs/attempt-N``, after those of earlier attempts and launches; ranks write into it wherever they run."""
    logs = directory / "logs"
    numbers = [int(name) for found in logs.glob("attempt-*") if (name := found.name.removeprefix("attempt-")).isdecimal()]
    made = logs / f"attempt-{max(numbers, default=-1) + 1}"
    try:
        made.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"train.run_dir: {made} cannot be made: {error.strerror}; give another train.run_dir") from None
    return made
