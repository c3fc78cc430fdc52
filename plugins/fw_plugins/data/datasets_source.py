"""Records of Hugging Face's library ``datasets``: of the hub, of a directory with files, or of one that ``save_to_disk`` wrote."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fw.api import UserError
from fw_plugins.data.records import Bad, Record, without_empty

_COMMIT = re.compile(r"[0-9a-f]{40}")


class DatasetRecords:
    """Of one split.

    Args:
        streaming: read records as they come, and keep nothing of the dataset's files.
    """

    def __init__(self, dataset: str, subset: str, split: str, revision: str, streaming: bool) -> None:
        self._dataset, self._subset, self._split = dataset, subset, split
        self._revision, self._streaming = revision, streaming
        self._commits: dict[str, str] = {}
        """The one that is read, once the hub has been asked; what was pushed meanwhile is another."""
        if importlib.util.find_spec("datasets") is None:
            raise UserError("data.dataset needs the package datasets, which is not installed: pip install fw[datasets]")

    def of(self, split: str) -> DatasetRecords:
        """Of another split, of the same commit."""
        other = DatasetRecords(self._dataset, self._subset, split, self._revision, self._streaming)
        other._commits = self._commits
        return other

    @property
    def _directory(self) -> Path | None:
        path = Path(self._dataset).expanduser()
        return path if path.is_dir() else None

    def identity(self) -> list[Any]:
        """What tells these records from others, without reading them: a directory's files, or the hub's commit.

        Raises:
            UserError: the hub has no such dataset.
        """
        if (directory := self._directory) is not None:
            files = sorted(path for path in directory.rglob("*") if path.is_file())
            content = [[str(path.relative_to(directory)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
            return [str(directory.resolve()), self._subset, self._split, content]
        return [self._dataset, self._subset, self._split, self._commit()]

    def _commit(self) -> str:
        if self._dataset not in self._commits:
            self._commits[self._dataset] = self._asked()
        return self._commits[self._dataset]

    def _asked(self) -> str:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError

        if _COMMIT.fullmatch(self._revision):
            return self._revision
        try:
            return str(HfApi().dataset_info(self._dataset, revision=self._revision or None).sha)
        except RevisionNotFoundError:
            raise UserError(f"data.revision: {self._dataset} has no '{self._revision}' on the hub") from None
        except (RepositoryNotFoundError, HFValidationError):
            raise UserError(
                f"data.dataset: {self._dataset} is neither a directory nor a dataset of the hub that can be seen from here"
            ) from None
        except OfflineModeIsEnabled:
            return self._revision  # what the cache has
        except Exception as error:  # of one HTTP client or another: which one it is depends on the version
            raise UserError(
                f"data.dataset: the hub cannot be asked for {self._dataset} ({type(error).__name__}); name a directory, give"
                " data.revision as a commit, or set HF_HUB_OFFLINE=1 for what is in the cache"
            ) from None

    def records(self, bad: Bad) -> Iterator[Record]:
        """In the dataset's order; none of them is bad in itself.

        Raises:
            UserError: there is no such split or subset, or it cannot be read.
        """
        place = f"{self._dataset} [{self._split}]"
        for number, value in enumerate(self._opened(), start=1):
            yield Record(f"{place} row {number}", without_empty(value))

    def _opened(self) -> Any:
        import datasets

        datasets.disable_progress_bars() if not os.isatty(2) else None
        directory = self._directory
        try:
            if directory is not None and ((directory / "dataset_dict.json").exists() or (directory / "state.json").exists()):
                found = self._saved(datasets.load_from_disk(str(directory)))
                return found.to_iterable_dataset() if self._streaming else found
            where = self._dataset if directory is None else str(directory)
            revision = {} if directory is not None else {"revision": self._commit() or None}
            found = datasets.load_dataset(where, self._subset or None, split=self._split, streaming=self._streaming, **revision)
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            said = " ".join(str(error).split())
            raise UserError(f"data.dataset: {self._dataset} cannot be opened: {said[:300]}") from None
        self._of_the_commit(found)
        return found

    def _of_the_commit(self, found: Any) -> None:
        """Where the hub cannot be asked, `datasets` takes the newest of its cache, whatever the revision."""
        wanted = self._commit() if self._directory is None else ""
        files = (Path(each["filename"]) for each in getattr(found, "cache_files", []))
        taken = {part for file in files for part in file.parts if _COMMIT.fullmatch(part)}
        if _COMMIT.fullmatch(wanted) and taken and wanted not in taken:
            raise UserError(
                f"data.revision: of {self._dataset} the newest in the cache is {', '.join(sorted(taken))}, and without the hub there is no"
                f" other to be had than that; {wanted} was asked for"
            )

    def _saved(self, found: Any) -> Any:
        """The split of what `save_to_disk` wrote."""
        if self._subset:
            raise UserError(f"data.subset: {self._dataset} is one that save_to_disk wrote, which has no subsets")
        splits = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
        if self._split not in splits:
            there = f"there are: {', '.join(splits)}; parts of one are named only of datasets with files"
            raise UserError(f"data.split: {self._dataset} has no '{self._split}' ({there})")
        return splits[self._split]
