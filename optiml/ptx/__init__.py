"""The PTX engine: a parser and an interpreter that runs kernels without a GPU."""

from optiml.ptx.parse import Module, parse

__all__ = ["Module", "parse"]
