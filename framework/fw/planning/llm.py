"""A model that generates within a budget, which a plan divides, and whose weights are where it finds room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fw.inference import llm
from fw.recipe.inference import InferenceRecipe


class LLM(llm.LLM):
    __doc__ = llm.LLM.__doc__

    def _begin(self, path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None, say: Callable[[str], None] = print) -> None:
        if recipe.inference.budget or recipe.offload.automatic:
            # Not before: what plans knows how runs train, and takes seconds to import.
            from fw.planning.generation import within_budget
            from fw.planning.placing import placed_here

            recipe = within_budget(path, placed_here(path, recipe, adapter), adapter)
        super()._begin(path, recipe, adapter, say)
