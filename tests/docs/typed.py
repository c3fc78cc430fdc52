"""Typing what pages tell to type, at a desk where what they name is."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from conftest import REPOSITORY, environment, fw as run_fw
from serving import serving

_READY = "is in the config's first lines, which tests/planning/test_ready_configs.py types"
ELSEWHERE = {
    "./tools/quickstart": "makes the environment that runs this test; tools/newcomer types it",
    "./tools/test": "runs this test",
    "source .venv/bin/activate": "has been done",
    "tools/gpu_check": "needs a GPU",
    "tools/bench gpu": "needs a GPU",
    "fw plan configs/llama3-405b-4096.yaml data='{name: synthetic, vocab_size: 128256}' --device h100-80gb": _READY,
    "fw plan configs/qlora-8b-24gb.yaml model='{name: llama3.1-8b}' data='{name: synthetic, vocab_size: 128256, min_length: 64}'"
    " --device rtx4090": _READY,
    "fw plan configs/llama3-8b-full-8x80gb.yaml data='{name: synthetic, vocab_size: 128256}' --device h100-80gb": _READY,
    "fw eval path/to/model --tasks hellaswag,arc_easy --limit 200 --output results.json": "fetches questions of the hub",
    "fw eval path/to/model --tasks gsm8k --chat --num-fewshot 5 kv_cache=quantized": "fetches questions of the hub",
}
"""What is not typed, and why. All of docs/plugins.md is, in tests/testing/test_tutorial.py."""

PAGES = sorted(str(page.relative_to(REPOSITORY)) for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
_BLOCK = re.compile(r"^ *```bash\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_ONE_STEP = ["train.max_steps=1", "train.val_every=0", "train.save_every=1", "train.sample_tokens=0"]


class Typed(NamedTuple):
    """A line of a page."""

    page: str
    line: str

    def __str__(self) -> str:
        return f"{self.page} {self.line}"


def lines_of(*pages: str) -> list[Typed]:
    """All that these pages of the repository tell to type, without what they say of it."""
    return [
        Typed(page, re.sub(r"\s+#\s.*$", "", line).strip())
        for page in pages
        for block in _BLOCK.findall((REPOSITORY / page).read_text())
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


def type_at(desk: Path, typed: Typed) -> None:
    """Do it, in one step where it trains, and see that it does not fail.

    Raises:
        AssertionError: it failed.
    """
    for made in re.findall(r" --(?:to|dir|output) (\S+)|mkdir (\S+)", typed.line):
        shutil.rmtree(desk / "".join(made), ignore_errors=True)
    line = typed.line.replace("/mnt/nvme", str(desk / "nvme"))
    program, *words = shlex.split(line)
    if program == "pip":
        _installable(words)
    elif program == "torchrun":
        _shell(f"{sys.executable} -m torch.distributed.run {line.removeprefix('torchrun')} {' '.join(_run(desk, words))}", desk)
    elif program != "fw":
        _shell(line, desk)
    elif words[0] == "serve":
        _serve(words[1:])
    elif words[0] == "train":
        done = run_fw(*words, *_run(desk, words))
        if "nvme" in line and done.code == 2 and "libaio-dev" in done.err:
            pytest.skip(done.err.strip())
        done.ok()
    else:
        done = run_fw(*words, *(_ONE_STEP if words[:2] == ["data", "teach"] else []))  # of what that step will see
        assert done.code == 3 if "--strict" in words else done.ok()


def _run(desk: Path, words: list[str]) -> list[str]:
    """One step, into a directory that is not there yet: what was trained there before is somebody else's."""
    if "resume=auto" in words:
        return [*_ONE_STEP, "train.max_steps=2"]
    given = next((word.removeprefix("train.run_dir=") for word in words if word.startswith("train.run_dir=")), None)
    if given is None:
        return [*_ONE_STEP, f"train.run_dir=typed/{len(list((desk / 'typed').glob('*')))}"]
    shutil.rmtree(desk / given, ignore_errors=True)
    return _ONE_STEP


def _shell(line: str, desk: Path) -> None:
    env = environment()
    path = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    done = subprocess.run(["bash", "-ec", line], cwd=desk, env={**env, "PATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def _installable(words: list[str]) -> None:
    """The extras and the files that pip is told of are there; installing is what `tools/newcomer` does."""
    extras = importlib.metadata.metadata("fw").get_all("Provides-Extra") or []
    named = [name for word in words if (found := re.search(r"\[(.*)\]", word)) for name in found[1].split(",")]
    assert words[0] == "install"
    assert named and set(named) <= set(extras)
    assert all((REPOSITORY / words[i + 1]).is_file() for i, word in enumerate(words) if word == "-c")


def _serve(words: list[str]) -> None:
    key = Path(words[words.index("--api-keys") + 1]).read_text().split()[0] if "--api-keys" in words else "none"
    with serving(words[0], *words[1:]) as server:
        said = server.openai(key=key).completions.create(model=server.openai(key=key).models.list().data[0].id, prompt="a", max_tokens=2)
        assert said.usage is not None
        assert said.usage.completion_tokens >= 1
