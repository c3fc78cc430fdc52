"""Finding plugins by entry point, without importing them, loading the ones a config names, and registering those of files."""

from fw.registry.apis import Apis
from fw.registry.discovery import OWN, Entry, entries, from_elsewhere, kinds_found
from fw.registry.inspection import Listing, declared, inspect, listing, literal
from fw.registry.loading import entry_of, load
from fw.registry.plugin import Conflicts, NoOptions, Plugin, Requires
from fw.registry.registering import load_file, only_here, register

__all__ = [
    "OWN",
    "Apis",
    "Conflicts",
    "Entry",
    "Listing",
    "NoOptions",
    "Plugin",
    "Requires",
    "declared",
    "entries",
    "entry_of",
    "from_elsewhere",
    "inspect",
    "kinds_found",
    "listing",
    "literal",
    "load",
    "load_file",
    "only_here",
    "register",
]
