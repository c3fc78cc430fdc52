"""A config handed to a cluster: checked where it can be, then submitted by its launcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fw import config as configuration
from fw.config import to_yaml
from fw.kinds.launcher import LauncherPlugin
from fw.launching.job import Job
from fw.recipe import World, resolve
from fw.training.inputs import check_input


def prepare(file: str, launcher: str, overrides: Sequence[str]) -> tuple[LauncherPlugin, Job, str]:
    """The launcher, what it gets, and the text it would submit.

    Args:
        file: a YAML file.
        launcher: name of a plugin; the file's own ``launcher`` section gives its options if it names the same.

    Raises:
        UserError: the config is wrong, or this launcher has nothing to submit to.
    """
    section = configuration.load(file, overrides).tree.get("launcher")
    named = section.get("name") if isinstance(section, Mapping) else section
    if named != launcher and not (isinstance(section, Mapping) and named is None):
        overrides = [f"launcher={{name: {launcher}}}", *(text for text in overrides if not text.startswith("launcher="))]
    elif named is None:
        overrides = [f"launcher.name={launcher}", *overrides]
    config = configuration.load(file, overrides)
    recipe = resolve(config, World())
    text_of = dict(config.tree)
    job = Job(launcher, config.name, file, overrides, to_yaml(text_of), recipe.launch, recipe.run_dir, recipe.resume)
    text = recipe.launcher.submission(job)
    if recipe.launcher.shares_files:
        check_input(recipe)
    return recipe.launcher, job, text
