"""Whether this build fits the running torch, and loading it if so.

The comparison needs nothing but the standard library: the console command reads this file by its path and imports
neither torch nor the package. Only :func:`load` and what follows it use torch.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shlex
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DISTRIBUTION = "scaled-mask-softmax"
LIBRARY = "libscaled_mask_softmax.so"

# Where the channels are, one index a (CUDA, torch) pair. Empty: there is no public one yet.
DEFAULT_INDEX = ""
_PIP = "pip install --force-reinstall --no-deps"
INSTALL_COMMAND = "scaled-mask-softmax install"
BUILD_COMMAND = "scaled-mask-softmax build"
INDEX_VARIABLE = "SCALED_MASK_SOFTMAX_INDEX"
COMPOSITE_VARIABLE = "SCALED_MASK_SOFTMAX_ALLOW_COMPOSITE"

# The facts of the native build, as its generated module _build_record holds them; None in a plain wheel.
RECORD: Mapping[str, Any] | None = None
# Whether the native library serves this process. Set by load().
NATIVE = False

_module: ModuleType | None = None
_library: Path | None = None
# What a plain wheel is still to say.
_plain_warning: str | None = None


@dataclass(frozen=True)
class TorchFacts:
    """What a native build depends on. `cxx11_abi` is None where it cannot be known without importing torch."""

    version: str  # "2.14.1+cu130"
    cuda: str | None  # torch.version.cuda, "13.0"
    hip: str | None = None
    cxx11_abi: bool | None = None

    @property
    def minor(self) -> str:
        return minor(self.version)

    @property
    def label(self) -> str:
        """The local version label of the wheel for this torch: "cu130torch2.14"."""
        if is_release(self.version):
            return f"{cuda_label(self.cuda)}torch{self.minor}"
        exact = re.sub(r"\+cu\d+$", "", self.version)
        return f"{cuda_label(self.cuda)}torch{re.sub('[-+_]', '.', exact.lower())}"

    @property
    def has_channel(self) -> bool:
        """Whether a native wheel can exist: none does for ROCm, or for the C++ ABI that torch left with 2.7."""
        return self.hip is None and self.cxx11_abi is not False


def minor(version: str) -> str:
    """ "2.14.1+cu130" -> "2.14"."""
    return ".".join(version.split(".")[:2])


def cuda_label(cuda: str | None) -> str:
    """ "13.0" -> "cu130", None -> "cpu"."""
    return "cpu" if cuda is None else "cu" + "".join(cuda.split(".")[:2])


def is_release(version: str) -> bool:
    """False for vendor and nightly builds of torch, whose ABI is that of no release."""
    return re.fullmatch(r"\d+\.\d+\.\d+(\+(cpu|cu\d+))?", version) is not None


def public_version(version: str) -> str:
    """ "1.0.0+cu130torch2.14" -> "1.0.0"."""
    return version.partition("+")[0]


def _matrix() -> Mapping[str, Any] | None:
    """The release matrix, which every build writes beside the console command; None in a checkout without one."""
    try:
        matrix: Mapping[str, Any] = importlib.import_module("scaled_mask_softmax_cli._matrix").MATRIX
    except ModuleNotFoundError:
        return None
    return matrix


def why_no_wheel(torch_facts: TorchFacts) -> str | None:
    """Why no release holds a native wheel for that torch, this Python and this machine; None where one may."""
    if torch_facts.hip is not None:
        return "none is made for ROCm"
    if torch_facts.cxx11_abi is False:
        return "none is made for the C++ ABI that torch left with 2.7"
    if sys.platform != "linux":
        return "they are made for Linux only"
    if not is_release(torch_facts.version):
        return f"torch {torch_facts.version} is a vendor's or a nightly build, which no release's wheel fits"
    matrix = _matrix()
    if matrix is None:
        return None
    machine, python = platform.machine(), "{}.{}".format(*sys.version_info)
    row = matrix["torch"].get(torch_facts.minor)
    if row is None:
        return f"they are made for torch {', '.join(matrix['torch'])}, and this is {torch_facts.minor}"
    label = cuda_label(torch_facts.cuda)
    if label not in row["cuda"]:
        return f"for torch {torch_facts.minor} they are made for {', '.join(row['cuda'])}, and this is {label}"
    if python not in row["python"]:
        pythons = row["python"]
        return f"for torch {torch_facts.minor} they are made for Python {pythons[0]} to {pythons[-1]}, this is {python}"
    if machine not in matrix["platforms"]:
        return f"they are made for {', '.join(matrix['platforms'])}, and this machine is {machine}"
    if not os.environ.get(INDEX_VARIABLE) and DEFAULT_INDEX and label not in row["proven"].get(machine, []):
        return f"{label} of torch {torch_facts.minor} on {machine} has not been proven yet"
    return None


def _how_to_build(torch_facts: TorchFacts) -> str:
    """How a clone makes a build for that torch, which is a release's."""
    if not torch_facts.has_channel:
        return f"SCALED_MASK_SOFTMAX_PLAIN=1 {_PIP} . in a clone"
    python = "{}.{}".format(*sys.version_info)
    cell = f"TORCH={torch_facts.minor} CUDA={cuda_label(torch_facts.cuda)} PYTHON={python}"
    return f"make wheel {cell} in a clone, which ends with the command that installs it"


def channel(label: str) -> str:
    """The folder of an index that holds the wheels of a label: "cu130torch2.14" -> "whl/cu130/torch2.14"."""
    cuda, _, torch_version = label.partition("torch")
    return f"whl/{cuda}/torch{torch_version}"


def index_url() -> str:
    """The index that commands name; empty where none is known."""
    return (os.environ.get(INDEX_VARIABLE) or DEFAULT_INDEX).rstrip("/")


def shown_index() -> str:
    """The index as a message may show it: without the name and password that its address may hold."""
    # As remedy.redacted of the console command does in a text; here what lacks a scheme may hold a password too.
    return re.sub(r"^(?!file:)((?:[\w+.-]+://)?)(?:[^/@]*:.*|[^/]*)@", r"\1***@", index_url())


def how_to_compile(options: str = "") -> str:
    """The command that compiles a wheel beside the running torch: of the index's source distribution, or of a clone."""
    command = " ".join([BUILD_COMMAND, *filter(None, [options])])
    if index := shown_index():
        return f"{command} --index {shlex.quote(index)}"
    return f"{command} . in a clone or an unpacked source distribution"


def how_to_install(version: str, torch_facts: TorchFacts) -> str:
    """The command that installs this version for that torch: from its channel alone, or plain where there is none.

    Where no prebuilt wheel is made for it, or no index is known, how to build instead. No password is in it.
    """
    public, index = public_version(version), shown_index()
    if torch_facts.has_channel and (reason := why_no_wheel(torch_facts)) is not None:
        return f"{how_to_compile()} (no prebuilt wheel: {reason})"
    if not index:
        return (
            f"no public index exists yet: {_how_to_build(torch_facts)}; or set {INDEX_VARIABLE} to an index that you "
            "have"
        )
    if not torch_facts.has_channel:
        return f'{_PIP} --index-url {shlex.quote(f"{index}/plain/")} "{DISTRIBUTION}=={public}"'
    if index != index_url():
        return f"{INSTALL_COMMAND}, which knows the login in {INDEX_VARIABLE}"
    label = torch_facts.label
    return f'{_PIP} --index-url {shlex.quote(f"{index}/{channel(label)}/")} "{DISTRIBUTION}=={public}+{label}"'


def native_exists(torch_facts: TorchFacts) -> bool:
    """Whether a plain wheel could be replaced by a native one with CUDA kernels. (ROCm calls its devices cuda too.)"""
    return torch_facts.cuda is not None and torch_facts.has_channel and sys.platform == "linux"


def _cuda_major(cuda: str | None) -> str | None:
    return None if cuda is None else cuda.split(".")[0]


def _cuda_text(cuda: str | None) -> str:
    return "no CUDA" if cuda is None else f"CUDA {cuda}"


def _abi_text(cxx11_abi: bool) -> str:
    return "C++11 ABI" if cxx11_abi else "pre-C++11 ABI"


def built_for(record: Mapping[str, Any]) -> str:
    """What a record demands, in words."""
    exact = record["torch"]
    torch_text = f"torch {record['torch_minor']}" if is_release(exact) else f"torch {exact} exactly"
    major = _cuda_major(record["cuda"])
    return f"{torch_text}, {_cuda_text(major)}, {_abi_text(record['cxx11_abi'])}"


def found(torch_facts: TorchFacts) -> str:
    """What there is, in the same words."""
    parts = [f"torch {torch_facts.version}", _cuda_text(torch_facts.cuda)]
    if torch_facts.hip is not None:
        parts.append(f"ROCm {torch_facts.hip}")
    if torch_facts.cxx11_abi is not None:
        parts.append(_abi_text(torch_facts.cxx11_abi))
    return ", ".join(parts)


def differences(record: Mapping[str, Any], torch_facts: TorchFacts) -> list[str]:
    """Which of torch's version, CUDA major and C++ ABI do not fit; empty where the build fits."""
    result = []
    # A release keeps its ABI over its patches; vendor and nightly builds promise nothing beyond themselves.
    if is_release(record["torch"]) and is_release(torch_facts.version):
        fits = record["torch_minor"] == torch_facts.minor
    else:
        fits = record["torch"] == torch_facts.version
    if not fits:
        result.append("the torch version")
    # A build without CUDA serves CPU tensors beside any torch, and its operators refuse CUDA tensors by name.
    if record["cuda"] is not None and _cuda_major(record["cuda"]) != _cuda_major(torch_facts.cuda):
        result.append("the CUDA major version")
    if torch_facts.cxx11_abi is not None and record["cxx11_abi"] != torch_facts.cxx11_abi:
        result.append("the C++ ABI")
    return result


def misfit(record: Mapping[str, Any], torch_facts: TorchFacts, problem: str, remedy: str | None = None) -> str:
    """The three lines of an error: the problem; built for and found; one remedy, by default the command for that torch.

    `scaled-mask-softmax doctor` says the same, and more.
    """
    return (
        f"scaled_mask_softmax {record['version']}: {problem}\n"
        f"  built for {built_for(record)}; found {found(torch_facts)} (scaled-mask-softmax doctor says more; "
        f"{COMPOSITE_VARIABLE}=1 runs on plain torch operators)\n"
        f"  fix: {remedy or how_to_install(record['version'], torch_facts)}"
    )


def mismatch(record: Mapping[str, Any], torch_facts: TorchFacts) -> str | None:
    """The text of the error where the build does not fit torch; None where it does."""
    differing = differences(record, torch_facts)
    return misfit(record, torch_facts, does_not_fit(differing)) if differing else None


def does_not_fit(differing: list[str]) -> str:
    return f"this build does not fit the installed torch ({', '.join(differing)})."


def running_torch() -> TorchFacts:
    """The facts of the torch of this process."""
    import torch

    return TorchFacts(str(torch.__version__), torch.version.cuda, torch.version.hip, torch.compiled_with_cxx11_abi())


def _read_record() -> None:
    """Set RECORD and the path of the library beside it, which an editable install keeps apart from this file."""
    global RECORD, _library
    name = f"{__package__}._build_record"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return
    RECORD = module.BUILD
    _library = Path(str(module.__file__)).with_name(LIBRARY)


def _mapped_libraries() -> list[str]:
    """The files of our library's name in this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = (line.rstrip("\n").split(maxsplit=5)[5:] for line in maps)
        return sorted({path[0] for path in paths if path and os.path.basename(path[0]) == LIBRARY})


def _is_registered() -> bool:
    import torch

    try:
        torch._C._dispatch_find_schema_or_throw("scaled_mask_softmax::scaled_mask_softmax", "")
    except RuntimeError:
        return False
    return True


def _other_copy(library: Path) -> str | None:
    """Who has registered our operators, if not `library` itself: loading it too would abort the process."""
    if not _is_registered():
        return None
    mapped = _mapped_libraries()
    if any(os.path.exists(path) and os.path.samefile(path, library) for path in mapped):
        return None
    return ", ".join(mapped) or "code outside a library of this name"


def _runtime_major(library: Path) -> str:
    """The major version of the CUDA runtime that the loaded library calls. Creates no CUDA context."""
    import ctypes

    version = ctypes.c_int()
    # Through the library's own handle, since a process can hold several runtimes.
    status = ctypes.CDLL(str(library)).cudaRuntimeGetVersion(ctypes.byref(version))
    return str(version.value // 1000) if status == 0 else f"of unknown version (error {status})"


def _load_native(record: Mapping[str, Any], library: Path) -> ModuleType:
    """Load the library and import _C. Raises ImportError, saying what to do, where that cannot work."""
    import torch

    facts = running_torch()
    if (text := mismatch(record, facts)) is not None:
        raise ImportError(text)
    if (other := _other_copy(library)) is not None:
        problem = f"another copy of the operators is already loaded in this process: {other}."
        raise ImportError(misfit(record, facts, problem, f"start again and load only one of it and {library}"))
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        reason = error.__cause__ or error  # torch's own error names the file, its cause says why
        raise ImportError(misfit(record, facts, f"its library cannot be loaded: {reason}.")) from error
    built_major = _cuda_major(record["cuda"])
    if built_major is not None and (major := _runtime_major(library)) != built_major:
        problem = f"the CUDA runtime in this process is {major}, this build is for {built_major}."
        remedy = f"keep other CUDA libraries out of LD_LIBRARY_PATH, or {how_to_install(record['version'], facts)}"
        raise ImportError(misfit(record, facts, problem, remedy))
    try:
        return importlib.import_module(f"{__package__}._C")
    except ImportError as error:
        version = "{}.{}".format(*sys.version_info)
        problem = f"its module _C, built for Python {record['python']}, does not import in Python {version}: {error}."
        raise ImportError(misfit(record, facts, problem)) from error


def load() -> bool:
    """Load the native library where there is one that fits, and return whether there is.

    Raises ImportError where there is one that does not fit, unless SCALED_MASK_SOFTMAX_ALLOW_COMPOSITE=1 allows the
    composite: then it warns once.
    """
    global NATIVE, _module, _plain_warning
    if NATIVE:
        return True
    _read_record()
    if RECORD is None or _library is None:
        if native_exists(facts := running_torch()):
            _plain_warning = (
                "scaled_mask_softmax: this is the plain wheel, which runs CUDA tensors on plain torch operators. For "
                f"the native kernels: {how_to_install(version(None), facts)}"
            )
        return False
    try:
        _module = _load_native(RECORD, _library)
    except ImportError as error:
        if os.environ.get(COMPOSITE_VARIABLE, "0") in {"", "0"}:
            raise
        warnings.warn(f"{error}\n{COMPOSITE_VARIABLE} is set: running on plain torch operators.", stacklevel=3)
        return False
    NATIVE = True
    return True


def warn_about_composite(x: torch.Tensor) -> None:
    """Once a process, at its first CUDA tensor outside torch.compile: a native wheel could serve it."""
    global _plain_warning
    if _plain_warning is None or x.device.type != "cuda":
        return
    import torch

    if not torch.compiler.is_compiling():  # a warning would break the graph
        text, _plain_warning = _plain_warning, None
        warnings.warn(text, stacklevel=3)


def version(record: Mapping[str, Any] | None) -> str:
    """The installed version: that of the record, or where there is none that of the distribution's metadata."""
    if record is not None:
        return str(record["version"])
    from importlib import metadata

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # a checkout on the path
        return "0+unknown"


def library_path() -> str:
    """The path of the native library, for torch.ops.load_library and C++ programs.

    Raises:
        RuntimeError: no native library is in use.
    """
    if not NATIVE:
        raise RuntimeError("scaled_mask_softmax: no native library is in use; expected a native wheel.")
    return str(_library)


def build_info() -> dict[str, Any]:
    """What this build was made of and for: whether it is native, its version and, if there is one, its build record."""
    info = {"native": NATIVE, "version": version(RECORD), **(RECORD or {})}
    if _module is not None:
        info["instruction_set"] = _module.build_info()["instruction_set"]
    return info
