"""The preview of variant wheels: the ordinary wheels under one version, with what each asks of the machine."""

import base64
import csv
import hashlib
import io
import json
import re
import zipfile

import pytest

from release import matrix, variants
from release.index import ChannelError
from release.wheel_file import WheelFileError
from tests import tiny_wheels
from tests.test_release_clients import NATIVE, ours


@pytest.fixture
def wheels(tmp_path):
    return [ours(tmp_path, f"1.0.0+{label}torch2.14") for label in ("cpu", "cu126", "cu130")]


def test_a_variant_is_the_wheel_under_another_version(wheels, tmp_path):
    (tmp_path / "out").mkdir()
    made = variants.make(matrix.load(), wheels[2], tmp_path / "out")
    assert made.name == f"scaled_mask_softmax-1.0.0+torch2.14-{NATIVE}-cu130.whl"
    with zipfile.ZipFile(made) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    info = "scaled_mask_softmax-1.0.0+torch2.14.dist-info"
    assert b"\nVersion: 1.0.0+torch2.14\n" in files[f"{info}/METADATA"]
    assert b"VERSION = '1.0.0+cu130torch2.14'" in files["scaled_mask_softmax/__init__.py"]
    asked = json.loads(files[f"{info}/variant.json"])["variants"]
    assert asked == {"cu130": {"nvidia": {"cuda_version_lower_bound": ["13.0"]}}}
    rows = {row[0]: row[1] for row in csv.reader(io.StringIO(files[f"{info}/RECORD"].decode()))}
    assert rows.keys() == files.keys()
    for name, contents in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(contents).digest()).rstrip(b"=").decode()
        assert rows[name] == ("" if name.endswith("/RECORD") else f"sha256={digest}")
    before = made.read_bytes()
    assert variants.make(matrix.load(), wheels[2], tmp_path / "out").read_bytes() == before


def test_a_page_for_each_torch(wheels, tmp_path):
    other = ours(tmp_path, "1.0.0+cu130torch2.13", "2.13")
    site = tmp_path / "site"
    assert variants.write(matrix.load(), site, [*wheels, other]) == [
        site / "whl/variants/torch2.14",
        site / "whl/variants/torch2.13",
    ]
    folder = site / "whl/variants/torch2.14/scaled-mask-softmax"
    data = json.loads((folder / "scaled_mask_softmax-1.0.0+torch2.14-variants.json").read_text())
    assert list(data["variants"]) == ["cu126", "cu130", "null"]
    page = (folder / "index.html").read_text()
    for target, digest in re.findall(r'href="([^"#]+)#sha256=(\w+)"', page):
        assert hashlib.sha256((folder / target.replace("%2B", "+")).read_bytes()).hexdigest() == digest
    assert page.count("href=") == 4
    # A later version joins it; again changes nothing.
    variants.write(matrix.load(), site, [ours(tmp_path, "1.1.0+cputorch2.14"), *wheels])
    assert (folder / "index.html").read_text().count("href=") == 6


def test_a_wheel_that_makes_no_variant_leaves_nothing(tmp_path):
    bare = tmp_path / "bare" / "scaled_mask_softmax-1.0.0+cu130torch2.14-py3-none-any.whl"
    with zipfile.ZipFile(tiny_wheels.wheel(tmp_path)) as source:
        bare.parent.mkdir()
        with zipfile.ZipFile(bare, "w") as archive:
            for info in source.infolist():
                if not info.filename.endswith("/RECORD"):
                    archive.writestr(info, source.read(info))
    with pytest.raises(WheelFileError, match=r"bare/.*: 0 RECORD files where one is expected"):
        variants.write(matrix.load(), tmp_path / "site", [bare])
    with pytest.raises(ChannelError, match="the matrix has no cu199"):
        variants.write(matrix.load(), tmp_path / "site", [tiny_wheels.wheel(tmp_path, "1.0.0+cu199torch2.14")])
    assert not (tmp_path / "site").exists()


def test_a_plain_wheel_is_no_variant(tmp_path):
    with pytest.raises(ChannelError, match="carries no label"):
        variants.write(matrix.load(), tmp_path, [ours(tmp_path, "1.0.0")])
