"""Wheels and source distributions that are broken, or made to mislead: each is refused, in words that name it."""

import base64
import hashlib
import os
import random
import struct
import zipfile

import pytest

from release import index, record, source_file, verify, wheel_file
from release.index import ChannelError
from release.verify import VerifyError
from release.wheel_file import WheelFileError
from tests import tiny_wheels

VERSION = "1.0.0+cu130torch2.14"
TAG = "cp311-cp311-manylinux_2_28_x86_64"
INFO = f"scaled_mask_softmax-{VERSION}.dist-info"
BUILD = {
    "version": VERSION,
    "torch": "2.14.1",
    "torch_minor": "2.14",
    "cuda": "13.0",
    "architectures": ["9.0"],
    "ptx": [],
    "python": "3.11",
}


@pytest.fixture
def good(tmp_path):
    return tiny_wheels.wheel(tmp_path / "good", tag=TAG, record=BUILD)


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def refused(wheel, message):
    with pytest.raises(WheelFileError, match=message) as caught:
        wheel_file.read(wheel)
    assert str(caught.value).startswith(f"{wheel}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/etc/evil", "a\\evil", "a\nevil"])
def test_a_path_that_leads_out(good, name):
    with zipfile.ZipFile(good, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"")
    refused(good, "it holds a file of the name .*evil', which is no path of a wheel")


@pytest.mark.parametrize("name", ["scaled_mask_softmax/__init__.py", f"{INFO}/METADATA"])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_files_of_one_name(good, name):
    """The second is what zipfile reads, the first what another installer may take."""
    with zipfile.ZipFile(good, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), contents(good)[name])
    refused(good, f"it holds '{name}' twice".replace("+", r"\+"))


def test_the_metadata_of_another_project(tmp_path):
    wheel = tiny_wheels.wheel(tmp_path, tag=TAG, name="torch")
    files = {name.replace("torch-", "scaled_mask_softmax-"): data for name, data in contents(wheel).items()}
    other = tmp_path / f"scaled_mask_softmax-{VERSION}-{TAG}.whl"
    with zipfile.ZipFile(other, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    refused(other, "METADATA is of torch, not of scaled-mask-softmax")


def test_what_is_no_file(good, tmp_path):
    for path in (tmp_path / "folder" / good.name, tmp_path / "pipe" / good.name):
        path.parent.mkdir()
    (tmp_path / "folder" / good.name).mkdir()
    os.mkfifo(tmp_path / "pipe" / good.name)  # reading it would wait for ever
    for path in tmp_path.glob("*/" + good.name):
        if path != good:
            refused(path, "this is no file, but a folder or a device: give the wheel itself")


@pytest.mark.parametrize(("method", "message"), [(12, "Invalid data stream"), (14, "broken"), (99, "not supported")])
def test_another_compression_than_is_said(good, method, message):
    data = bytearray(good.read_bytes())
    for magic, offset in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        struct.pack_into("<H", data, data.index(magic) + offset, method)
    good.write_bytes(data)
    refused(good, message)


def test_any_broken_byte(good, tmp_path):
    """Whatever bytes are wrong, the error is ours."""
    source = tiny_wheels.source(tmp_path / "source")
    numbers = random.Random(0)
    for path, read in ((good, wheel_file.read), (source, source_file.read)):
        right, said = path.read_bytes(), []
        for _ in range(3000):
            data = bytearray(right)
            for _ in range(numbers.choice([1, 2, 4])):
                # The directory of an archive, at its end, decides what is read, and how.
                data[-1 - int(len(data) * numbers.random() ** 2)] = numbers.choice([0, 255, numbers.randrange(256)])
            path.write_bytes(data)
            try:
                read(path)
            except WheelFileError as error:
                said.append(str(error))
        assert len(said) > 1000
        assert all(text.startswith(f"{path}: ") for text in said)


def test_names_that_are_no_text(good):
    """Bytes that a flag says to be UTF-8, and an empty name."""
    right = good.read_bytes()
    start = right.index(b"PK\1\2")
    for offset, value in ((46, b"\xff"), (28, b"\0\0")):
        data = bytearray(right)
        struct.pack_into("<H", data, start + 8, 0x800)
        data[start + offset : start + offset + len(value)] = value
        good.write_bytes(data)
        refused(good, "no wheel, or a broken one")


@pytest.mark.parametrize("text", ["BUILD = " + "[" * 5000, "BUILD = " + "-" * 100_000 + "1", "BUILD = {1: '\0'}"])
def test_a_build_record_that_python_does_not_read(text):
    with pytest.raises(record.RecordError, match="holds no BUILD"):
        record.read(text)


def with_record(wheel, rows, more):
    """The wheel with another RECORD, and `more` files, which it names."""
    files = contents(wheel) | more
    del files[f"{INFO}/RECORD"]
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows += f"{name},sha256={digest},{len(data)}\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in (files | {f"{INFO}/RECORD": f"{rows}{INFO}/RECORD,,\n".encode()}).items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return wheel


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("x" * 200_000 + ",,\n", "RECORD is not a table of paths, hashes and sizes: field larger than"),
        ("/etc/passwd,sha256=x,1\n", "RECORD and contents differ: /etc/passwd"),
        (
            "scaled_mask_softmax/__init__.py,sha256=x,1\n",
            r"RECORD has more than one row of scaled_mask_softmax/__init__\.py",
        ),
    ],
)
def test_a_record_file_that_misleads(good, rows, message):
    with pytest.raises(VerifyError, match=message) as caught:
        verify.verify(with_record(good, rows, {}))
    assert str(caught.value).startswith(f"{good}: RECORD: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 1),
        ("torch", None),
        ("torch_minor", "2"),
        ("cuda", 13),
        ("architectures", "9.0"),
        ("ptx", [9.0]),
        ("python", ["3.11"]),
    ],
)
def test_a_build_record_of_wrong_values(good, key, value):
    text = f"BUILD = {BUILD | {key: value}!r}\n".encode()
    with_record(good, "", {"scaled_mask_softmax/_build_record.py": text})
    with pytest.raises(VerifyError, match="the build record's ") as caught:
        verify.verify(good)
    assert str(caught.value) == f"{good}: names: the build record's {key} is {value!r}: build it again"
    with pytest.raises(VerifyError) as caught:
        verify.build_record(good)
    assert str(caught.value).startswith(f"{good}: the build record's {key} is ")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (b"BUILD = 1\n", "{path}: the build record holds no BUILD"),
        (b"BUILD = {'version': 1}\n", "{path} was built for no torch, and belongs to another channel"),
        (b"BUILD = {'ptx': 7}\n", "'{path.name}': ptx is 7, as no file of ours has it"),
    ],
)
def test_a_build_record_that_the_index_refuses(good, tmp_path, build, message):
    with_record(good, "", {"scaled_mask_softmax/_build_record.py": build})
    with pytest.raises(ChannelError) as caught:
        index.write(tmp_path / "site", [good])
    assert str(caught.value).startswith(message.format(path=good))
    assert not (tmp_path / "site").exists()
