"""A good wheel passes verification; each way to be wrong is named."""

import base64
import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile

import pytest

from release import ROOT, fatbin, preflight, verify
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
    "architectures": [],
    "ptx": [],
    "python": "3.11",
}


def link(source, target, *options):
    """Compiles a shared library that needs the shared C++ library, unless an option says otherwise."""
    compiler = preflight.cxx_compiler().split()
    found = subprocess.run(
        [*compiler, "-print-file-name=libstdc++.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if found == "libstdc++.so" and "-static-libstdc++" not in options:
        # As cmake/SharedStdcxx.cmake: this compiler has only a static one beside it.
        options += ("-l:libstdc++.so.6",)
    subprocess.run([*compiler, "-shared", "-fPIC", "-Wl,--no-as-needed", "-o", target, source, *options], check=True)


@pytest.fixture(scope="session")
def compile_library(tmp_path_factory):
    """Compiles a shared library from source text with linker options; returns its bytes."""
    folder = tmp_path_factory.mktemp("libraries")
    cache = {}

    def build(code='extern "C" int answer() { return 42; }', *options):
        if (code, options) not in cache:
            source, target = folder / f"{len(cache)}.cpp", folder / f"{len(cache)}.so"
            source.write_text(code)
            link(source, target, *options)
            cache[code, options] = target.read_bytes()
        return cache[code, options]

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
        extra=None,
        forge_record=False,
    ):
        info = f"{PACKAGE}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.4\nName: scaled-mask-softmax\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {value}\n" for value in requires)
        files = {
            f"{PACKAGE}/__init__.py": b"",
            f"{PACKAGE}/_build_record.py": f"BUILD = { ({**BUILD, 'version': version} | (build or {}))!r}\n".encode(),
            LIBRARY: library or compile_library(),
            MODULE: compile_library(),
            f"{info}/METADATA": metadata.encode(),
            **(extra or {}),
        }
        if record is None:
            del files[f"{PACKAGE}/_build_record.py"]
        elif record:
            files[f"{PACKAGE}/_build_record.py"] = record
        rows = []
        for name, data in files.items():
            digest = hashlib.sha256(b"forged" if forge_record else data).digest()
            rows.append(f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(data)}\n")
        path = tmp_path / f"{PACKAGE}-{file_version or version}-{python}-{abi or python}-{platform}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
            archive.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")
        return path

    return build


def test_a_right_wheel(make):
    report = verify.verify(make())
    assert report.version == "1.0.0+cputorch2.14"
    assert report.architectures == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file_version": "1.0.1+cputorch2.14"}, r"the file name says 1\.0\.1\+cputorch2\.14, METADATA 1\.0\.0"),
        ({"build": {"version": "1.0.1+cputorch2.14"}}, r"the build record says 1\.0\.1"),
        ({"version": "1.0.0+cputorch2.13"}, r"label cputorch2\.13 is not cputorch2\.14"),
        ({"version": "1.0.0"}, r"label  is not cputorch2\.14"),
        ({"version": "1.0.0+CPUtorch2.14"}, "is not lower case"),
        ({"build": {"torch": "2.13.0+cpu"}}, r"torch 2\.13\.0\+cpu is not of 2\.14"),
        ({"build": {"python": "3.12"}}, r"tags cp311-cp311, but built by Python 3\.12"),
        ({"requires": ()}, "must pin torch and name nothing else"),
        ({"requires": ("torch>=2.14",)}, "Requires-Dist is 'torch>=2.14'"),
        ({"requires": ("torch>=2.14,<2.15", "numpy")}, "must pin torch and name nothing else"),
        ({"requires": ("torch==2.14.1+cpu",)}, r"a '\+' in Requires-Dist"),
        ({"extra": {f"{PACKAGE}.libs/libgomp-a34b3233.so.1.0.0": b"x"}}, r"expected inside, found .*libgomp"),
        ({"extra": {f"{PACKAGE}/libcudart.so.13": b"x"}}, r"expected inside, found .*libcudart"),
        ({"platform": f"linux_{MACHINE}"}, "is no manylinux"),
        ({"build": {"cuda": "13.0"}, "version": "1.0.0+cu130torch2.14"}, r"CUDA 13\.0: \[\]"),
        ({"build": {"architectures": ["9.0"]}}, r"the build record says \['9\.0'\]"),
        ({"forge_record": True}, "RECORD has another hash"),
    ],
)
def test_wrong_wheels(make, changes, message):
    with pytest.raises(VerifyError, match=message):
        verify.verify(make(**changes))


def test_a_missing_library(make, tmp_path):
    good = make()
    bad = tmp_path / "bad" / good.name
    bad.parent.mkdir()
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as target:
        for info in source.infolist():
            if info.filename != LIBRARY:
                target.writestr(info, source.read(info))
    with pytest.raises(VerifyError, match=r"RECORD and contents differ: .*libscaled_mask_softmax\.so"):
        verify.verify(bad)


@pytest.mark.parametrize("rpath", ["/somewhere/torch/lib", "$ORIGIN/../torch/lib:/build", ""])
def test_rpath_must_be_relative(make, compile_library, rpath):
    code = 'extern "C" int answer() { return 43; }'
    library = compile_library(code, f"-Wl,-rpath,{rpath}" if rpath else "-Wl,-rpath,$ORIGIN/../torch/lib::")
    with pytest.raises(VerifyError, match=r"RPATH .* is not relative"):
        verify.verify(make(library=library))


def test_a_relative_rpath(make, compile_library):
    library = compile_library('extern "C" int answer() { return 43; }', "-Wl,-rpath,$ORIGIN/../torch/lib")
    verify.verify(make(library=library))


def test_a_static_cxx_library(make, compile_library):
    library = compile_library('extern "C" int answer() { return 44; }', "-static-libstdc++")
    with pytest.raises(VerifyError, match=r"holds a C\+\+ library of its own"):
        verify.verify(make(library=library))


@pytest.mark.parametrize("options", [(), ("-static-libstdc++",)])
def test_a_compiler_without_a_shared_cxx_library(make, tmp_path, monkeypatch, options):
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
    link(source, target, *options)
    wheel = make(library=target.read_bytes())
    if options:
        with pytest.raises(VerifyError, match=r"holds a C\+\+ library of its own"):
            verify.verify(wheel)
    else:
        verify.verify(wheel)


def test_a_library_that_nobody_brings(make, compile_library, tmp_path):
    (tmp_path / "libforeign.so").write_bytes(
        compile_library('extern "C" int foreign() { return 1; }', "-Wl,-soname,libforeign.so.3")
    )
    code = 'extern "C" int foreign(); extern "C" int answer() { return foreign(); }'
    library = compile_library(code, f"-L{tmp_path}", "-lforeign")
    with pytest.raises(VerifyError, match=r"needs libforeign\.so\.3, which nobody brings"):
        verify.verify(make(library=library))


@pytest.mark.skipif(MACHINE != "x86_64", reason="the older tag exists on x86_64 only")
def test_the_manylinux_tag_must_be_true(make, compile_library):
    code = '#include <string>\nextern "C" int answer(const char* t) { return std::string(t).append("x").size(); }'
    library = compile_library(code)
    verify.verify(make(library=library))
    with pytest.raises(
        VerifyError, match=r"needs GLIBCXX_3\.4\.21 of libstdc\+\+\.so\.6: manylinux_2_5_x86_64 is not true"
    ):
        verify.verify(make(library=library, platform="manylinux_2_5_x86_64"))


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "release", "verify", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_the_command(make):
    wheel = make()
    done = run(wheel)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{wheel.name}: right; ")


def flip(data):
    """`data` with other bytes in its middle."""
    middle = len(data) // 2
    return data[: middle - 20] + bytes(40) + data[middle + 20 :]


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
        f"error: {wheel}: this is a plain wheel, and only native ones are verified: give one built for a torch\n"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"record": None}, "_build_record.py is missing"),
        ({"record": b"BUILD = {"}, r"the build record holds no BUILD = \{\.\.\.\} of plain values"),
        ({"record": b"BUILD = {'version': '1.0.0'}"}, "the build record lacks torch, torch_minor"),
        ({"library": b"text"}, "is no shared library"),
        ({"platform": f"manylinux_2_99_{MACHINE}"}, f"no manylinux_2_99 for {MACHINE} is known"),
    ],
)
def test_broken_parts(make, changes, message):
    wheel = make(**changes)
    with pytest.raises(VerifyError, match=message) as caught:
        verify.verify(wheel)
    assert str(caught.value).startswith(f"{wheel}: ")


@pytest.mark.parametrize(
    ("cuda", "message"),
    [
        ("13.0", r"architectures \['9\.0'\], the matrix has \['7\.5', "),
        ("13.7", f"the matrix has no cu137 for {MACHINE}"),
    ],
)
def test_an_incomplete_wheel(make, monkeypatch, cuda, message):
    monkeypatch.setattr(fatbin, "read", lambda library: [fatbin.Entry("cubin", "9.0", frozenset())])
    monkeypatch.setattr(verify, "policy_kernels", list)
    label = "cu" + cuda.replace(".", "")
    wheel = make(version=f"1.0.0+{label}torch2.14", build={"cuda": cuda, "architectures": ["9.0"]})
    verify.verify(wheel)
    with pytest.raises(VerifyError, match=message) as caught:
        verify.verify(wheel, complete=True)
    assert str(caught.value).startswith(f"{wheel}: ")


def test_size(make, monkeypatch):
    loaded = verify.matrix.load()
    monkeypatch.setattr("release.matrix.load", lambda: dataclasses.replace(loaded, max_wheel_size=0))
    with pytest.raises(VerifyError, match="is more than 0 MiB"):
        verify.verify(make())


def test_every_kernel_on_every_architecture():
    names = {f"{prefix}EvNS0_9ArgumentsE" for prefix in verify.policy_kernels()}
    assert len(names) > 20
    verify.check_kernels({"8.0": names, "9.0": names}, verify.policy_kernels())
    lost = sorted(names)[3]
    with pytest.raises(VerifyError, match=r"no cubin for 9\.0 of 1 kernels"):
        verify.check_kernels({"8.0": names, "9.0": names - {lost}}, verify.policy_kernels())
