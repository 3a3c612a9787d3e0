"""The PTX engine: a parser and an interpreter that runs kernels without a GPU."""

from optiml.ptx.counters import Counters, LineCounters
from optiml.ptx.machine import LaunchResult, Limits, LoadedModule, Machine, engine_name
from optiml.ptx.native.splitting import available_cores, usable_threads
from optiml.ptx.parse import Module, parse

__all__ = [
    "Counters", "LaunchResult", "Limits", "LineCounters", "LoadedModule", "Machine", "Module", "available_cores",
    "engine_name", "parse", "usable_threads",
]  # fmt: skip
