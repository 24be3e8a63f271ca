"""The driver and the GPUs, asked in processes apart: a driver that hangs or crashes takes nobody with it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .ask import Answer, ask

NATIVE, JIT, NONE = "native", "JIT from PTX", "none"
VISIBLE = "CUDA_VISIBLE_DEVICES"
WSL_DRIVER = "/usr/lib/wsl/lib/libcuda.so.1"

# On a machine of eight GPUs without the persistence daemon each takes many seconds.
DRIVER_SECONDS, SMI_SECONDS = 45.0, 30.0

_CAPABILITY = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}")
# Of a driver: "580.65.06".
_VERSION = re.compile(r"\b[0-9]{3,6}(?:\.[0-9]{1,6}){1,2}\b")

# The driver's own interface, which creates no context by these calls. Attributes 75 and 76 are the compute capability.
_ASK_DRIVER = """
import ctypes, json, sys
report = {"library": None, "code": None, "error": None, "cuda": None, "gpus": []}
driver = None
for name in sys.argv[1:]:
    try:
        driver = ctypes.CDLL(name)
        break
    except OSError as error:
        report["error"] = str(error)
if driver is not None:
    report["error"] = None
    report["library"] = name
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            paths = (line.rstrip("\\n").split(maxsplit=5)[5:] for line in maps)
            report["library"] = next((path[0] for path in paths if path and "libcuda.so" in path[0]), name)
    except OSError:  # a sandbox without /proc
        pass
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)) == 0:
        report["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    report["code"] = driver.cuInit(0)
    count = ctypes.c_int()
    if report["code"] == 0:
        report["code"] = driver.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name, uuid = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, 256, device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        # The second form tells the instances of a GPU apart.
        ask = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
        ask(uuid, device)
        text = name.value.decode("utf-8", "replace")
        digits = uuid.raw.hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        prefix = "MIG-" if " MIG " in text else "GPU-"
        report["gpus"].append([text, f"{major.value}.{minor.value}", prefix + "-".join(parts)])
print(json.dumps(report))
"""

# What cuInit answers, in words: the cause, and what to do.
CODES = {
    3: "it was not initialised: restart the machine, or ask its administrator",
    34: "it is a stub, which exists for linking only: take its folder out of LD_LIBRARY_PATH",
    46: "a GPU is in use exclusively or unavailable: see nvidia-smi -q -d COMPUTE",
    802: "the GPUs are not ready: start nvidia-fabricmanager, or wait for it",
    803: "the kernel's module and the library are of two drivers: restart the machine after a driver's upgrade; in a "
    "container, start it again",
    804: "the forward compatibility library in use does not serve this GPU: take its folder out of LD_LIBRARY_PATH",
    999: "for no reason that it names: see dmesg, and restart the machine",
}
NO_DEVICE = 100


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str  # "NVIDIA H200"
    capability: str  # "9.0"
    uuid: str  # "GPU-..."; "MIG-..." for an instance of one


@dataclass(frozen=True)
class Driver:
    """What the driver says, of the GPUs that CUDA_VISIBLE_DEVICES leaves visible and of all."""

    state: str  # "works", "absent", "fails" or "hangs"
    error: str = ""  # in words, where it fails
    code: int | None = None  # of cuInit
    library: str | None = None  # the file of libcuda
    cuda: str | None = None  # the newest CUDA that it runs: "13.0"
    version: str | None = None  # "580.65.06"
    visible: list[Gpu] = field(default_factory=list)
    all: list[Gpu] = field(default_factory=list)
    smi: str = "absent"  # nvidia-smi: "ok", "absent", "hangs", "failed" or "garbage"
    smi_says: str = ""
    smi_gpus: list[Gpu] = field(default_factory=list)
    wsl: bool = False

    @property
    def branch(self) -> int | None:
        return int(self.version.split(".")[0]) if self.version else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def verdict(
    capability: str, cubins: Sequence[str], ptx: Sequence[str], compiler: str | None, driver_cuda: str | None
) -> tuple[str, str]:
    """Whether GPU code runs on a compute capability: natively, compiled at first use, or not; and why not.

    A cubin runs on its own major version from its minor upwards, an architecture-specific one ("9.0a") on its own
    alone; PTX on anything as new, if the driver is not older than the compiler that wrote it.
    """
    found = _numbers(capability)
    for arch in cubins:
        wanted = _numbers(arch)
        if found == wanted or (arch[-1].isdigit() and found[:1] == wanted[:1] and found >= wanted):
            return NATIVE, ""
    if not any(found >= _numbers(arch) for arch in ptx):
        return NONE, "architecture"
    if compiler and driver_cuda and _numbers(driver_cuda)[:2] < _numbers(compiler)[:2]:
        return NONE, "driver"
    return JIT, ""


def _driver_version(root: Path) -> str | None:
    """The version of the kernel's module."""
    for name in ("proc/driver/nvidia/version", "sys/module/nvidia/version"):
        try:
            text = (root / name).read_text("utf-8", "replace")
        except OSError:
            continue
        if match := _VERSION.search(text):
            return match[0]
    return None


def is_wsl(root: Path) -> bool:
    try:
        return "microsoft" in (root / "proc/version").read_text("utf-8", "replace").lower()
    except OSError:
        return False


def _ask_driver(environment: Mapping[str, str], wsl: bool, seconds: float) -> tuple[Answer, dict[str, object]]:
    names = ["libcuda.so.1", *([WSL_DRIVER] if wsl else [])]
    answer = ask([sys.executable, "-I", "-S", "-c", _ASK_DRIVER, *names], seconds, environment)
    try:
        return answer, dict(json.loads(answer.output)) if answer.state == "ok" else {}
    except ValueError:
        return Answer("failed", error=f"it answered {answer.output[:200]!r}"), {}


def _gpus(report: Mapping[str, object]) -> list[Gpu]:
    rows = report.get("gpus", [])
    assert isinstance(rows, list)
    return [Gpu(index, *row) for index, row in enumerate(rows)]


def _smi(environment: Mapping[str, str], wsl: bool, seconds: float) -> tuple[Answer, list[Gpu], str | None]:
    """nvidia-smi's answer, its GPUs and the driver's version."""
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None and wsl and Path("/usr/lib/wsl/lib/nvidia-smi").exists():
        program = "/usr/lib/wsl/lib/nvidia-smi"
    if program is None:
        return Answer("absent"), [], None
    query = ["--query-gpu=index,name,uuid,compute_cap,driver_version", "--format=csv,noheader"]
    answer = ask([program, *query], seconds, environment)
    found, version = [], None
    if answer.state == "ok":
        for line in answer.output.splitlines():
            parts = [part.strip() for part in line.split(",")]
            if len(parts) != 5 or not re.fullmatch("[0-9]{1,4}", parts[0]) or not _CAPABILITY.fullmatch(parts[3]):
                return Answer("garbage", answer.output, answer.error), [], None
            found.append(Gpu(int(parts[0]), parts[1], parts[3], parts[2]))
            version = parts[4] if _VERSION.fullmatch(parts[4]) else version
        if not found:
            return Answer("garbage", answer.output, answer.error), [], None
    return answer, found, version


def look(
    environment: Mapping[str, str],
    root: Path = Path("/"),
    *,
    driver_seconds: float = DRIVER_SECONDS,
    smi_seconds: float = SMI_SECONDS,
) -> Driver:
    """Asks the driver's library, and nvidia-smi for what that does not say. `root` is where /proc and /sys are."""
    wsl = is_wsl(root)
    answer, report = _ask_driver(environment, wsl, driver_seconds)
    everything = _gpus(report)
    if VISIBLE in environment and answer.state == "ok" and report.get("library"):
        others = {name: value for name, value in environment.items() if name != VISIBLE}
        everything = _gpus(_ask_driver(others, wsl, driver_seconds)[1])
    smi, smi_gpus, smi_version = _smi(environment, wsl, smi_seconds)
    code = report.get("code")
    if answer.state == "hangs":
        state, error = "hangs", f"it did not answer within {driver_seconds:g} s"
    elif answer.state != "ok":
        state, error = "fails", answer.last_words
    elif report.get("library") is None:
        text = str(report.get("error") or "")
        # The loaders' words for a file that is not there; any other are about one that is.
        absent = re.search("no such file|could not find", text, re.I)
        state, error = ("absent", "") if absent else ("fails", text)
    elif code in (0, NO_DEVICE):
        state, error = "works", ""
    else:
        assert isinstance(code, int)
        state, error = "fails", f"{CODES.get(code, 'see the list of CUDA driver errors')} (cuInit: {code})"
    return Driver(
        state=state,
        error=error,
        code=code if isinstance(code, int) else None,
        library=str(report["library"]) if report.get("library") else None,
        cuda=str(report["cuda"]) if report.get("cuda") else None,
        version=_driver_version(root) or smi_version,
        visible=_gpus(report),
        all=everything,
        smi=smi.state,
        smi_says=smi.last_words[:200],
        smi_gpus=smi_gpus,
        wsl=wsl,
    )
