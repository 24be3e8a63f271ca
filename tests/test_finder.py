"""install, channels, download and build, where nothing goes wrong but what was asked for."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import tarfile
from pathlib import Path

import fake_driver
import pytest
import tiny_wheels
from faulty_server import serve
from finder_target import FULL, INSTALLERS, PYTHON, TAG, Target

from release import index, matrix
from scaled_mask_softmax_cli import channels, finder
from scaled_mask_softmax_cli.channels import Wheel, version_order

VENDOR = "2.14.0a0+b4e4ee8.nv25.11"
H200_CODE = {"architectures": ["8.0", "9.0"], "ptx": ["12.0"]}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An index with spaces and other letters in its path: two torches, two CUDAs, a withdrawn and a coming version."""
    folder, site = tmp_path / "wheels", tmp_path / "ein Index für ærø"
    made = [
        tiny_wheels.wheel(folder, FULL, record={"version": FULL, **H200_CODE}),
        tiny_wheels.wheel(folder, "0.9.0+cu130torch2.14"),
        tiny_wheels.wheel(folder, "1.1.0rc1+cu130torch2.14"),
        tiny_wheels.wheel(folder, "1.0.1+cu130torch2.14"),
        tiny_wheels.wheel(folder, "1.0.0+cu126torch2.14"),
        tiny_wheels.wheel(folder, "1.0.0+cu130torch2.13"),
        tiny_wheels.wheel(folder, "1.0.0+cputorch2.14", f"{TAG}-{TAG}-manylinux_2_28_aarch64"),
        tiny_wheels.wheel(folder, "1.0.0+cputorch2.14", f"cp39-cp39-manylinux_2_28_{os.uname().machine}"),
    ]
    index.write(site, made)
    found = index.Index(site)
    found.yank("1.0.1", "wrong rows")
    found.write()
    return site


@pytest.fixture(params=["http", "file:", "folder"])
def address(request: pytest.FixtureRequest, site: Path) -> str:
    """The index as --index takes it."""
    if request.param == "http":
        server = request.getfixturevalue("server")
        return str(server.address)
    return site.as_uri() if request.param == "file:" else str(site)


@pytest.fixture
def server(site: Path):  # type: ignore[no-untyped-def]
    with serve(site) as server:
        yield server


def command_of(output: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.startswith("  ") and "--index-url" in line]
    return shlex.split(line)


# install


@pytest.mark.parametrize("installer", INSTALLERS)
def test_install(installer: str, address: str, tmp_path: Path) -> None:
    """From the channel alone and with the full version; torch is left alone, the plain wheel replaced."""
    target = Target(tmp_path / "target")
    target.unpack("1.0.0")
    torch = sorted((target.site / "torch").iterdir())
    shown = target.run("install", "--dry-run", "--index", address, "--installer", installer)
    assert shown.returncode == 0, shown.stderr
    assert target.installed["scaled-mask-softmax"] == "1.0.0"
    done = target.run("install", "--index", address, "--installer", installer)
    assert done.returncode == 0, done.stdout + done.stderr
    command = command_of(shown.stdout)
    assert command == command_of(done.stdout)
    assert command[-1] == f"scaled-mask-softmax=={FULL}"
    channel = command[command.index("--index-url") + 1]
    assert channel.endswith("/whl/cu130/torch2.14/")
    assert re.match(r"(http|file)://", channel)
    assert target.installed == {"torch": "2.14.1", "scaled-mask-softmax": FULL}
    assert sorted((target.site / "torch").iterdir()) == torch
    assert target.has(tmp_path / "wheels" / f"scaled_mask_softmax-{FULL}-py3-none-any.whl")
    assert f"installed {FULL}; torch was left alone" in done.stdout


@pytest.mark.parametrize(
    ("version", "cuda", "label"),
    [
        ("2.14.0", "13.0", "cu130torch2.14"),
        ("2.14.1+cu126", "12.6", "cu126torch2.14"),
        ("2.13.0", "13.0", "cu130torch2.13"),
    ],
)
def test_install_takes_the_channel_of_the_running_torch(
    version: str, cuda: str, label: str, site: Path, tmp_path: Path
) -> None:
    target = Target(tmp_path / "target", version, cuda)
    done = target.run("install", SCALED_MASK_SOFTMAX_INDEX=str(site))
    assert done.returncode == 0, done.stderr
    assert target.installed["scaled-mask-softmax"] == f"1.0.0+{label}"


@pytest.mark.parametrize(
    ("asked", "got"), [("0.9.0", "0.9.0"), ("1.1.0rc1+cu130torch2.14", "1.1.0rc1"), ("1.0.1", "1.0.1")]
)
def test_install_of_a_version(asked: str, got: str, site: Path, tmp_path: Path) -> None:
    target = Target(tmp_path / "target")
    done = target.run("install", "--index", site, "--version", asked)
    assert done.returncode == 0, done.stderr
    assert target.installed["scaled-mask-softmax"] == f"{got}+cu130torch2.14"
    assert ("was withdrawn: wrong rows" in done.stdout) is (got == "1.0.1")


def test_install_from_a_mirror_that_has_the_pages_alone(site: Path, tmp_path: Path) -> None:
    (site / channels.DATA).unlink()
    target = Target(tmp_path / "target")
    done = target.run("install", "--index", site)
    assert done.returncode == 0, done.stderr
    assert "has no index.json; its channel whl/cu130/torch2.14 is taken as it is" in done.stdout
    assert target.installed["scaled-mask-softmax"] == FULL


@pytest.mark.parametrize(
    ("torch", "status", "text"),
    [
        ((None,), 2, "torch is not installed for this Python: install it first"),
        (("2.14.1+rocm6.4", None, "6.4"), 5, "none is made for ROCm: use the plain wheel"),
        (
            ("2.11.0+cu128", "12.8"),
            5,
            "has no channel whl/cu128/torch2.11 for torch 2.11.0+cu128; it has cpu/torch2.14,",
        ),
        ((VENDOR, "13.0"), 5, "No prebuilt wheel: scaled-mask-softmax build FOLDER makes one"),
        (("2.14.1+cpu", None), 5, f"has no wheel for Python {PYTHON} ({TAG}) on "),
    ],
)
def test_install_where_there_is_no_wheel(
    torch: tuple[str | None, ...], status: int, text: str, site: Path, tmp_path: Path
) -> None:
    target = Target(tmp_path / "target", *torch)
    done = target.run("install", "--index", site)
    assert (done.returncode, done.stdout) == (status, "")
    assert text in done.stderr
    assert "scaled-mask-softmax" not in target.installed


def test_install_of_what_is_not_there(site: Path, tmp_path: Path) -> None:
    done = Target(tmp_path / "target").run("install", "--index", site, "--version", "9.9")
    assert done.returncode == 5
    assert "has no version 9.9; it has 0.9.0+cu130torch2.14, 1.0.0+cu130torch2.14, 1.0.1+" in done.stderr


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "no public index exists yet: give --index"),
        (["--index", "/nowhere/at all"], "/nowhere/at all is no folder"),
        (["--index", "ftp://index.example"], "ftp: is no address of an index"),
        (["--index", "file:///nowhere"], "/nowhere is no folder"),
    ],
)
def test_no_index(given: list[str], text: str, tmp_path: Path) -> None:
    done = Target(tmp_path / "target").run("install", *given)
    assert done.returncode == 6
    assert text in done.stderr


def test_install_says_what_the_wheel_does_on_each_gpu(site: Path, tmp_path: Path) -> None:
    target = Target(tmp_path / "target")
    later = "A later GPU,13,0,22222222222222222222222222222222"
    driver = fake_driver.library(tmp_path / "driver")
    gpus = f"{fake_driver.H200};{fake_driver.V100};{later}"
    done = target.run("install", "--dry-run", "--index", site, **driver, FAKE_GPUS=gpus)
    notes = [line for line in done.stdout.splitlines() if line.startswith("note:")]
    assert notes == [
        "note: on GPU 1 (Tesla V100, compute capability 7.0): none",
        "note: on GPU 2 (A later GPU, compute capability 13.0): JIT from PTX",
    ]


def test_other_indexes_are_left_out(site: Path, server, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """An extra index of the environment is not asked."""
    target = Target(tmp_path / "target")
    extra = f"{server.address}/extra"
    done = target.run("install", "--index", site, PIP_EXTRA_INDEX_URL=extra, PIP_INDEX_URL=extra, PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stdout
    assert server.asked == []


def test_other_indexes_of_configuration_files_are_left_out(site: Path, server, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """What they say of proxies is kept."""
    target, config = Target(tmp_path / "target"), tmp_path / "pip.conf"
    extra = f"[global]\nextra-index-url =\n    {server.address}/extra\n    {server.address}/more\nno-index = true\n"
    config.write_text(f"{extra}timeout = 3\n[install]\nfind-links = {server.address}/links\n")
    done = target.run("install", "--index", site, "--installer", "pip", PIP_CONFIG_FILE=str(config))
    assert done.returncode == 0, done.stdout
    assert server.asked == []
    config.write_text("[global]\nproxy = http://127.0.0.1:1\n")
    variables = {"PIP_CONFIG_FILE": str(config), "NO_PROXY": "", "no_proxy": ""}
    done = target.run("install", "--index", server.address, "--installer", "pip", **variables)
    assert done.returncode == 6, done.stdout
    # As an old pip and as a new one says that it asked the proxy.
    assert re.search(r"Cannot connect to proxy|host='127\.0\.0\.1', port=1\)", done.stdout)


@pytest.mark.parametrize("installer", INSTALLERS)
@pytest.mark.parametrize("setting", ["NO_BINARY", "REQUIRE_HASHES", "TARGET", "DRY_RUN"])
def test_settings_that_bend_an_installer(setting: str, installer: str, site: Path, tmp_path: Path) -> None:
    """What keeps it from installing, or sends it elsewhere, is named."""
    variable = f"{'UV' if installer == 'uv' else 'PIP'}_{setting}"
    value = {"NO_BINARY": "1" if installer == "uv" else ":all:", "TARGET": str(tmp_path / "elsewhere")}.get(
        setting, "1"
    )
    target = Target(tmp_path / "target")
    done = target.run("install", "--index", site, "--installer", installer, **{variable: value})
    if done.returncode == 0:  # uv knows some of them as options alone
        assert (installer, target.installed["scaled-mask-softmax"]) == ("uv", FULL)
    else:
        assert f"{variable} is set, which may be why." in done.stderr
        assert "is being changed" not in done.stderr or setting == "NO_BINARY"


def test_another_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wheel of ours serves musl, whatever its version."""
    for found, expected in (("glibc", "2.36"), (2, 36)), (("", ""), (0, 0)), (("musl", "1.2"), (0, 0)):
        monkeypatch.setattr(finder.platform, "libc_ver", lambda found=found: found)
        assert finder._glibc() == expected
    assert not a_wheel("cp311", "cp311", "manylinux_2_28_x86_64").serves("cp311", "x86_64", (0, 0))


# channels


def test_channels(address: str, tmp_path: Path) -> None:
    done = Target(tmp_path / "target").run("channels", "--index", address)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["channel", "version", "Python", "platform", "size", "architectures"]
    mine = [line for line in lines if line.startswith("* whl/cu130/torch2.14 ")]
    assert [line.split()[2] for line in mine] == [
        "0.9.0+cu130torch2.14",
        "1.0.0+cu130torch2.14",
        "1.0.1+cu130torch2.14",
        "1.1.0rc1+cu130torch2.14",
    ]
    assert mine[1].endswith("8.0, 9.0, PTX 12.0")
    assert "(withdrawn: wrong rows)" in mine[2]
    assert lines[-1] == "torch 2.14.1+cu130 takes whl/cu130/torch2.14, marked *"


def test_a_reader_that_has_enough(site: Path, tmp_path: Path) -> None:
    target = Target(tmp_path / "target")
    ours, theirs = os.pipe()
    os.close(ours)
    command = target.command("channels", "--index", site)
    done = subprocess.run(command, env=target.environment(), stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "")


def test_channels_without_torch_and_as_json(site: Path, tmp_path: Path) -> None:
    target = Target(tmp_path / "target", None)
    done = target.run("channels", "--index", site)
    assert done.returncode == 0
    assert "takes" not in done.stdout
    data = json.loads(target.run("channels", "--index", site, "--json").stdout)
    assert sorted(data["channels"]) == sorted(index.Index(site).channels)
    assert {wheel["sha256"] for wheels in data["channels"].values() for wheel in wheels} == {
        entry.sha256 for entry in index.Index(site).entries()
    }


# download


@pytest.mark.parametrize("installer", INSTALLERS)
def test_download_and_install_without_a_network(installer: str, address: str, tmp_path: Path) -> None:
    here = Target(tmp_path / "here", None)
    folder = tmp_path / "un dossier à emporter"
    done = here.run("download", "--index", address, "--torch", "2.14", "--cuda", "cu130", folder)
    assert done.returncode == 0, done.stderr
    assert f"scaled_mask_softmax-{FULL}-py3-none-any.whl  0.0 MB  fetched, sha256 verified" in done.stdout
    assert [path.name for path in folder.rglob("*") if path.name.endswith((".part", ".new"))] == []
    there = Target(tmp_path / "there")
    assert f"* whl/cu130/torch2.14  {FULL}" in there.run("channels", "--index", folder).stdout
    done = there.run("install", "--index", folder, "--installer", installer)
    assert done.returncode == 0, done.stdout + done.stderr
    assert there.installed["scaled-mask-softmax"] == FULL


def test_the_folder_is_an_index_of_the_project(site: Path, tmp_path: Path) -> None:
    """What makes indexes reads it, so that it can be served and added to."""
    folder, target = tmp_path / "carried", Target(tmp_path / "target")
    for cuda in ("cu130", "cu126", "cu130"):
        done = target.run("download", "--index", site, "--cuda", cuda, folder)
        assert done.returncode == 0, done.stderr
    assert "was there already, sha256 verified" in done.stdout
    found = index.Index(folder)
    assert [entry.version for entry in found.entries()] == ["1.0.0+cu126torch2.14", FULL]
    # pip's own way, from the page alone.
    channel = (folder / "whl/cu130/torch2.14").as_uri()
    command = [
        target.python,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--index-url",
        f"{channel}/",
        f"scaled-mask-softmax=={FULL}",
    ]
    done = subprocess.run(command, env=target.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_download_for_another_machine(site: Path, tmp_path: Path) -> None:
    target, folder = Target(tmp_path / "target", None), tmp_path / "folder"
    arguments = ("download", "--index", site, "--torch", "2.14.1", "--cuda", "cpu", "--python", PYTHON)
    done = target.run(*arguments, "--platform", "aarch64", folder)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.rglob("*.whl")
    assert wheel.name == f"scaled_mask_softmax-1.0.0+cputorch2.14-{TAG}-{TAG}-manylinux_2_28_aarch64.whl"
    done = target.run(*arguments, "--platform", "riscv64", folder)
    assert done.returncode == 5
    assert (
        f"has no wheel for torch 2.14, cpu, Python {PYTHON} on riscv64; whl/cpu/torch2.14 has 1.0.0+cpu" in done.stderr
    )


def test_download_takes_the_default_cuda_of_the_matrix(site: Path, tmp_path: Path) -> None:
    target, folder = Target(tmp_path / "target", None), tmp_path / "folder"
    assert target.run("download", "--index", site, "--torch", "2.13", folder).returncode == 0
    assert (folder / "whl/cu130/torch2.13").is_dir()
    done = target.run("download", "--index", site, folder)
    assert done.returncode == 2
    assert "give --torch" in done.stderr
    done = target.run("download", "--index", site, "--torch", "2.99", folder)
    assert "give --cuda" in done.stderr


# build

_BACKEND = """
import json, os, pathlib, shutil
def build_wheel(directory, config_settings=None, metadata_directory=None):
    if os.environ.get("FAIL"):
        raise SystemExit("c++: fatal error: Killed signal terminated program cc1plus")
    names = ("SCALED_MASK_SOFTMAX_TORCH", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "SCALED_MASK_SOFTMAX_PLAIN")
    pathlib.Path(os.environ["SEEN"]).write_text(json.dumps({name: os.environ.get(name) for name in names}))
    (made,) = pathlib.Path("made").glob("*.whl")
    shutil.copy(made, directory)
    return made.name
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source distribution whose build takes no time."""
    folder = tmp_path / "scaled_mask_softmax-1.0.0"
    (folder / "release").mkdir(parents=True)
    for name in ("CMakeLists.txt", "release/matrix.toml"):
        (folder / name).touch()
    (folder / "backend.py").write_text(_BACKEND)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n[project]\n'
        'name = "scaled-mask-softmax"\nversion = "1.0.0"\n'
    )
    tiny_wheels.wheel(folder / "made", "1.0.0+cu130torch2.14.0a0.b4e4ee8.nv25.11")
    return folder


def vendor(tmp_path: Path) -> Target:
    target = Target(tmp_path / "target", VENDOR)
    (target.site / "torch/include/ATen").mkdir(parents=True)
    return target


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("installer", INSTALLERS)
def test_build(installer: str, archive: bool, source: Path, tmp_path: Path) -> None:
    """For a vendor's torch: it says what that takes, builds against that torch, and installs only when asked."""
    target, given = vendor(tmp_path), source
    if archive:
        given = tmp_path / "scaled_mask_softmax-1.0.0.tar.gz"
        with tarfile.open(given, "w:gz") as tar:
            tar.add(source, source.name)
    variables = {"SEEN": str(tmp_path / "seen.json"), "SCALED_MASK_SOFTMAX_PLAIN": "1", "MAX_JOBS": "1"}
    arguments = ("build", given, "--output", tmp_path / "out", "--archs", "9.0", "--installer", installer)
    shown = target.run(*arguments, "--dry-run", **variables)
    assert shown.returncode == 0, shown.stderr
    assert (
        f"This compiles scaled-mask-softmax for torch {VENDOR}, for 9.0.\nIt takes about 4 min on idle cores"
        in shown.stdout
    )
    assert not (tmp_path / "out").exists()
    done = target.run(*arguments, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert done.stdout.splitlines()[-1].endswith(str(wheel))
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen == {
        "SCALED_MASK_SOFTMAX_TORCH": str(target.site / "torch"),
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "MAX_JOBS": "1",
        "SCALED_MASK_SOFTMAX_PLAIN": None,
    }
    assert "scaled-mask-softmax" not in target.installed
    done = target.run(*arguments, "--install", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert target.installed["scaled-mask-softmax"] == "1.0.0+cu130torch2.14.0a0.b4e4ee8.nv25.11"


def test_build_is_for_the_gpus_that_are_here_or_for_all(source: Path, tmp_path: Path) -> None:
    target = vendor(tmp_path)
    driver = fake_driver.library(tmp_path / "driver")
    gpus = f"{fake_driver.H200};{fake_driver.H200};{fake_driver.V100}"
    done = target.run("build", source, "--dry-run", **driver, FAKE_GPUS=gpus, MAX_JOBS="2")
    assert (
        "for 7.0, 9.0.\nIt takes about 3 min on idle cores and 2 GB of memory for 2 architectures, 2 compilations"
        in done.stdout
    )
    # A driver without a device, and an nvidia-smi that says so: the machine may have both.
    none = {**driver, **fake_driver.smi(tmp_path / "driver", "exit 9"), "FAKE_GPUS": ""}
    none["PATH"] += f":{target.environment()['PATH']}"
    done = target.run("build", source, "--dry-run", **none)
    row = matrix.load().cuda["cu130"]
    assert f"TORCH_CUDA_ARCH_LIST='{row.architectures[os.uname().machine]}'" in done.stdout
    assert row.architectures["x86_64"].endswith("+PTX")
    done = target.run("build", source, "--dry-run", "--archs", "Hopper 8.0", **none)
    assert "for Hopper, 8.0.\n" in done.stdout
    # A CUDA that the matrix does not know yet.
    stranger = Target(tmp_path / "stranger", "2.16.0.dev20261101+cu140", "14.0")
    (stranger.site / "torch/include/ATen").mkdir(parents=True)
    done = stranger.run("build", source, "--dry-run", **none)
    assert "for torch 2.16.0.dev20261101+cu140, for what the build chooses.\n" in done.stdout


def test_a_build_that_runs_out_of_memory(source: Path, tmp_path: Path) -> None:
    done = vendor(tmp_path).run("build", source, "--output", tmp_path / "out", FAIL="1", SEEN="")
    assert done.returncode == 9
    assert "the build failed; memory ran out: set MAX_JOBS=1" in done.stderr


def test_what_cannot_be_built(source: Path, tmp_path: Path) -> None:
    target = vendor(tmp_path)
    for given, text in [
        (tmp_path / "nowhere", "is not there"),
        (tmp_path, "is no source of this project, since it has no pyproject.toml"),
    ]:
        done = target.run("build", given)
        assert (done.returncode, text in done.stderr) == (2, True)
    (target.site / "torch/include/ATen").rmdir()
    done = target.run("build", source)
    assert (done.returncode, "has no headers" in done.stderr) == (2, True)
    done = Target(tmp_path / "rocm", "2.14.1+rocm6.4", None, "6.4").run("build", source)
    assert (done.returncode, "none is made for ROCm" in done.stderr) == (5, True)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "link"])
def test_a_hostile_source_distribution(name: str, tmp_path: Path) -> None:
    given = tmp_path / "evil.tar.gz"
    with tarfile.open(given, "w:gz") as tar:
        member = tarfile.TarInfo(name)
        if name == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member)
    done = vendor(tmp_path).run("build", given)
    assert done.returncode == 7
    assert f"holds {name}, as no source distribution does" in done.stderr
    assert not (tmp_path / "outside").exists()


@pytest.fixture
def with_source(site: Path, source: Path, tmp_path: Path) -> Path:
    """The index with plain wheels and source distributions of two versions and a withdrawn one."""
    made = [tiny_wheels.source(tmp_path / "sources", version, source) for version in ("0.9.0", "1.0.0", "1.0.1")]
    index.write(site, [*made, *(tiny_wheels.wheel(tmp_path / "plain", version) for version in ("0.9.0", "1.0.0"))])
    return site


@pytest.mark.parametrize("installer", INSTALLERS)
def test_build_of_the_indexs_source_distribution(
    installer: str, with_source: Path, address: str, tmp_path: Path
) -> None:
    """Fetched and verified: the newest that is not withdrawn, or the version that is asked for."""
    with index.update(with_source) as found:
        found.yank("1.0.1", "wrong rows")
    target = vendor(tmp_path)
    refused = target.run("install", "--index", address)
    assert refused.returncode == 5
    assert re.search(r"scaled-mask-softmax build --index \S.* makes one from its source distribution", refused.stderr)
    arguments = ("build", "--output", tmp_path / "out", "--installer", installer)
    variables = {"SEEN": str(tmp_path / "seen.json")}
    for given, version in (("--dry-run",), "1.0.0"), (("--dry-run", "--version", "1.0.1"), "1.0.1"), ((), "1.0.0"):
        done = target.run(*arguments, *given, "--index", address, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(
            rf"^scaled_mask_softmax-{version}\.tar\.gz  0\.0 MB  fetched from .*, sha256 ver", done.stdout, re.M
        )
        assert ("was withdrawn: wrong rows" in done.stdout) is (version == "1.0.1")
        assert "This compiles scaled-mask-softmax for torch " in done.stdout
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert done.stdout.splitlines()[-1].endswith(str(wheel))
    assert not list(tmp_path.glob("scaled-mask-softmax-*"))


def test_build_of_an_index_without_that_source_distribution(with_source: Path, tmp_path: Path) -> None:
    target = vendor(tmp_path)
    done = target.run("build", "--index", with_source, "--version", "9.9")
    assert done.returncode == 5
    assert "has no source distribution of version 9.9; it has 0.9.0, 1.0.0, 1.0.1: give a clone" in done.stderr
    index.write(tmp_path / "bare", [tiny_wheels.wheel(tmp_path / "wheels", FULL)])
    done = target.run("build", SCALED_MASK_SOFTMAX_INDEX=str(tmp_path / "bare"))
    assert (done.returncode, "bare has no source distribution: give a clone" in done.stderr) == (5, True)
    done = target.run("build")
    assert (done.returncode, "there is nothing to build: give a clone" in done.stderr) == (2, True)
    done = target.run("build", ".", "--index", with_source)
    assert (done.returncode, "not both" in done.stderr) == (2, True)


def test_a_source_distribution_that_is_not_the_indexs(with_source: Path, server, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Nothing of it is unpacked."""
    server.fault("1.0.1.tar.gz", replace=tiny_wheels.source(tmp_path / "other", "1.0.1").read_bytes())
    done = vendor(tmp_path).run("build", "--index", server.address)
    assert done.returncode in (6, 7)
    assert re.search("another sha256 than the index says|ended after|there are no more than", done.stderr)
    assert "This compiles" not in done.stdout


def test_the_plain_wheel_and_the_source_distribution_for_a_machine_without_a_network(
    with_source: Path, tmp_path: Path
) -> None:
    target, folder = vendor(tmp_path), tmp_path / "carried"
    done = target.run("download", "--index", with_source, "--plain", "--version", "1.0.0", folder)
    assert done.returncode == 0, done.stderr
    names = sorted(entry.filename for entry in index.Index(folder).entries())
    assert names == ["scaled_mask_softmax-1.0.0-py3-none-any.whl", "scaled_mask_softmax-1.0.0.tar.gz"]
    # As the last lines say.
    install, build = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("  ")]
    channel = install[install.index("--index-url") + 1].replace("/DIR/", f"{folder}/")
    command = [target.python, "-m", "pip", "install", "--no-deps", "--index-url", channel, install[-1]]
    subprocess.run(command, env=target.environment(), capture_output=True, check=True)
    assert target.installed["scaled-mask-softmax"] == "1.0.0"
    assert build[:2] == ["scaled-mask-softmax", "build"]
    words = [str(folder) if word == "DIR" else word for word in build[1:]]
    done = target.run(*words, "--dry-run", "--installer", "pip")
    assert done.returncode == 0, done.stderr
    assert "fetched from" in done.stdout
    done = target.run("download", "--index", folder, "--plain", "--version", "2.0", tmp_path / "more")
    assert (done.returncode, "has no source distribution of version 2.0; it has 1.0.0" in done.stderr) == (5, True)


def test_installers_are_not_offered_the_source_distribution(with_source: Path, tmp_path: Path) -> None:
    """They would compile it, unasked."""
    with index.update(with_source) as found:
        for file in [name for name in found.channels["plain"] if name.endswith(".whl")]:
            (with_source / "plain" / channels.PROJECT / file).unlink()
            del found.channels["plain"][file]
    command = [Target(tmp_path / "target").python, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    url = (with_source / "plain").as_uri()
    done = subprocess.run(
        [*command, "--index-url", f"{url}/", channels.PROJECT], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "No matching distribution found" in done.stderr


def test_channels_lists_what_fits_every_torch(with_source: Path, tmp_path: Path) -> None:
    lines = Target(tmp_path / "target").run("channels", "--index", with_source).stdout.splitlines()
    plain = [line.split() for line in lines if line.startswith("  plain ")]
    assert [row[1:4] for row in plain] == [
        ["0.9.0", "source", "any"],
        ["0.9.0", "py3", "any"],
        ["1.0.0", "source", "any"],
        ["1.0.0", "py3", "any"],
        ["1.0.1", "source", "any"],
    ]


# What takes which wheel


def a_wheel(python: str, abi: str, platform: str) -> Wheel:
    return Wheel("", "", "", "", "", 1, "", [], [], None, python, abi, platform)


@pytest.mark.parametrize(
    ("tags", "takes"),
    [
        (("cp311", "cp311", "manylinux_2_28_x86_64"), True),
        (("cp311", "cp311", "manylinux2014_x86_64.manylinux_2_17_x86_64"), True),
        (("cp311", "cp311", "linux_x86_64"), True),
        (("py3", "none", "any"), True),
        (("cp311", "cp311", "manylinux_2_36_x86_64"), False),
        (("cp311", "cp311", "manylinux_2_28_aarch64"), False),
        (("cp311", "cp311", "musllinux_1_2_x86_64"), False),
        (("cp312", "cp312", "manylinux_2_28_x86_64"), False),
        (("cp313t", "cp313t", "manylinux_2_28_x86_64"), False),
    ],
)
def test_which_python_takes_which_wheel(tags: tuple[str, str, str], takes: bool) -> None:
    assert a_wheel(*tags).serves("cp311", "x86_64", (2, 35)) is takes


def test_the_order_of_versions() -> None:
    order = ["0.9.0", "1.0.0a1", "1.0.0rc1", "1.0.0", "1.0.0+cu130torch2.14", "1.0.10", "1.2.0", "10.0.0"]
    assert [version_order(a) <= version_order(b) for a, b in itertools.pairwise(order)] == [True] * (len(order) - 1)
