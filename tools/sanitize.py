"""Builds the native engine with AddressSanitizer and UBSan into build/sanitized, and runs tests of the engine with it.

    python tools/sanitize.py [--quick | --threads] [pytest arguments]

`--quick` builds without optimisation and without the AVX2 variant, and runs a few files of tests. `--threads` builds
with ThreadSanitizer instead, into build/sanitized-threads, and runs the tests that divide launches among threads.
Prints why and ends with 0 where gcc or its sanitizers are missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUICK = ["tests/emulator/test_native_ordering.py", "tests/emulator/test_tensor.py", "tests/emulator/test_fuzz.py",
         "tests/emulator/test_threads.py"]  # fmt: skip
DIVIDED = ["tests/emulator/test_threads.py", "tests/emulator/test_corpus_a.py", "tests/emulator/test_corpus_bc.py"]


def runtime(name: str) -> str | None:
    """Path of a library of gcc's; None if there is none."""
    if shutil.which("gcc") is None:
        return None
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    return path if os.path.isabs(path) else None


def main() -> int:
    arguments = sys.argv[1:]
    modes = [argument for argument in ("--quick", "--threads") if argument in arguments]
    arguments = [argument for argument in arguments if argument not in modes]
    mode = modes[0].removeprefix("--") if modes else "full"
    names = ("libtsan.so",) if mode == "threads" else ("libasan.so", "libubsan.so")
    libraries = [runtime(name) for name in names]
    if None in libraries:
        print(f"skipped: gcc with {' and '.join(names)} was not found")
        return 0
    if find_spec("setuptools") is None:
        print("skipped: setuptools, which builds the engine, is not installed")
        return 0
    environment = {**os.environ, "OPTIML_SANITIZE": mode}
    folder = ROOT / "build" / ("sanitized-threads" if mode == "threads" else "sanitized")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-base", f"{folder}-parts", "--build-lib", str(folder)],
        cwd=ROOT, env=environment, check=True,
    )  # fmt: skip
    packages = find_spec("nvidia")
    folders = [str(Path(place) / "cu13" / "lib") for place in (packages and packages.submodule_search_locations) or ()]
    environment |= {
        "LD_LIBRARY_PATH": ":".join(folders),  # where NVRTC's own search for its parts fails below the sanitizers
        "PYTHONPATH": str(folder),
        "LD_PRELOAD": ":".join(str(library) for library in libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": f"halt_on_error=1:exitcode=66:log_path={folder}.report",
        "OPENBLAS_NUM_THREADS": "1",  # ThreadSanitizer cannot see how its threads agree
    }
    chosen = arguments or {"quick": QUICK, "threads": DIVIDED, "full": ["tests/emulator"]}[mode]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    return subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
