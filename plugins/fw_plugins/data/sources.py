"""Where documents come from: text files, or the documentation that comes with every Python."""

from __future__ import annotations

import ast
import glob
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from fw.api import UserError

PYTHON_DOCS = "python-docs"

_LARGEST = 64 * 1024
_FEWEST = 20
_OMITTED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Files named or matched by ``patterns``, in order, each once.

    Raises:
        UserError: a name or pattern that matches no file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = sorted(p for p in glob.glob(str(Path(pattern).expanduser()), recursive=True) if Path(p).is_file())
        if not matches:
            raise UserError(f"data.files: '{pattern}' matches no file (looked from {Path.cwd()})")
        found.update((Path(match), None) for match in matches)
    return list(found)


def from_files(files: Sequence[Path]) -> Iterator[str]:
    """Documents of text files: a file each, long ones cut at blank lines so that a split between documents is possible.

    Raises:
        UserError: a file that is unreadable or not UTF-8, with the position.
    """
    sizes = [file.stat().st_size for file in files]
    limit = _LARGEST
    if sum(max(1, size // limit) for size in sizes) < _FEWEST:
        limit = max(512, sum(sizes) // (5 * _FEWEST))
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"data.files: {file} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None
        except OSError as error:
            raise UserError(f"data.files: {file} cannot be read: {error.strerror}") from None
        yield from cut(text, limit)


def cut(text: str, limit: int, separators: Sequence[str] = ("\n\n", "\n", " ")) -> Iterator[str]:
    """Pieces of about ``limit`` characters, at the first separator that serves; joined they are the text."""
    if len(text) <= limit:
        if text.strip():
            yield text
        return
    if not separators:
        yield from (text[i : i + limit] for i in range(0, len(text), limit))
        return
    separator, *finer = separators
    piece = ""
    parts = text.split(separator)
    for number, part in enumerate(parts):
        part += separator * (number < len(parts) - 1)
        if piece and len(piece) + len(part) > limit:
            yield from cut(piece, limit, finer)
            piece = ""
        piece += part
    yield from cut(piece, limit, finer)


def from_python() -> Iterator[str]:
    """English that comes with every Python: the language reference's topics, then the docstrings of the standard library by module.

    A docstring that several places share is kept once.
    """
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]
    seen: set[str] = set()
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).parts
        if _OMITTED.intersection(parts) or parts[0] == "pydoc_data":
            continue
        document = "\n\n".join(_docstrings(file, ".".join(parts).removesuffix(".py").removesuffix(".__init__"), seen))
        if document:
            yield document


def python_version() -> str:
    """What :func:`from_python` depends on."""
    return f"{sys.version} {sysconfig.get_paths()['stdlib']}"


def _docstrings(file: Path, module: str, seen: set[str]) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):  # templates and deliberately bad files
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and text not in seen:
                seen.add(text)
                yield f"{module if isinstance(node, ast.Module) else node.name}\n\n{text}"
