"""From YAML files and command-line overrides to a frozen :class:`Config` that knows where every value came from.

This package knows nothing of plugins: it reads, layers and remembers. :mod:`fw.recipe` gives the values their types.
"""

from fw.config.load import Config, load
from fw.config.origin import DEFAULT, Origin
from fw.config.schema import fill, options_of
from fw.config.sections import LaunchSection, MemorySection, TrainSection
from fw.config.size import format_size, parse_size

__all__ = [
    "DEFAULT",
    "Config",
    "LaunchSection",
    "MemorySection",
    "Origin",
    "TrainSection",
    "fill",
    "format_size",
    "load",
    "options_of",
    "parse_size",
]
