"""Which CUDA compiler a build takes, what it refuses, and what it reads back from the library."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from release import ROOT, configure, environments, fatbin, matrix, record, toolkit, torch_info
from release.configure import ConfigureError
from release.record import RecordError
from release.toolkit import ToolkitError

VARIABLES = ("CUDACXX", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST")


def fake_toolkit(root, version="13.0.88", codes="sm_75 sm_80 sm_90 sm_120", layout="lib64"):
    """A folder with an nvcc that answers as NVIDIA's does, headers and a runtime; returns its nvcc."""
    (root / "bin").mkdir(parents=True)
    (root / "include").mkdir()
    (root / "include/cuda_runtime_api.h").touch()
    (root / layout).mkdir()
    (root / layout / f"libcudart.so.{version.split('.')[0]}").touch()
    nvcc = root / "bin/nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        f'  --version) echo "Cuda compilation tools, release {version[:4]}, V{version}";;\n'
        f'  --dryrun) echo "#\\$ TOP={root}/bin/.." >&2;;\n'
        f"  --list-gpu-code) for code in {codes}; do echo $code; done;;\n"
        "esac\n"
    )
    nvcc.chmod(0o755)
    return nvcc


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """No CUDA compiler anywhere but where a test puts one."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    return monkeypatch


def test_the_first_of_four_places(clean, tmp_path):
    first, second, third = (fake_toolkit(tmp_path / name) for name in ("a", "b", "c"))
    clean.setenv("PATH", str(third.parent))
    assert toolkit.locate_nvcc() == (third, "PATH")
    clean.setenv("CUDA_HOME", str(second.parent.parent))
    assert toolkit.locate_nvcc() == (second, "CUDA_HOME")
    clean.setenv("CUDACXX", str(first))
    assert toolkit.locate_nvcc() == (first, "CUDACXX")


@pytest.mark.parametrize("name", ["CUDACXX", "CUDA_HOME"])
def test_a_variable_that_names_nothing(clean, tmp_path, name):
    clean.setenv(name, str(tmp_path / "gone"))
    with pytest.raises(ToolkitError, match=f"{name}=.*gone"):
        toolkit.locate_nvcc()


@pytest.mark.parametrize("layout", ["lib64", "lib"])
def test_inspection(tmp_path, layout):
    nvcc = fake_toolkit(tmp_path / "with space", codes="sm_120 sm_75 sm_90", layout=layout)
    kit = toolkit.inspect(nvcc, "test")
    assert kit.compiler.version == "13.0.88"
    assert kit.version == "13.0"
    assert kit.compiler.architectures == ("7.5", "9.0", "12.0")
    assert kit.root == tmp_path / "with space"
    assert kit.runtime == tmp_path / "with space" / layout / "libcudart.so.13"


def test_a_compiler_that_does_not_work(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nexit 3\n")
    nvcc.chmod(0o755)
    with pytest.raises(ToolkitError, match="does not work"):
        toolkit.inspect(nvcc, "test")


def torch_with(cuda):
    return torch_info.TorchInfo(Path("/torch"), "2.14.1", cuda)


def test_cuda_majors_must_agree(tmp_path):
    kit = toolkit.inspect(fake_toolkit(tmp_path / "a", "12.8.93"), "PATH")
    with pytest.raises(ConfigureError, match=r"CUDA 12\.8 but torch 2\.14\.1 is built for CUDA 13\.0"):
        configure.check_cuda(torch_with("13.0"), kit)


def test_cuda_minors_may_differ_with_a_warning(tmp_path):
    kit = toolkit.inspect(fake_toolkit(tmp_path / "a", "13.2.10"), "PATH")
    assert "13.2" in (configure.check_cuda(torch_with("13.0"), kit) or "")
    assert configure.check_cuda(torch_with("13.2"), kit) is None


def test_default_architectures_come_from_the_matrix(tmp_path):
    listed = matrix.load().cuda["cu130"].architectures[os.uname().machine]
    codes = " ".join("sm_" + arch.replace(".", "") for arch in listed.removesuffix("+PTX").split(";"))
    kit = toolkit.inspect(fake_toolkit(tmp_path / "a", codes=codes), "PATH")
    assert configure.default_architectures(torch_with("13.0"), kit) == listed
    assert configure.default_architectures(torch_with("13.1"), kit) == listed
    older = toolkit.inspect(fake_toolkit(tmp_path / "b", codes="sm_75 sm_80 sm_90"), "PATH")
    assert configure.default_architectures(torch_with("13.0"), older) == "7.5;8.0;9.0+PTX"


def fake_torch(folder, cuda="13.0"):
    path = folder / "torch"
    (path / "include/ATen").mkdir(parents=True)
    (path / "version.py").write_text(f"__version__ = '2.14.1'\ncuda = {cuda!r}\nhip = None\n")
    return path


def run_configure(tmp_path, **env):
    output = tmp_path / "out/facts.json"
    output.parent.mkdir()
    base = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-m", "release", "configure", "--output", output],
        cwd=ROOT,
        env={**base, torch_info.TORCH_VARIABLE: str(tmp_path / "torch"), **env},
        capture_output=True,
        text=True,
    )
    return done, output


def test_configure_says_what_it_chose_and_why(tmp_path):
    fake_torch(tmp_path)
    nvcc = fake_toolkit(tmp_path / "kit")
    done, output = run_configure(tmp_path, CUDACXX=str(nvcc), TORCH_CUDA_ARCH_LIST="9.0+PTX; 8.0;")
    assert done.returncode == 0, done.stderr
    assert f"nvcc 13.0.88 at {nvcc} (from CUDACXX), torch's CUDA is 13.0" in done.stderr
    assert "architectures 8.0;9.0+PTX (from TORCH_CUDA_ARCH_LIST)" in done.stderr
    facts = json.loads(output.read_text())
    assert facts["asked_architectures"] == ["8.0", "9.0"]
    assert facts["asked_ptx"] == ["9.0"]
    assert facts["version"] == f"{matrix.load().version}+cu130torch2.14"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"CUDACXX": "/nowhere/nvcc"}, "CUDACXX=/nowhere/nvcc is not a program"),
        ({"TORCH_CUDA_ARCH_LIST": "8.0;Hoper"}, "unknown 'Hoper' in TORCH_CUDA_ARCH_LIST"),
        (
            {"TORCH_CUDA_ARCH_LIST": "13.0"},
            "'13.0' in TORCH_CUDA_ARCH_LIST is too new for nvcc 13.0.88, whose newest is 12.0",
        ),
    ],
)
def test_configure_refuses_in_one_sentence(tmp_path, env, message):
    fake_torch(tmp_path)
    nvcc = fake_toolkit(tmp_path / "kit")
    done, output = run_configure(tmp_path, **{"CUDACXX": str(nvcc), **env})
    assert done.returncode == 1
    assert f"error: {message}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()


def test_without_a_compiler_configure_names_the_ways_out(clean, tmp_path):
    clean.setattr(os, "access", lambda *arguments: False)
    clean.setenv(torch_info.TORCH_VARIABLE, str(fake_torch(tmp_path)))
    with pytest.raises(
        ConfigureError, match=r"no nvcc was found in CUDACXX, CUDA_HOME, PATH or /usr/local/cuda.*make wheel"
    ):
        configure.facts()


def test_a_torch_without_cuda_needs_no_compiler(clean, tmp_path):
    clean.setenv(torch_info.TORCH_VARIABLE, str(fake_torch(tmp_path, None)))
    facts = configure.facts()
    assert facts["cuda"] is None
    assert str(facts["version"]).endswith("+cputorch2.14")


# A library with GPU code, made by hand: the container's headers are all that is read.


def elf(sections):
    """A 64-bit ELF file with the given sections: a dict of names and contents."""
    names = b"\0" + b"\0".join(name.encode() for name in [*sections, ".shstrtab"]) + b"\0"
    contents = [*sections.values(), names]
    body, headers, position = b"", [struct.pack("<IIQQQQIIQQ", *[0] * 10)], 64
    for name, data in zip([*sections, ".shstrtab"], contents):
        offset = names.index(b"\0" + name.encode() + b"\0") + 1
        headers.append(struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, position, len(data), 0, 0, 1, 0))
        body += data
        position += len(data)
    start = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        3,
        62,
        1,
        0,
        0,
        position,
        0,
        64,
        0,
        0,
        64,
        len(headers),
        len(headers) - 1,
    )
    return start + body + b"".join(headers)


def entry(kind, number, flags=0, code=b""):
    return struct.pack("<HHIQIIIIIIQQQ", kind, 0x101, 64, len(code), 0, 0, 0, number, 0, 0, flags, 0, 0) + code


def container(*entries):
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def cubin(*kernels):
    return elf({f".text.{name}": b"\0" * 8 for name in kernels} | {".text": b""})


@pytest.fixture
def library(tmp_path):
    first = container(
        entry(2, 75, code=cubin("_Zone")), entry(2, 90, 1 << 20, cubin("_Zone")), entry(2, 100, 1 << 21, cubin("_Zone"))
    )
    second = container(entry(2, 75, code=cubin("_Ztwo", "_Zthree")), entry(1, 120, code=b"compressed"))
    path = tmp_path / "lib.so"
    path.write_bytes(elf({".nv_fatbin": first + b"\0" * 16 + second, ".text": b"\x90"}))
    return path


def test_reading_back(library):
    entries = fatbin.read(library)
    assert fatbin.architectures(entries) == ["7.5", "9.0a", "10.0f"]
    assert fatbin.ptx(entries) == ["12.0"]
    assert fatbin.kernels(entries, library) == {
        "7.5": {"_Zone", "_Ztwo", "_Zthree"},
        "9.0a": {"_Zone"},
        "10.0f": {"_Zone"},
    }


@pytest.fixture
def compressed(tmp_path):
    path = tmp_path / "lib.so"
    first = container(entry(2, 75, code=b"compressed"), entry(2, 90, 1 << 20, b"compressed"))
    second = container(entry(2, 75, code=b"compressed"), entry(1, 120, code=b"compressed"))
    path.write_bytes(elf({".nv_fatbin": first + b"\0" * 16 + second}))
    return path


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Makes a cuobjdump that leaves these cubins, by name, and exits with a status."""

    def make(cubins, status=0):
        folder = tmp_path / "cubins"
        folder.mkdir()
        for name, data in cubins.items():
            (folder / name).write_bytes(data)
        path = tmp_path / "cuobjdump"
        path.write_text(
            f'#!/bin/sh\n[ "$1 $2" = "-xelf all" ] || exit 9\ncp {folder}/* . ; echo broken >&2; exit {status}'
        )
        path.chmod(0o755)
        monkeypatch.setattr(fatbin, "cuobjdump", lambda: path)

    return make


READABLE = {
    "lib.1.sm_75.cubin": cubin("_Zone"),
    "lib.2.sm_90a.cubin": cubin("_Zone"),
    "lib.3.sm_75.cubin": cubin("_Ztwo", "_Zthree"),
}


def test_compressed_cubins(compressed, program):
    program(READABLE)
    entries = fatbin.read(compressed)
    assert (fatbin.architectures(entries), fatbin.ptx(entries)) == (["7.5", "9.0a"], ["12.0"])
    assert fatbin.kernels(entries, compressed) == {"7.5": {"_Zone", "_Ztwo", "_Zthree"}, "9.0a": {"_Zone"}}


def test_compressed_cubins_that_cuobjdump_does_not_read(compressed, program):
    entries = fatbin.read(compressed)
    program(dict(list(READABLE.items())[:2]))
    with pytest.raises(fatbin.FatbinError, match=r"cuobjdump reads 2 cubins of lib\.so, which holds 3"):
        fatbin.kernels(entries, compressed)


def test_a_cuobjdump_that_fails(compressed, program):
    entries = fatbin.read(compressed)
    program(READABLE, status=3)
    with pytest.raises(fatbin.FatbinError, match=r"cuobjdump cannot read the cubins of lib\.so: broken$"):
        fatbin.kernels(entries, compressed)


def test_resources(compressed, monkeypatch, tmp_path):
    program = tmp_path / "cuobjdump"
    program.write_text(
        """#!/bin/sh
[ "$1" = --dump-resource-usage ] || exit 9
cat <<'END'

Fatbin elf code:
================
arch = sm_75
code version = [1,8]
compressed

Resource usage:
 Common:
  GLOBAL:0
 Function _Zone:
  REG:64 STACK:40 SHARED:256 LOCAL:0 CONSTANT[0]:1008 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Ztwo:
  REG:32 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:1008 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_100f

Resource usage:
 Function _Zone:
  REG:255 STACK:8 SHARED:0 LOCAL:0
END
"""
    )
    program.chmod(0o755)
    monkeypatch.setattr(fatbin, "cuobjdump", lambda: program)
    assert fatbin.resources(compressed) == [
        fatbin.Resources("7.5", "_Zone", 64, 40),
        fatbin.Resources("7.5", "_Ztwo", 32, 0),
        fatbin.Resources("10.0f", "_Zone", 255, 8),
    ]


def test_without_cuobjdump_the_command_that_installs_it_is_named(compressed, monkeypatch):
    entries = fatbin.read(compressed)
    monkeypatch.setattr(fatbin, "CUOBJDUMP", "nvidia-cuda-nothing")
    assert fatbin.cuobjdump() is None
    with pytest.raises(fatbin.FatbinError, match=r"install it with python -m pip install nvidia-cuda-nothing$"):
        fatbin.kernels(entries, compressed)


def test_cuobjdump_is_one_of_the_build_tools():
    (requirement,) = [tool for tool in environments.TOOLS if tool.startswith("nvidia")]
    assert re.split("[<>=]", requirement)[0] == fatbin.CUOBJDUMP
    assert requirement in matrix.test_requirements()


def test_a_library_without_gpu_code(tmp_path):
    path = tmp_path / "lib.so"
    path.write_bytes(elf({".text": b"\x90"}))
    assert fatbin.read(path) == []


FACTS = {
    "version": "1.0.0+cu130torch2.14",
    "torch": "2.14.1+cu130",
    "torch_minor": "2.14",
    "cuda": "13.0",
    "cuda_compiler": "13.0.88",
    "cxx11_abi": True,
    "commit": None,
    "asked_architectures": ["7.5", "9.0a", "10.0f"],
    "asked_ptx": ["12.0"],
}


def test_build_record(library, tmp_path):
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps(FACTS))
    record.write(library, facts, "GNU 12.2.0", tmp_path / "_build_record.py")
    build = record.read((tmp_path / "_build_record.py").read_text())
    assert list(build) == [
        "version", "torch", "torch_minor", "cuda", "cuda_compiler", "host_compiler",
        "cxx11_abi", "architectures", "ptx", "commit", "python", "platform",
    ]  # fmt: skip
    assert build["architectures"] == ["7.5", "9.0a", "10.0f"]
    assert build["ptx"] == ["12.0"]
    assert build["python"] == "{}.{}".format(*sys.version_info)
    assert re.fullmatch(r"linux_\w+", build["platform"])


def test_the_library_must_hold_what_was_asked_for(library):
    with pytest.raises(
        RecordError, match=r"holds cubins for 7\.5, 9\.0a, 10\.0f and PTX for 12\.0, but asked for were 7\.5"
    ):
        record.make(library, {**FACTS, "asked_architectures": ["7.5"]}, "GNU 12.2.0")


@pytest.mark.parametrize("mask", ["boolean", "same"])
def test_the_oldest_architecture(tmp_path, mask):
    """What a kernel asks of a multiprocessor, its assembler checks: compute capability 7.5 holds fewest threads."""
    nvcc = toolkit.locate_nvcc()
    if nvcc is None:
        pytest.skip("needs a CUDA compiler")
    source = ROOT / "src/cuda" / f"forward_float16_{mask}.cu"
    options = ["-std=c++20", "-arch=sm_75", "-Werror=all-warnings", "-Wno-deprecated-gpu-targets", "-Xptxas=-O0"]
    cubin = tmp_path / "kernels.cubin"
    done = subprocess.run(
        [nvcc[0], *options, f"-I{ROOT / 'src'}", "-cubin", "-o", cubin, source], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
