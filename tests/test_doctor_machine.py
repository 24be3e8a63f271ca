"""What the doctor sees of a machine: of files, environments, drivers and programs that are made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import fake_driver
import pytest
import stand_in
from fake_driver import H200, MIG, V100
from stand_in import RECORD

from scaled_mask_softmax_cli import ask, facts, gpus, installed

UUIDS = {
    "H200": "GPU-11111111-2222-3333-4444-555555555555",
    "V100": "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee",
    "MIG": "MIG-99999999-8888-7777-6666-555555555555",
}


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a machine with a driver and three devices."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "bin").mkdir()  # of no program, a machine's own nvidia-smi among them
    return {"PATH": str(folder / "bin"), **fake_driver.library(folder), "FAKE_GPUS": f"{H200};{V100};{MIG}"}


def look(variables: dict[str, str], root: Path = Path("/nowhere")) -> gpus.Driver:
    return gpus.look(variables, root, driver_seconds=20, smi_seconds=20)


# The driver's library


def test_every_gpu(driver: dict[str, str]) -> None:
    found = look(driver)
    assert (found.state, found.code, found.cuda, found.smi) == ("works", 0, "13.0", "absent")
    assert [(gpu.index, gpu.name, gpu.capability) for gpu in found.visible] == [
        (0, "NVIDIA H200", "9.0"),
        (1, "Tesla V100", "7.0"),
        (2, "NVIDIA H200 MIG 1g.18gb", "9.0"),
    ]
    assert [gpu.uuid for gpu in found.visible] == list(UUIDS.values())
    assert found.all == found.visible
    assert found.library == str(Path(driver["LD_LIBRARY_PATH"], "libcuda.so.1"))


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        ("1,0", ["Tesla V100", "NVIDIA H200"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        (UUIDS["V100"], ["Tesla V100"]),
        (UUIDS["V100"][:9], ["Tesla V100"]),
        (UUIDS["MIG"], ["NVIDIA H200 MIG 1g.18gb"]),
        ("0,9,1", ["NVIDIA H200"]),
    ],
)
def test_visible_gpus(visible: str, shown: list[str], driver: dict[str, str]) -> None:
    found = look({**driver, "CUDA_VISIBLE_DEVICES": visible})
    assert found.state == "works"
    assert [gpu.name for gpu in found.visible] == shown
    assert len(found.all) == 3


@pytest.mark.parametrize(
    ("code", "text"),
    [(34, "it is a stub"), (802, "nvidia-fabricmanager"), (803, "two drivers"), (999, "(cuInit: 999)")],
)
def test_a_driver_that_fails(code: int, text: str, driver: dict[str, str]) -> None:
    found = look({**driver, "FAKE_INIT": str(code)})
    assert (found.state, found.code, found.visible) == ("fails", code, [])
    assert text in found.error


def test_a_driver_without_a_device(driver: dict[str, str]) -> None:
    found = look({**driver, "FAKE_GPUS": ""})
    assert (found.state, found.code, found.all) == ("works", gpus.NO_DEVICE, [])


def test_a_driver_that_crashes_or_hangs_takes_nobody_with_it(driver: dict[str, str]) -> None:
    crashed = look({**driver, "FAKE_CRASH": "1"})
    assert (crashed.state, crashed.error) == ("fails", "killed by signal 6")
    started = time.monotonic()
    hanging = gpus.look({**driver, "FAKE_HANG": "1"}, Path("/nowhere"), driver_seconds=1.5)
    assert time.monotonic() - started < 10
    assert (hanging.state, hanging.error) == ("hangs", "it did not answer within 1.5 s")


def test_no_driver_is_no_error(tmp_path: Path) -> None:
    if subprocess.run(
        [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"], capture_output=True
    ).returncode:
        found = look({"PATH": "/usr/bin:/bin"})
        assert (found.state, found.error, found.smi) == ("absent", "", "absent")
    # A file that is no library is one.
    (tmp_path / "libcuda.so.1").write_bytes(b"nothing")
    broken = look({"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(tmp_path)})
    assert broken.state == "fails"
    assert "file too short" in broken.error


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27"),
        ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release"),
        ("sys/module/nvidia/version", "580.65.06\n"),
    ],
)
def test_the_version_of_the_kernels_module(file: str, text: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    found = look({"PATH": "/usr/bin:/bin"}, tmp_path)
    assert (found.version, found.branch) == ("580.65.06", 580)


def test_wsl(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    for text, expected in [
        ("Linux version 6.6.87.2-microsoft-standard-WSL2", True),
        ("Linux version 6.1.0-debian", False),
    ]:
        (tmp_path / "proc/version").write_text(text)
        assert look({"PATH": "/usr/bin:/bin"}, tmp_path).wsl is expected


# nvidia-smi


def test_nvidia_smi(tmp_path: Path) -> None:
    line = f"0, NVIDIA H200, {UUIDS['H200']}, 9.0, 580.65.06"
    found = look(fake_driver.smi(tmp_path, f"echo '{line}'"))
    assert (found.smi, found.version) == ("ok", "580.65.06")
    assert found.smi_gpus == [gpus.Gpu(0, "NVIDIA H200", "9.0", UUIDS["H200"])]


@pytest.mark.parametrize(
    ("script", "state", "says"),
    [
        ("echo 'No devices were found'", "garbage", "No devices were found"),
        ("echo '0, NVIDIA H200, GPU-1, [N/A], 580'", "garbage", "[N/A]"),
        ("printf '\\377\\376\\0garbage'", "garbage", "garbage"),
        ("true", "garbage", ""),
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18",
            "failed",
            "version mismatch",
        ),
        ("kill -9 $$", "failed", "killed by signal 9"),
        ("yes", "failed", "it printed more than 16 MB"),
        ("yes >&2", "failed", "it printed more than 16 MB"),
        ("echo '²,a,b,9.0,580.65'", "garbage", "²"),
        ("echo '0,a,b,٩.0,580.65'", "garbage", "a,b"),
        ("echo 99999999999999999999,a,b,9.0,580.65", "garbage", "99999"),
    ],
)
def test_an_nvidia_smi_that_says_something_else(script: str, state: str, says: str, tmp_path: Path) -> None:
    found = look(fake_driver.smi(tmp_path, script))
    assert (found.smi, found.smi_gpus) == (state, [])
    assert says in found.smi_says


def test_an_nvidia_smi_that_hangs(tmp_path: Path) -> None:
    """With a child that keeps its output open."""
    variables = fake_driver.smi(tmp_path, "sleep 600 & sleep 600")
    started = time.monotonic()
    assert gpus.look(variables, Path("/nowhere"), smi_seconds=1).smi == "hangs"
    assert time.monotonic() - started < 15


def test_asking_for_a_program_that_is_not_there() -> None:
    assert ask.ask(["/nowhere/program"], 5).state == "absent"


# The environment


def test_shadowing_libraries(tmp_path: Path) -> None:
    cuda, empty = tmp_path / "cuda 12/lib64", tmp_path / "empty"
    for folder in (cuda, empty):
        folder.mkdir(parents=True)
    for name in (
        "libcudart.so.12",
        "libcudart_static.a",
        "libcublasLt.so.12.4.5",
        "libfoo.so",
        "libc10.so",
        "libgomp.so.1",
    ):
        (cuda / name).touch()
    found = facts.shadows({"LD_LIBRARY_PATH": f"{empty}:{tmp_path / 'nowhere'}::{cuda}"})
    assert [Path(path).name for path in found] == [
        "libc10.so",
        "libcublasLt.so.12.4.5",
        "libcudart.so.12",
        "libgomp.so.1",
    ]
    assert facts.shadows({}) == []


@pytest.mark.parametrize(
    ("home", "problem"),
    [
        (None, "is not set"),
        ("", "is no absolute path"),
        ("relative", "is no absolute path"),
        ("/nowhere/at/all", "does not exist"),
        ("/dev/null", "is no folder"),
        ("/proc/1", "cannot be written"),
    ],
)
def test_odd_homes(home: str | None, problem: str) -> None:
    if home == "/proc/1" and os.access(home, os.W_OK):
        home = "/proc/self/task/none" if not os.geteuid() else home
        problem = "does not exist"
    found = facts.homes({} if home is None else {"HOME": home})
    assert [(name, text) for name, _, text in found] == [("HOME", problem)]


def test_homes_with_spaces_and_other_letters_are_fine(tmp_path: Path) -> None:
    home = tmp_path / "Ærø und so weiter"
    home.mkdir()
    assert facts.homes({"HOME": str(home), "XDG_CACHE_HOME": f"{home}/not yet", "TMPDIR": str(tmp_path)}) == []


def test_where_the_driver_keeps_what_it_compiles(tmp_path: Path) -> None:
    assert facts.ptx_cache({"HOME": str(tmp_path)}) == (f"{tmp_path}/.nv/ComputeCache", True)
    assert facts.ptx_cache({"CUDA_CACHE_PATH": str(tmp_path / "kept")}) == (str(tmp_path / "kept"), True)
    assert facts.ptx_cache({"CUDA_CACHE_PATH": "/dev/null/x"})[1] is False
    assert facts.ptx_cache({"HOME": str(tmp_path), "CUDA_CACHE_DISABLE": "1"})[1] is False


# torch and the package, by their files


def see(site: Path, code: str) -> object:
    """What a Python whose only packages are in `site` sees."""
    imports = "import json, sys\nfrom scaled_mask_softmax_cli import facts, installed"
    program = f"{imports}\nprint(json.dumps({code}, default=str))"
    cli = site / stand_in.COMMAND.name
    if not cli.exists():
        cli.symlink_to(stand_in.COMMAND)
    done = stand_in.run(["-S", "-c", program], PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "flavour"),
    [
        ("2.14.1+cu130", "13.0", None, "release"),
        ("2.14.1", "13.0", None, "release"),
        ("2.14.1+cpu", None, None, "CPU"),
        ("2.14.1+rocm6.4", None, "6.4.1", "ROCm"),
        ("2.10.0a0+b4e4ee8.nv25.11", "13.0", None, "vendor"),
        ("2.14.0+gitabc123", "13.0", None, "vendor"),
        ("2.13.0.dev20260516+cu132", "13.2", None, "nightly"),
    ],
)
def test_kinds_of_torch(version: str, cuda: str | None, hip: str | None, flavour: str, tmp_path: Path) -> None:
    stand_in.torch(tmp_path, version, cuda, hip)
    stand_in.package(tmp_path, RECORD)
    code = "[(t := installed.find_torch()).version, t.cuda, t.hip, t.flavour, t.cxx11_abi, t.folder]"
    assert see(tmp_path, code) == [version, cuda, hip, flavour, True, str(tmp_path / "torch")]


def test_torch_of_conda(tmp_path: Path) -> None:
    """Its version has no local part; its metadata says who installed it."""
    stand_in.torch(tmp_path, "2.14.1", "13.0")
    stand_in.package(tmp_path, RECORD)
    info = stand_in.distribution(tmp_path, "2.14.1", "torch")
    (info / "INSTALLER").write_text("conda\n")
    assert see(tmp_path, "[(t := installed.find_torch()).flavour, t.distribution.installer]") == ["conda", "conda"]


def test_the_abi_of_torch_from_its_cmake_files(tmp_path: Path) -> None:
    stand_in.torch(tmp_path, "2.5.1+cu124", "12.4")
    assert see(tmp_path, "installed.find_torch().cxx11_abi") is None
    folder = tmp_path / "torch/share/cmake/Torch"
    folder.mkdir(parents=True)
    (folder / "TorchConfig.cmake").write_text('set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")\n')
    assert see(tmp_path, "installed.find_torch().cxx11_abi") is False


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "is missing"),
        ("", "gives no version"),
        ("cuda = '13.0'\n", "gives no version"),
        ("__version__ = 2.14\n", "gives no version"),
        ("__version__ = ", "is no Python"),
        ("__version__ = '2.14.1'\0", "is no Python"),
        ("\udcff\udcfe", "is no Python"),
        ("-" * 100_000 + "1", "is no Python"),
    ],
)
def test_a_broken_torch(text: str | None, problem: str, tmp_path: Path) -> None:
    stand_in.torch(tmp_path, "2.14.1", "13.0")
    version = tmp_path / "torch/version.py"
    version.unlink()
    if text is not None:
        version.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert see(tmp_path, "[(t := installed.find_torch()).version, t.broken]") == ["", problem]


def test_copies_on_the_path(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for site in (first, second):
        stand_in.package(site, RECORD)
        stand_in.torch(site, "2.14.1+cu130", "13.0")
    code = f"[sys.path.append({str(second)!r}), installed.find_package().others, installed.find_torch().others][1:]"
    assert see(first, code) == [[str(second / "scaled_mask_softmax")], [str(second / "torch")]]


def test_the_remains_of_an_installation(tmp_path: Path) -> None:
    stand_in.package(tmp_path, RECORD)
    (stand_in.distribution(tmp_path, "1.0.0+cu130torch2.14") / "RECORD").unlink()
    (tmp_path / "~caled_mask_softmax").mkdir()
    code = "[(p := installed.find_package()).leftovers, [d.complete for d in p.distributions]]"
    assert see(tmp_path, code) == [[str(tmp_path / "~caled_mask_softmax")], [False]]


@pytest.mark.parametrize("text", ["", "BUILD = {", "BUILD = {'version': open('x')}", "import os\n"])
def test_a_record_that_cannot_be_read(text: str, tmp_path: Path) -> None:
    folder = stand_in.package(tmp_path, RECORD)
    (folder / installed.RECORD_FILE).write_text(text)
    assert see(tmp_path, "[(p := installed.find_package()).broken, p.record]") == [installed.RECORD_FILE, None]


def test_a_package_that_cannot_be_read(tmp_path: Path) -> None:
    folder = stand_in.package(tmp_path, RECORD)
    (folder / "_build.py").write_text("def (")
    assert see(tmp_path, "[installed.find_package(), installed.unreadable()]") == [None, str(folder / "_build.py")]
    (tmp_path / stand_in.COMMAND.name).unlink()
    result = stand_in.command(tmp_path, "doctor", "--no-import")
    assert result.returncode == 2  # no torch is there either
    assert f"also       the installation is broken: {folder / '_build.py'} cannot be read." in result.stdout


def test_a_package_whose_own_rules_cannot_be_read(tmp_path: Path) -> None:
    """Those that came with the command serve."""
    command, other = tmp_path / "command", tmp_path / "other"
    stand_in.package(command, None)
    (stand_in.package(other, RECORD) / "_build.py").write_text("def (")
    shutil.copytree(stand_in.COMMAND, command / stand_in.COMMAND.name)
    code = f"[sys.path.insert(0, {str(other)!r}), (p := installed.find_package()).broken, p.record['version']][1:]"
    assert see(command, code) == ["_build.py", RECORD["version"]]


@pytest.mark.parametrize(
    ("torch", "package", "state"),
    [
        ("import nowhere", "", ("ok", "ModuleNotFoundError: No module named 'nowhere'", None)),
        ("", "raise ImportError('it does not fit')", ("ok", None, "ImportError: it does not fit")),
        ("", "", ("ok", None, None)),
        ("import os; os.abort()", "", ("failed", "killed by signal 6", None)),
        ("raise SystemExit(3)", "", ("ok", "SystemExit: 3", None)),
        ("import time; time.sleep(600)", "", ("hangs", None, None)),
    ],
)
def test_the_import_in_a_process_apart(torch: str, package: str, state: tuple[str | None, ...], tmp_path: Path) -> None:
    for name, text in [("torch", torch), ("scaled_mask_softmax", package)]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    code = "[(i := facts.try_import(dict(__import__('os').environ), 4)).state, i.torch, i.package]"
    assert see(tmp_path, code) == list(state)
