"""Print what makes a shell complete fw's verbs, options, files and overrides."""

from __future__ import annotations

import argparse

EXAMPLES = """examples:
  eval "$(fw completion bash)"        # in ~/.bashrc
  eval "$(fw completion zsh)"         # in ~/.zshrc
  fw completion fish > ~/.config/fish/completions/fw.fish"""

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which shell."""
    parser.add_argument("shell", choices=SHELLS, help="whose words are printed")


def run(options: argparse.Namespace) -> int:
    """Print."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["fw"], use_defaults=True, shell=options.shell))
    return 0
