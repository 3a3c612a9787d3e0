"""What this machine can do, and the one command that fixes each gap."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from optiml.device.cuda import Gpu, find_gpus, has_gpu_nodes
from optiml.device.nvml import Nvml
from optiml.errors import ModelFailed, OptimlError, SetupError
from optiml.mixture.needs import needs_of
from optiml.process import probe
from optiml.ptx import engine_name
from optiml.settings import FILE_NAME, MixtureSettings, ModelEndpoint, Settings
from optiml.store import Store
from optiml.toolchain.nvcc import find_toolkit
from optiml.toolchain.nvrtc import Compiler, header_folders
from optiml.toolchain.tools import find_tool

State = Literal["ok", "warn", "missing"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of `optiml doctor`; `fix` is a command, empty where nothing is to be done."""

    name: str
    state: State
    detail: str
    fix: str = ""


def examine(settings: Settings, store: Store) -> tuple[Check, ...]:
    """Look at everything a stage needs. Starts the compiler once; changes nothing."""
    return (
        Check(name="python", state="ok", detail=f"{sys.version.split()[0]}, {os.cpu_count()} cores"),
        _compiler(settings),
        _device(),
        *_gpus(),
        _sandbox(),
        _home(settings, store),
        _launchers(),
        _chat("chat model", settings.chat, settings.home),
        *(
            _chat(f"text mixture, expert {number}", expert, settings.home)
            for number, expert in enumerate(settings.text_mixture.experts if settings.text_mixture else (), start=1)
        ),
        _mixture(settings),
    )


def _compiler(settings: Settings) -> Check:
    try:
        compiler = Compiler(timeout_s=settings.compile_timeout_s, memory_bytes=settings.compile_memory_bytes)
        try:
            found = compiler.version
        finally:
            compiler.close()
        header_folders()
    except OptimlError as error:
        return Check(
            name="compiler",
            state="missing",
            detail=str(error),
            fix="pip install nvidia-cuda-nvrtc cuda-bindings nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl",
        )
    return Check(name="compiler", state="ok", detail=f"{found} with the CUDA headers, in a sandboxed child")


def _device() -> Check:
    standing = "standing for an A100, H100 or H200; times are modelled"
    if engine_name() == "native":
        return Check(name="device", state="ok", detail=f"embedded PTX engine (native), {standing}")
    return Check(
        name="device",
        state="warn",
        detail=f"embedded PTX engine (numpy, several times slower than the native one), {standing}",
        fix="install a C compiler, then: pip install --force-reinstall --no-deps optiml",
    )


def _gpus() -> tuple[Check, ...]:
    """One line per GPU that CUDA shows, or one that says why there is none."""
    if not has_gpu_nodes():
        return (Check(name="gpu", state="warn", detail="no NVIDIA GPU; everything runs on the embedded device"),)
    try:
        found = find_gpus()
    except SetupError as error:
        fix = "" if find_spec("pycuda") is not None else "pip install 'optiml[gpu]'"
        return (Check(name="gpu", state="warn", detail=f"a GPU is there and is not used: {error}", fix=fix),)
    if not found:
        return (
            Check(
                name="gpu", state="warn", detail="CUDA shows no GPU to this process", fix="check CUDA_VISIBLE_DEVICES"
            ),
        )
    return (*(_described(gpu) for gpu in found), *(_program(name) for name in ("ncu", "compute-sanitizer")))


def _described(gpu: Gpu) -> Check:
    version = Nvml(gpu.pci_bus_id).driver_version()
    driver = f"driver {version}" if version else "driver unknown (pip install nvidia-ml-py)"
    return Check(
        name=f"gpu cuda:{gpu.index}",
        state="ok",
        detail=f"{gpu.name}, {gpu.arch}, {gpu.sms} SMs, {gpu.memory_bytes / 2**30:.0f} GiB, {driver}, "
        f"CUDA up to {gpu.driver_cuda}",
    )


def _program(name: str) -> Check:
    """A tool of NVIDIA's that profiles and level-2 checks on a GPU need."""
    path = find_tool(name)
    if path is not None:
        return Check(name=name, state="ok", detail="found")
    what = "profiles carry no hardware counters" if name == "ncu" else "level 2 cannot be reached on the GPU"
    return Check(name=name, state="warn", detail=f"not found: {what}", fix=f"install the CUDA toolkit ({name} on PATH)")


def _sandbox() -> Check:
    layers = probe()
    lines = layers.describe()
    holds = ", ".join(line.removeprefix("yes ") for line in lines if line.startswith("yes "))
    lacks = "; ".join(line.removeprefix("no  ") for line in lines if not line.startswith("yes "))
    if layers.strong:
        return Check(name="sandbox", state="ok", detail=holds)
    return Check(
        name="sandbox",
        state="warn",
        detail=f"foreign references are refused here and the compiler runs with limits only; holds: {holds or 'none'}; "
        f"lacks: {lacks}",
        fix="run on Linux 5.13 or newer with Landlock and seccomp, or pass --trust-reference for your own references",
    )


def _home(settings: Settings, store: Store) -> Check:
    free = shutil.disk_usage(settings.home if settings.home.exists() else settings.home.anchor).free
    detail = f"{settings.home}, {free / 2**30:.1f} GiB free"
    if store.warnings:
        return Check(
            name="store",
            state="warn",
            detail=f"{detail}; {store.warnings[0]}",
            fix="set OPTIML_HOME to a folder that can be written",
        )
    return Check(name="store", state="ok", detail=detail)


def _chat(name: str, model: ModelEndpoint | None, home: Path) -> Check:
    """A chat model as the settings name it; nothing is sent."""
    if model is None:
        return Check(
            name=name,
            state="warn",
            detail="none is set up; catalogue, search and agents work without",
            fix=f"write [chat] with name, url and key_env into {home / FILE_NAME}",
        )
    lacking = "url" if not model.url else "name" if not model.name else ""
    if lacking:
        return Check(
            name=name, state="missing", detail=f"it has no {lacking}", fix=f"set {lacking} in {home / FILE_NAME}"
        )
    try:
        key = model.read_key()
    except ModelFailed as error:
        return Check(
            name=name, state="missing", detail=str(error), fix=f"set key_env or key_file in {home / FILE_NAME}"
        )
    address = urlsplit(model.url)
    if key is not None and address.scheme == "http" and address.hostname not in ("127.0.0.1", "::1", "localhost"):
        return Check(name=name, state="warn", detail="its key is sent without encryption", fix="use an https url")
    return Check(name=name, state="ok", detail=f"{model.name} at {address.hostname}, {model.api} API; not tried")


def _launchers() -> Check:
    """What kernels with host code need besides the sandbox."""
    toolkit, host_compiler = find_toolkit(), shutil.which("g++")
    if toolkit is not None and host_compiler is not None:
        return Check(name="launcher kernels", state="ok", detail="nvcc and g++ are here, and run in a sandbox")
    missing = [name for name, found in (("nvcc", toolkit), ("g++", host_compiler)) if found is None]
    return Check(
        name="launcher kernels",
        state="warn",
        detail=f"{' and '.join(missing)} not found; kernels with a launcher are left unverified",
        fix="pip install 'optiml[toolchain]'" if toolkit is None else "apt-get install g++",
    )


def _mixture(settings: Settings) -> Check:
    name = "mixture generator"
    lacking = _optional(name, "torch", "mixture")
    if lacking.state != "ok":
        return lacking
    needs = needs_of(settings.mixture or MixtureSettings(), gpu=has_gpu_nodes())
    memory = f"{needs.memory_bytes / 2**30:.1f} GiB of memory in {needs.dtype}"
    if not needs.missing:
        fits = needs.memory_bytes <= needs.memory_free_bytes
        free = f"{needs.memory_free_bytes / 2**30:.1f} GiB are free"
        return Check(
            name=name,
            state="ok" if fits or needs.dtype == "bfloat16" else "warn",
            detail=f"experts {', '.join(needs.present)} need {memory}; {free}",
            fix="" if fits else "set fewer or smaller experts, or four_bit = true, below [mixture] in optiml.toml",
        )
    room = "" if needs.disk_bytes <= needs.disk_free_bytes else " (more than is free)"
    which = "the experts of [mixture]" if settings.mixture else "not set up; the default experts"
    return Check(
        name=name,
        state="warn",
        detail=f"{lacking.detail}; {which} need {needs.disk_bytes / 1e9:.1f} GB of disk{room} and {memory}; "
        f"{len(needs.missing)} of them are not here: {needs.missing[0]}",
        fix="download the experts (hf download NAME) and name them below [mixture] in optiml.toml",
    )


def _optional(name: str, package: str, extra: str) -> Check:
    fix = f"pip install 'optiml[{extra}]'"
    try:
        return Check(name=name, state="ok", detail=f"{package} {version(package)}")
    except PackageNotFoundError:
        present = find_spec(package.replace("-", "_")) is not None
    return Check(name=name, state="ok" if present else "warn", detail=f"{package} is not installed", fix=fix)
