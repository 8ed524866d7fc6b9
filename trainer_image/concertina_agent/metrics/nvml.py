"""Calls of NVML, NVIDIA's management library, by ctypes, because the agent uses the standard library only.

If the driver fails, a call may hang, so calls must be made in a separate thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Optional, Union

LIBRARY = "libnvidia-ml.so.1"
MOST_GPUS = 64
_SUCCESS, _TIMEOUT = 0, 10
_NAME, _UUID = 96, 96
"""Maximum lengths in bytes of a GPU's name and of its UUID."""
_TEMPERATURE_GPU, _CLOCK_SM, _CLOCK_MEMORY = 0, 1, 2
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_XID_CRITICAL = 0x8


class NvmlError(RuntimeError):
    """Error that NVML is missing or does not work. The text is a sentence."""


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Event(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclasses.dataclass(frozen=True)
class GpuIdentity:
    """Identity of a GPU."""

    index: int
    """Index of the GPU in this container."""
    uuid: str
    device: str
    """Name of the GPU's device file, such as nvidia0."""
    model: str


@dataclasses.dataclass(frozen=True)
class Reading:
    """Values read from a GPU. A value that the GPU does not provide is None."""

    utilization: Optional[float]
    """Share of time, from 0 to 1, in which a kernel ran on the GPU."""
    memory_used: Optional[int]
    memory_total: Optional[int]
    """Size of the GPU's memory in bytes."""
    sm_clock: Optional[float]
    memory_clock: Optional[float]
    """Clock rate of the memory in hertz."""
    temperature: Optional[float]
    """Temperature in degrees Celsius."""
    power: Optional[float]
    """Power in watts."""
    corrected: Optional[int]
    uncorrected: Optional[int]
    """Number of uncorrected ECC errors since the driver was loaded."""


class Nvml:
    """Loaded NVML library."""

    def __init__(self, library: str = LIBRARY) -> None:
        """Load the library and find the GPUs.

        Raises:
            NvmlError: If the library is missing or does not work.
        """
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(f"{library} can't be loaded: {error}") from error
        self._must("nvmlInit_v2")
        count = ctypes.c_uint()
        self._must("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self._devices: list[tuple[GpuIdentity, ctypes.c_void_p]] = []
        for index in range(min(count.value, MOST_GPUS)):
            device = ctypes.c_void_p()
            if self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device)) == _SUCCESS:
                self._devices.append((self._identity(index, device), device))
        self._events = self._registered()

    @property
    def gpus(self) -> tuple[GpuIdentity, ...]:
        return tuple(gpu for gpu, _ in self._devices)

    def read(self) -> Iterator[tuple[GpuIdentity, Reading]]:
        for gpu, device in self._devices:
            utilization, memory = _Utilization(), _Memory()
            busy = self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(utilization)) == _SUCCESS
            has_memory = self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory)) == _SUCCESS
            sm_clock, memory_clock = (self._clock(device, kind) for kind in (_CLOCK_SM, _CLOCK_MEMORY))
            temperature = self._number(ctypes.c_uint, "nvmlDeviceGetTemperature", device, _TEMPERATURE_GPU)
            milliwatts = self._number(ctypes.c_uint, "nvmlDeviceGetPowerUsage", device)
            corrected, uncorrected = (
                self._number(ctypes.c_ulonglong, "nvmlDeviceGetTotalEccErrors", device, kind, _VOLATILE)
                for kind in (_CORRECTED, _UNCORRECTED)
            )
            yield (
                gpu,
                Reading(
                    utilization=utilization.gpu / 100 if busy else None,
                    memory_used=memory.used if has_memory else None,
                    memory_total=memory.total if has_memory else None,
                    sm_clock=sm_clock,
                    memory_clock=memory_clock,
                    temperature=temperature,
                    power=None if milliwatts is None else milliwatts / 1000,
                    corrected=corrected,
                    uncorrected=uncorrected,
                ),
            )

    def wait_for_xid(self, seconds: float) -> Optional[tuple[GpuIdentity, int]]:
        """Wait for the next critical XID (error code of NVIDIA's driver), and return its GPU and its number.

        `seconds` is the longest time to wait. The result is None if no XID occurs in this time. If the library does not
        support events, the method returns None at once.
        """
        event = _Event()
        if self._events is None:
            return None
        milliseconds = ctypes.c_uint(int(seconds * 1000))
        if self._call("nvmlEventSetWait_v2", self._events, ctypes.byref(event), milliseconds) != _SUCCESS:
            return None
        gpu = next((gpu for gpu, device in self._devices if device.value == event.device), None)
        return None if gpu is None or event.type != _XID_CRITICAL else (gpu, int(event.data))

    @property
    def hears_of_xids(self) -> bool:
        return self._events is not None

    def _registered(self) -> Optional[ctypes.c_void_p]:
        """Return a new NVML event set, to which all GPUs that support events are registered.

        Return None if no GPU supports events.
        """
        events = ctypes.c_void_p()
        if self._call("nvmlEventSetCreate", ctypes.byref(events)) != _SUCCESS:
            return None
        kind = ctypes.c_ulonglong(_XID_CRITICAL)
        codes = [self._call("nvmlDeviceRegisterEvents", device, kind, events) for _, device in self._devices]
        return events if _SUCCESS in codes else None

    def _identity(self, index: int, device: ctypes.c_void_p) -> GpuIdentity:
        minor = self._number(ctypes.c_uint, "nvmlDeviceGetMinorNumber", device)
        name = f"nvidia{index if minor is None else minor}"
        return GpuIdentity(
            index,
            self._text("nvmlDeviceGetUUID", device, _UUID),
            name,
            self._text("nvmlDeviceGetName", device, _NAME),
        )

    def _text(self, function: str, device: ctypes.c_void_p, length: int) -> str:
        buffer = ctypes.create_string_buffer(length)
        code = self._call(function, device, buffer, ctypes.c_uint(length))
        return buffer.value.decode(errors="replace") if code == _SUCCESS else ""

    def _clock(self, device: ctypes.c_void_p, kind: int) -> Optional[float]:
        megahertz = self._number(ctypes.c_uint, "nvmlDeviceGetClockInfo", device, kind)
        return None if megahertz is None else megahertz * 1e6

    def _number(
        self,
        kind: Union[type[ctypes.c_uint], type[ctypes.c_ulonglong]],
        function: str,
        device: ctypes.c_void_p,
        *which: int,
    ) -> Optional[int]:
        value = kind()
        code = self._call(function, device, *map(ctypes.c_int, which), ctypes.byref(value))
        return int(value.value) if code == _SUCCESS else None

    def _must(self, function: str, *arguments: Any) -> None:
        code = self._call(function, *arguments)
        if code != _SUCCESS:
            raise NvmlError(f"NVML does not work: {function} returned the error code {code}")

    def _call(self, function: str, *arguments: Any) -> int:
        """Call a function of NVML and return its code, or -1 if the library is too old to have the function."""
        try:
            called: Callable[..., int] = getattr(self._library, function)
        except AttributeError:
            return -1
        return called(*arguments)
