"""A model that generates within a budget, which a plan divides."""

from __future__ import annotations

from pathlib import Path

from fw.inference import llm
from fw.planning.generation import within_budget
from fw.recipe.inference import InferenceRecipe


class LLM(llm.LLM):
    __doc__ = llm.LLM.__doc__

    def _begin(self, path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None) -> None:
        super()._begin(path, within_budget(path, recipe, adapter), adapter)
