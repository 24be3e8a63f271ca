"""What importing the package does, refuses and leaves alone."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import stand_in
import torch
from elftools.elf.elffile import ELFFile
from stand_in import RECORD

import scaled_mask_softmax
from release import index, matrix, torch_info
from scaled_mask_softmax import _build

FIX = "pip install --force-reinstall --no-deps"
CHANNELS = f"{stand_in.INDEX}/whl"
IMPORT = "import scaled_mask_softmax"

VENDOR = "2.14.0a0+b4e4ee8.nv25.11"
NIGHTLY = "2.14.0.dev20260516+cu130"

PYTHON = "{}.{}".format(*sys.version_info)


def own_build(version: str) -> str:
    reason = f"torch {version} is a vendor's or a nightly build, which no release's wheel fits"
    return f"scaled-mask-softmax build --index {stand_in.INDEX} (no prebuilt wheel: {reason})"


# The torch found (version, CUDA, ROCm, C++11 ABI), what differs from RECORD, its description, and the end of the fix.
MISFITS = {
    "minor": (
        ("2.13.0+cu130", "13.0", None, True),
        "the torch version",
        "torch 2.13.0+cu130, CUDA 13.0, C++11 ABI",
        f'--index-url {CHANNELS}/cu130/torch2.13/ "scaled-mask-softmax==1.0.0+cu130torch2.13"',
    ),
    "older minor without a label": (
        ("2.13.0", "12.9", None, True),
        "the torch version, the CUDA major version",
        "torch 2.13.0, CUDA 12.9, C++11 ABI",
        f'--index-url {CHANNELS}/cu129/torch2.13/ "scaled-mask-softmax==1.0.0+cu129torch2.13"',
    ),
    "CUDA major": (
        ("2.14.1+cu126", "12.6", None, True),
        "the CUDA major version",
        "torch 2.14.1+cu126, CUDA 12.6, C++11 ABI",
        f'--index-url {CHANNELS}/cu126/torch2.14/ "scaled-mask-softmax==1.0.0+cu126torch2.14"',
    ),
    "no CUDA": (
        ("2.14.1+cpu", None, None, True),
        "the CUDA major version",
        "torch 2.14.1+cpu, no CUDA, C++11 ABI",
        f'--index-url {CHANNELS}/cpu/torch2.14/ "scaled-mask-softmax==1.0.0+cputorch2.14"',
    ),
    "both": (
        ("2.11.0+cu126", "12.6", None, True),
        "the torch version, the CUDA major version",
        "torch 2.11.0+cu126, CUDA 12.6, C++11 ABI",
        f'--index-url {CHANNELS}/cu126/torch2.11/ "scaled-mask-softmax==1.0.0+cu126torch2.11"',
    ),
    "C++ ABI": (
        ("2.14.1+cu130", "13.0", None, False),
        "the C++ ABI",
        "torch 2.14.1+cu130, CUDA 13.0, pre-C++11 ABI",
        f'--index-url {stand_in.INDEX}/plain/ "scaled-mask-softmax==1.0.0"',
    ),
    "ROCm": (
        ("2.14.1+rocm6.4", None, "6.4.1", True),
        "the torch version, the CUDA major version",
        "torch 2.14.1+rocm6.4, no CUDA, ROCm 6.4.1, C++11 ABI",
        f'--index-url {stand_in.INDEX}/plain/ "scaled-mask-softmax==1.0.0"',
    ),
    "nightly": (
        (NIGHTLY, "13.0", None, True),
        "the torch version",
        f"torch {NIGHTLY}, CUDA 13.0, C++11 ABI",
        own_build(NIGHTLY),
    ),
    "vendor": (
        (VENDOR, "13.0", None, True),
        "the torch version",
        f"torch {VENDOR}, CUDA 13.0, C++11 ABI",
        own_build(VENDOR),
    ),
}


def text_of(problem: str, built_for: str, found: str, fix: str, version: str = "1.0.0+cu130torch2.14") -> str:
    return (
        f"scaled_mask_softmax {version}: {problem}\n  built for {built_for}; found {found} (scaled-mask-softmax doctor "
        f"says more; SCALED_MASK_SOFTMAX_ALLOW_COMPOSITE=1 runs on plain torch operators)\n  fix: {fix}"
    )


@pytest.fixture
def native() -> Path:
    """The native library's path: these tests are for a native build."""
    return Path(scaled_mask_softmax.library_path())


def link_artefacts(folder: Path, library: Path) -> None:
    """Put the native build's files into a folder, under their own names."""
    (module,) = library.parent.glob("_C.*.so")
    for path in (library, module):
        (folder / path.name).symlink_to(path)


def running_record(**changes: object) -> dict[str, object]:
    record = {key: value for key, value in scaled_mask_softmax.build_info().items() if key in RECORD}
    return {**record, **changes}


# The comparison


@pytest.mark.parametrize("name", MISFITS)
def test_a_build_that_does_not_fit_is_refused_before_loading(name: str, tmp_path: Path) -> None:
    facts, differing, found, fix = MISFITS[name]
    stand_in.package(tmp_path, RECORD)
    stand_in.torch(tmp_path, *facts)
    assert stand_in.import_error(IMPORT, tmp_path) == text_of(
        f"this build does not fit the installed torch ({differing}).",
        "torch 2.14, CUDA 13, C++11 ABI",
        found,
        fix if fix.startswith("scaled-mask-softmax build") else f"{FIX} {fix}",
    )


@pytest.mark.parametrize(
    ("changes", "built_for"),
    [
        ({"torch": VENDOR}, f"torch {VENDOR} exactly, CUDA 13, C++11 ABI"),
        ({"cuda": None, "torch_minor": "2.13", "torch": "2.13.0+cpu"}, "torch 2.13, no CUDA, C++11 ABI"),
        ({"cxx11_abi": False}, "torch 2.14, CUDA 13, pre-C++11 ABI"),
    ],
)
def test_the_refusal_says_what_the_build_is_for(changes: dict[str, object], built_for: str, tmp_path: Path) -> None:
    stand_in.package(tmp_path, {**RECORD, **changes})
    stand_in.torch(tmp_path, "2.14.1+cu130", "13.0")
    assert f"  built for {built_for}; found " in stand_in.import_error(IMPORT, tmp_path)


def test_the_index_variable_moves_the_channels(tmp_path: Path) -> None:
    stand_in.package(tmp_path, RECORD)
    stand_in.torch(tmp_path, "2.13.0+cu130", "13.0")
    text = stand_in.import_error(IMPORT, tmp_path, SCALED_MASK_SOFTMAX_INDEX="file:///mirror/")
    assert f'{FIX} --index-url file:///mirror/whl/cu130/torch2.13/ "' in text


@pytest.mark.parametrize(
    ("facts", "way"),
    [
        (("2.13.0+cu130", "13.0"), f"make wheel TORCH=2.13 CUDA=cu130 PYTHON={PYTHON} in a clone, which ends with the"),
        (("2.13.0", None), f"make wheel TORCH=2.13 CUDA=cpu PYTHON={PYTHON} in a clone, which ends with the"),
        (("2.13.0+rocm6.4", None, "6.4"), f"SCALED_MASK_SOFTMAX_PLAIN=1 {FIX} . in a clone; or set SCALED_MASK_SOFTM"),
    ],
)
def test_while_there_is_no_index_a_refusal_says_how_to_build(
    facts: tuple[str | None, ...], way: str, tmp_path: Path
) -> None:
    stand_in.package(tmp_path, {**RECORD, "torch": "2.12.1+cu130", "torch_minor": "2.12"})
    stand_in.torch(tmp_path, *facts)
    text = stand_in.import_error(IMPORT, tmp_path, SCALED_MASK_SOFTMAX_INDEX="")
    assert f"  fix: no public index exists yet: {way}" in text
    assert "--index-url" not in text


@pytest.mark.parametrize(
    ("built", "version", "cuda"),
    [
        ("2.14.1+cu130", "2.14.1+cu130", "13.0"),
        ("2.14.1+cu130", "2.14.0+cu130", "13.0"),
        ("2.14.1+cu130", "2.14.2+cu132", "13.2"),
        ("2.14.1", "2.14.3", "13.0"),
        (VENDOR, VENDOR, "13.0"),
        (NIGHTLY, NIGHTLY, "13.0"),
    ],
)
def test_builds_that_fit(built: str, version: str, cuda: str) -> None:
    facts = _build.TorchFacts(version, cuda, None, True)
    assert _build.mismatch({**RECORD, "torch": built}, facts) is None


def test_a_build_without_cuda_fits_beside_any_cuda() -> None:
    facts = _build.TorchFacts("2.14.1+cu130", "13.0", None, True)
    assert _build.mismatch({**RECORD, "torch": "2.14.1+cpu", "cuda": None}, facts) is None


@pytest.mark.parametrize("version", ["2.14.1+cu130", "2.15.0", "2.14.1+cpu", VENDOR, NIGHTLY, "2.13.0a0+git1A2b3c"])
@pytest.mark.parametrize("cuda", ["13.0", "12.6", None])
def test_the_command_names_what_the_build_publishes(
    version: str, cuda: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_build.INDEX_VARIABLE, stand_in.INDEX)
    label = torch_info.TorchInfo(Path(), version, cuda).label
    channel = index.channel(f"scaled_mask_softmax-1.0.0+{label}-cp311-cp311-linux_x86_64.whl")
    assert _build.channel(label) == channel
    facts = _build.TorchFacts(version, cuda, None, True)
    command = _build.how_to_install("1.0.0+anything", facts)
    if _build.why_no_wheel(facts) is None:
        assert command.endswith(f'/{channel}/ "scaled-mask-softmax==1.0.0+{label}"')
    else:
        assert command.startswith(f"scaled-mask-softmax build --index {stand_in.INDEX} (no prebuilt wheel: ")
        monkeypatch.delenv(_build.INDEX_VARIABLE)
        assert _build.how_to_install("1.0.0", facts).startswith("scaled-mask-softmax build . in a clone or an unpacked")


@pytest.mark.parametrize("row", matrix.load().torch.values(), ids=lambda row: row.minor)
def test_a_wheel_is_named_for_exactly_what_the_matrix_has(row: matrix.Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build.platform, "machine", lambda: "x86_64")
    for label, cuda in {"cpu": None, **{name: cuda.toolkit for name, cuda in matrix.load().cuda.items()}}.items():
        reason = _build.why_no_wheel(_build.TorchFacts(row.release, cuda))
        assert (reason is None) is (label in row.cuda and PYTHON in row.python), reason


@pytest.mark.parametrize(
    ("version", "cuda", "machine", "reason"),
    [
        ("2.99.0", "13.0", "x86_64", ", and this is 2.99"),
        (
            "2.14.1+cu128",
            "12.8",
            "x86_64",
            "made for cu130, cu126, cu132, cpu, and this is cu128",
        ),
        ("2.14.1+cu130", "13.0", "riscv64", "they are made for x86_64, aarch64, and this machine is riscv64"),
    ],
)
def test_why_there_is_no_wheel(
    version: str, cuda: str, machine: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_build.platform, "machine", lambda: machine)
    facts = _build.TorchFacts(version, cuda, None, True)
    assert reason in str(_build.why_no_wheel(facts))
    assert f"(no prebuilt wheel: {_build.why_no_wheel(facts)})" in _build.how_to_install("1.0.0", facts)


def test_a_public_index_has_proven_cells_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(_build, "DEFAULT_INDEX", stand_in.INDEX)
    monkeypatch.delenv(_build.INDEX_VARIABLE, raising=False)
    for cell in matrix.load().cells(machine="x86_64"):
        if PYTHON in cell.torch.python:
            facts = _build.TorchFacts(cell.torch.release, cell.cuda and cell.cuda.toolkit)
            assert (_build.why_no_wheel(facts) is None) is cell.is_proven


@pytest.mark.parametrize("value", ["", "0"])
def test_the_composite_is_not_allowed_by_an_empty_variable(value: str, tmp_path: Path) -> None:
    stand_in.package(tmp_path, RECORD)
    stand_in.torch(tmp_path, "2.13.0+cu130", "13.0")
    text = stand_in.import_error(IMPORT, tmp_path, SCALED_MASK_SOFTMAX_ALLOW_COMPOSITE=value)
    assert "does not fit" in text


def test_the_composite_can_be_allowed(tmp_path: Path) -> None:
    stand_in.package(tmp_path, {**running_record(), "torch": "2.10.0+cu130", "torch_minor": "2.10"})
    code = f"""
import warnings, torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import scaled_mask_softmax as package
    y = package.scaled_mask_softmax(torch.zeros(2, 4, requires_grad=True), is_causal=True)
    package._build.warn_about_composite(torch.zeros(1))
(warning,) = caught
assert "does not fit the installed torch (the torch version)" in str(warning.message)
assert str(warning.message).endswith("is set: running on plain torch operators."), warning.message
assert warning.filename == "<string>", warning.filename
assert y.tolist() == [[1, 0, 0, 0], [0.5, 0.5, 0, 0]] and y.requires_grad
dropped = package.scaled_mask_softmax(torch.zeros(50, 4, requires_grad=True), dropout_p=0.5)
assert set(dropped.flatten().tolist()) == {{0.0, 0.5}} and dropped.requires_grad
overwritten = package.scaled_mask_softmax_(torch.zeros(50, 4), dropout_p=0.5)
assert set(overwritten.flatten().tolist()) == {{0.0, 0.5}}
assert package.build_info()["native"] is False
assert package.__version__ == {scaled_mask_softmax.__version__!r}
assert {_build.LIBRARY!r} not in open("/proc/self/maps").read()
try:
    package.library_path()
except RuntimeError as error:
    print(error)
"""
    result = stand_in.run(["-c", code], tmp_path, SCALED_MASK_SOFTMAX_ALLOW_COMPOSITE="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "scaled_mask_softmax: no native library is in use; expected a native wheel.\n"


# Loading


def test_another_copy_is_refused(native: Path, tmp_path: Path) -> None:
    other = tmp_path / native.name
    other.write_bytes(native.read_bytes())
    code = f"import torch\ntorch.ops.load_library({str(other)!r})\n{IMPORT}"
    lines = stand_in.import_error(code).split("\n")
    problem = f"another copy of the operators is already loaded in this process: {other}."
    assert lines[0] == f"scaled_mask_softmax {scaled_mask_softmax.__version__}: {problem}"
    assert lines[2] == f"  fix: start again and load only one of it and {native}"


def test_operators_of_our_namespace_from_elsewhere_are_refused(native: Path) -> None:
    code = f"""
import torch
library = torch.library.Library("scaled_mask_softmax", "DEF")
library.define("scaled_mask_softmax(Tensor x) -> Tensor")
{IMPORT}"""
    text = stand_in.import_error(code)
    assert "another copy of the operators is already loaded in this process: code outside a library" in text


def test_the_same_library_may_be_loaded_before_and_the_package_reloaded(native: Path) -> None:
    code = f"""
import importlib, torch
torch.ops.load_library({str(native)!r})
import scaled_mask_softmax
importlib.reload(scaled_mask_softmax)
print(scaled_mask_softmax.build_info()["native"], scaled_mask_softmax.scaled_mask_softmax(torch.zeros(1, 2)).tolist())
"""
    assert stand_in.python(code) == "True [[0.5, 0.5]]\n"


def test_another_cuda_runtime_is_refused(native: Path, tmp_path: Path) -> None:
    if torch.version.cuda is None:
        pytest.skip("needs a torch with CUDA")
    major = int(torch.version.cuda.split(".")[0])
    pretended = f"{major - 1}.6"
    folder = stand_in.package(tmp_path, running_record(cuda=pretended))
    link_artefacts(folder, native)
    code = f"import torch\ntorch.version.cuda = {pretended!r}\n{IMPORT}"
    lines = stand_in.import_error(code, tmp_path).split("\n")
    assert lines[0].endswith(f": the CUDA runtime in this process is {major}, this build is for {major - 1}.")
    minor, label = _build.minor(torch.__version__), f"cu{major - 1}6"
    keep = "  fix: keep other CUDA libraries out of LD_LIBRARY_PATH, or "
    if label in getattr(matrix.load().torch.get(minor), "cuda", ()):
        assert lines[2].startswith(f"{keep}{FIX} ")
        assert lines[2].endswith(f'+{label}torch{minor}"')
    else:
        # There is no wheel for such a torch.
        assert lines[2].startswith(f"{keep}scaled-mask-softmax build ")


def test_a_library_that_does_not_load_is_an_import_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_build.INDEX_VARIABLE, stand_in.INDEX)
    folder = stand_in.package(tmp_path, running_record())
    missing = stand_in.import_error(IMPORT, tmp_path)
    assert "its library cannot be loaded: " in missing
    assert f"{folder / _build.LIBRARY}: cannot open shared object file" in missing
    assert _build.how_to_install(scaled_mask_softmax.__version__, _build.running_torch()) in missing
    (folder / _build.LIBRARY).write_bytes(b"not a library")
    assert "file too short" in stand_in.import_error(IMPORT, tmp_path)


def test_a_module_for_another_python_is_an_import_error(native: Path, tmp_path: Path) -> None:
    folder = stand_in.package(tmp_path, running_record(python="3.9"))
    (folder / native.name).symlink_to(native)
    text = stand_in.import_error(IMPORT, tmp_path)
    assert "its module _C, built for Python 3.9, does not import in Python 3." in text
    assert "No module named 'scaled_mask_softmax._C'" in text


def test_the_module_is_linked_to_the_library(native: Path) -> None:
    (module,) = native.parent.glob("_C.*.so")
    with module.open("rb") as stream:
        tags = list(ELFFile(stream).get_section_by_name(".dynamic").iter_tags())
    needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
    assert _build.LIBRARY in needed
    assert not any("torch" in name or "c10" in name or "cuda" in name for name in needed)
    assert [tag.runpath for tag in tags if tag.entry.d_tag == "DT_RUNPATH"] == ["$ORIGIN"]
    code = f"""
import importlib.util, torch
def mapped():
    lines = open("/proc/self/maps").read().splitlines()
    return sorted({{line.split()[-1] for line in lines if line.endswith({_build.LIBRARY!r})}})
assert mapped() == []
spec = importlib.util.spec_from_file_location("_C", {str(module)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(*mapped(), hasattr(torch.ops.scaled_mask_softmax, "scaled_mask_softmax"))
"""
    assert stand_in.python(code) == f"{native.resolve()} True\n"


def test_an_editable_install_keeps_the_artefacts_apart(native: Path, tmp_path: Path) -> None:
    stand_in.package(tmp_path / "checkout", None)
    artefacts = tmp_path / "site" / "scaled_mask_softmax"
    artefacts.mkdir(parents=True)
    link_artefacts(artefacts, native)
    (artefacts / "_build_record.py").write_text(f"BUILD = {running_record()!r}\n", "utf-8")
    code = f"""
import importlib.machinery, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name in ("scaled_mask_softmax._C", "scaled_mask_softmax._build_record"):
            return importlib.machinery.PathFinder.find_spec(name, [{str(artefacts)!r}])
sys.meta_path.insert(0, Finder)
import scaled_mask_softmax
print(scaled_mask_softmax.library_path(), scaled_mask_softmax.__file__)
"""
    expected = f"{artefacts / native.name} {tmp_path / 'checkout' / 'scaled_mask_softmax' / '__init__.py'}\n"
    assert stand_in.python(code, tmp_path / "checkout") == expected


def test_the_version_is_one(native: Path) -> None:
    info = scaled_mask_softmax.build_info()
    assert info["native"] is True
    assert scaled_mask_softmax.__version__ == info["version"] == importlib.metadata.version("scaled-mask-softmax")
    assert info["version"].endswith(f"+{_build.running_torch().label}")
    compiled = importlib.import_module("scaled_mask_softmax._C").build_info()
    assert {key: info[key] for key in compiled} == compiled
    assert native.name == _build.LIBRARY
    assert native.is_file()


# What importing leaves alone

PROBE = """
import json, os, sys
import torch

home = os.environ["HOME"]

def state():
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "denormal": 5e-324 * 1.0 > 0 and (torch.tensor([1e-40]) * 1).item() > 0 and sys.float_info.min / 2 > 0,
        "cuda": torch.cuda.is_initialized(),
    }

def snapshot():
    files = {}
    for root in (os.environ["PACKAGE"], home, os.environ["TMPDIR"]):
        for folder, _, names in os.walk(root):
            for path in [folder, *(os.path.join(folder, name) for name in names)]:
                status = os.lstat(path)
                files[path] = (status.st_mtime_ns, status.st_size)
    return files

written = []
def audit(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        written.append(str(arguments[0]))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.putenv"):
        written.append(f"{event} {arguments}")

# Denormal numbers are handled as before, whichever way that is.
torch.set_flush_denormal(os.environ["FLUSH"] == "1")
torch.zeros(1)
before, files = state(), snapshot()
sys.addaudithook(audit)
import scaled_mask_softmax
report = {"native": scaled_mask_softmax.build_info()["native"], "written": list(written), "before": before}
report["after"] = state()
report["files"] = [path for path in set(snapshot().items()) ^ set(files.items())]

# The driver tells whether a context exists, once it is initialised, which creates none.
import ctypes
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    driver = None
report["contexts"] = []
if driver is not None and driver.cuInit(0) == 0:
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    for device in range(count.value):
        assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        report["contexts"].append(active.value)
print(json.dumps(report))
"""


@pytest.fixture(scope="module", params=["0", "1"], ids=["denormals", "flushed"])
def probe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a fresh process was like before and after the import."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "home").mkdir()
    (folder / "tmp").mkdir()
    library = Path(scaled_mask_softmax.library_path())
    package = stand_in.package(folder / "site", running_record())
    link_artefacts(package, library)
    output = stand_in.python(
        PROBE,
        folder / "site",
        HOME=str(folder / "home"),
        TMPDIR=str(folder / "tmp"),
        PACKAGE=str(package),
        FLUSH=request.param,
    )
    report: dict[str, object] = json.loads(output)
    assert report["native"] is True
    report["flushed"] = request.param == "1"
    return report


def test_importing_creates_no_cuda_context(probe: dict[str, object]) -> None:
    after = probe["after"]
    assert isinstance(after, dict)
    assert after["cuda"] is False
    assert not any(probe["contexts"])  # type: ignore[arg-type]
    assert len(probe["contexts"]) == torch.cuda.device_count()  # type: ignore[arg-type]


def test_importing_starts_no_thread(probe: dict[str, object]) -> None:
    assert probe["after"]["threads"] == probe["before"]["threads"]  # type: ignore[index]


def test_importing_writes_nothing(probe: dict[str, object]) -> None:
    assert probe["written"] == []
    assert probe["files"] == []


def test_importing_leaves_denormal_numbers_alone(probe: dict[str, object]) -> None:
    expected = not probe["flushed"]
    assert probe["before"]["denormal"] is expected  # type: ignore[index]
    assert probe["after"]["denormal"] is expected  # type: ignore[index]


@pytest.mark.parametrize(
    "order",
    [
        "import scaled_mask_softmax, torch",
        "import torch, numpy, scaled_mask_softmax",
        "from scaled_mask_softmax.modules import ScaledMaskSoftmax; import torch, scaled_mask_softmax",
        "import scaled_mask_softmax._build, torch; import scaled_mask_softmax",
    ],
)
def test_any_import_order(order: str) -> None:
    code = f"{order}\nprint(scaled_mask_softmax.ScaledMaskSoftmax(2.0)(torch.zeros(1, 2)).tolist())"
    assert stand_in.python(code) == "[[0.5, 0.5]]\n"


def test_a_process_forked_after_the_import_computes() -> None:
    code = """
import os, torch, scaled_mask_softmax
child = os.fork()
if child == 0:
    status = 1
    try:
        for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
            x = torch.randn(64, 1000, device=device, requires_grad=True)
            y = scaled_mask_softmax.scaled_mask_softmax(x, is_causal=True)
            y.square().sum().backward()
            torch.testing.assert_close(y.sum(-1), torch.ones(64, device=device))
            assert x.grad.isfinite().all()
        status = 0
    finally:
        os._exit(status)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert stand_in.python(code) == "0\n"


def test_importing_is_quick() -> None:
    """Under 50 ms over torch. The least of some runs: whatever else the machine does only adds to it."""
    least = float("inf")
    for _ in range(6):
        result = stand_in.run(["-X", "importtime", "-c", "import torch; import scaled_mask_softmax"])
        assert result.returncode == 0, result.stderr
        (cumulative,) = re.findall(r"^import time:\s+\d+ \|\s+(\d+) \| scaled_mask_softmax$", result.stderr, re.M)
        least = min(least, int(cumulative) / 1000)
        if least < 50:
            break
    assert least < 50


# The plain wheel


def test_a_plain_wheel_runs_the_composite_and_warns_at_the_first_cuda_tensor(tmp_path: Path) -> None:
    stand_in.package(tmp_path, None)
    stand_in.distribution(tmp_path, "1.0.0")
    code = """
import types, warnings
import torch
torch.__version__, torch.version.cuda = "2.14.1+cu130", "13.0"
import scaled_mask_softmax as package

def tensor(kind):
    return types.SimpleNamespace(device=types.SimpleNamespace(type=kind))

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert package.scaled_mask_softmax(torch.zeros(1, 2)).tolist() == [[0.5, 0.5]]
    package._build.warn_about_composite(tensor("mps"))
    assert caught == []
    for _ in range(2):
        package._build.warn_about_composite(tensor("cuda"))
    if torch.cuda.is_available():
        package.scaled_mask_softmax(torch.zeros(1, 2, device="cuda"))
(warning,) = caught
print(warning.message)
assert package.build_info() == {"native": False, "version": "1.0.0"}
assert package.__version__ == "1.0.0"
assert not hasattr(torch.ops.scaled_mask_softmax, "scaled_mask_softmax")
"""
    assert stand_in.python(code, tmp_path) == (
        "scaled_mask_softmax: this is the plain wheel, which runs CUDA tensors on plain torch operators. "
        f"For the native kernels: {FIX} --index-url {CHANNELS}/cu130/torch2.14/ "
        '"scaled-mask-softmax==1.0.0+cu130torch2.14"\n'
    )


def test_a_plain_wheel_is_traced_whole_and_says_nothing_on_rocm(tmp_path: Path) -> None:
    stand_in.package(tmp_path, None)
    code = """
import types
import warnings
import torch
# torch's compiler warns of torch itself.
warnings.filterwarnings("ignore", ".*autograd.function.Function.* should not be instantiated", DeprecationWarning)
real = torch.version.cuda, torch.version.hip
torch.version.cuda, torch.version.hip = None, "6.4"
import scaled_mask_softmax as package
package._build.warn_about_composite(types.SimpleNamespace(device=types.SimpleNamespace(type="cuda")))
torch.version.cuda, torch.version.hip = real
compiled = torch.compile(package.scaled_mask_softmax, fullgraph=True, backend="eager")
print(compiled(torch.zeros(1, 2)).tolist())
"""
    assert stand_in.python(code, tmp_path) == "[[0.5, 0.5]]\n"
