"""Where packages, CUDA's libraries and NVIDIA's programs are looked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optiml import sandbox
from optiml.toolchain.tools import find_tool, library_folders


def test_a_folder_of_pip_install_target_holds_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, other = tmp_path / "target", tmp_path / "other"
    (target / "thing-1.0.dist-info").mkdir(parents=True)
    other.mkdir()
    monkeypatch.setattr(sys, "path", [str(target), str(other), str(tmp_path / "gone"), ""])
    assert sandbox.package_folders() == [str(target)]


def test_a_program_of_the_toolkit_is_found_beside_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "a-tool-of-nobody"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    (tmp_path / "lib64").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_tool("a-tool-of-nobody") == program
    assert library_folders()[0] == str(tmp_path / "lib64")
    monkeypatch.delenv("CUDA_HOME")
    assert find_tool("a-tool-of-nobody") is None
