"""A model that generates within a budget, which a plan divides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fw.inference import llm
from fw.recipe.inference import InferenceRecipe


class LLM(llm.LLM):
    __doc__ = llm.LLM.__doc__

    def _begin(self, path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None, say: Callable[[str], None] = print) -> None:
        if recipe.inference.budget:
            # Not before: what plans knows how runs train, and takes seconds to import.
            from fw.planning.generation import within_budget

            recipe = within_budget(path, recipe, adapter)
        super()._begin(path, recipe, adapter, say)
