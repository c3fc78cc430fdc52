"""From a config to a recipe: one plugin per kind with its options in its own dataclass, and the rules between them checked."""

from fw.recipe.resolve import Recipe, resolve
from fw.recipe.world import World, current_world

__all__ = ["Recipe", "World", "current_world", "resolve"]
