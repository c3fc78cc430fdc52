"""From YAML files and command-line overrides to a frozen :class:`Config` that knows where every value came from.

This package knows nothing of plugins: it reads, layers and remembers. :mod:`fw.recipe` gives the values their types.
"""

from fw.config.inference import InferenceSection
from fw.config.load import PLUGINS, Config, layered, load, overridden
from fw.config.origin import DEFAULT, Origin
from fw.config.schema import check_interpolations, fill, interpolated, options_of
from fw.config.sections import ASKED_FOR, LaunchSection, LoaderSection, MemorySection, TrainSection
from fw.config.serve import ServeSection
from fw.config.size import format_size, parse_size
from fw.config.yaml_source import dump as to_yaml

__all__ = [
    "ASKED_FOR",
    "DEFAULT",
    "PLUGINS",
    "Config",
    "InferenceSection",
    "LaunchSection",
    "LoaderSection",
    "MemorySection",
    "Origin",
    "ServeSection",
    "TrainSection",
    "check_interpolations",
    "fill",
    "format_size",
    "interpolated",
    "layered",
    "load",
    "options_of",
    "overridden",
    "parse_size",
    "to_yaml",
]
