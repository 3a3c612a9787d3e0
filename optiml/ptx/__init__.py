"""The PTX engine: a parser and an interpreter that runs kernels without a GPU."""

from optiml.ptx.counters import Counters, LineCounters
from optiml.ptx.machine import LaunchResult, Limits, LoadedModule, Machine, engine_name
from optiml.ptx.parse import Module, parse

__all__ = [
    "Counters", "LaunchResult", "Limits", "LineCounters", "LoadedModule", "Machine", "Module", "engine_name", "parse",
]  # fmt: skip
