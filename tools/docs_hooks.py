"""Pages of the site that are made of the program itself: every option of every section and plugin, and the configs."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
for part in ("framework", "plugins", "models"):
    sys.path.insert(0, str(ROOT / part))

_CONFIG_LINK = re.compile(r"\]\(\.\./configs/([a-z0-9.-]+)\.yaml\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {"reference/config.md": _sections(), "reference/plugins.md": _plugins(), "reference/configs.md": _configs()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Configs are pages of the site."""
    return _CONFIG_LINK.sub(lambda found: f"](reference/configs.md#{_anchor(found[1])})", markdown)


def _sections() -> str:
    from fw import config

    sections = {
        "train": config.TrainSection,
        "loader": config.LoaderSection,
        "launch": config.LaunchSection,
        "memory": config.MemorySection,
        "inference": config.InferenceSection,
        "serve": config.ServeSection,
    }
    parts = [
        "# Sections of a config",
        "",
        "Those that belong to no plugin. Each option with its type, its default, and what it does to memory.",
    ]
    for name, cls in sections.items():
        parts += ["", f"## {name}", "", (cls.__doc__ or "").strip(), "", *_options(cls)]
    return "\n".join(parts) + "\n"


def _plugins() -> str:
    from fw.kinds import KINDS, plugin_class
    from fw.registry import entries
    from fw.registry.inspection import listing

    parts = ["# Plugins and their options", "", "Those that fw comes with, by kind."]
    for name, kind in KINDS.items():
        contract = kind.load_contract()
        parts += [
            "",
            f"## {name}",
            "",
            f"{kind.decides[0].upper()}{kind.decides[1:]}." + (f" Default: `{kind.default}`." if kind.default else ""),
        ]
        problems = {each.entry.name: each.problem for each in listing(name, kind.apis)}
        for entry in entries(name):
            if entry.distribution != "fw":
                continue
            parts += ["", f"### {name} `{entry.name}`", ""]
            if problems.get(entry.name):
                parts.append(f"Not described here: {problems[entry.name]}.")
                continue
            cls = plugin_class(contract, entry.name)
            parts += [(cls.__doc__ or "").strip().splitlines()[0], "", *_options(cls.Config)]
    return "\n".join(parts) + "\n"


def _options(cls: type) -> list[str]:
    from fw.config import options_of

    if not dataclasses.fields(cls):
        return ["No options."]
    rows = ["| option | type | default | |", "| --- | --- | --- | --- |"]
    for option in options_of(cls):
        cells = (f"`{option.name}`", f"`{option.type}`", f"`{option.default}`", " ".join(option.doc.split()))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _configs() -> str:
    parts = ["# Ready configs", "", "Those of `configs/`; each begins with the commands that it is for, and the one that plans it."]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        parts += ["", f"## {path.stem}", "", "```yaml", path.read_text().rstrip(), "```"]
    return "\n".join(parts) + "\n"


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "", name.lower())
