"""A good wheel passes verification; a damaged one fails at the gate for its damage, which is named."""

import base64
import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import cxx
import pytest
import torch

import scaled_mask_softmax
from release import ROOT, beside, environments, fatbin, matrix, preflight, sbom, verify
from release.verify import VerifyError

MACHINE = os.uname().machine
PACKAGE = "scaled_mask_softmax"
LIBRARY = f"{PACKAGE}/lib{PACKAGE}.so"
MODULE = f"{PACKAGE}/_C.cpython-311-{MACHINE}-linux-gnu.so"
BUILD = {
    "version": "1.0.0+cputorch2.14",
    "torch": "2.14.1+cpu",
    "torch_minor": "2.14",
    "cuda": None,
    "cuda_compiler": None,
    "host_compiler": "GNU 14.2.1",
    "architectures": [],
    "ptx": [],
    "python": "3.11",
}


def link(source, target, *options):
    """Compiles a stripped shared library that needs the shared C++ library, unless an option says otherwise."""
    compiler = preflight.cxx_compiler().split()
    if "-static-libstdc++" not in options:
        options += tuple(cxx.shared_library_options(compiler))
    strip = [] if "-g" in options else ["-s"]
    subprocess.run(
        [*compiler, "-shared", "-fPIC", "-Wl,--no-as-needed", *strip, "-o", target, source, *options], check=True
    )


LICENSE = (ROOT / "LICENSE").read_bytes()
ANSWER = 'extern "C" int answer() { return 42; }'


@pytest.fixture(scope="session")
def stubs(tmp_path_factory):
    """Libraries with the names of torch's, CUDA's and ours."""
    folder = tmp_path_factory.mktemp("stubs")
    source = folder / "stub.cpp"
    for name, code in {
        "libc10.so": 'extern "C" int c10() { return 1; }',
        "libtorch_cpu.so": "",
        "libc10_cuda.so": "",
        "libtorch_cuda.so": "",
        "libcudart.so.13": "",
        "libforeign.so.3": "",
        "libscaled_mask_softmax.so": ANSWER,
    }.items():
        source.write_text(code)
        link(source, folder / name, f"-Wl,-soname,{name}")
    return folder


CPU = ("-l:libc10.so", "-l:libtorch_cpu.so")
CUDA = (*CPU, "-l:libc10_cuda.so", "-l:libtorch_cuda.so", "-l:libcudart.so.13")
MATRIX = matrix.load().cuda["cu130"].architectures[MACHINE].removesuffix("+PTX").split(";")
MODULE_NEEDS = ("-l:libscaled_mask_softmax.so",)


@pytest.fixture(scope="session")
def compile_library(tmp_path_factory, stubs):
    """Compiles a shared library from source text with linker options; returns its bytes."""
    folder = tmp_path_factory.mktemp("libraries")
    cache = {}

    def build(code=ANSWER, *options, needs=CPU):
        key = code, options, needs
        if key not in cache:
            source, target = folder / f"{len(cache)}.cpp", folder / f"{len(cache)}.so"
            source.write_text(code)
            link(source, target, f"-L{stubs}", *needs, *options)
            cache[key] = target.read_bytes()
        return cache[key]

    return build


@pytest.fixture
def make(tmp_path, compile_library):
    """Makes a wheel: right where a test does not say otherwise."""

    def build(
        *,
        version=BUILD["version"],
        file_version=None,
        requires=("torch>=2.14,<2.15", 'pytest>=8; extra == "test"'),
        platform=f"manylinux_2_28_{MACHINE}",
        python="cp311",
        abi=None,
        build=None,
        record=b"",
        library=None,
        module=None,
        licence=LICENSE,
        expression="BSD-3-Clause",
        bill=None,
        extra=None,
        forge_record=False,
        init="",
    ):
        info, tag = f"{PACKAGE}-{version}.dist-info", f"{python}-{abi or python}-{platform}"
        metadata = f"Metadata-Version: 2.4\nName: scaled-mask-softmax\nVersion: {version}\n"
        metadata += f"License-Expression: {expression}\n" if expression else ""
        metadata += "".join(f"Requires-Dist: {value}\n" for value in requires)
        values = {**BUILD, "version": version} | (build or {})
        files = {
            f"{PACKAGE}/__init__.py": init.encode(),
            f"{PACKAGE}/_build_record.py": f"BUILD = {values!r}\n".encode(),
            LIBRARY: library or compile_library(needs=CUDA if values["cuda"] else CPU),
            MODULE: module or compile_library(needs=MODULE_NEEDS),
            f"{info}/METADATA": metadata.encode(),
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
            f"{info}/licenses/LICENSE": licence,
            f"{info}/sboms/{sbom.FILE}": sbom.text(values, "3.0.1").encode() if bill is None else bill,
            **(extra or {}),
        }
        files = {name: data for name, data in files.items() if data is not None}
        if record is None:
            del files[f"{PACKAGE}/_build_record.py"]
        elif record:
            files[f"{PACKAGE}/_build_record.py"] = record
        rows = []
        for name, data in files.items():
            digest = hashlib.sha256(b"forged" if forge_record else data).digest()
            rows.append(f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(data)}\n")
        path = tmp_path / f"{PACKAGE}-{file_version or version}-{tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
            archive.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")
        return path

    return build


GATES = (
    *(
        "wheel",
        "size",
        "RECORD",
        "names",
        "contents",
        "needed",
        "search path",
        "platform",
        "stripped",
        "paths",
        "symbols",
    ),
    *("architectures", "kernels", "licence", "bill of materials"),
)


def test_a_right_wheel(make):
    report = verify.verify(make())
    assert report.version == "1.0.0+cputorch2.14"
    assert report.architectures == []
    assert report.gates == GATES
    assert verify.verify(make(), complete=True).gates == (*GATES[:-2], "matrix", *GATES[-2:])


def refused(wheel, gate, message, **options):
    with pytest.raises(VerifyError, match=message) as caught:
        verify.verify(wheel, **options)
    assert str(caught.value).startswith(f"{wheel}: {gate}: ")


@pytest.mark.parametrize(
    ("gate", "changes", "message"),
    [
        (
            "wheel",
            {"file_version": "1.0.1+cputorch2.14"},
            r"the file name says 1\.0\.1\+cputorch2\.14, METADATA 1\.0\.0",
        ),
        ("names", {"build": {"version": "1.0.1+cputorch2.14"}}, r"the build record says 1\.0\.1"),
        ("names", {"version": "1.0.0+cputorch2.13"}, r"label cputorch2\.13 is not cputorch2\.14"),
        ("names", {"version": "1.0.0"}, r"label  is not cputorch2\.14"),
        ("names", {"version": "1.0.0+CPUtorch2.14"}, "is not lower case"),
        ("names", {"build": {"torch": "2.13.0+cpu"}}, r"torch 2\.13\.0\+cpu is not of 2\.14"),
        ("names", {"build": {"python": "3.12"}}, r"tags cp311-cp311, but built by Python 3\.12"),
        ("names", {"requires": ()}, "must pin torch and name nothing else"),
        ("names", {"requires": ("torch>=2.14",)}, "Requires-Dist is 'torch>=2.14'"),
        ("names", {"requires": ("torch>=2.14,<2.15", "numpy")}, "must pin torch and name nothing else"),
        ("names", {"requires": ("torch==2.14.1+cpu",)}, r"a '\+' in Requires-Dist"),
        (
            "contents",
            {"extra": {f"{PACKAGE}.libs/libgomp-a34b3233.so.1.0.0": b"x"}},
            r"expected inside, found .*libgomp",
        ),
        ("contents", {"extra": {f"{PACKAGE}/libcudart.so.13": b"x"}}, r"expected inside, found .*libcudart"),
        ("platform", {"platform": f"linux_{MACHINE}"}, "is no manylinux"),
        ("architectures", {"build": {"cuda": "13.0"}, "version": "1.0.0+cu130torch2.14"}, r"CUDA 13\.0: \[\]"),
        ("architectures", {"build": {"architectures": ["9.0"]}}, r"the build record says \['9\.0'\]"),
        ("RECORD", {"forge_record": True}, "RECORD has another hash"),
        ("licence", {"licence": None}, "0 licenses/LICENSE files"),
        ("licence", {"licence": b"All rights reserved."}, "is not the project's"),
        ("licence", {"expression": ""}, "License-Expression is missing"),
        ("bill of materials", {"bill": b"{}"}, "not a bill of materials of ours"),
        (
            "bill of materials",
            {"bill": sbom.text({**BUILD, "torch": "2.14.0+cpu"}, "3.0.1").encode()},
            "something else than the build record",
        ),
    ],
)
def test_wrong_wheels(make, gate, changes, message):
    refused(make(**changes), gate, message)


def test_what_the_library_needs(make, compile_library):
    refused(
        make(library=compile_library(needs=(*CPU, "-l:libforeign.so.3"))),
        "needed",
        r"needs libforeign\.so\.3, which nobody brings",
    )
    # A build without CUDA that needs CUDA, one with it that does not, and another major version of it.
    refused(make(library=compile_library(needs=CUDA)), "needed", r"needs libc10_cuda\.so, which nobody brings")
    cuda = {"version": "1.0.0+cu130torch2.14", "build": {"cuda": "13.0"}}
    refused(make(library=compile_library(), **cuda), "needed", r"does not ask for libc10_cuda\.so")
    old = {"version": "1.0.0+cu126torch2.14", "build": {"cuda": "12.6"}}
    refused(make(library=compile_library(needs=CUDA), **old), "needed", r"needs libcudart\.so\.13, which nobody")
    refused(make(module=compile_library(needs=())), "needed", r"does not ask for libscaled_mask_softmax\.so")


@pytest.mark.parametrize("part", ["library", "module"])
def test_a_library_that_is_not_stripped(make, compile_library, part):
    needs = CPU if part == "library" else MODULE_NEEDS
    refused(make(**{part: compile_library(ANSWER, "-g", needs=needs)}), "stripped", "is not stripped: it holds .debug")


def test_paths_of_the_building_machine(make, compile_library):
    code = 'extern "C" const char* answer() {{ return "{}"; }}'
    leak = compile_library(code.format("at /home/someone/env/torch/include/ATen/core/TensorBase.h:12"))
    refused(make(library=leak), "paths", r"names /home/someone/env/torch/include/ATen/core/TensorBase\.h, a file of")
    for harmless in ("at torch/include/ATen/core/TensorBase.h:12", "^/p.h~"):
        verify.verify(make(library=compile_library(code.format(harmless))))


def test_compressed_code_names_no_paths(make, compile_library, monkeypatch):
    """What compression leaves is any bytes, and was taken for a path."""
    code = '__attribute__((section(".nv_fatbin"))) char data[] = "/a/p.h"; extern "C" char* answer() { return data; }'
    library = compile_library(code)
    monkeypatch.setattr(fatbin, "is_compressed", lambda section: b"/a/p.h" in section)
    monkeypatch.setattr(fatbin, "read", lambda library: [])
    verify.verify(make(library=library))
    monkeypatch.setattr(fatbin, "is_compressed", lambda section: False)
    refused(make(library=library), "paths", r"names /a/p\.h, a file of")


def test_what_is_compressed():
    build, library = scaled_mask_softmax.build_info(), Path(scaled_mask_softmax.library_path())
    code = [contents for name, contents in fatbin.sections(library.read_bytes()) if name == ".nv_fatbin"]
    assert len(code) == (build["cuda"] is not None)
    for section in code:
        assert fatbin.is_compressed(section) == (int(build["cuda_compiler"].split(".")[0]) >= 13)


def test_symbols(make, compile_library, stubs, tmp_path):
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "lib/libc10.so").write_bytes((stubs / "libc10.so").read_bytes())
    (torch / "include/ATen").mkdir(parents=True)
    (torch / "version.py").write_text("__version__ = '2.14.0'\ncuda = None\nhip = None\n")
    verify.verify(
        make(library=compile_library('extern "C" { int c10(); int answer() { return c10(); } }')), torches=[torch]
    )
    lost = make(library=compile_library('extern "C" { int gone(); int answer() { return gone(); } }'))
    verify.verify(lost)
    refused(lost, "symbols", r"torch 2\.14\.0 lacks 1 symbols, the first gone", torches=[torch])
    code = 'extern "C" { int gone(), PyLong_One(), answer(); int init() { return gone() + answer() + PyLong_One(); } }'
    module = compile_library(code, needs=MODULE_NEEDS)
    refused(make(module=module), "symbols", f"nobody defines gone, which {MODULE} asks for".replace(".", r"\."))
    weak = 'extern "C" int gone() __attribute__((weak)); extern "C" int answer() { return gone ? gone() : 1; }'
    verify.verify(make(library=compile_library(weak)), torches=[torch])


def test_a_missing_library(make, tmp_path):
    good = make()
    bad = tmp_path / "bad" / good.name
    bad.parent.mkdir()
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for info in source.infolist():
            if info.filename != LIBRARY:
                target.writestr(info, source.read(info))
    refused(bad, "RECORD", r"RECORD and contents differ: .*libscaled_mask_softmax\.so")


@pytest.mark.parametrize("rpath", ["/somewhere/torch/lib", "$ORIGIN/../torch/lib:/build", ""])
def test_rpath_must_be_relative(make, compile_library, rpath):
    code = 'extern "C" int answer() { return 43; }'
    library = compile_library(code, f"-Wl,-rpath,{rpath}" if rpath else "-Wl,-rpath,$ORIGIN/../torch/lib::")
    refused(make(library=library), "search path", r"RPATH .* is not relative")


def test_a_relative_rpath(make, compile_library):
    library = compile_library('extern "C" int answer() { return 43; }', "-Wl,-rpath,$ORIGIN/../torch/lib")
    verify.verify(make(library=library))


def test_a_static_cxx_library(make, compile_library):
    library = compile_library('extern "C" int answer() { return 44; }', "-static-libstdc++")
    refused(make(library=library), "needed", r"holds a C\+\+ library of its own")


@pytest.mark.parametrize("options", [(), ("-static-libstdc++",)])
def test_a_compiler_without_a_shared_cxx_library(make, stubs, tmp_path, monkeypatch, options):
    """The libraries of these tests come out right with a compiler that links the static one by itself."""
    compiler = tmp_path / "g++"
    real = preflight.cxx_compiler()
    compiler.write_text(
        "#!/bin/sh\n"
        '[ "$1" != -print-file-name=libstdc++.so ] || { echo libstdc++.so; exit; }\n'
        f'exec {real} "$@" -static-libstdc++\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    source, target = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text('extern "C" int answer() { return 45; }')
    link(source, target, f"-L{stubs}", *CPU, *options)
    wheel = make(library=target.read_bytes())
    if options:
        with pytest.raises(VerifyError, match=r"holds a C\+\+ library of its own"):
            verify.verify(wheel)
    else:
        verify.verify(wheel)


@pytest.mark.skipif(MACHINE != "x86_64", reason="the older tag exists on x86_64 only")
def test_the_manylinux_tag_must_be_true(make, compile_library):
    code = '#include <string>\nextern "C" int answer(const char* t) { return std::string(t).append("x").size(); }'
    library = compile_library(code)
    verify.verify(make(library=library))
    refused(
        make(library=library, platform="manylinux_2_5_x86_64"),
        "platform",
        r"needs GLIBCXX_3\.4\.21 of libstdc\+\+\.so\.6: manylinux_2_5_x86_64 is not true",
    )


def test_a_library_of_another_machine(make, compile_library):
    other = {"x86_64": 183, "aarch64": 62}[MACHINE]  # EM_AARCH64, EM_X86_64
    library = bytearray(compile_library())
    library[18:20] = other.to_bytes(2, "little")
    refused(make(library=bytes(library)), "platform", f"{LIBRARY} is of EM_.*, the tag says {MACHINE}")


def test_a_record_that_is_no_table(make, tmp_path):
    good = make()
    bad = tmp_path / "bad" / good.name
    bad.parent.mkdir()
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for info in source.infolist():
            data = source.read(info)
            target.writestr(info, data.replace(b",", b";") if info.filename.endswith("/RECORD") else data)
    refused(bad, "RECORD", "RECORD is not a table of paths, hashes and sizes")


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "release", "verify", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_the_command(make):
    wheel = make()
    done = run(wheel)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()
    assert first.startswith(f"{wheel.name}: right; ")
    assert second == f"  passed: {', '.join(GATES)}"


def flip(data):
    """`data` with other bytes in its middle."""
    middle = len(data) // 2
    return data[: middle - 20] + bytes(255 - byte for byte in data[middle - 20 : middle + 20]) + data[middle + 20 :]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("", None, "there is no such file"),
        ("", lambda data: b"text", "this is no wheel, or a broken one"),
        ("", lambda data: data[:-100], "this is no wheel, or a broken one"),
        ("", flip, "this is no wheel, or a broken one"),
        ("wheel.zip", lambda data: data, "the file name is not name-version-python-abi-platform.whl"),
        ("numpy-2.0.0-py3-none-any.whl", lambda data: data, f"the file is named numpy, not {PACKAGE}"),
    ],
)
def test_the_command_says_what_is_no_wheel(make, tmp_path, name, change, message):
    good = make()
    path = tmp_path / "other" / (name or good.name)
    path.parent.mkdir()
    if change:
        path.write_bytes(change(good.read_bytes()))
    done = run(path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {path}: {message}")
    assert done.stderr.count("\n") == 1


def test_the_command_says_that_a_plain_wheel_is_none_to_verify(make):
    wheel = make(version="1.0.0", python="py3", abi="none", platform="any", requires=())
    done = run(wheel)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {wheel}: wheel: this is a plain wheel, and only native ones are verified: give one built for a torch\n"
    )


@pytest.mark.parametrize(
    ("gate", "changes", "message"),
    [
        ("names", {"record": None}, "_build_record.py is missing"),
        ("names", {"record": b"BUILD = {"}, r"the build record holds no BUILD = \{\.\.\.\} of plain values"),
        ("names", {"record": b"BUILD = {'version': '1.0.0'}"}, "the build record lacks torch, torch_minor"),
        ("contents", {"library": b"text"}, "is no shared library"),
        ("platform", {"platform": f"manylinux_2_99_{MACHINE}"}, f"no manylinux_2_99 for {MACHINE} is known"),
    ],
)
def test_broken_parts(make, gate, changes, message):
    refused(make(**changes), gate, message)


@pytest.mark.parametrize(
    ("cuda", "architectures", "ptx", "message"),
    [
        ("13.0", ["9.0"], ["9.0"], r"architectures \['9\.0'\], the matrix has \['7\.5', "),
        ("13.0", MATRIX[:-1], ["12.0"], r"architectures .*, the matrix has .*'12\.0'\]"),
        ("13.0", MATRIX, [], r"PTX for \[\], the matrix has \['12\.0'\]"),
        ("13.0", MATRIX, MATRIX, r"PTX for \['7\.5', .*, the matrix has \['12\.0'\]"),
        ("13.7", ["9.0"], [], f"the matrix has no cu137 for {MACHINE}"),
    ],
)
def test_an_incomplete_wheel(make, monkeypatch, cuda, architectures, ptx, message):
    entries = [fatbin.Entry("cubin", arch, frozenset()) for arch in architectures]
    entries += [fatbin.Entry("ptx", arch, None) for arch in ptx]
    monkeypatch.setattr(fatbin, "read", lambda library: entries)
    monkeypatch.setattr(verify, "policy_kernels", dict)
    monkeypatch.setattr(fatbin, "resources", lambda library: [])
    label = "cu" + cuda.replace(".", "")
    build = {"cuda": cuda, "architectures": architectures, "ptx": ptx}
    wheel = make(version=f"1.0.0+{label}torch2.14", build=build)
    verify.verify(wheel)
    refused(wheel, "matrix", message, complete=True)


def test_size(make, monkeypatch):
    loaded = verify.matrix.load()
    monkeypatch.setattr("release.matrix.load", lambda: dataclasses.replace(loaded, max_wheel_size=0))
    refused(make(), "size", "is more than 0 MB")


def test_every_kernel_on_every_architecture():
    names = {f"{prefix}EvNS0_9ArgumentsE" for prefix in verify.policy_kernels()}
    assert len(names) > 20
    verify.check_kernels({"8.0": names, "9.0": names}, verify.policy_kernels())
    lost = sorted(names)[3]
    with pytest.raises(VerifyError, match=r"no cubin for 9\.0 of 1 kernels"):
        verify.check_kernels({"8.0": names, "9.0": names - {lost}}, verify.policy_kernels())
    with pytest.raises(VerifyError, match=r"the policy never chooses 1 kernels of 8\.0, the first \['_Zold'\]"):
        verify.check_kernels({"8.0": {*names, "_Zold"}, "9.0": names}, verify.policy_kernels())


def test_the_installed_library_holds_every_kernel():
    """Compressed by the compilers whose drivers all read that."""
    build, library = scaled_mask_softmax.build_info(), Path(scaled_mask_softmax.library_path())
    entries = fatbin.read(library)
    assert fatbin.architectures(entries) == build["architectures"]
    assert fatbin.ptx(entries) == build["ptx"]
    if build["cuda"] is not None:
        compresses = int(build["cuda_compiler"].split(".")[0]) >= 13
        assert all((entry.kernels is None) == compresses for entry in entries if entry.kind == "cubin")
        present = fatbin.kernels(entries, library)
        assert list(present) == build["architectures"]
        verify.check_kernels(present, verify.policy_kernels())
        resources = fatbin.resources(library)
        assert {(kernel.arch, kernel.kernel) for kernel in resources} == {
            (arch, name) for arch, names in present.items() for name in names
        }
        verify.check_resources(resources, verify.policy_kernels())


def test_a_lost_kernel(make, monkeypatch):
    entries = [fatbin.Entry("cubin", "9.0", frozenset({"_Zfirst"}))]
    monkeypatch.setattr(fatbin, "read", lambda library: entries)
    monkeypatch.setattr(verify, "policy_kernels", lambda: {"_Zfirst": 128, "_Zsecond": 128})
    wheel = make(version="1.0.0+cu130torch2.14", build={"cuda": "13.0", "architectures": ["9.0"]})
    refused(wheel, "kernels", "no cubin for 9.0 of 1 kernels, the first")


@pytest.mark.parametrize(
    ("registers", "stack", "message"),
    [
        (64, 136, "takes 64 registers and 136 bytes of stack a thread, and is to take 128 bytes at most"),
        # 512 threads of 128 registers fill a multiprocessor.
        (129, 0, "takes 129 registers and 0 bytes of stack a thread: a multiprocessor has registers for 0 warps of it"),
    ],
)
def test_a_kernel_that_takes_too_much(make, monkeypatch, registers, stack, message):
    monkeypatch.setattr(fatbin, "read", lambda library: [fatbin.Entry("cubin", "9.0", frozenset({"_Zfirst"}))])
    monkeypatch.setattr(verify, "policy_kernels", lambda: {"_Zfirst": 512})
    found = fatbin.Resources("9.0", "_Zfirst", 128, 128)
    monkeypatch.setattr(fatbin, "resources", lambda library: [found])
    wheel = make(version="1.0.0+cu130torch2.14", build={"cuda": "13.0", "architectures": ["9.0"]})
    assert verify.verify(wheel).gates == (*GATES[:-2], "resources", *GATES[-2:])
    found = dataclasses.replace(found, registers=registers, stack=stack)
    refused(wheel, "resources", message)


def test_every_patch_release_is_asked(make, monkeypatch, tmp_path):
    from release import __main__ as program
    from release import environments, new_torch, provision

    asked = []

    def torch(cell, interpreter, *, importable):
        asked.append((cell.torch.release, cell.cuda_label, importable))
        return environments.Environment(tmp_path / cell.torch.release, "3.11")

    monkeypatch.setattr(provision, "torch", torch)
    monkeypatch.setattr(environments, "tools", lambda interpreter: None)
    monkeypatch.setattr(new_torch, "released", lambda tools: ["2.15.0", "2.14.1", "2.14.0", "2.1.4"])
    folders = program._every_patch(make())
    assert asked == [("2.14.1", "cpu", False), ("2.14.0", "cpu", False)]
    assert folders[0] == tmp_path / "2.14.1/lib/python3.11/site-packages/torch"


# What imports and uses the stand-in for the library, and a softmax in plain torch.
INIT = """
import ctypes, pathlib, torch
__version__ = {version!r}
assert ctypes.CDLL(str(pathlib.Path(__file__).with_name("lib{package}.so"))).answer() == 42
def scaled_mask_softmax(x, mask, scale):
    return torch.softmax((x * scale).masked_fill({mask}, -float("inf")), -1)
"""


@pytest.fixture
def use(make, tmp_path, monkeypatch):
    """Makes a stand-in wheel, and what uses it beside the torch of this environment."""
    monkeypatch.setattr(beside, "WORK", tmp_path / "work")
    python = "{}.{}".format(*sys.version_info)
    # Below lib/pythonX.Y/site-packages, as in every virtual environment.
    torch_here = environments.Environment(Path(torch.__file__).parents[4], python)
    interpreter = preflight.Interpreter(Path(sys.executable), python)
    major, minor = map(int, torch.__version__.split(".")[:2])

    def make_and_use(*, newer=0, mask="mask", **changes):
        wanted = f"{major}.{minor + newer}"
        version = f"1.0.0+cputorch{wanted}"
        wheel = make(
            version=version,
            requires=(f"torch>={wanted},<{major}.{minor + newer + 1}",),
            python="cp" + python.replace(".", ""),
            build={"torch": f"{wanted}.0", "torch_minor": wanted, "python": python},
            init=INIT.format(version=version, package=PACKAGE, mask=mask),
            **changes,
        )
        return wheel, lambda build: beside.use(wheel, build["version"], interpreter, torch_here)

    return make_and_use


def test_a_wheel_is_used(use, capsys):
    wheel, how = use()
    assert verify.verify(wheel, use=how).gates == (*GATES, "use")
    assert "is right on" in capsys.readouterr().out


def test_a_wheel_that_cannot_be_used(use, compile_library, capsys):
    def fails(told, **changes):
        wheel, how = use(**changes)
        refused(wheel, "use", "failed", use=how)
        assert told in capsys.readouterr().out

    fails("undefined symbol: gone", library=compile_library(f'{ANSWER} extern "C" int gone(); int late = gone();'))
    fails("Tensor-likes are not close", mask="~mask")
    fails("No matching distribution found for torch", newer=1)
