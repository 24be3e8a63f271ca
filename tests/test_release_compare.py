"""Two builds of one wheel: the same bytes, or the list of what differs."""

import subprocess
import sys
import zipfile

import pytest

from release import ROOT, compare, preflight
from tests.test_release_clients import make_wheel

VERSION = "1.0.0+cputorch2.14"


@pytest.fixture
def pair(tmp_path):
    """Two copies of a wheel, the second rewritten with other files or times."""
    first = make_wheel(tmp_path, "scaled_mask_softmax", VERSION)

    def make(changes=None, time=(2020, 1, 1, 0, 0, 0)):
        second = tmp_path / "again" / first.name
        second.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(first) as source:
            files = {info.filename: source.read(info) for info in source.infolist()} | (changes or {})
        with zipfile.ZipFile(second, "w") as target:
            for name, data in files.items():
                if data is not None:
                    target.writestr(zipfile.ZipInfo(name, time), data)
        return first, second

    return make


def test_the_same(pair, tmp_path):
    first, _ = pair()
    copy = tmp_path / "again" / first.name
    copy.write_bytes(first.read_bytes())
    assert compare.differences(first, copy) == []


def test_what_differs(pair):
    assert compare.differences(*pair()) == ["the archive: the files' times"]
    name = "scaled_mask_softmax/__init__.py"
    changes = {name: b"x = 1\n", "more.py": b"", f"scaled_mask_softmax-{VERSION}.dist-info/WHEEL": None}
    assert compare.differences(*pair(changes)) == [
        "more.py: only in the second",
        f"scaled_mask_softmax-{VERSION}.dist-info/WHEEL: only in the first",
        f"{name}: 31 and 6 bytes",
    ]  # fmt: skip


def test_sections_of_a_library(tmp_path):
    libraries = []
    for value in (1, 2):
        source, target = tmp_path / "a.cpp", tmp_path / f"{value}.so"
        source.write_text(f'extern "C" const char* answer() {{ return "answer {value}"; }}')
        subprocess.run(
            [*preflight.cxx_compiler().split(), "-shared", "-fPIC", "-s", "-Wl,--build-id=none", "-o", target, source],
            check=True,
        )
        libraries.append(target.read_bytes())
    assert compare._parts(*libraries) == "sections .rodata"


def test_the_command(pair):
    first, second = pair({"more.py": b""})

    def run(*paths):
        command = [sys.executable, "-m", "release", "compare", *paths]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert (run(first, first).returncode, run(first, first).stdout) == (0, "the same, byte for byte\n")
    done = run(first, second)
    assert (done.returncode, done.stdout) == (1, "more.py: only in the second\n")
    assert done.stderr.endswith(" differ\n")
