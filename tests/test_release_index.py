"""Channels: what pip needs on a page, and one (CUDA, torch) pair never sees another's wheels."""

import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from release import ROOT, index, landing
from release.index import ChannelError
from release.wheel_file import WheelFileError
from scaled_mask_softmax_cli import channels
from tests import tiny_wheels


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


def make_wheel(folder, label="cu130torch2.14", tag="py3-none-any", build=None):
    version = f"1.0.0+{label}" if label else "1.0.0"
    path = folder / f"scaled_mask_softmax-{version}-{tag}.whl"
    info = f"scaled_mask_softmax-{version}.dist-info"
    text = f"Metadata-Version: 2.4\nName: scaled-mask-softmax\nVersion: {version}\nRequires-Python: >=3.10\n"
    files = {
        "scaled_mask_softmax/__init__.py": f"VERSION = {version!r}\n",
        **({"scaled_mask_softmax/_build_record.py": f"BUILD = {build!r}\n"} if build else {}),
        f"{info}/METADATA": text,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = "".join(f"{name},,\n" for name in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, contents in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(name), contents)  # without the time, so that the same is the same
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


def test_the_plain_channel(tmp_path):
    """It holds the plain wheel and the source distribution, which is on no page that installers read."""
    site, plain, source = tmp_path / "site", make_wheel(tmp_path, label=""), tiny_wheels.source(tmp_path)
    assert index.write(site, [make_wheel(tmp_path), plain, source]) == [site / "whl/cu130/torch2.14", site / "plain"]
    (link,) = links(site / "plain/scaled-mask-softmax/index.html")
    assert link["href"].partition("#")[0] == plain.name
    assert (site / "plain/scaled-mask-softmax" / source.name).read_bytes() == source.read_bytes()
    entries = json.loads((site / "index.json").read_text())["channels"]["plain"]
    assert [(entry["filename"], entry["version"], entry["requires_python"]) for entry in entries] == [
        (plain.name, "1.0.0", ">=3.10"),
        (source.name, "1.0.0", ">=3.10"),
    ]
    assert entries[1]["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert f"{entries[1]['sha256']}  plain/scaled-mask-softmax/{source.name}\n" in (site / "SHA256SUMS").read_text()
    # They are no part of a release's native wheels, and withdrawn with their version.
    with index.update(site) as found:
        assert found.yank("1.0.0", "wrong rows") == 3
        found.expect([make_wheel(tmp_path).name], "1.0.0", allow_missing=False)
    # A changed source distribution is refused, as a changed wheel.
    tiny_wheels.source(tmp_path, tree=tmp_path / "site/whl")
    with pytest.raises(ChannelError, match="differ: a released file never changes"):
        index.write(site, [source])
    (site / "plain/scaled-mask-softmax" / source.name).write_bytes(source.read_bytes())
    with pytest.raises(ChannelError, match="is not the file that was indexed"):
        index.write(site, [])


@pytest.mark.parametrize("bad", ["cut", "another's", "of another version", "without PKG-INFO", "renamed", "missing"])
def test_a_source_distribution_that_is_none_of_ours(tmp_path, bad):
    metadata = {"another's": "Name: other\nVersion: 1.0.0\n", "of another version": "Name: scaled-mask-softmax\n"}
    path = tiny_wheels.source(tmp_path, metadata=metadata.get(bad))
    if bad == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif bad == "without PKG-INFO":
        with tarfile.open(path, "w:gz") as tar:
            tar.add(ROOT / "LICENSE", "scaled_mask_softmax-1.0.0/LICENSE")
    elif bad == "renamed":
        path = path.rename(tmp_path / "scaled_mask_softmax-1.0.1.tar.gz")
    elif bad == "missing":
        path.unlink()
    with pytest.raises(WheelFileError, match=re.escape(str(path))):
        index.write(tmp_path / "site", [path])
    assert not (tmp_path / "site").exists()


def test_an_index_json_of_a_later_format(tmp_path):
    index.write(tmp_path, [make_wheel(tmp_path)])
    data = json.loads((tmp_path / "index.json").read_text())
    assert data["format"] == index.FORMAT == channels.FORMAT
    (tmp_path / "index.json").write_text(json.dumps({**data, "format": 2}))
    with pytest.raises(ChannelError, match="it is of format 2, and this release writes 1"):
        index.Index(tmp_path)
    del data["format"]
    (tmp_path / "index.json").write_text(json.dumps(data))
    assert len(list(index.Index(tmp_path).entries())) == 1


@pytest.mark.parametrize("bad", ["no label", "missing", "broken", "another's", "renamed"])
def test_all_wheels_are_checked_before_anything_is_written(tmp_path, bad):
    good, broken = make_wheel(tmp_path), tmp_path / "scaled_mask_softmax-1.0.0+cu130torch2.13-py3-none-any.whl"
    if bad == "no label":
        broken = make_wheel(tmp_path, label="", tag="cp311-cp311-linux_x86_64")
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
    first, second = make_wheel(tmp_path), tmp_path / "other" / make_wheel(tmp_path).name
    shutil.copy(first, second)
    index.write(tmp_path / "site", [first, second])
    with zipfile.ZipFile(second, "a") as archive:
        archive.writestr("scaled_mask_softmax/more.py", "")
    for wheels in ([first, second], [second]):
        with pytest.raises(ChannelError, match=r"differ: a released file never changes"):
            index.write(tmp_path / "site", wheels)
    (channel,) = index.write(tmp_path / "site", [second], may_replace=True)
    assert next(channel.rglob("*.whl")).read_bytes() == second.read_bytes()


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_index_json_says_what_the_pages_say(tmp_path):
    site = tmp_path / "site"
    build = {"version": "1.0.0+cu130torch2.14", "architectures": ["9.0"], "ptx": ["9.0"]}
    index.write(site, [make_wheel(tmp_path, build=build), make_wheel(tmp_path, "cputorch2.14")])
    data = json.loads((site / "index.json").read_text())
    assert list(data["channels"]) == ["whl/cpu/torch2.14", "whl/cu130/torch2.14"]
    (entry,) = data["channels"]["whl/cu130/torch2.14"]
    (link,) = links(site / "whl/cu130/torch2.14/scaled-mask-softmax/index.html")
    assert link["href"] == f"{entry['url']}#sha256={entry['sha256']}"
    assert link["data-core-metadata"] == f"sha256={entry['metadata_sha256']}"
    assert (entry["version"], entry["architectures"], entry["yanked"]) == ("1.0.0+cu130torch2.14", ["9.0"], None)
    assert entry["size"] == (site / "whl/cu130/torch2.14/scaled-mask-softmax" / entry["filename"]).stat().st_size
    sums = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=site, capture_output=True, text=True)
    assert (sums.returncode, sums.stdout.count(": OK")) == (0, 2)


def test_again_changes_nothing(tmp_path):
    site, wheel = tmp_path / "site", make_wheel(tmp_path)
    index.write(site, [wheel])
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*")}
    index.write(site, [wheel])
    assert {path: path.stat().st_mtime_ns for path in site.rglob("*")} == before


def test_a_reader_never_sees_half_an_update(tmp_path, monkeypatch):
    """Whatever write is the last one that happens, every link on every page leads to the right file."""
    site = tmp_path / "site"
    index.write(site, [make_wheel(tmp_path)])
    new = [
        make_wheel(tmp_path, "cu130torch2.14", "cp311-cp311-linux_x86_64"),
        make_wheel(tmp_path, "cu130torch2.15", "cp311-cp311-linux_x86_64"),
    ]
    real, writes = os.replace, 0
    for allowed in range(100):
        left = allowed

        def one_more(source, target):
            nonlocal left, writes
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            writes += 1
            real(source, target)

        monkeypatch.setattr("os.replace", one_more)
        shutil.copytree(site, tmp_path / str(allowed))
        try:
            index.write(tmp_path / str(allowed), new)
            done = True
        except KeyboardInterrupt:
            done = False
        for page in (tmp_path / str(allowed)).rglob("index.html"):
            for link in links(page):
                target, _, fragment = link["href"].partition("#sha256=")
                path = page.parent / unquote(target)
                assert path.exists()
                if fragment:
                    assert hashlib.sha256(path.read_bytes()).hexdigest() == fragment
                    metadata = path.with_name(f"{path.name}.metadata").read_bytes()
                    assert link["data-core-metadata"] == f"sha256={hashlib.sha256(metadata).hexdigest()}"
        # And the same command, again, completes it.
        monkeypatch.setattr("os.replace", real)
        index.write(tmp_path / str(allowed), new)
        index.write(tmp_path / "whole", [*site.rglob("*.whl"), *new])
        assert files(tmp_path / str(allowed)).keys() >= files(tmp_path / "whole").keys()
        assert (tmp_path / str(allowed) / "index.json").read_bytes() == (tmp_path / "whole/index.json").read_bytes()
        if done:
            break
    assert done
    assert allowed >= 8


def test_a_wheel_in_a_channel_that_is_not_its_own(tmp_path):
    site = tmp_path / "site"
    index.write(site, [make_wheel(tmp_path)])
    stray = make_wheel(tmp_path, "cu126torch2.14")
    folder = site / "whl/cu130/torch2.14/scaled-mask-softmax"
    shutil.move(stray, folder)
    with pytest.raises(ChannelError, match=r"not its own, which is whl/cu126/torch2\.14"):
        index.write(site, [])
    # Renamed so that it fits, its build record still tells.
    wheel = make_wheel(tmp_path, "cu130torch2.14", build={"version": "1.0.0+cu126torch2.14"})
    with pytest.raises(ChannelError, match=r"was built for cu126torch2\.14"):
        index.write(tmp_path / "other", [wheel])
    assert not (tmp_path / "other").exists()


def test_a_file_that_was_changed_after_it_was_indexed(tmp_path):
    (channel,) = index.write(tmp_path / "site", [make_wheel(tmp_path)])
    (inside,) = channel.rglob("*.whl")
    with zipfile.ZipFile(inside, "a") as archive:
        archive.writestr("scaled_mask_softmax/more.py", "")
    with pytest.raises(ChannelError, match="is not the file that was indexed"):
        index.Index(tmp_path / "site")


def test_an_index_json_that_is_none(tmp_path):
    (tmp_path / "index.json").write_text('{"channels": {}}')
    with pytest.raises(ChannelError, match="is none of ours"):
        index.Index(tmp_path)


def test_withdrawn(tmp_path):
    site = tmp_path / "site"
    index.write(site, [make_wheel(tmp_path, label) for label in ("cu130torch2.14", "cputorch2.14", "cputorch2.13")])
    found = index.Index(site)
    assert found.yank("1.0.0+cputorch2.14", "wrong rows") == 1
    assert found.yank("1.0.0", "wrong rows & more") == 3
    with pytest.raises(ChannelError, match=r"nothing of 2\.0\.0"):
        found.yank("2.0.0", "")
    found.write()
    # Adding more, or the same again, brings none back.
    index.write(site, [make_wheel(tmp_path, tag="cp311-cp311-linux_x86_64"), make_wheel(tmp_path, "cputorch2.13")])
    pages = [links(page) for page in sorted(site.glob("whl/*/*/scaled-mask-softmax/index.html"))]
    withdrawn = [[link.get("data-yanked") for link in page] for page in pages]
    assert withdrawn == [["wrong rows & more"], ["wrong rows & more"], [None, "wrong rows & more"]]


def test_the_order_of_versions():
    mixed = ["1.10.0+x", "1.0.0+x", "1.0.0rc1+x", "1.2.0+x", "1.0.0a1+x", "1.0.1+x"]
    right = ["1.0.0a1+x", "1.0.0rc1+x", "1.0.0+x", "1.0.1+x", "1.2.0+x", "1.10.0+x"]
    assert sorted(mixed, key=landing.version_order) == right


def test_the_landing_page_is_written(tmp_path):
    """tests/test_release_landing.py says what is in it."""
    site = tmp_path / "site"
    index.write(site, [make_wheel(tmp_path, tag="cp311-cp311-linux_x86_64")])
    assert "whl/cu130/torch2.14/" in [link["href"] for link in links(site / "index.html")]
    command = [sys.executable, "-m", "release", "index", site, "--address", "https://index.example/"]
    subprocess.run(command, cwd=ROOT, check=True)
    text = html.unescape((site / "index.html").read_text())
    assert 'index-url https://index.example/whl/cu130/torch2.14/ "scaled-mask-softmax==1.0.0+cu130torch2.14"' in text


def test_a_copy_made_by_following_links_is_whole(tmp_path):
    site = tmp_path / "site"
    tags = ("cp311-cp311-linux_x86_64", "cp312-cp312-linux_x86_64")
    index.write(
        site, [make_wheel(tmp_path, label, tag) for label in ("cu130torch2.14", "cputorch2.14") for tag in tags]
    )
    index.write(site, [make_wheel(tmp_path, label=""), tiny_wheels.source(tmp_path)])
    found, left = set(), {site / "index.html"}
    while left:
        page = left.pop()
        found.add(page)
        for link in links(page) if page.suffix == ".html" else []:
            path = (page.parent / unquote(link["href"].partition("#")[0])).resolve()
            path = path / "index.html" if path.is_dir() else path
            assert path.is_file()
            left |= {path} - found
    assert found == {path for path in site.rglob("*") if path.is_file()}


def test_absolute_links(tmp_path):
    site, assets = tmp_path / "site", tmp_path / "assets"
    wheel = make_wheel(tmp_path)
    base = "https://files.example/v1.0.0/"
    found = index.Index(site)
    found.add(wheel, base_url=base, assets=assets)
    found.write()
    (link,) = links(site / "whl/cu130/torch2.14/scaled-mask-softmax/index.html")
    assert link["href"].startswith(f"{base}scaled_mask_softmax-1.0.0%2Bcu130torch2.14-py3-none-any.whl#sha256=")
    assert sorted(path.name for path in assets.iterdir()) == [wheel.name, f"{wheel.name}.metadata"]
    assert not list(site.rglob("*.whl"))
    # Another release beside it: the first is known from index.json alone.
    again = index.Index(site)
    again.add(make_wheel(tmp_path, tag="cp311-cp311-linux_x86_64"), base_url=base, assets=assets)
    again.write()
    assert len(links(site / "whl/cu130/torch2.14/scaled-mask-softmax/index.html")) == 2


def test_plain_files_that_lie_elsewhere(tmp_path):
    """As a release publishes them: on the index their addresses, and nothing else of them."""
    site, assets, base = tmp_path / "site", tmp_path / "assets", "https://files.example/v1.0.0/"
    plain, source = make_wheel(tmp_path, label=""), tiny_wheels.source(tmp_path)
    with index.update(site) as found:
        for path in (make_wheel(tmp_path), plain, source):
            found.add(path, base_url=base, assets=assets)
    assert {path.name for path in assets.glob("*1.0.0[-.]*")} == {plain.name, f"{plain.name}.metadata", source.name}
    (link,) = links(site / "plain/scaled-mask-softmax/index.html")
    assert link["href"].startswith(f"{base}{plain.name}#sha256=")
    hrefs = [link["href"] for link in links(site / "index.html")]
    assert {f"{base}{source.name}", f"{base}{plain.name}", f"{base}{plain.name}.metadata"} <= set(hrefs)
    read = channels.read(channels.Source(str(site)))
    assert [wheel.address for wheel in read["plain"]] == [f"{base}{plain.name}", f"{base}{source.name}"]
    assert not [*site.rglob("*.whl"), *site.rglob("*.tar.gz")]


def test_what_a_release_must_hold(tmp_path):
    wheel = make_wheel(tmp_path)
    other = wheel.name.replace("py3-none-any", "cp311-cp311-linux_x86_64")
    found = index.Index(tmp_path / "site")
    found.add(wheel)
    with pytest.raises(ChannelError, match=f"1 wheels of the release are missing, the first {re.escape(other)}"):
        found.expect([wheel.name, other], "1.0.0", allow_missing=False)
    with pytest.raises(ChannelError, match=r"is no wheel of release 1\.0\.0: the matrix has no such cell, or unproven"):
        found.expect([other], "1.0.0", allow_missing=True)
    found.expect([wheel.name, other], "1.0.0", allow_missing=True)
    found.write()
    assert json.loads((tmp_path / "site/index.json").read_text())["expected_missing"] == [other]
    # An older release's wheels are no part of this one.
    found.expect(["new.whl"], "1.1.0", allow_missing=True)


def test_the_command(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "release", "index", tmp_path / "site", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    wheel = make_wheel(tmp_path)
    assert run(wheel).stdout == f"{tmp_path / 'site/whl/cu130/torch2.14'}\n"
    assert run("--yank", "1.0.0", "--reason", "wrong rows").stdout == "withdrawn: 1 files of 1.0.0\n"
    done = run("--release", "complete")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is no wheel of release" in done.stderr


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
