"""Builds the native engine with AddressSanitizer and UBSan into build/sanitized, and runs tests of the engine with it.

    python tools/sanitize.py [--quick] [pytest arguments]

`--quick` builds without optimisation and without the AVX2 variant, and runs a few files of tests. Prints why and ends
with 0 where gcc or its sanitizers are missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "sanitized"
QUICK = ["tests/emulator/test_native_ordering.py", "tests/emulator/test_tensor.py", "tests/emulator/test_fuzz.py"]


def runtime(name: str) -> str | None:
    """Path of a library of gcc's; None if there is none."""
    if shutil.which("gcc") is None:
        return None
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    return path if os.path.isabs(path) else None


def main() -> int:
    arguments = sys.argv[1:]
    quick = "--quick" in arguments
    arguments = [argument for argument in arguments if argument != "--quick"]
    libraries = [runtime("libasan.so"), runtime("libubsan.so")]
    if None in libraries:
        print("skipped: gcc with libasan and libubsan was not found")
        return 0
    if find_spec("setuptools") is None:
        print("skipped: setuptools, which builds the engine, is not installed")
        return 0
    environment = {**os.environ, "OPTIML_SANITIZE": "quick" if quick else "full"}
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-base", str(ROOT / "build" / "sanitized-parts"),
         "--build-lib", str(FOLDER)],
        cwd=ROOT, env=environment, check=True,
    )  # fmt: skip
    packages = find_spec("nvidia")
    folders = [str(Path(place) / "cu13" / "lib") for place in (packages and packages.submodule_search_locations) or ()]
    environment |= {
        "LD_LIBRARY_PATH": ":".join(folders),  # where NVRTC's own search for its parts fails below the sanitizers
        "PYTHONPATH": str(FOLDER),
        "LD_PRELOAD": ":".join(str(library) for library in libraries),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    chosen = arguments or (QUICK if quick else ["tests/emulator"])
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    return subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
