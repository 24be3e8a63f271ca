"""Channels: what pip needs on a page, and one (CUDA, torch) pair never sees another's wheels."""

import hashlib
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from release import ROOT, index
from release.index import ChannelError
from release.wheel_file import WheelFileError


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links = []

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.links.append(dict(attrs))


def links(page):
    parser = Links()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.links


def make_wheel(folder, label="cu130torch2.14", tag="py3-none-any"):
    version = f"1.0.0+{label}" if label else "1.0.0"
    path = folder / f"scaled_mask_softmax-{version}-{tag}.whl"
    info = f"scaled_mask_softmax-{version}.dist-info"
    text = f"Metadata-Version: 2.4\nName: scaled-mask-softmax\nVersion: {version}\nRequires-Python: >=3.10\n"
    files = {
        "scaled_mask_softmax/__init__.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": text,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{name},,\n" for name in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, contents in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, contents)
    return path


def test_page(tmp_path):
    wheel = make_wheel(tmp_path)
    (channel,) = index.write(tmp_path / "site", [wheel])
    assert channel == tmp_path / "site/whl/cu130/torch2.14"
    assert links(channel / "index.html") == [{"href": "scaled-mask-softmax/"}]
    (link,) = links(channel / "scaled-mask-softmax/index.html")
    target, _, fragment = link["href"].partition("#")
    assert "+" not in target
    assert "%2B" in target
    assert unquote(target) == wheel.name
    copy = channel / "scaled-mask-softmax" / unquote(target)
    assert fragment == "sha256=" + hashlib.sha256(copy.read_bytes()).hexdigest()
    metadata = copy.with_name(copy.name + ".metadata").read_bytes()
    assert link["data-core-metadata"] == "sha256=" + hashlib.sha256(metadata).hexdigest()
    assert link["data-requires-python"] == ">=3.10"
    assert b"Version: 1.0.0+cu130torch2.14" in metadata


def test_channels_are_apart_and_grow(tmp_path):
    site = tmp_path / "site"
    index.write(site, [make_wheel(tmp_path, "cu130torch2.14"), make_wheel(tmp_path, "cputorch2.14")])
    index.write(site, [make_wheel(tmp_path, "cu130torch2.14", "cp311-cp311-linux_x86_64")])
    pages = {path: links(path) for path in site.rglob("scaled-mask-softmax/index.html")}
    names = {path.parent.parent.relative_to(site).as_posix(): len(found) for path, found in pages.items()}
    assert names == {"whl/cu130/torch2.14": 2, "whl/cpu/torch2.14": 1}
    assert all(
        "cputorch" not in link["href"] for link in pages[site / "whl/cu130/torch2.14/scaled-mask-softmax/index.html"]
    )


def test_a_plain_wheel_belongs_to_no_channel(tmp_path):
    with pytest.raises(ChannelError, match="belongs to no channel"):
        index.write(tmp_path / "site", [make_wheel(tmp_path, label="")])


@pytest.mark.parametrize("bad", ["no label", "missing", "broken", "another's", "renamed"])
def test_all_wheels_are_checked_before_anything_is_written(tmp_path, bad):
    good, broken = make_wheel(tmp_path), tmp_path / "scaled_mask_softmax-1.0.0+cu130torch2.13-py3-none-any.whl"
    if bad == "no label":
        broken = make_wheel(tmp_path, label="")
    elif bad == "broken":
        broken.write_bytes(good.read_bytes()[:-100])
    elif bad == "another's":
        broken = good.rename(tmp_path / good.name.replace("scaled_mask_softmax", "other"))
        good = make_wheel(tmp_path)
    elif bad == "renamed":
        broken.write_bytes(good.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "release", "index", tmp_path / "site", good, broken],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert broken.name in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "site").exists()


def test_a_broken_wheel_in_the_channel_leaves_it_as_it_is(tmp_path):
    (channel,) = index.write(tmp_path / "site", [make_wheel(tmp_path)])
    broken = channel / "scaled-mask-softmax/scaled_mask_softmax-1.0.0+cu130torch2.14-cp311-cp311-linux_x86_64.whl"
    broken.write_bytes(b"half a wheel")
    before = {path: path.read_bytes() for path in channel.rglob("*") if path.is_file()}
    with pytest.raises(WheelFileError, match="this is no wheel, or a broken one"):
        index.write(tmp_path / "site", [make_wheel(tmp_path, tag="cp312-cp312-linux_x86_64")])
    assert {path: path.read_bytes() for path in channel.rglob("*") if path.is_file()} == before


def test_a_wheel_that_is_in_the_channel_already(tmp_path):
    (channel,) = index.write(tmp_path / "site", [make_wheel(tmp_path)])
    (inside,) = channel.rglob("*.whl")
    before = inside.read_bytes()
    assert index.write(tmp_path / "site", [inside]) == [channel]
    assert inside.read_bytes() == before


def test_two_wheels_of_one_name(tmp_path):
    (tmp_path / "other").mkdir()
    first, second = make_wheel(tmp_path), make_wheel(tmp_path / "other")
    index.write(tmp_path / "site", [first, second])
    with zipfile.ZipFile(second, "a") as archive:
        archive.writestr("scaled_mask_softmax/more.py", "")
    with pytest.raises(ChannelError, match="have one name and differ"):
        index.write(tmp_path / "site", [first, second])


def test_pip_installs_the_full_version_from_it(tmp_path):
    (channel,) = index.write(tmp_path / "a site", [make_wheel(tmp_path)])
    command = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "-d",
        tmp_path / "got",
    ]
    done = subprocess.run(
        [*command, "--index-url", channel.as_uri() + "/", "scaled-mask-softmax==1.0.0+cu130torch2.14"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null"},
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "got").iterdir()] == [
        "scaled_mask_softmax-1.0.0+cu130torch2.14-py3-none-any.whl"
    ]
    assert re.search(r"\.whl\.metadata", done.stdout), "pip did not use the PEP 658 metadata"
