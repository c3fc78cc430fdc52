"""Which checkpoint a run goes on from: the newest whole one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from typing import Any

from fw.bars import Bar
from fw.errors import RunError, UserError
from fw.kinds.checkpoint import Beat, NewerFormatError, Ranks, Reader
from fw.kinds.data import Corpus
from fw.launching.outcome import RESUME_FROM, launched_by_fw, restarted_by_another
from fw.place import Place, place
from fw.recipe import Recipe
from fw.training.same_run import older_checkpoints

AUTO = "auto"

_BEFORE_THEY_WERE_KEPT = {"train.packing": False, "train.length_bucketing": 0, "peft": {"name": "none"}}
"""What a checkpoint means that says nothing of a setting."""


def find(recipe: Recipe, corpus: Corpus, ranks: Ranks, say: Callable[[str], None]) -> Reader | None:
    """The checkpoint to go on from, if any, verified. Collective: the same one on all ranks.

    Raises:
        UserError: it is no checkpoint, it is damaged, or going on from it would not be what it looks like.
        RunError: a rank failed while it read.
    """
    where = recipe.config.origin(("resume",))
    resume = recipe.resume
    if launched_by_fw() and RESUME_FROM in os.environ:
        chosen = os.environ[RESUME_FROM]  # the launching process has verified it
        reader = recipe.checkpoint.open(place(chosen)) if chosen else None
    else:
        older = None
        if restarted_by_another():
            older = ranks.gather(older_checkpoints(recipe.run_dir) if ranks.rank == 0 else None)[0]
        try:
            reader = None if older is None else newest(recipe, ranks, say, older)
            if reader is None and resume:
                reader = newest(recipe, ranks, say) if resume == AUTO else _given(recipe, resume, ranks)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    if reader is not None:
        try:
            _check_continues(recipe, corpus, reader)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    return reader


def identities(recipe: Recipe) -> frozenset[str]:
    """Of the checkpoints that are there: what a run that begins knows to be another one's, or of another future of its own."""
    plugin, directory = recipe.checkpoint, recipe.checkpoints
    found = set()
    for name in plugin.found(directory):
        with suppress(UserError):
            found.add(plugin.open(directory / name).identity)
    return frozenset(found)


def newest(recipe: Recipe, ranks: Ranks, say: Callable[[str], None], apart_from: Set[str] = frozenset()) -> Reader | None:
    """The newest whole checkpoint of the run, else None where it has none. Collective.

    Args:
        apart_from: identities of checkpoints that are none of this run's.

    Raises:
        UserError: there are checkpoints, and none is whole.
    """
    wrong = []
    for reader, problem in _candidates(recipe, ranks):
        if reader is not None and reader.identity in apart_from:
            continue
        problem = problem or (_damage(reader, ranks) if reader is not None else "")
        if problem or reader is None:
            wrong.append(problem)
            continue
        for text in wrong:
            say(f"warning: {text}; going back to {reader.place}")
        return reader
    if wrong and not apart_from:
        raise UserError(
            f"none of the checkpoints in {recipe.checkpoints} is whole ({'; '.join(wrong)}); remove them or give another"
            " train.run_dir to begin anew"
        )
    for text in wrong:
        say(f"warning: {text}")
    return None


def _candidates(recipe: Recipe, ranks: Ranks) -> Iterator[tuple[Reader | None, str]]:
    """Readers, or why there is none, from the newest on; the first rank says which checkpoints there are."""
    directory = recipe.checkpoints
    for name in ranks.gather(recipe.checkpoint.found(directory) if ranks.rank == 0 else None)[0]:
        yield _opened(recipe, directory / name, ranks)


def _opened(recipe: Recipe, step: Place, ranks: Ranks) -> tuple[Reader | None, str]:
    """A reader on every rank, or why one has none.

    Raises:
        UserError: the checkpoint is newer than this fw.
        RunError: another rank does not find what the first one does.
    """
    reader, problem, newer = None, "", False
    try:
        reader = recipe.checkpoint.open(step)
    except UserError as error:
        problem, newer = str(error), isinstance(error, NewerFormatError)
    heard = ranks.gather((problem, newer))
    first, is_newer = heard[0]
    if is_newer:
        raise UserError(first)
    if not first and (elsewhere := [rank for rank, (text, _) in enumerate(heard) if text]):
        text = heard[elsewhere[0]][0]
        raise RunError(f"rank {elsewhere[0]}: {text}; rank 0 has it: checkpoints must be where all hosts share them")
    return (None if first else reader), first


def _damage(reader: Reader, ranks: Ranks) -> str:
    """What is wrong with a checkpoint, read by all ranks together."""

    def look(beat: Beat) -> list[str]:
        with Bar(desc="verifying", unit="B", unit_scale=True, shown=ranks.rank == 0) as bar:

            def read(count: int) -> None:
                bar.update(count)
                beat(f"verifying {reader.place}")

            return reader.damages((ranks.rank, ranks.size), read)

    found = [text for texts in ranks.together(f"checkpoint {reader.place} could not be verified", look) for text in texts]
    return f"checkpoint {reader.place} is damaged: {'; '.join(found)}" if found else ""


def _given(recipe: Recipe, resume: str, ranks: Ranks) -> Reader:
    """What a path or URL means: a step, or the newest of a directory of them or of a run."""
    given = place(resume)
    for directory in (given, given / "checkpoints"):
        names = ranks.gather(recipe.checkpoint.found(directory) if ranks.rank == 0 else None)[0]
        if names:
            given = directory / names[0]
            break
    reader, problem = _opened(recipe, given, ranks)
    problem = problem or (_damage(reader, ranks) if reader is not None else "")
    if problem or reader is None:
        raise UserError(problem)
    return reader


def _check_continues(recipe: Recipe, corpus: Corpus, reader: Reader) -> None:
    state = reader.state()
    if missing := [key for key in ("step", "tokens", "loader", "data", "must_agree", "scalars") if key not in state]:
        raise UserError(f"{reader.place} holds no state of a run ({', '.join(missing)}); begin from it with model.weights")
    if state["data"] != corpus.fingerprint:
        raise UserError(
            f"{reader.place} was trained on other data than the config gives (tokens differ); use the same data section"
            " (where a chat template writes the day, with data.date: the one it was prepared on)"
        )
    for setting, (now, why) in must_agree(recipe).items():
        before = state["must_agree"].get(setting, _BEFORE_THEY_WERE_KEPT.get(setting))
        if before != now:
            raise UserError(f"{reader.place} was trained with {setting}={before}, the config says {now}, which would change {why}")
    samples = [len(corpus.train), len(corpus.val)]
    if (then := state.get("samples", samples)) != samples:
        raise UserError(
            f"{reader.place} was trained on {then[0]:,} samples with {then[1]:,} held out, the config gives {samples[0]:,} and"
            f" {samples[1]:,}: the order of the data would change; hold out what was held out then"
        )


def must_agree(recipe: Recipe) -> dict[str, tuple[Any, str]]:
    """What a resumed run must have in common with the run it goes on with, and what would change."""
    parameters = str(recipe.precision.policy().parameters).removeprefix("torch.")
    bucketing = recipe.train.length_bucketing
    steps = {"train.global_batch_size": (recipe.train.global_batch_size, "which samples change places")} if bucketing else {}
    return {
        "train.seed": (recipe.train.seed, "the order of the data"),
        "train.sequence_length": (recipe.train.sequence_length, "what the data is cut into"),
        "train.packing": (recipe.train.packing, "which samples share a row"),
        "train.length_bucketing": (bucketing, "the order of the data"),
        **steps,
        "optimizer": (recipe.names["optimizer"][0], "what the optimizer's state means"),
        "parameter dtype": (parameters, "what the optimizer's state means"),
        "peft": ({k: v for k, v in recipe.tree["peft"].items() if k not in ("adapter", "dropout")}, "what trains"),
    }
