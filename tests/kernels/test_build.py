"""Compiling kernels: who is asked, how often, and what is told."""

from __future__ import annotations

import ctypes
import os
import shutil

import pytest

from fw.kernels import build
from fw.kernels.build import NotCompiled, library, with_threads


@pytest.fixture
def refusing(monkeypatch, tmp_path):
    """A compiler that refuses, and writes a line for each time it is asked to compile."""
    asked = tmp_path / "asked"
    asked.touch()
    command = tmp_path / "refuses"
    command.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho asked >> {asked}\necho "it does not like that" >&2\nexit 1\n')
    os.chmod(command, 0o700)
    monkeypatch.setenv("CXX", str(command))
    monkeypatch.setenv("FW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_refused", {})
    library.cache_clear()
    yield lambda: len(asked.read_text().splitlines())
    library.cache_clear()


def test_a_compiler_that_refuses_is_not_asked_again(refusing, monkeypatch):
    with pytest.raises(NotCompiled, match=r"refuses .*: it does not like that"):
        library()
    times = refusing()
    assert times > 0
    for _ in range(3):
        with pytest.raises(NotCompiled, match=r"refuses .*: it does not like that"):
            library()
        with with_threads(2):
            pass
    assert refusing() == times
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotCompiled, match="no such command"):
        library()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_driver_for_c_serves_as_well(tmp_path):
    source = tmp_path / "own.cpp"
    source.write_text("struct A { virtual long f() { return 1; } };\nstruct B : A { long f() override { return 2; } };\n")
    source.write_text(source.read_text() + 'extern "C" long own(long b) { A* a = b ? new B : new A; return a->f(); }\n')
    made = tmp_path / "made" / "own.so"
    build._compile(["gcc"], ["-fPIC"], [source], made)
    assert ctypes.CDLL(str(made)).own(ctypes.c_long(1)) == 2
