"""Finding plugins by entry point, without importing them, and loading the ones a config names."""

from fw.registry.discovery import Entry, entries, kinds_found
from fw.registry.inspection import Listing, declared, inspect, listing, literal
from fw.registry.loading import entry_of, load
from fw.registry.plugin import Conflicts, NoOptions, Plugin, Requires

__all__ = [
    "Conflicts",
    "Entry",
    "Listing",
    "NoOptions",
    "Plugin",
    "Requires",
    "declared",
    "entries",
    "entry_of",
    "inspect",
    "kinds_found",
    "listing",
    "literal",
    "load",
]
