"""Builds the native PTX engine where there is a C compiler; without one the numpy engine is used."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("optiml/ptx/csrc")
# The generated handlers without vector instructions are a fallback for old machines: compiled quickly, not for speed.
LEVELS = {"ptx_engine.c": "-O2", "ptx_engine_avx2.c": "-O3", "ptx_handlers.c": "-O1", "ptx_handlers_avx2.c": "-O3"}
FLAGS = ["-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing", "-fwrapv",
         "-g0"]  # fmt: skip
if os.environ.get("OPTIML_SANITIZE"):  # see tools/sanitize.py
    mode = os.environ["OPTIML_SANITIZE"]
    which = ["-fsanitize=thread"] if mode == "threads" else ["-fsanitize=address,undefined", "-fno-sanitize=vptr"]
    FLAGS += [*which, "-fno-omit-frame-pointer", "-g1"]
    quick = mode == "quick"  # without the AVX2 variant, compiled fast and not for speed
    FLAGS += ["-DPLAIN_ONLY"] if quick else []
    LEVELS = dict.fromkeys(LEVELS, "-O0" if quick else "-O1")


class BuildEngine(build_ext):
    """Writes the generated C, and compiles each source at a level of its own."""

    def build_extension(self, ext: Extension) -> None:
        generated = Path(self.build_temp) / "generated"
        generate = runpy.run_path("optiml/ptx/native/generate.py")
        generate["write"](Path("optiml/ptx/native/table.py"), generated)
        objects = []
        for source in ext.sources:
            objects += self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                include_dirs=[*ext.include_dirs, str(generated)],
                extra_postargs=[*FLAGS, LEVELS[Path(source).name]],
            )
        self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), libraries=ext.libraries)


setup(
    ext_modules=[
        Extension(
            "optiml.ptx.native._engine",
            sources=[str(SOURCES / name) for name in LEVELS],
            include_dirs=[str(SOURCES)],
            libraries=["m", "pthread"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildEngine},
)
