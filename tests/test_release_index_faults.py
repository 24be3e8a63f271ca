"""The index under trouble: readers keep what they had, nothing is lost, the error says what to mend, and the same
command again completes the update."""

import contextlib
import errno
import functools
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from urllib.parse import unquote

import pytest

from release import ROOT, index
from release.index import ChannelError
from release.wheel_file import WheelFileError
from tests.test_release_index import files, links, make_wheel

NOBODY = 65534


def start(site, *arguments, **options):
    command = [sys.executable, "-m", "release", "index", site, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process):
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def large(folder, python, size=2**20):
    """A wheel of at least `size` bytes for CPython 3.`python`."""
    path = make_wheel(folder, tag=f"cp3{python}-cp3{python}-linux_x86_64")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("scaled_mask_softmax/data", os.urandom(size))
    return path


def check_links(site):
    """Every link of every page leads to the file that it names, with its hash and its metadata."""
    count = 0
    for page in site.glob("whl/**/index.html"):
        for link in links(page):
            target, _, digest = link["href"].partition("#sha256=")
            path = page.parent / unquote(target)
            assert path.exists()
            if digest:
                count += 1
                assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
                metadata = path.with_name(f"{path.name}.metadata").read_bytes()
                assert link["data-core-metadata"] == f"sha256={hashlib.sha256(metadata).hexdigest()}"
    return count


def leftovers(site):
    return [path.name for path in site.rglob(".*")]


def test_a_full_disk(tmp_path):
    """A file that the system refuses half way, as a full disk or a quota does."""
    site, small, big = tmp_path / "site", make_wheel(tmp_path), large(tmp_path, 11)
    index.write(site, [small])
    before = files(site)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, 2**19))

    code, errors = finish(start(site, big, preexec_fn=limit))
    assert code == 1
    assert errors.count("\n") == 1
    assert "File too large" in errors
    assert "still serves what it did; mend this and run the same command again" in errors
    assert files(site) == before
    assert leftovers(site) == []
    assert finish(start(site, big)) == (0, "")
    assert check_links(site) == 2


def test_a_disk_that_is_full_at_any_write(tmp_path, monkeypatch):
    site = tmp_path / "site"
    index.write(site, [make_wheel(tmp_path)])
    new = [large(tmp_path, 11, 100), make_wheel(tmp_path, "cu130torch2.15")]
    index.write(tmp_path / "whole", [*site.rglob("*.whl"), *new])
    real, done = os.fsync, 0
    for at in range(100):
        here, calls = tmp_path / f"site{at}", 0
        shutil.copytree(site, here)

        def full(descriptor, at=at):
            nonlocal calls
            calls += 1
            if calls > at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        monkeypatch.setattr("os.fsync", full)
        with contextlib.suppress(ChannelError):
            index.write(here, new)
            done = at
        assert check_links(here) >= 1
        assert leftovers(here) == []
        monkeypatch.setattr("os.fsync", real)
        index.write(here, new)
        assert files(here) == files(tmp_path / "whole")
        if done:
            break
    assert done >= 8
    monkeypatch.setattr("os.fsync", functools.partial(full, at=0))
    with pytest.raises(ChannelError, match=r"No space left on device\. The index below"):
        index.write(site, new)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ChannelError, match=r"file/site: Not a directory\. The index below"):
        index.write(tmp_path / "file/site", [make_wheel(tmp_path)])


def test_killed_half_way(tmp_path):
    """SIGKILL, with ever more of the update done; each time what readers see is whole, and nothing known is lost."""
    site = tmp_path / "site"
    wheels = [large(tmp_path, python, 3 * 2**20) for python in range(10, 22)]
    index.write(site, wheels[:1])
    known, killed = 1, 0
    for goal in range(2, len(wheels) + 1, 2):
        process = start(site, *wheels)
        while process.poll() is None and sum(1 for _ in site.rglob("*.whl")) < goal:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        process.communicate()
        assert check_links(site) >= known
        data = json.loads((site / "index.json").read_text())
        known = len(data["channels"]["whl/cu130/torch2.14"])
    assert killed >= 3
    assert finish(start(site, *wheels)) == (0, "")
    assert check_links(site) == len(wheels)
    assert leftovers(site) == []
    index.write(tmp_path / "whole", wheels)
    assert files(site) == files(tmp_path / "whole")


def test_many_at_once(tmp_path):
    """The wheels lie elsewhere, so that index.json alone knows them: a lost update could not be found again."""
    site = tmp_path / "site"
    wheels = [large(tmp_path, python, 100) for python in range(10, 16)]
    elsewhere = ["--base-url", "https://files.example/v1/", "--assets", tmp_path / "assets"]
    running = [start(site, wheel, *elsewhere) for wheel in wheels]
    ends = [finish(process) for process in running]
    assert [code for code, _ in ends] == [0] * len(wheels)
    assert {errors for _, errors in ends} <= {"", f"waiting for another update of {site}\n"}
    assert {entry.filename for entry in index.Index(site).entries()} == {wheel.name for wheel in wheels}
    assert len(links(site / "whl/cu130/torch2.14/scaled-mask-softmax/index.html")) == len(wheels)
    assert leftovers(site) == []


def test_an_update_waits_for_another(tmp_path):
    site = tmp_path / "site"
    with index.update(site) as found:
        process = start(site, make_wheel(tmp_path, "cu126torch2.14"))
        assert process.stderr.readline() == f"waiting for another update of {site}\n"
        found.add(make_wheel(tmp_path))
    assert finish(process) == (0, "")
    assert len(list(index.Index(site).entries())) == 2


@pytest.fixture
def shared():
    """A folder that other users reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def another_user():
    """Whom permissions bind: nobody, where the tests are root's."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("what", "mode"),
    [
        (".", 0o555),
        ("index.json", 0o000),
        ("whl/cu130/torch2.14/scaled-mask-softmax", 0o555),
        ("whl/cu130/torch2.14/scaled-mask-softmax/scaled_mask_softmax-1.0.0+cu130torch2.14-py3-none-any.whl", 0o000),
    ],
    ids=["folder", "index.json", "channel", "wheel"],
)
def test_files_of_another_user(shared, what, mode):
    site, new = shared / "site", make_wheel(shared, tag="cp311-cp311-linux_x86_64")
    index.write(site, [make_wheel(shared)])
    for folder in (site, *site.rglob("*")):
        folder.chmod(0o777 if folder.is_dir() else 0o666)
    before = files(site)
    (site / what).chmod(mode)
    with another_user(), pytest.raises(ChannelError, match="Permission denied") as error:
        index.write(site, [new])
    assert str(site) in str(error.value)
    assert "\n" not in str(error.value)
    (site / what).chmod(0o777)
    assert files(site) == before
    assert leftovers(site) == []
    with another_user():
        index.write(site, [new])
    assert check_links(site) == 2


def test_a_lock_that_another_user_left(shared):
    site, wheel = shared / "site", make_wheel(shared)
    site.mkdir()
    site.chmod(0o777)
    (site / ".lock").touch(0o444)
    with another_user(), pytest.raises(ChannelError, match=r"site/\.lock: Permission denied"):
        index.write(site, [wheel])
    (site / ".lock").chmod(0o644)
    index.write(site, [wheel])
    assert leftovers(site) == []


@pytest.mark.parametrize(
    "name",
    [
        "scaled_mask_softmax-1.0.0+cu130torch2.14-py3-none-any\n.whl",
        "scaled_mask_softmax-1.0.0+cu130torch2.14-py3-none-any.whl\n",
        "scaled_mask_softmax-1.0.0+cu130torch..-py3-none-any.whl",
        "scaled_mask_softmax-1.0.0+cu130torch2.14%2f..%2f..-py3-none-any.whl",
        "scaled_mask_softmax-1.0.0+cu130torch2.14<script>-py3-none-any.whl",
        'scaled_mask_softmax-1.0.0+cu130torch2.14-py3-none-any"onclick="x.whl',
        "scaled_mask_softmax-1.0.0+cu130torch2.14-..-none-any.whl",
        "scaled_mask_softmax-1.0.0+CU130torch2.14-py3-none-any.whl",
        "scaled_mask_softmax-1.0.0+cu130torch\u0662.14-py3-none-any.whl",
        "scaled_mask_softmax-\u0661.0.0+cu130torch2.14-py3-none-any.whl",
        "-scaled_mask_softmax-1.0.0+cu130torch2.14-py3-none-any.whl",
    ],
)
def test_hostile_names(tmp_path, name):
    """Refused even where METADATA agrees with the name; nothing is written."""
    version = name.split("-")[1]
    plain = make_wheel(tmp_path)
    with zipfile.ZipFile(plain) as archive:
        contents = {info.filename: archive.read(info) for info in archive.infolist()}
    info = "scaled_mask_softmax-1.0.0+cu130torch2.14.dist-info/METADATA"
    contents[info] = contents[info].replace(b"1.0.0+cu130torch2.14", version.encode())
    hostile = tmp_path / name
    with zipfile.ZipFile(hostile, "w") as archive:
        for file, text in contents.items():
            archive.writestr(file, text)
    with pytest.raises((ChannelError, WheelFileError)) as error:
        index.write(tmp_path / "site", [hostile])
    assert "\n" not in str(error.value).replace(str(hostile), "")
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Requires-Python: >=3.10", 'Requires-Python: >=3.10" onclick="alert(1)'),
        ("Requires-Python: >=3.10", "Requires-Python: <script>alert(1)</script>"),
        ("['9.0']", "['<img src=x onerror=alert(1)>']"),
        ("['9.0']", "7"),
        ("['9.0']", "{'9.0': 1}"),
        ("['9.0']", "__import__('os').system('touch ran')"),
    ],
)
def test_hostile_metadata(tmp_path, monkeypatch, old, new):
    monkeypatch.chdir(tmp_path)
    build = {"version": "1.0.0+cu130torch2.14", "architectures": ["9.0"], "ptx": []}
    plain, hostile = make_wheel(tmp_path, build=build), tmp_path / "hostile"
    hostile.mkdir()
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(hostile / plain.name, "w") as archive:
        texts = {info.filename: source.read(info).decode() for info in source.infolist()}
        assert any(old in text for text in texts.values())
        for file, text in texts.items():
            archive.writestr(file, text.replace(old, new))
    done = start(tmp_path / "site", hostile / plain.name)
    code, errors = finish(done)
    assert code == 1
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert not (tmp_path / "site").exists()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--yank", ""], "--yank is given no version"),
        (["--reason", "wrong rows"], "--reason is why --yank withdraws a version: give --yank VERSION too"),
        (["--base-url", "https://files.example/"], "--base-url says where the files of --assets will lie: give both"),
        (["--assets", "assets"], "--base-url says where the files of --assets will lie: give both"),
    ],
)
def test_options_that_would_do_nothing(tmp_path, arguments, message):
    site = tmp_path / "site"
    index.write(site, [make_wheel(tmp_path)])
    before = files(site)
    code, errors = finish(start(site, *arguments))
    assert code == 1
    assert errors.startswith(f"error: {message}")
    assert errors.count("\n") == 1
    assert files(site) == before


def test_a_folder_that_is_not_there_and_no_file(tmp_path):
    code, errors = finish(start(tmp_path / "sit"))
    assert code == 1
    assert errors == f"error: {tmp_path}/sit is no folder, and there is no FILE to lay out in it: give one of them\n"
    assert not (tmp_path / "sit").exists()


def test_an_index_json_that_is_gone(tmp_path):
    """It is not written anew: what was withdrawn would be offered again."""
    index.write(tmp_path, [make_wheel(tmp_path)])
    with index.update(tmp_path) as found:
        found.yank("1.0.0", "wrong rows")
    (tmp_path / "index.json").unlink()
    before = files(tmp_path)
    with pytest.raises(ChannelError, match=r"index\.json is gone, .*: put it back, or remove the pages too"):
        index.write(tmp_path, [])
    assert files(tmp_path) == before


def test_a_file_that_is_gone(tmp_path):
    """A page must not lead nowhere: the file is asked for, and taken."""
    site, wheel = tmp_path / "site", make_wheel(tmp_path)
    index.write(site, [wheel])
    before, (inside,) = files(site), site.rglob("*.whl")
    inside.unlink()
    code, errors = finish(start(site))
    assert code == 1
    assert errors == f"error: {inside} is gone, and pages link to it: put it back, or give its copy as a FILE\n"
    assert finish(start(site, wheel)) == (0, "")
    assert files(site) == before


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_text("other")])
def test_metadata_that_was_changed_comes_back(tmp_path, change):
    site = tmp_path / "site"
    index.write(site, [make_wheel(tmp_path)])
    (metadata,) = site.rglob("*.metadata")
    change(metadata)
    index.write(site, [])
    assert check_links(site) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["channels"].update({"../../out": []}), r"'\.\./\.\./out' is no channel"),
        (
            lambda data: data["channels"]["whl/cu130/torch2.14"].append(
                dict(data["channels"]["whl/cu130/torch2.14"][0])
            ),
            "has two entries of one file",
        ),
        (lambda data: data.update(expected_missing="abc"), "expected_missing are not names"),
        (lambda data: data["channels"]["whl/cu130/torch2.14"][0].update(filename=1), "1 is the name of no wheel"),
        (lambda data: data["channels"]["whl/cu130/torch2.14"][0].update(size="1"), "size is '1'"),
    ],
)
def test_an_index_json_with_wrong_values(tmp_path, change, message):
    site = tmp_path / "a/b/site"
    index.write(site, [make_wheel(tmp_path)])
    data = json.loads((site / "index.json").read_text())
    change(data)
    (site / "index.json").write_text(json.dumps(data))
    before = files(tmp_path)
    with pytest.raises(
        ChannelError, match=rf"index\.json is none of ours: .*{message}.*Put back the one that was here"
    ):
        index.write(site, [])
    assert files(tmp_path) == before


def test_an_index_json_that_nests_too_deep(tmp_path):
    (tmp_path / "index.json").write_text("[" * 100_000)
    with pytest.raises(ChannelError, match=r"index\.json is none of ours: RecursionError"):
        index.write(tmp_path, [])


def test_a_folder_whose_name_is_no_text(tmp_path):
    site = tmp_path / os.fsdecode(b"\xff")
    assert finish(start(site, make_wheel(tmp_path))) == (0, "")
    assert check_links(site) == 1


@pytest.mark.parametrize("reason", ["\udcff", "wrong\nrows", "wrong\0rows"])
def test_a_reason_that_is_no_line_of_text(tmp_path, reason):
    site = tmp_path / "site"
    index.write(site, [make_wheel(tmp_path)])
    before = files(site)
    with pytest.raises(ChannelError, match="is no line of text"), index.update(site) as found:
        found.yank("1.0.0", reason)
    assert files(site) == before


def test_what_cannot_be_written_leaves_all_as_it_was(tmp_path):
    """No page is written where one of them cannot be."""
    site = tmp_path / "site"
    index.write(site, [make_wheel(tmp_path)])
    before = files(site)
    found = index.Index(site)
    found.add(make_wheel(tmp_path, "cputorch2.14"))
    found.missing = ["\udcff"]
    with pytest.raises(ChannelError, match=r"'\\udcff' cannot be written as UTF-8"):
        found.write()
    assert files(site) == before


def test_a_path_that_is_empty(tmp_path):
    code, errors = finish(start("", make_wheel(tmp_path)))
    assert code == 2
    assert "the path is empty: name a folder, such as . for this one" in errors
    assert not (ROOT / "index.json").exists()
