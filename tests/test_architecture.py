"""The rules of the tree that no tool checks: layers, one importer of subprocess, nothing that unpickles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("optiml/**/*.py"), *ROOT.glob("optiml_mcp/*.py")])

LAYERS = (  # low to high; a folder's modules may import one another
    ("optiml.errors",),
    ("optiml.records", "optiml.expressions"),
    ("optiml.codec", "optiml.diffs", "optiml.frames", "optiml.niceness", "optiml.sandbox", "optiml.scratch"),
    ("optiml.settings", "optiml.process", "optiml.store", "optiml.kernel_file"),
    ("optiml.ptx", "optiml.problems", "optiml.llm"),
    ("optiml.toolchain",),
    ("optiml.device",),
    ("optiml.reward",),
    ("optiml.verify", "optiml.measure", "optiml.generate"),
    ("optiml.mixture",),
    ("optiml.search",),
    ("optiml.evaluate", "optiml.report"),
    ("optiml.searches", "optiml.doctor"),
    ("optiml.workbench",),
    ("optiml.bench",),
    ("optiml.show", "optiml_mcp"),
    ("optiml.cli",),
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def place(name: str) -> tuple[int, str] | None:
    """Layer and group of a module; None for the package itself and for foreign modules."""
    for level, groups in enumerate(LAYERS):
        for group in groups:
            if name == group or name.startswith(group + "."):
                return level, group
    return None


def test_every_module_has_a_layer() -> None:
    homeless = [module_name(path) for path in SOURCES if place(module_name(path)) is None]
    assert homeless == ["optiml"]


def test_no_module_imports_its_own_layer_or_a_higher_one() -> None:
    upward = []
    for path in SOURCES:
        here = place(module_name(path))
        for name in imports(path) if here is not None else ():
            there = place(name)
            if there is not None and there[1] != here[1] and there[0] >= here[0]:
                upward.append(f"{module_name(path)} imports {name}")
    assert upward == []


def test_the_ptx_engine_knows_only_the_error_tree() -> None:
    foreign = {
        name
        for path in SOURCES
        if module_name(path).startswith("optiml.ptx")
        for name in imports(path)
        if name.startswith("optiml.") and not name.startswith("optiml.ptx")
    }
    assert foreign == {"optiml.errors"}


def test_only_process_starts_programs() -> None:
    starters = {
        module_name(path) for path in SOURCES for name in imports(path) if name in ("subprocess", "multiprocessing")
    }
    assert starters == {"optiml.process"}


def test_nothing_unpickles_and_only_the_reference_child_executes_text() -> None:
    found = []
    for path in SOURCES:
        name = module_name(path)
        found += [f"{name}: import {item}" for item in imports(path) if item in ("pickle", "marshal", "shelve", "dill")]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append(f"{name}: {node.func.id}")
    assert found == ["optiml.measure.baselines_child: exec", "optiml.verify.reference_child: exec"]


def test_only_the_command_line_prints() -> None:
    printers = {
        module_name(path)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printers <= {"optiml.cli", "optiml.show"}


def test_every_public_module_says_what_it_is_for() -> None:
    modules = [path for path in SOURCES if path.name != "reference.py"]  # those are data: the text of a Problem
    silent = [module_name(path) for path in modules if ast.get_docstring(ast.parse(path.read_text("utf-8"))) is None]
    assert silent == []
