"""Builds the native PTX engine where there is a C compiler; without one the numpy engine is used."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("optiml/ptx/csrc")
FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing",
         "-fwrapv", "-w"]  # fmt: skip


class BuildEngine(build_ext):
    """Writes the generated C first."""

    def build_extension(self, ext: Extension) -> None:
        generated = Path(self.build_temp) / "generated"
        generate = runpy.run_path("optiml/ptx/native/generate.py")
        generate["write"](Path("optiml/ptx/native/table.py"), generated)
        ext.include_dirs.append(str(generated))
        super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "optiml.ptx.native._engine",
            sources=[str(SOURCES / "ptx_engine.c"), str(SOURCES / "ptx_engine_avx2.c")],
            depends=[str(path) for path in SOURCES.glob("*.[hi]*")] + ["optiml/ptx/native/table.py"],
            include_dirs=[str(SOURCES)],
            extra_compile_args=FLAGS,
            libraries=["m"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildEngine},
)
