"""Every diagnosis of the doctor, from facts that are made up: one test a diagnosis, of its name."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import stand_in
from stand_in import RECORD

from release import ROOT, cli_data, matrix
from scaled_mask_softmax import _build
from scaled_mask_softmax_cli import diagnoses, doctor, facts, gpus, installed, known, remedy, status
from scaled_mask_softmax_cli.diagnoses import DIAGNOSES, Judgement, judge
from scaled_mask_softmax_cli.facts import Facts, Imported
from scaled_mask_softmax_cli.gpus import Driver, Gpu

H200 = Gpu(0, "NVIDIA H200", "9.0", "GPU-1")
V100 = Gpu(1, "Tesla V100", "7.0", "GPU-2")
LATER = Gpu(1, "A later GPU", "13.0", "GPU-3")
WORKS = Driver("works", code=0, library="/usr/lib/libcuda.so.1", cuda="13.0", version="580.65.06", smi="ok")
TORCH = installed.Torch(Path("/site/torch"), "2.14.1+cu130", "13.0", None, "release", True, None)
TORCH_UPGRADED = dataclasses.replace(TORCH, version="2.15.0+cu132", cuda="13.2")


def with_gpus(*visible: Gpu, everything: tuple[Gpu, ...] | None = None, **changes: Any) -> Driver:
    hidden = list(visible) if everything is None else list(everything)
    return dataclasses.replace(WORKS, visible=list(visible), all=hidden, **changes)


@pytest.fixture(autouse=True)
def index(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index is known, and a matrix."""
    monkeypatch.setenv(_build.INDEX_VARIABLE, stand_in.INDEX)
    monkeypatch.setattr(known, "load", lambda: known.parse(cli_data.data(matrix.load())))
    monkeypatch.setattr(installed, "rules", lambda: _build)


class Case:
    """Facts of an installation where all is well, and what a test changes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def package(self, record: dict[str, Any] | None = RECORD, **changes: Any) -> installed.Package:
        self.folder.mkdir(exist_ok=True)
        stand_in.artefacts(self.folder)
        return dataclasses.replace(installed.Package([self.folder], _build, record), **changes)  # type: ignore[arg-type]

    def facts(self, **changes: Any) -> Facts:
        well = Facts(
            python=f"{RECORD['python']}.1",
            implementation="CPython",
            tag=facts.tag(),
            executable="/venv/bin/python",
            environment="venv",
            platform="linux-x86_64",
            machine=str(RECORD["platform"]).removeprefix("linux_"),
            libc=("glibc", "2.36"),
            torch=TORCH,
            package=self.package(),
            unreadable=None,
            driver=with_gpus(H200),
            visible=None,
            shadows=[],
            homes=[],
            ptx_cache=("/home/.nv", True),
            imported=Imported("ok"),
        )
        return dataclasses.replace(well, **changes)

    def expect(self, name: str, code: int, text: str, *, require_gpu: bool = False, **changes: Any) -> Judgement:
        """The diagnosis is made, alone of its status unless 0, with this exit status and text."""
        judgement = judge(self.facts(**changes), require_gpu=require_gpu)
        found = [item for item in judgement.findings if item.diagnosis == name]
        assert found, judgement
        assert (judgement.status, found[0].status) == (code, code)
        assert text in found[0].text
        assert "{" not in found[0].text + found[0].fix
        if code:
            assert judgement.verdict == judgement.problems[0].text
        return judgement


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path / "scaled_mask_softmax")


def test_all_is_well(case: Case) -> None:
    judgement = judge(case.facts())
    assert (judgement.status, judgement.verdict, judgement.findings) == (0, "fits", [])
    assert [item.verdict for item in judgement.gpus] == ["native"]


# The package and torch


def test_no_package(case: Case) -> None:
    judgement = case.expect("no-package", 2, "not installed for this Python", package=None)
    assert judgement.remedy.first.endswith(f'"scaled-mask-softmax=={matrix.load().version}+cu130torch2.14"')


def test_no_torch(case: Case) -> None:
    judgement = case.expect("no-torch", 2, "torch is not installed", torch=None)
    assert judgement.problems[0].fix == 'pip install "torch==2.14.*"'
    record = {**RECORD, "cuda": "12.6"}
    judgement = case.expect("no-torch", 2, "", torch=None, package=case.package(record))
    channel = f"{matrix.load().torch_channels}/cu126"
    assert judgement.problems[0].fix == f'pip install --index-url {channel} "torch==2.14.*"'


def test_torch_broken(case: Case) -> None:
    broken = dataclasses.replace(TORCH, version="", broken="gives no version")
    case.expect("torch-broken", 1, "its version.py gives no version", torch=broken)


def test_torch_mixed(case: Case) -> None:
    other = installed.Distribution(Path("/site/torch-2.13.0.dist-info"), "2.13.0", "pip", True)
    torch = dataclasses.replace(TORCH, distribution=other)
    case.expect("torch-mixed", 1, "its metadata says 2.13.0, its version.py 2.14.1+cu130", torch=torch)


MISFITS = {
    "upgraded": (TORCH_UPGRADED, "the torch version"),
    "downgraded": (dataclasses.replace(TORCH, version="2.13.0+cu130"), "the torch version"),
    "CPU": (dataclasses.replace(TORCH, version="2.14.1+cpu", cuda=None, flavour="CPU"), "the CUDA major version"),
    "CUDA 12": (dataclasses.replace(TORCH, version="2.14.1+cu126", cuda="12.6"), "the CUDA major version"),
    "ROCm": (
        dataclasses.replace(TORCH, version="2.14.1+rocm6.4", cuda=None, hip="6.4"),
        "the torch version, the CUDA major version",
    ),
    "vendor": (
        dataclasses.replace(TORCH, version="2.14.0a0+b4e4ee8.nv25.11", flavour="vendor"),
        "the torch version",
    ),
    "nightly": (
        dataclasses.replace(TORCH, version="2.14.0.dev20260516+cu130", flavour="nightly"),
        "the torch version",
    ),
    "old ABI": (dataclasses.replace(TORCH, cxx11_abi=False), "the C++ ABI"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfit(name: str, case: Case) -> None:
    torch, differing = MISFITS[name]
    judgement = case.expect("misfit", 1, f"does not fit the installed torch ({differing})", torch=torch)
    # The error of the import says the same: the problem, built for and found, and the fix.
    record = case.facts().package.record  # type: ignore[union-attr]
    assert record is not None
    error = str(_build.mismatch(record, remedy.torch_facts(_build, torch))).splitlines()
    assert len(error) == 3
    assert error[0].endswith(f": {judgement.verdict}")
    assert error[2] == f"  fix: {judgement.remedy.first}"
    table = doctor.table(case.facts(torch=torch), judgement)
    assert f"verdict    {judgement.verdict}\nfix        {judgement.remedy.first}\n" in table
    if name in ("vendor", "nightly"):
        assert judgement.remedy.first.startswith(f"scaled-mask-softmax build --index {stand_in.INDEX} (no prebuilt ")
        assert re.search(r"^wheel      no prebuilt wheel: torch 2\.14\S+ is a vendor's or a nightly build", table, re.M)
        assert re.search(
            r"^takes      about \d+ min on idle cores and \d+ GB of memory for 1 architecture, ", table, re.M
        )
    elif name in ("ROCm", "old ABI"):
        assert judgement.remedy.first.endswith('"scaled-mask-softmax==1.0.0"')
    else:
        ways = dict(judgement.remedy.lines)
        assert list(ways) == ["fix", "with uv", "mirrored", "offline"]
        assert ways["fix"].startswith(f"pip install --force-reinstall --no-deps --index-url {stand_in.INDEX}/whl/")
        assert ways["with uv"].partition("--index-url")[2] == ways["fix"].partition("--index-url")[2]
        assert ways["offline"].startswith(f"scaled-mask-softmax download --torch {_build.minor(torch.version)} --cuda ")


def test_wrong_python(case: Case) -> None:
    case.expect("wrong-python", 1, "is for Python 3.9, and this is", package=case.package({**RECORD, "python": "3.9"}))


def test_wrong_machine(case: Case) -> None:
    record = {**RECORD, "platform": "linux_ppc64le"}
    case.expect("wrong-machine", 1, "is for ppc64le, and this machine is", package=case.package(record))


def test_missing_part(case: Case) -> None:
    package = case.package(folders=[Path("/nowhere")])
    case.expect("missing-part", 1, f"{_build.LIBRARY}, _C.", package=package)


def test_unreadable_part(case: Case) -> None:
    package = case.package(None, broken="_build_record.py")
    case.expect("unreadable-part", 1, "_build_record.py cannot be read", package=package)
    path = Path("/site/scaled_mask_softmax/_build.py")
    case.expect("unreadable-part", 1, f"{path} cannot be read", package=None, unreadable=path)


def distribution(version: str, complete: bool = True) -> installed.Distribution:
    return installed.Distribution(Path(f"/site/scaled_mask_softmax-{version}.dist-info"), version, "pip", complete)


def test_cut_off(case: Case) -> None:
    package = case.package(distributions=[distribution(str(RECORD["version"]), complete=False)])
    judgement = case.expect("cut-off", 1, "/site/scaled_mask_softmax-1.0.0+cu130torch2.14.dist-info", package=package)
    assert "scaled-mask-softmax install" in judgement.problems[0].fix
    package = case.package(leftovers=[Path("/site/~caled_mask_softmax")])
    case.expect("cut-off", 1, "left /site/~caled_mask_softmax", package=package)


def test_mixed_files(case: Case) -> None:
    package = case.package(distributions=[distribution("1.0.0+cu130torch2.13")])
    text = "the metadata says 1.0.0+cu130torch2.13, the build record 1.0.0+cu130torch2.14"
    case.expect("mixed-files", 1, text, package=package)
    package = case.package(distributions=[distribution("1.0.0+torch2.13")])
    case.expect("mixed-files", 1, "the metadata says 1.0.0+torch2.13", package=package)


def test_a_variant_wheel_is_not_mixed(case: Case) -> None:
    assert judge(case.facts(package=case.package(distributions=[distribution("1.0.0+torch2.14")]))).status == 0


def test_several_copies(case: Case) -> None:
    package = case.package(others=[Path("/home/me/.local/scaled_mask_softmax")])
    judgement = case.expect("several-copies", 0, "the others: /home/me/.local/scaled_mask_softmax", package=package)
    assert judgement.verdict == "fits"


def test_several_torches(case: Case) -> None:
    torch = dataclasses.replace(TORCH, others=[Path("/home/me/.local/torch")])
    case.expect("several-torches", 0, "Python takes /site/torch; the others: /home/me/.local/torch", torch=torch)


def test_no_cuda_code(case: Case) -> None:
    record = {
        **RECORD,
        "version": "1.0.0+cputorch2.14",
        "cuda": None,
        "cuda_compiler": None,
        "architectures": [],
        "ptx": [],
    }
    case.expect("no-cuda-code", 0, "no CUDA kernels, though torch has CUDA 13.0", package=case.package(record))


def test_plain_on_cuda(case: Case) -> None:
    judgement = case.expect("plain-on-cuda", 0, "the plain wheel", package=case.package(None))
    assert judgement.verdict == "works, on plain torch operators"
    table = doctor.table(case.facts(package=case.package(None)), judgement)
    assert f"\nfor native {judgement.remedy.first}\n" in table


# The import, in a process apart


def test_torch_import(case: Case) -> None:
    error = "OSError: libcudart.so.13: cannot open shared object file"
    case.expect("torch-import", 1, error, imported=Imported("ok", torch=error))


def test_import(case: Case) -> None:
    error = "ImportError: scaled_mask_softmax 1.0.0: its library cannot be loaded.\n  built for x; found y\n  fix: z"
    imported = Imported("ok", package=error)
    judgement = case.expect("import", 1, error, imported=imported)
    assert "verdict    the package does not import: ImportError: " in doctor.table(
        case.facts(imported=imported), judgement
    )


def test_import_hangs(case: Case) -> None:
    case.expect("import-hangs", 1, "did not end", imported=Imported("hangs"))


def test_what_does_not_fit_is_not_said_twice(case: Case) -> None:
    imported = Imported("ok", package="ImportError: this build does not fit")
    judgement = judge(case.facts(torch=TORCH_UPGRADED, imported=imported))
    assert [item.diagnosis for item in judgement.findings] == ["misfit"]


def test_several_libraries(case: Case, tmp_path: Path) -> None:
    files = [tmp_path / "a/libgomp.so.1", tmp_path / "b/libgomp-1a2b3c.so.1.0.0"]
    for file in files:
        file.parent.mkdir()
        file.touch()
    imported = Imported("ok", libraries=[str(file) for file in files])
    case.expect(
        "several-libraries", 0, f"copies of libgomp are in the process: {files[0]}, {files[1]}", imported=imported
    )
    # One file under two names is one.
    files[1].unlink()
    files[1].symlink_to(files[0])
    assert judge(case.facts(imported=imported)).findings == []


# The driver and the GPUs


def test_driver_old(case: Case) -> None:
    driver = with_gpus(H200, cuda="12.4", version="550.54.14")
    judgement = case.expect(
        "driver-old", 4, "runs CUDA 12.4, this build needs CUDA 13 and so driver 580", driver=driver
    )
    assert [item.verdict for item in judgement.gpus] == ["none"]


def test_driver_old_by_its_number(case: Case) -> None:
    """Where the library does not say its CUDA, the kernel's module tells the driver's branch."""
    case.expect("driver-old", 4, "CUDA of driver 550.54.14", driver=with_gpus(H200, cuda=None, version="550.54.14"))


def test_driver_fails(case: Case) -> None:
    driver = Driver("fails", error=f"{gpus.CODES[803]} (cuInit: 803)", code=803)
    case.expect("driver-fails", 4, "are of two drivers: restart the machine", driver=driver)


def test_driver_hangs(case: Case) -> None:
    case.expect("driver-hangs", 4, "the driver hangs", driver=Driver("hangs", error="it did not answer within 45 s"))


def test_driver_hidden(case: Case) -> None:
    driver = Driver("absent", smi="ok", smi_gpus=[H200])
    judgement = case.expect("driver-hidden", 4, "libcuda.so.1 is not here", driver=driver)
    assert "NVIDIA_DRIVER_CAPABILITIES" in judgement.problems[0].fix


@pytest.mark.parametrize("require", [False, True])
def test_no_driver(require: bool, case: Case) -> None:
    driver = Driver("absent")
    judgement = case.expect("no-driver", 4 if require else 0, "no NVIDIA driver", driver=driver, require_gpu=require)
    assert judgement.findings[0].fix == (
        "install NVIDIA's driver, or start the container with the GPUs" if require else ""
    )


@pytest.mark.parametrize("require", [False, True])
def test_no_gpu(require: bool, case: Case) -> None:
    case.expect("no-gpu", 4 if require else 0, "shows no GPU", driver=with_gpus(), require_gpu=require)


@pytest.mark.parametrize("require", [False, True])
def test_gpus_hidden(require: bool, case: Case) -> None:
    driver = with_gpus(everything=(H200, V100))
    text = "CUDA_VISIBLE_DEVICES=-1 hides every GPU (2)"
    case.expect("gpus-hidden", 4 if require else 0, text, driver=driver, visible="-1", require_gpu=require)


@pytest.mark.parametrize("visible", ["0,7", "GPU-1,GPU-9", "0,MIG-12"])
def test_gpu_missing(visible: str, case: Case) -> None:
    entry = visible.split(",")[1]
    text = f"names 2 devices and the driver shows 1: {entry} is not here"
    case.expect("gpu-missing", 3, text, driver=with_gpus(H200, everything=(H200, V100)), visible=visible)


def test_a_list_that_a_negative_number_ends_is_no_mistake(case: Case) -> None:
    assert judge(case.facts(driver=with_gpus(H200, everything=(H200, V100)), visible="0,-1,1")).findings == []


def test_gpu_architecture(case: Case) -> None:
    """One bad GPU of two has a status of its own; two of two another."""
    text = "GPU 1 (Tesla V100, compute capability 7.0) cannot run this build, which holds code for 8.0, 9.0 and PTX"
    judgement = case.expect("gpu-architecture", 3, text, driver=with_gpus(H200, V100))
    assert [item.verdict for item in judgement.gpus] == ["native", "none"]
    judgement = case.expect("gpu-architecture", 4, text, driver=with_gpus(V100))
    # Another CUDA of this torch serves it.
    channel = f"{matrix.load().torch_channels}/cu126"
    way = f'pip install --index-url {channel} "torch==2.14.*", and then scaled-mask-softmax install: cu126 serves it'
    assert judgement.problems[0].fix == way
    # The release's wheel serves what a build of one's own left out; and one's own build what no release serves.
    package = case.package({**RECORD, "architectures": ["8.0"], "ptx": []})
    assert case.expect("gpu-architecture", 4, "", driver=with_gpus(H200), package=package).problems[0].fix == ""
    kepler = with_gpus(Gpu(0, "Tesla K80", "3.7", "GPU-4"))
    assert (
        case.expect("gpu-architecture", 4, "", driver=kepler)
        .problems[0]
        .fix.startswith("scaled-mask-softmax build --archs 3.7 --index https://index.example")
    )
    # Hidden GPUs don't matter.
    assert judge(case.facts(driver=with_gpus(H200, everything=(H200, V100)))).status == 0


def test_gpu_jit(case: Case) -> None:
    judgement = case.expect("gpu-jit", 0, "compiles it from PTX", driver=with_gpus(H200, LATER))
    assert [item.verdict for item in judgement.gpus] == ["native", "JIT from PTX"]


def test_gpu_ptx(case: Case) -> None:
    record = {**RECORD, "cuda_compiler": "13.2.20"}
    text = "the driver's CUDA 13.0 is older than the 13.2 that wrote it"
    case.expect("gpu-ptx", 3, text, driver=with_gpus(H200, LATER), package=case.package(record))
    case.expect("gpu-ptx", 4, text, driver=with_gpus(LATER), package=case.package(record))


def test_ptx_cache(case: Case) -> None:
    text = "cannot be kept in /home/.nv"
    case.expect("ptx-cache", 0, text, driver=with_gpus(LATER), ptx_cache=("/home/.nv", False))
    assert judge(case.facts(ptx_cache=("/home/.nv", False))).findings == []


@pytest.mark.parametrize(
    ("capability", "cubins", "ptx", "expected"),
    [
        ("9.0", ["8.0", "9.0"], [], "native"),
        ("8.9", ["8.0", "8.6"], [], "native"),
        ("12.1", ["12.0"], [], "native"),
        ("8.0", ["8.6"], [], "none"),
        ("10.0", ["9.0"], [], "none"),
        ("10.0", ["9.0a"], ["9.0"], "JIT from PTX"),
        ("9.0", ["9.0a"], [], "native"),
        ("10.3", ["10.0a"], [], "none"),
        ("7.5", ["8.0"], ["12.0"], "none"),
        ("12.0", ["9.0"], ["12.0"], "JIT from PTX"),
        ("7.0", [], [], "none"),
    ],
)
def test_which_gpu_code_runs_where(capability: str, cubins: list[str], ptx: list[str], expected: str) -> None:
    assert gpus.verdict(capability, cubins, ptx, "13.0.88", "13.0")[0] == expected


def test_gpus_are_judged_without_a_native_build_too(case: Case) -> None:
    """Against the release's wheel for this torch; that changes no status."""
    for package in (None, case.package(None)):
        judgement = judge(case.facts(package=package, driver=with_gpus(H200, V100)))
        assert [item.verdict for item in judgement.gpus] == ["native", "none"]
        assert judgement.status == (2 if package is None else 0)


# The surroundings


def test_shadowed(case: Case) -> None:
    case.expect(
        "shadowed", 0, "taken instead: /opt/cuda/lib64/libcudart.so.12", shadows=["/opt/cuda/lib64/libcudart.so.12"]
    )


def test_shadow_taken(case: Case, tmp_path: Path) -> None:
    library = tmp_path / "libcudart.so.13"
    library.touch()
    imported = Imported("ok", libraries=["/site/torch/lib/libc10.so", str(library)])
    shadows = ["/opt/cuda/lib64/libcublas.so.13", str(library)]
    judgement = case.expect("shadow-taken", 0, f"torch's own: {library}.", shadows=shadows, imported=imported)
    assert "shadowed" not in [item.diagnosis for item in judgement.findings]


def test_smi_hangs(case: Case) -> None:
    case.expect("smi-hangs", 0, "nvidia-smi hangs", driver=with_gpus(H200, smi="hangs"))


def test_smi_odd(case: Case) -> None:
    driver = with_gpus(H200, smi="garbage", smi_says="[Insufficient Permissions]")
    case.expect("smi-odd", 0, "(garbage): [Insufficient Permissions]", driver=driver)


def test_wsl_driver(case: Case) -> None:
    driver = with_gpus(H200, wsl=True, library="/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06")
    case.expect("wsl-driver", 0, "comes from /usr/lib/x86_64-linux-gnu/", driver=driver)
    driver = with_gpus(H200, wsl=True, library=gpus.WSL_DRIVER)
    assert judge(case.facts(driver=driver)).findings == []
    assert "CUDA 13.0, of Windows (WSL2) (/usr/lib/wsl/" in doctor.table(case.facts(driver=driver), judge(case.facts()))


def test_home(case: Case) -> None:
    judgement = case.expect("home", 0, "HOME=/nowhere does not exist", homes=[("HOME", "/nowhere", "does not exist")])
    assert judgement.notes[0].fix == "set HOME to a folder that can be written"


@pytest.mark.parametrize(
    ("libc", "tag", "reason"),
    [
        (("glibc", "2.27"), None, "they need glibc 2.28 or newer, and this is 2.27"),
        (("glibc", "2.28"), None, ""),
        (("", ""), None, "they need glibc, and this system has another C library"),
        (("glibc", "2.36"), "cp313t", "they are made for CPython with its global lock, and this takes cp313t wheels"),
    ],
)
def test_machines_that_no_wheel_is_made_for(
    libc: tuple[str, str], tag: str | None, reason: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remedy.platform, "libc_ver", lambda: libc)
    if tag is not None:
        monkeypatch.setattr(remedy, "tag", lambda: tag)
    torch = dataclasses.replace(TORCH, version="2.13.0+cu130")
    found = judge(case.facts(torch=torch)).remedy
    assert found.no_wheel == reason
    if reason:
        assert found.first.endswith(f"(no prebuilt wheel: {reason})")
        assert found.takes.startswith("about ")
    else:
        assert "--index-url" in found.first


@pytest.mark.parametrize(
    ("count", "parallel", "minutes", "memory"),
    [(0, 1, 1, 1.0), (1, 1, 4, 1.0), (1, 2, 2, 2.0), (6, 1, 15, 1.0), (6, 64, 1, 64.0)],
)
def test_what_a_build_takes(count: int, parallel: int, minutes: int, memory: float) -> None:
    assert remedy.estimate(count, parallel) == (minutes, memory)


def test_as_many_compilations_as_cmake_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "7")
    assert remedy.jobs() == 7
    monkeypatch.setenv("MAX_JOBS", "many")
    assert 1 <= remedy.jobs() <= (os.cpu_count() or 1)
    # One fact in two languages.
    assert "/ (3000000 * " in (ROOT / "cmake/Jobs.cmake").read_text(encoding="utf-8")


# What decides, and what is printed


def test_the_worst_decides(case: Case) -> None:
    """Nothing to compare, then misfits, then GPUs."""
    bad = with_gpus(V100)
    assert judge(case.facts(torch=None, driver=bad)).status == 2
    judgement = judge(case.facts(torch=TORCH_UPGRADED, driver=bad))
    assert (judgement.status, [item.status for item in judgement.problems]) == (1, [1, 4])
    table = doctor.table(case.facts(torch=TORCH_UPGRADED, driver=bad), judgement)
    assert "\nalso       GPU 1 (Tesla V100" in table


def test_the_table_of_gpus(case: Case) -> None:
    found = case.facts(driver=with_gpus(H200, everything=(H200, V100)), visible="0")
    table = doctor.table(found, judge(found))
    assert "\ndriver     580.65.06, CUDA 13.0 (/usr/lib/libcuda.so.1)\n" in table
    assert "\nGPU 0      NVIDIA H200, compute capability 9.0: native (GPU-1)\n" in table
    assert "\nhidden     1 more, by CUDA_VISIBLE_DEVICES=0\n" in table


def test_json_holds_everything(case: Case) -> None:
    found = case.facts(driver=with_gpus(H200, V100))
    data = doctor.as_json(found, judge(found))
    assert (data["status"], data["findings"][0]["diagnosis"]) == (3, "gpu-architecture")
    assert [gpu["verdict"] for gpu in data["gpus"]] == ["native", "none"]
    assert data["package"]["record"] == RECORD
    assert data["commands"]["fix"] == judge(found).remedy.first
    assert data["driver"]["visible"][0]["name"] == "NVIDIA H200"


def test_a_bug_report_keeps_secrets(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(_build.INDEX_VARIABLE, "https://me:secret@mirror.example/sms")
    monkeypatch.setenv("SOME_TOKEN", "another secret")
    monkeypatch.setenv("UV_PUBLISH_TOKEN", "a third secret")
    found = case.facts(torch=TORCH_UPGRADED)
    text = doctor.bug_report(found, judge(found))
    assert text.startswith("```\nPython ")
    assert text.endswith("\n```\n")
    assert "secret" not in text
    assert "https://***@mirror.example/sms" in text
    assert "UV_PUBLISH_TOKEN=***" in text
    assert str(tmp_path) not in text
    assert "package    1.0.0+cu130torch2.14 (~/scaled_mask_softmax)" in text
    assert "status 1; findings: misfit" in text
    judgement = judge(found)
    assert judgement.remedy.first == f"scaled-mask-softmax install, which knows the login in {_build.INDEX_VARIABLE}"
    for text in (doctor.table(found, judgement), json.dumps(doctor.as_json(found, judgement))):
        assert "me:" not in text
        assert "with uv" not in text


def test_text_that_would_write_to_the_terminal(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of variables, programs and file names; JSON keeps it as it is."""
    odd = "\x1b]0;owned\x07\x1b[2J\u202e\udcff"
    monkeypatch.setenv("PYTHONPATH", odd)
    torch = dataclasses.replace(TORCH, folder=Path(f"/site{odd}/torch"))
    found = case.facts(torch=torch, visible=odd, driver=with_gpus(everything=(H200,), smi="garbage", smi_says=odd))
    judgement = judge(found)
    for text in (doctor.table(found, judgement), doctor.bug_report(found, judgement)):
        assert all(letter.isprintable() or letter == "\n" for letter in text)
        assert "\\x1b]0;owned\\x07\\x1b[2J\\u202e\\udcff/torch" in text
    assert json.loads(json.dumps(doctor.as_json(found, judgement)))["visible"] == odd


# The documentation


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of docs/install/doctor.md."""
    text = (ROOT / "docs/install/doctor.md").read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    lines = re.split(r"\n## ", text)[0].splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


def test_the_documented_statuses() -> None:
    assert rows("Exit statuses") == [[str(code), text] for code, text in status.MEANING.items()]


def documented_status(diagnosis: diagnoses.Diagnosis) -> str:
    if diagnosis.needs_gpu:
        return diagnoses.REQUIRED
    return (
        "3, or 4 if it is every GPU"
        if diagnosis.message.startswith("GPU ") and diagnosis.status
        else str(diagnosis.status)
    )


def test_the_documented_diagnoses() -> None:
    """Each is in the table with its cause, its message, its status and the test of its name."""
    expected = [
        [name, item.cause, f"`{item.message}`", documented_status(item), f"`test_{name.replace('-', '_')}`"]
        for name, item in DIAGNOSES.items()
    ]
    assert rows("Diagnoses") == expected
    for *_, test in expected:
        assert test.strip("`") in globals()
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in DIAGNOSES if f'"{name}"' not in source] == []
