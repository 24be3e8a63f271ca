"""What can be wrong with an installation, and the judgement of the facts.

DIAGNOSES is the table; docs/install/doctor.md is held to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from . import facts as facts_module
from . import gpus, installed, known, remedy
from .facts import Facts
from .remedy import Remedy
from .status import FITS, MISFIT, NO_GPU, NOTHING, SOME_GPUS

# Of several findings, the first of these statuses is the exit status.
_ORDER = (NOTHING, MISFIT, NO_GPU, SOME_GPUS, FITS)
# Statuses that only --require-gpu gives.
REQUIRED = "0, or 4 with --require-gpu"


@dataclass(frozen=True)
class Diagnosis:
    cause: str
    message: str  # str.format's fields are filled in
    status: int
    fix: str = ""  # empty: the command that installs for this torch; for a finding of status 0: nothing
    needs_gpu: bool = False  # status 4 where a GPU is required, and else nothing to fix


DIAGNOSES = {
    "no-package": Diagnosis(
        "the command alone is on the path", "scaled_mask_softmax is not installed for this Python.", NOTHING
    ),
    "no-torch": Diagnosis(
        "torch was never installed, or into another environment",
        "torch is not installed for this Python: install it first.",
        NOTHING,
        "{torch_command}",
    ),
    "torch-broken": Diagnosis(
        "an installation of torch that was cut off, or one that this user may not read",
        "torch at {folder} is broken: its version.py {problem}.",
        MISFIT,
        "{torch_command} --force-reinstall, or where it is another user's have its rights changed",
    ),
    "torch-mixed": Diagnosis(
        "one torch was installed over another that was not removed",
        "two torches are mixed in {folder}: its metadata says {metadata}, its version.py {version}.",
        MISFIT,
        "pip uninstall torch, until it finds none, and install one again",
    ),
    "misfit": Diagnosis(
        "torch was upgraded, downgraded or replaced under the package: another minor, another CUDA major, a CPU, ROCm, "
        "vendor or nightly build",
        "this build does not fit the installed torch ({differing}).",
        MISFIT,
    ),
    "wrong-python": Diagnosis(
        "site-packages of one Python on the path of another",
        "this build is for Python {built}, and this is Python {running}.",
        MISFIT,
    ),
    "wrong-machine": Diagnosis(
        "an environment shared by machines of different kinds",
        "this build is for {built}, and this machine is {running}.",
        MISFIT,
    ),
    "missing-part": Diagnosis(
        "a file was deleted, or a copy left it out", "the installation is broken: {parts} is missing.", MISFIT
    ),
    "unreadable-part": Diagnosis(
        "a full disk or a crash left half a file", "the installation is broken: {part} cannot be read.", MISFIT
    ),
    "cut-off": Diagnosis(
        "an installer was killed half way",
        "an installation was cut off and left {paths}.",
        MISFIT,
        "scaled-mask-softmax install, which clears them away",
    ),
    "mixed-files": Diagnosis(
        "two installers wrote into one environment at once",
        "files of two installations are mixed: the metadata says {metadata}, the build record {record}.",
        MISFIT,
    ),
    "torch-import": Diagnosis(
        "torch itself does not work: a library that it needs is missing, shadowed or too old",
        "torch does not import: {error}",
        MISFIT,
        "take other libraries out of LD_LIBRARY_PATH; where torch still fails, {torch_command} --force-reinstall",
    ),
    "import": Diagnosis(
        "what the files do not show: a second copy loaded, a library that does not load",
        "the package does not import: {error}",
        MISFIT,
    ),
    "import-hangs": Diagnosis(
        "a file system or a driver that does not answer",
        "importing torch and the package did not end.",
        MISFIT,
        "look at the file system of {folder}; --no-import leaves the import out",
    ),
    "driver-old": Diagnosis(
        "a driver older than the CUDA of the build",
        "the driver is too old: it runs CUDA {found}, this build needs CUDA {wanted} and so driver {minimum} or newer.",
        NO_GPU,
        "upgrade the driver, or install torch and this package for an older CUDA",
    ),
    "driver-fails": Diagnosis(
        "an upgraded driver without a restart, a fabric manager that is down, a broken device",
        "the driver does not work: {error}.",
        NO_GPU,
        "see the driver's own tools; the package cannot mend this",
    ),
    "driver-hangs": Diagnosis(
        "a GPU that fell off the bus, or a kernel's module that waits for it",
        "the driver hangs: {error}.",
        NO_GPU,
        "take the node out of service and restart it",
    ),
    "driver-hidden": Diagnosis(
        "a container that was given nvidia-smi and not the driver's libraries",
        "nvidia-smi works, but libcuda.so.1 is not here.",
        NO_GPU,
        "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    "no-driver": Diagnosis(
        "a machine without a GPU, or a container that was started without it",
        "no NVIDIA driver is here: CPU tensors work.",
        FITS,
        "install NVIDIA's driver, or start the container with the GPUs",
        needs_gpu=True,
    ),
    "no-gpu": Diagnosis(
        "a driver without a device; a GPU in MIG mode without an instance",
        "the driver shows no GPU: CPU tensors work.",
        FITS,
        "see nvidia-smi -L: the machine has no GPU, or MIG no instance",
        needs_gpu=True,
    ),
    "gpus-hidden": Diagnosis(
        "CUDA_VISIBLE_DEVICES is empty, -1, or begins with what is not there",
        "CUDA_VISIBLE_DEVICES={value} hides every GPU ({count}): CPU tensors work.",
        FITS,
        "unset CUDA_VISIBLE_DEVICES, or set it from nvidia-smi -L",
        needs_gpu=True,
    ),
    "gpu-missing": Diagnosis(
        "CUDA_VISIBLE_DEVICES names a number or UUID that is not there; CUDA drops it and what follows",
        "CUDA_VISIBLE_DEVICES={value} names {named} devices and the driver shows {shown}: {entry} is not here.",
        SOME_GPUS,
        "set CUDA_VISIBLE_DEVICES from nvidia-smi -L",
    ),
    "gpu-architecture": Diagnosis(
        "a GPU older than every architecture of the build, or newer than it on a build without PTX",
        "GPU {index} ({name}, compute capability {capability}) cannot run this build, which holds {code}.",
        SOME_GPUS,
        "{way}",
    ),
    "gpu-ptx": Diagnosis(
        "a GPU newer than the build, which only PTX serves, and a driver older than the compiler that wrote the PTX",
        "GPU {index} ({name}, compute capability {capability}) can only take PTX, and the driver's CUDA {found} is "
        "older than the {compiler} that wrote it.",
        SOME_GPUS,
        "upgrade the driver to one of CUDA {compiler} or newer",
    ),
    "gpu-jit": Diagnosis(
        "a GPU newer than the build",
        "GPU {index} ({name}, compute capability {capability}) has no native code: the driver compiles it from PTX at "
        "first use, which takes a while.",
        FITS,
    ),
    "ptx-cache": Diagnosis(
        "a read-only home on a node whose GPU code is compiled from PTX",
        "what the driver compiles from PTX cannot be kept in {folder}, so that every process compiles again.",
        FITS,
        "set CUDA_CACHE_PATH to a folder that can be written",
    ),
    "no-cuda-code": Diagnosis(
        "a CPU build beside a torch with CUDA",
        "this build has no CUDA kernels, though torch has CUDA {cuda}: CUDA tensors raise.",
        FITS,
    ),
    "several-copies": Diagnosis(
        "a user's site-packages below an environment, a checkout on PYTHONPATH",
        "several copies of scaled_mask_softmax are on the path, of which Python takes {first}; the others: {others}.",
        FITS,
        "pip uninstall scaled-mask-softmax, until one is left",
    ),
    "several-torches": Diagnosis(
        "a user's site-packages below an environment",
        "several torches are on the path, of which Python takes {first}; the others: {others}.",
        FITS,
        "pip uninstall torch, until one is left",
    ),
    "several-libraries": Diagnosis(
        "packages that brought a copy of their own",
        "several copies of {name} are in the process: {files}.",
        FITS,
    ),
    "shadowed": Diagnosis(
        "a system's CUDA or a module's on LD_LIBRARY_PATH",
        "LD_LIBRARY_PATH holds libraries that torch brings itself, which may be taken instead: {files}.",
        FITS,
        "unset LD_LIBRARY_PATH, or take these folders out of it",
    ),
    "shadow-taken": Diagnosis(
        "the same, where torch's own search path does not come first",
        "libraries of LD_LIBRARY_PATH are in the process instead of torch's own: {files}.",
        FITS,
        "unset LD_LIBRARY_PATH, or take these folders out of it",
    ),
    "smi-hangs": Diagnosis(
        "a GPU or a driver that is failing", "nvidia-smi hangs.", FITS, "take the node out of service and restart it"
    ),
    "smi-odd": Diagnosis(
        "an old or broken nvidia-smi, or a wrapper of that name",
        "nvidia-smi does not say what it should ({state}): {text}",
        FITS,
    ),
    "wsl-driver": Diagnosis(
        "a Linux driver installed inside WSL2, where Windows' is the one that works",
        "WSL2 takes its driver from Windows, in /usr/lib/wsl/lib, and libcuda.so.1 comes from {library}.",
        FITS,
        "remove the Linux driver inside WSL2; a toolkit is welcome there, a driver is not",
    ),
    "home": Diagnosis(
        "a batch system or a container without a home",
        "{variable}={path} {problem}: caches of torch and CUDA have no place.",
        FITS,
        "set {variable} to a folder that can be written",
    ),
    "plain-on-cuda": Diagnosis(
        "the plain wheel beside a torch with CUDA",
        "this is the plain wheel, which runs CUDA tensors on plain torch operators.",
        FITS,
    ),
}


@dataclass(frozen=True)
class Finding:
    diagnosis: str  # its name in DIAGNOSES
    status: int
    text: str
    fix: str


@dataclass(frozen=True)
class GpuVerdict:
    gpu: gpus.Gpu
    verdict: str  # gpus.NATIVE, JIT or NONE
    reason: str  # of NONE: "architecture" or "driver"


@dataclass(frozen=True)
class Judgement:
    status: int
    verdict: str  # one sentence
    findings: list[Finding]
    gpus: list[GpuVerdict]  # the visible ones, if there is GPU code to judge
    remedy: Remedy  # for this torch

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status != FITS]

    @property
    def notes(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == FITS]


class _Findings:
    def __init__(self, facts: Facts, require_gpu: bool) -> None:
        record = facts.package.record if facts.package else None
        self.torch_command = remedy.torch_command(record)
        self.require_gpu = require_gpu
        self.found: list[Finding] = []

    def add(self, key: str, status: int | None = None, /, **fields: object) -> None:
        diagnosis = DIAGNOSES[key]
        if status is None:
            status = NO_GPU if diagnosis.needs_gpu and self.require_gpu else diagnosis.status
        fields["torch_command"] = self.torch_command
        text, fix = diagnosis.message.format(**fields), diagnosis.fix.format(**fields)
        if diagnosis.needs_gpu and status == FITS:
            fix = ""
        self.found.append(Finding(key, status, text, fix))


def _public(version: str) -> str:
    return version.partition("+")[0]


def _check_torch(facts: Facts, add: _Findings) -> bool:
    """Whether there is a torch to compare with."""
    torch = facts.torch
    if torch is None:
        add.add("no-torch")
        return False
    if not torch.version:
        add.add("torch-broken", folder=torch.folder, problem=torch.broken)
        return False
    metadata = torch.distribution.version if torch.distribution else ""
    if metadata and _public(metadata) != _public(torch.version):
        add.add("torch-mixed", folder=torch.folder, metadata=metadata, version=torch.version)
    if torch.others:
        add.add("several-torches", first=torch.folder, others=", ".join(map(str, torch.others)))
    return True


def _check_package(facts: Facts, package: installed.Package, torch: installed.Torch | None, add: _Findings) -> None:
    record = package.record
    if package.broken:
        add.add("unreadable-part", part=package.broken)
    if torch is not None and record is not None:
        differing = package.build.differences(record, remedy.torch_facts(package.build, torch))
        if differing:
            add.add("misfit", differing=", ".join(differing))
    if record is not None:
        machine = re.sub(r"^linux_", "", record["platform"])
        if machine != facts.machine:
            add.add("wrong-machine", built=machine, running=facts.machine)
        running = ".".join(facts.python.split(".")[:2])
        missing = package.missing
        if record["python"] != running:
            add.add("wrong-python", built=record["python"], running=running)
        elif missing:
            add.add("missing-part", parts=", ".join(missing))
    incomplete = [item.path for item in package.distributions if not item.complete]
    if cut_off := [*incomplete, *package.leftovers]:
        add.add("cut-off", paths=", ".join(map(str, cut_off)))
    elif record is not None and package.distributions:
        metadata = package.distributions[0].version
        # The CUDA of a variant wheel is no part of its version.
        variant = re.sub(r"\+[a-z0-9]*?torch", "+torch", record["version"])
        if not package.others and metadata not in (record["version"], variant):
            add.add("mixed-files", metadata=metadata, record=record["version"])
    if package.others:
        others = ", ".join(map(str, package.others))
        add.add("several-copies", first=package.folders[0], others=others)


def _check_import(facts: Facts, add: _Findings) -> None:
    imported = facts.imported
    if imported is None:
        return
    if imported.state == "hangs":
        add.add("import-hangs", folder=facts.torch.folder if facts.torch else "site-packages")
    elif imported.torch is not None:
        add.add("torch-import", error=imported.torch)
    elif imported.package is not None:
        # The package's own errors begin with its name and end with the fix.
        add.add("import", error=imported.package)
    for name, files in facts_module.several(imported.libraries).items():
        add.add("several-libraries", name=name, files=", ".join(files))


def _code_text(cubins: Iterable[str], ptx: Iterable[str]) -> str:
    with_ptx = f" and PTX for {', '.join(ptx)}" if list(ptx) else ""
    return f"code for {', '.join(cubins) or 'none'}{with_ptx}"


def _way_for(facts: Facts, capability: str) -> str:
    """How to serve a GPU that the installed build does not; empty: by the release's wheel for this torch."""
    table, build, torch = known.load(), installed.rules(), facts.torch
    if table is None or build is None or torch is None or torch.cuda is None:
        return ""
    minor, here = build.minor(torch.version), build.cuda_label(torch.cuda)
    row = table.torch.get(minor)
    labels = [label for label in row.cuda if label in table.cuda] if row is not None else []
    for label in sorted(labels, key=lambda label: label != here):
        cubins = table.cuda[label].cubins(facts.machine)
        if gpus.verdict(capability, cubins, cubins[-1:], None, None)[0] != gpus.NONE:
            if label == here:
                return ""
            where = f"--index-url {table.torch_channels}/{label}"
            return f'pip install {where} "torch=={minor}.*", and then scaled-mask-softmax install: {label} serves it'
    return str(build.how_to_compile(f"--archs {capability}"))


def _judge_gpus(facts: Facts, add: _Findings) -> list[GpuVerdict]:
    """The visible GPUs against the code of the installed build, or of the release's wheel for this torch."""
    record = facts.package.record if facts.package else None
    if record is not None and record["cuda"] is not None:
        cubins, ptx, compiler = record["architectures"], record["ptx"], record["cuda_compiler"]
    else:
        table, build = known.load(), installed.rules()
        if table is None or build is None or facts.torch is None or facts.torch.cuda is None:
            return []
        row = table.cuda.get(build.cuda_label(facts.torch.cuda))
        if row is None:
            return []
        cubins = row.cubins(facts.machine)
        ptx, compiler, record = cubins[-1:], row.toolkit, None
    driver = facts.driver
    judged = [
        GpuVerdict(gpu, *gpus.verdict(gpu.capability, cubins, ptx, compiler, driver.cuda)) for gpu in driver.visible
    ]
    if record is None:
        return judged
    bad = [item for item in judged if item.verdict == gpus.NONE]
    status = NO_GPU if len(bad) == len(judged) else SOME_GPUS
    for item in judged:
        gpu, short = item.gpu, ".".join(str(compiler).split(".")[:2])
        who: dict[str, object] = {"index": gpu.index, "name": gpu.name, "capability": gpu.capability}
        if item.verdict == gpus.JIT:
            add.add("gpu-jit", **who)
        elif item.reason == "driver":
            add.add("gpu-ptx", status, **who, found=driver.cuda, compiler=short)
        elif item.verdict == gpus.NONE:
            way = _way_for(facts, gpu.capability)
            add.add("gpu-architecture", status, **who, code=_code_text(cubins, ptx), way=way)
    if any(item.verdict == gpus.JIT for item in judged) and not facts.ptx_cache[1]:
        add.add("ptx-cache", folder=facts.ptx_cache[0])
    return judged


def _driver_is_old(facts: Facts, major: int, add: _Findings) -> bool:
    driver, table = facts.driver, known.load()
    minimum = table.min_driver(major) if table is not None else None
    old = driver.cuda is not None and int(driver.cuda.split(".")[0]) < major
    if driver.cuda is None and driver.branch is not None and minimum is not None:
        old = driver.branch < minimum
    if old:
        found = driver.cuda or f"of driver {driver.version}"
        add.add("driver-old", found=found, wanted=major, minimum=minimum or "of that CUDA")
    return old


def _check_driver(facts: Facts, add: _Findings) -> list[GpuVerdict]:
    """Findings that matter to a build with CUDA kernels, and the GPUs' verdicts."""
    driver, package = facts.driver, facts.package
    record = package.record if package else None
    if record is None or record["cuda"] is None:
        return _judge_gpus(facts, add)
    if driver.state == "absent":
        add.add("driver-hidden" if driver.smi_gpus else "no-driver")
    elif driver.state == "hangs":
        add.add("driver-hangs", error=driver.error)
    elif driver.state == "fails":
        add.add("driver-fails", error=driver.error)
    elif _driver_is_old(facts, int(record["cuda"].split(".")[0]), add):
        return [GpuVerdict(gpu, gpus.NONE, "driver") for gpu in driver.visible]
    elif not driver.all:
        add.add("no-gpu")
    elif not driver.visible:
        add.add("gpus-hidden", value=facts.visible, count=len(driver.all))
    else:
        named = [entry.strip() for entry in (facts.visible or "").split(",") if entry.strip()]
        shown = len(driver.visible)
        # A negative number ends the list on purpose.
        if shown < len(named) and not named[shown].startswith("-"):
            add.add("gpu-missing", value=facts.visible, named=len(named), shown=shown, entry=named[shown])
        return _judge_gpus(facts, add)
    return []


def _check_surroundings(facts: Facts, add: _Findings) -> None:
    driver = facts.driver
    if driver.smi == "hangs":
        add.add("smi-hangs")
    elif driver.smi in ("garbage", "failed") and driver.state != "absent":
        add.add("smi-odd", state=driver.smi, text=driver.smi_says or "nothing")
    if driver.wsl and driver.library is not None and not driver.library.startswith("/usr/lib/wsl/"):
        add.add("wsl-driver", library=driver.library)
    if taken := facts_module.taken(facts.shadows, facts.imported.libraries if facts.imported else []):
        add.add("shadow-taken", files=", ".join(taken))
    elif facts.shadows:
        add.add("shadowed", files=", ".join(facts.shadows))
    for variable, path, problem in facts.homes:
        add.add("home", variable=variable, path=path, problem=problem)


def judge(facts: Facts, *, require_gpu: bool = False) -> Judgement:
    """What is wrong, how bad it is, and the commands that mend it."""
    add = _Findings(facts, require_gpu)
    package, torch = facts.package, facts.torch
    if package is None and facts.unreadable is not None:
        add.add("unreadable-part", part=facts.unreadable)
    elif package is None:
        add.add("no-package")
    comparable = _check_torch(facts, add)
    if package is not None:
        _check_package(facts, package, torch if comparable else None, add)
    if not any(finding.status in (MISFIT, NOTHING) for finding in add.found):
        _check_import(facts, add)
    judged = _check_driver(facts, add)
    if package is not None and torch is not None and torch.cuda is not None:
        if package.record is None and not package.broken:
            if package.build.native_exists(remedy.torch_facts(package.build, torch)):
                add.add("plain-on-cuda")
        elif package.record is not None and package.record["cuda"] is None:
            add.add("no-cuda-code", cuda=torch.cuda)
    _check_surroundings(facts, add)
    found = sorted(add.found, key=lambda finding: _ORDER.index(finding.status))
    status = found[0].status if found else FITS
    if status != FITS:
        verdict = found[0].text
    else:
        verdict = "works, on plain torch operators" if package and package.record is None else "fits"
    way = Remedy([])
    if torch is not None and torch.version:
        table = known.load()
        version = package.version if package else table.version if table else ""
        if version:
            way = remedy.for_torch(version, torch, facts.driver, facts.machine)
    return Judgement(status, verdict, found, judged, way)
