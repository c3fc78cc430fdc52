"""Versions of a kind's contract, and what becomes of plugins written for one that is not the newest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Apis:
    """Which versions of a contract the core speaks.

    A new version that old plugins can live with leaves the older number in ``spoken``: they work, and their users are told. Once the
    number is taken out, they are refused. Either way the sentence says what has to change in them.

    Attributes:
        spoken: the newest last.
        changes: version → what a plugin written for the one before has to change, as an imperative clause.
    """

    spoken: tuple[int, ...] = (1,)
    changes: Mapping[int, str] = field(default_factory=dict)

    def problem(self, kind: str, api: object, distribution: str) -> str:
        """Why a plugin written for version ``api`` cannot be honoured, or an empty string."""
        if api in self.spoken:
            return ""
        remedy = "upgrade fw" if isinstance(api, int) and api > self.newest else f"upgrade {distribution}"
        if isinstance(api, int) and (todo := self._todo(api)):
            remedy += f", or change it: {todo}"
        return f"was written for api {api} of kind '{kind}', this fw speaks {self._numbers()}; {remedy}"

    def advice(self, kind: str, api: object) -> str:
        """What to know of a plugin that is honoured and yet not of the newest version, or an empty string."""
        if api not in self.spoken or api == self.newest:
            return ""
        assert isinstance(api, int)
        todo = self._todo(api)
        return f"was written for api {api} of kind '{kind}', which a later fw will refuse; for api {self.newest}{todo and f': {todo}'}"

    @property
    def newest(self) -> int:
        """What a plugin that is written now declares."""
        return self.spoken[-1]

    def _todo(self, api: int) -> str:
        return "; ".join(what for version, what in sorted(self.changes.items()) if api < version <= self.newest)

    def _numbers(self) -> str:
        *others, last = map(str, self.spoken)
        return f"{', '.join(others)} and {last}" if others else last


FIRST = Apis()
"""Of a contract that has not changed yet."""
