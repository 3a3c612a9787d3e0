"""What NVML says of a GPU: driver, clocks, throttling, energy. Reads only; every figure may be missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

try:
    import pynvml
except ImportError:  # the extra `gpu` is not installed: conditions are then left out
    pynvml = None


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """One reading; None where the driver does not tell."""

    sm_mhz: int | None
    memory_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttled: tuple[str, ...]  # reasons that hold the clocks down at this moment


_REASONS = {
    "SwPowerCap": "power cap", "HwSlowdown": "hardware slowdown", "SwThermalSlowdown": "temperature",
    "HwThermalSlowdown": "temperature of the hardware", "HwPowerBrakeSlowdown": "power brake",
}  # fmt: skip


class Nvml:
    """One GPU by its PCI address. Without NVML every reading is None."""

    def __init__(self, pci_bus_id: str) -> None:
        self._handle: Any = None
        if pynvml is not None:
            try:
                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
            except pynvml.NVMLError:
                self._handle = None

    def driver_version(self) -> str | None:
        if self._handle is None:
            return None
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError:
            return None

    def clocks(self) -> Clocks:
        reasons = self._read("nvmlDeviceGetCurrentClocksEventReasons") or 0
        power = self._read("nvmlDeviceGetPowerUsage")
        throttled = tuple(
            text
            for name, text in _REASONS.items()
            if self._handle is not None and reasons & getattr(pynvml, f"nvmlClocksEventReason{name}", 0)
        )
        return Clocks(
            sm_mhz=self._clock("NVML_CLOCK_SM"),
            memory_mhz=self._clock("NVML_CLOCK_MEM"),
            temperature_c=self._temperature(),
            power_w=None if power is None else power / 1000.0,
            throttled=throttled,
        )

    def energy_mj(self) -> int | None:
        """Energy used since the driver was loaded, in millijoules."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption")

    def _clock(self, kind: str) -> int | None:
        return None if self._handle is None else self._read("nvmlDeviceGetClockInfo", getattr(pynvml, kind))

    def _temperature(self) -> int | None:
        return None if self._handle is None else self._read("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)

    def _read(self, name: str, *arguments: Any) -> int | None:
        function = getattr(pynvml, name, None)
        if self._handle is None or function is None:
            return None
        try:
            return int(function(self._handle, *arguments))
        except pynvml.NVMLError:
            return None
