"""install and download under trouble: nothing is lost, nothing half is taken for whole, and each time a clear word."""

from __future__ import annotations

import contextlib
import email.utils
import gzip
import hashlib
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_wheels
from faulty_server import CERTIFICATE, Server, proxy, serve
from finder_target import FULL, INSTALLERS, Target

from release import ROOT, index
from scaled_mask_softmax_cli import channels, fetch
from scaled_mask_softmax_cli.channels import Source, may_lead
from scaled_mask_softmax_cli.status import Failure

SIZE = 1_000_000
CHANNEL = "whl/cu130/torch2.14"
WHEEL = f"scaled_mask_softmax-{FULL}-py3-none-any.whl"


def build(folder: Path, seed: int = 0) -> Path:
    return tiny_wheels.wheel(folder / f"wheels{seed}", FULL, payload=random.Random(seed).randbytes(SIZE))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    index.write(tmp_path / "site", [build(tmp_path)])
    return tmp_path / "site"


@pytest.fixture
def server(site: Path) -> Iterator[Server]:
    with serve(site) as server:
        yield server


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target(tmp_path / "target")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "carried"


def there(folder: Path) -> bool:
    """Whether the folder has the wheel, whole, and an index of it."""
    path = folder / CHANNEL / channels.PROJECT / WHEEL
    if not path.exists():
        assert not (folder / channels.DATA).exists()
        return False
    (entry,) = json.loads((folder / channels.DATA).read_text())["channels"][CHANNEL]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
    assert not list(folder.rglob("*.part"))
    return True


def part(folder: Path) -> Path:
    return folder / CHANNEL / channels.PROJECT / f".{WHEEL}.part"


# The server goes away


def test_a_server_that_goes_away_again_and_again(server: Server, target: Target, folder: Path) -> None:
    """Each time the download goes on where it stopped."""
    server.fault(".whl", drop=(150_000, 5))
    done = target.run("download", "--index", server.address, folder)
    assert done.returncode == 0, done.stderr
    assert there(folder)
    asked = server.ranges(".whl")
    assert asked == ["", *(f"bytes={150_000 * n}-" for n in range(1, 6))]
    assert done.stderr.count("trying again") == 5


def test_a_server_that_is_gone_and_comes_back(server: Server, target: Target, folder: Path) -> None:
    server.fault(".whl", drop=(1, 0), status=(503, 9))
    done = target.run("download", "--index", server.address, folder)
    assert done.returncode == 6
    assert "answers 503" in done.stderr
    assert not there(folder)
    server.faults.clear()
    server.fault(".whl", drop=(400_000, 1))
    server.fault("nothing")
    process = target.start("download", "--index", server.address, folder)
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert there(folder)


def test_what_was_fetched_is_kept_for_the_next_time(server: Server, target: Target, folder: Path) -> None:
    """After so many failures in one place the command gives up; the same command goes on."""
    server.fault(".whl", stall=300_000)
    done = target.run("download", "--index", server.address, "--timeout", "1", folder)
    assert done.returncode == 6
    assert "0.3 MB are kept, and the same command goes on from there" in done.stderr
    kept = part(folder).stat().st_size
    assert 200_000 < kept <= 300_000
    assert not there(folder)
    server.go.set()
    server.faults.clear()
    server.asked.clear()
    done = target.run("download", "--index", server.address, folder)
    assert done.returncode == 0, done.stderr
    assert there(folder)
    assert server.ranges(".whl") == [f"bytes={kept}-"]


@pytest.mark.parametrize("ranges", ["none", "wrong"])
def test_a_server_without_ranges(ranges: str, server: Server, target: Target, folder: Path) -> None:
    """One that sends the whole is taken from the start; one that sends another part is not believed."""
    part(folder).parent.mkdir(parents=True)
    part(folder).write_bytes(build(folder.parent).read_bytes()[:200_000])
    server.fault(".whl", ranges=ranges)
    done = target.run("download", "--index", server.address, folder)
    assert done.returncode == (0 if ranges == "none" else 6), done.stderr
    assert there(folder) is (ranges == "none")


@pytest.mark.parametrize("beginning", [b"x" * 200_000, b"x" * SIZE * 2], ids=["shorter", "longer"])
def test_a_beginning_of_another_file(beginning: bytes, server: Server, target: Target, folder: Path) -> None:
    """The whole is fetched once more."""
    part(folder).parent.mkdir(parents=True)
    part(folder).write_bytes(beginning)
    done = target.run("download", "--index", server.address, folder)
    assert done.returncode == 0, done.stderr
    assert there(folder)


def test_no_server(target: Target, folder: Path) -> None:
    done = target.run("download", "--index", "http://127.0.0.1:1", folder)
    assert done.returncode == 6
    assert "http://127.0.0.1:1/index.json cannot be reached: " in done.stderr
    assert not folder.exists()


def test_the_progress_bar(server: Server, target: Target, folder: Path) -> None:
    """On a terminal."""
    ours, theirs = os.openpty()
    command = target.command("download", "--index", server.address, folder)
    done = subprocess.run(command, env=target.environment(), stdout=subprocess.DEVNULL, stderr=theirs, timeout=300)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0
    assert f"\r[{'#' * 30}] 1.0 MB of 1.0 MB  {WHEEL}" in shown


def test_a_server_that_never_answers(server: Server, target: Target, folder: Path) -> None:
    server.fault("index.json", stall=0)
    started = time.monotonic()
    done = target.run("channels", "--index", server.address, "--timeout", "0.5")
    assert done.returncode == 6
    assert "timed out" in done.stderr
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize("path", ["index.json", ".whl"])
def test_a_busy_server(path: str, code: int, server: Server, target: Target, folder: Path) -> None:
    """It is asked again when it says; where that is too long, the command says how long and ends."""
    server.fault(path, status=(code, 1), headers={"Retry-After": "1"})
    started = time.monotonic()
    done = target.run("download", "--index", server.address, folder)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started > 1
    assert there(folder)
    shutil.rmtree(folder)
    later = email.utils.formatdate(time.time() + 7200, usegmt=True)
    for wait, seconds in ("3600", "3600"), (later, "7[12]\\d\\d"):
        server.fault(path, status=(code, 1), headers={"Retry-After": wait})
        started = time.monotonic()
        done = target.run("download", "--index", server.address, folder)
        assert done.returncode == 6
        assert re.search(rf"answers {code} .* and asks to come back in {seconds} s$", done.stderr.strip())
        assert time.monotonic() - started < 30
        assert not there(folder)


def test_a_server_that_trickles(server: Server, target: Target) -> None:
    """Each piece of it comes in time, the whole never."""
    server.fault("index.json", slow=0.1, piece=1)
    done = target.run("channels", "--index", server.address, "--timeout", "0.2")
    assert done.returncode == 6
    assert re.search(r"index\.json is too slow: \d+ bytes in 2 s; a larger --timeout waits longer", done.stderr)


def test_a_server_that_wants_a_login(server: Server, target: Target) -> None:
    for code in (401, 403):
        server.fault("index.json", status=(code, 1))
        done = target.run("channels", "--index", server.address)
        assert done.returncode == 6
        assert f"answers {code} " in done.stderr
        assert "give the login as https://NAME:PASSWORD@HOST/" in done.stderr


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"<html>log in to the hotel first</html>", "(it begins '<html>log in to the hotel first</html>')"),
        (b"", "(it begins '')"),
        (b"[" * 200_000, "(it begins '[[["),
        (b"\xff\x00\x1b[2J", "is no index of this project"),
        (b'{"channels": {"whl/cu130/torch2.14": [{"size": ' + b"9" * 5000 + b"}]}}", "is no index of this project"),
    ],
)
def test_another_page_than_an_index(data: bytes, text: str, server: Server, target: Target) -> None:
    server.fault("index.json", replace=data)
    done = target.run("channels", "--index", server.address)
    assert done.returncode == 6
    assert text in done.stderr
    assert "\x1b" not in done.stderr


def test_an_index_that_is_cut_off(server: Server, target: Target) -> None:
    server.fault("index.json", drop=(100, 1))
    done = target.run("channels", "--index", server.address)
    assert done.returncode == 6
    assert re.search(r"index\.json ended after 100 of \d+ bytes; repeat the command", done.stderr)


@pytest.mark.parametrize("path", ["index.json", ".whl"])
def test_an_answer_in_another_encoding(path: str, server: Server, target: Target, folder: Path) -> None:
    server.fault(path, headers={"Content-Encoding": "gzip"}, replace=gzip.compress(b"{}"))
    done = target.run("download", "--index", server.address, folder)
    assert done.returncode == 6
    assert "comes in the encoding gzip, which was not asked for" in done.stderr
    assert not there(folder)


def test_a_giant_index(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_MAX_INDEX", 100)
    with pytest.raises(Failure, match="is larger than any index of this project") as caught:
        channels.read(Source(server.address))
    assert caught.value.status == 7


def test_a_certificate_of_its_own(site: Path, target: Target, folder: Path) -> None:
    """Refused with the way to trust it; with that, it works."""
    with serve(site, tls=True) as server:
        done = target.run("download", "--index", server.address, folder)
        assert done.returncode == 6
        assert re.search("certificate verify failed: self.signed certificate", done.stderr)
        assert "where a proxy or a mirror has its own certificate, set SSL_CERT_FILE to it" in done.stderr
        assert not folder.exists()
        done = target.run("download", "--index", server.address, folder, SSL_CERT_FILE=str(CERTIFICATE))
        assert done.returncode == 0, done.stderr
        assert there(folder)
        for installer in INSTALLERS:
            arguments = ("install", "--index", server.address, "--installer", installer)
            done = target.run(*arguments, SSL_CERT_FILE=str(CERTIFICATE))
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="this machine has no IPv6")
def test_an_address_of_ipv6(site: Path, target: Target, folder: Path) -> None:
    with serve(site, "::1") as server:
        assert "//[::1]:" in server.address
        done = target.run("download", "--index", server.address, folder, NO_PROXY="::1")
        assert done.returncode == 0, done.stderr
        assert there(folder)


# The file is not what the index says


def test_a_truncated_wheel(server: Server, target: Target, folder: Path) -> None:
    whole = build(folder.parent).read_bytes()
    server.fault(".whl", replace=whole[:500_000])
    done = target.run("download", "--index", server.address, folder)
    assert done.returncode == 6
    assert f"there are no more than 500000 of {len(whole)} bytes; 0.5 MB are kept" in done.stderr
    assert not there(folder)
    # The rest came later: it is fetched alone.
    server.faults.clear()
    server.asked.clear()
    assert target.run("download", "--index", server.address, folder).returncode == 0
    assert there(folder)
    assert server.ranges(".whl") == ["bytes=500000-"]


def test_a_wrong_hash(server: Server, target: Target, folder: Path) -> None:
    other = bytearray(build(folder.parent).read_bytes())
    other[len(other) // 2] ^= 1
    server.fault(".whl", replace=bytes(other))
    done = target.run("download", "--index", server.address, folder)
    assert done.returncode == 7
    assert f"{WHEEL} has another sha256 than the index says, and was thrown away" in done.stderr
    assert not there(folder)
    assert not part(folder).exists()


def test_a_wheel_that_does_not_end(server: Server, target: Target, folder: Path) -> None:
    server.fault(".whl", replace=build(folder.parent).read_bytes() * 20)
    done = target.run("download", "--index", server.address, folder)
    assert done.returncode == 7
    assert "is longer than the" in done.stderr
    assert not there(folder)
    assert part(folder).stat().st_size <= SIZE + 10_000


@pytest.mark.parametrize("installer", INSTALLERS)
def test_install_of_a_wrong_hash(installer: str, server: Server, target: Target, folder: Path) -> None:
    target.unpack("1.0.0")
    other = bytearray(build(folder.parent).read_bytes())
    other[len(other) // 2] ^= 1
    server.fault(".whl", replace=bytes(other))
    done = target.run("install", "--index", server.address, "--installer", installer)
    assert done.returncode == 7, done.stdout + done.stderr
    assert "the wheel is not the one that the index names" in done.stderr
    assert target.installed["scaled-mask-softmax"] == "1.0.0"


@pytest.mark.parametrize("installer", INSTALLERS)
def test_install_from_a_server_that_goes_away(installer: str, server: Server, target: Target) -> None:
    """What was installed before is as it was; repeated, it installs."""
    target.unpack("1.0.0")
    # So little of it that a pip that goes on by itself, five times, does not come to its end.
    server.fault(".whl", drop=(50_000, 99))
    done = target.run("install", "--index", server.address, "--installer", installer)
    assert done.returncode in (6, 7), done.stdout + done.stderr
    assert "What was installed before is as it was." in done.stderr
    assert target.installed["scaled-mask-softmax"] == "1.0.0"
    server.faults.clear()
    done = target.run("install", "--index", server.address, "--installer", installer)
    assert done.returncode == 0, done.stdout + done.stderr
    assert target.installed["scaled-mask-softmax"] == FULL


@pytest.mark.parametrize("installer", INSTALLERS)
@pytest.mark.parametrize("code", [503, 404])
@pytest.mark.parametrize("listed", [True, False])
def test_install_from_a_channel_that_fails(
    listed: bool, code: int, installer: str, server: Server, site: Path, target: Target
) -> None:
    """What index.json lists is not on the channel's page: the index is in trouble. Unlisted, it may not be there."""
    if not listed:
        (site / channels.DATA).unlink()
    server.fault(f"/{channels.PROJECT}/", status=(code, 99))
    done = target.run("install", "--index", server.address, "--installer", installer)
    assert done.returncode in ({6} if listed else {5, 6}), done.stdout + done.stderr


@pytest.mark.parametrize("installer", INSTALLERS)
def test_a_rebuilt_wheel_behind_a_cache(
    installer: str, server: Server, site: Path, target: Target, tmp_path: Path
) -> None:
    """The same name with other contents: caches that keep the old file for a day are passed by, in the folder too."""
    server.fault(".whl", headers={"Cache-Control": "max-age=86400", "ETag": '"old"'})
    carried = tmp_path / "carried"
    variables = {"PIP_CACHE_DIR": str(tmp_path / "cache"), "UV_CACHE_DIR": str(tmp_path / "cache")}
    for seed in (0, 1):
        wheel = build(tmp_path, seed)
        index.write(site, [wheel], may_replace=True)
        done = target.run("install", "--index", server.address, "--installer", installer, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        assert target.has(wheel)
        assert target.run("download", "--index", server.address, carried).returncode == 0
        assert there(carried)
        assert (carried / CHANNEL / channels.PROJECT / WHEEL).read_bytes() == wheel.read_bytes()


def test_a_mirror_that_is_behind(server: Server, site: Path, target: Target, tmp_path: Path) -> None:
    """Its page is new and its file old."""
    old = (site / CHANNEL / channels.PROJECT / WHEEL).read_bytes()
    index.write(site, [build(tmp_path, 1)], may_replace=True)
    server.fault(".whl", replace=old)
    assert target.run("install", "--index", server.address).returncode == 7
    assert target.run("download", "--index", server.address, tmp_path / "carried").returncode == 7
    assert not there(tmp_path / "carried")


# Writing fails


def small_files() -> None:
    """No file of this process grows over 400 kB, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))


def test_a_full_disk(server: Server, target: Target, folder: Path) -> None:
    done = target.run("download", "--index", server.address, folder, before=small_files)
    assert done.returncode == 8
    assert "cannot be written: File too large: raise the limit" in done.stderr
    assert not there(folder)
    kept = part(folder).stat().st_size
    server.asked.clear()
    assert target.run("download", "--index", server.address, folder).returncode == 0
    assert there(folder)
    assert server.ranges(".whl") == [f"bytes={kept}-"]


def test_a_disk_without_room(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before anything is fetched."""
    source = Source(server.address)
    found = channels.read(source)
    assert found is not None
    usage = shutil.disk_usage(folder.parent)._replace(free=1000)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage)
    folder.mkdir()
    with pytest.raises(
        Failure, match=r"has 0\.0 MB free, and scaled_mask_softmax-\S+ takes 1\.0 MB: free some"
    ) as caught:
        fetch.fetch(source, found[CHANNEL][0], folder)
    assert caught.value.status == 8
    assert list(folder.iterdir()) == []
    assert server.ranges(".whl") == []


@pytest.mark.parametrize("code", [28, 122, 30])
def test_words_for_disks_that_refuse(code: int, tmp_path: Path) -> None:
    failure = fetch.not_written(tmp_path / "file", OSError(code, os.strerror(code)))
    assert failure.status == 8
    assert (": free some space and repeat" if code != 30 else ": give a folder on another") in str(failure)


@pytest.mark.parametrize("installer", INSTALLERS)
def test_install_on_a_full_disk(installer: str, server: Server, target: Target) -> None:
    target.unpack("1.0.0")
    done = target.run("install", "--index", server.address, "--installer", installer, before=small_files)
    assert done.returncode == 8, done.stdout + done.stderr
    assert "the disk is full, or a limit on files is reached" in done.stderr
    assert target.installed["scaled-mask-softmax"] == "1.0.0"
    assert target.run("install", "--index", server.address, "--installer", installer).returncode == 0
    assert target.installed["scaled-mask-softmax"] == FULL


_AS_NOBODY = """
import os, sys
import encodings.cp437, encodings.idna, getpass, sysconfig, tarfile, zipfile
from scaled_mask_softmax_cli import __main__
sysconfig.get_config_vars()
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sys.exit(__main__.main(sys.argv[1:]))
"""


def as_nobody(target: Target, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the command without root's rights, which stop at no folder. (The Python may be root's alone, so it is root
    that starts it.)
    """
    words = [str(argument) for argument in arguments]
    return subprocess.run(
        [target.python, "-c", _AS_NOBODY, *words],
        env=target.environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter."""
    folder = Path("/tmp") / f"sms-test-{os.getpid()}-{random.randrange(10**9)}"
    folder.mkdir(mode=0o755)
    yield folder
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(folder)


def test_a_read_only_folder_and_files_of_another_user(server: Server, open_folder: Path) -> None:
    """Whose the folder is belongs to the message."""
    folder, target = open_folder / "carried", Target(open_folder / "target")
    assert target.run("download", "--index", server.address, folder).returncode == 0
    wheel = folder / CHANNEL / channels.PROJECT / WHEEL
    before = wheel.read_bytes()
    wheel.write_bytes(b"older")
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    owner = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    done = as_nobody(target, "download", "--index", server.address, folder)
    assert done.returncode == 8, done.stdout + done.stderr
    assert f"cannot be written: Permission denied ({wheel.parent} belongs to {owner})" in done.stderr
    assert wheel.read_bytes() == b"older"
    done = as_nobody(target, "download", "--index", server.address, folder / "below")
    assert done.returncode == 8
    assert f"({folder} belongs to {owner}): give another folder" in done.stderr
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    assert target.run("download", "--index", server.address, folder).returncode == 0
    assert wheel.read_bytes() == before


def test_install_into_an_environment_of_another_user(server: Server, open_folder: Path) -> None:
    """Nothing is started, and the environment is as it was."""
    target = Target(open_folder / "target", copy_pip=True)
    target.unpack("1.0.0")
    target.site.chmod(0o555)
    done = as_nobody(target, "install", "--index", server.address)
    target.site.chmod(0o755)
    assert done.returncode == 8, done.stdout + done.stderr
    assert f"{target.site} cannot be written (" in done.stderr
    assert target.installed["scaled-mask-softmax"] == "1.0.0"


def test_a_wheel_that_this_user_may_not_read(server: Server, open_folder: Path) -> None:
    """Another user's file in a folder that this one may write is replaced."""
    folder, target = open_folder / "carried", Target(open_folder / "target")
    assert target.run("download", "--index", server.address, folder).returncode == 0
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    wheel = folder / CHANNEL / channels.PROJECT / WHEEL
    wheel.chmod(0o000)
    done = as_nobody(target, "download", "--index", server.address, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert there(folder)


def test_a_doctor_that_may_not_read(open_folder: Path) -> None:
    """Another user's files, and a folder on LD_LIBRARY_PATH that may not be listed."""
    target, closed = Target(open_folder / "target", copy_pip=True), open_folder / "closed"
    closed.mkdir(mode=0o000)
    info = next(target.site.glob("torch-*.dist-info"))
    (info / "INSTALLER").touch(0o000)
    variables = {"LD_LIBRARY_PATH": str(closed), "HOME": str(closed)}
    done = as_nobody(target, "doctor", "--no-import", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    version = target.site / "torch/version.py"
    version.chmod(0o000)
    done = as_nobody(target, "doctor", "--no-import", **variables)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"torch at {version.parent} is broken: its version.py cannot be read (Permission denied)." in done.stdout
    done = as_nobody(target, "install", "--dry-run", "--index", "/nowhere", **variables)
    assert done.returncode == 2
    assert f"torch at {version.parent} is broken: its version.py cannot be read (Permission denied)" in done.stderr


# The command's own output, and where it stands


def test_output_on_a_full_disk(site: Path, target: Target) -> None:
    for arguments in (["channels", "--index", site], ["doctor", "--no-import"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                target.command(*arguments), env=target.environment(), stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert done.returncode == 8
        assert done.stderr == (
            f"scaled-mask-softmax {arguments[0]}: the output cannot be written: [Errno 28] No space left on device\n"
        )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams(closed: str, server: Server, target: Target, folder: Path) -> None:
    command = " ".join(shlex.quote(str(word)) for word in target.command("download", "--index", server.address, folder))
    done = subprocess.run(["sh", "-c", f"{command} {closed}"], env=target.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert there(folder)


def test_letters_that_the_terminal_lacks(site: Path, target: Target) -> None:
    """Text of an index in an encoding without its letters."""
    change(site, yanked="größer als 断")
    done = target.run("channels", "--index", site, PYTHONIOENCODING="ascii:strict")
    assert done.returncode == 0
    assert "(withdrawn: gr\\xf6\\xdfer als \\u65ad)" in done.stdout


def test_a_folder_that_is_gone(site: Path, target: Target, tmp_path: Path) -> None:
    """A batch system may remove the folder in which a shell still stands."""
    gone = tmp_path / "gone"
    gone.mkdir()
    for arguments, status, text in [
        (["download", "--index", str(site), "x"], 8, "x is no folder here ("),
        (["channels", "--index", "x"], 6, "x is no folder"),
        (["doctor", "--no-import"], 0, ""),
        (["install", "--dry-run", "--index", str(site)], 0, ""),
    ]:
        words = " ".join(shlex.quote(str(word)) for word in target.command(*arguments))
        script = f"mkdir -p {gone}; cd {gone}; rmdir {gone}; exec {words}"
        done = subprocess.run(["sh", "-c", script], env=target.environment(), capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
        assert text in done.stderr


def test_a_home_that_nobody_knows(site: Path, open_folder: Path) -> None:
    """~ where neither HOME nor the users' table tells what it is."""
    target = Target(open_folder / "target")
    for arguments in (["channels", "--index", "~no-such-user/x"], ["download", "--index", site, "~no-such-user/x"]):
        done = target.run(*arguments)
        assert done.returncode in (6, 8)
        assert "~no-such-user/x is no folder" in done.stderr


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e9", "soon"])
def test_a_timeout_that_is_none(seconds: str, target: Target) -> None:
    done = target.run("channels", f"--timeout={seconds}")
    assert done.returncode == 2
    assert f"{seconds!r} is no number of seconds above 0, such as 30" in done.stderr


# Two at once, and killed half way


def read_until(text: str, process: subprocess.Popen[str]) -> None:
    """Reads what a process says of errors, up to the line that has `text`."""
    assert process.stderr is not None
    assert any(text in line for line in process.stderr)


def test_two_downloads_at_once(server: Server, target: Target, folder: Path) -> None:
    """The second waits, says so, and finds the first one's files."""
    server.fault(".whl", hold=600_000)
    folder.mkdir()
    arguments = ("download", "--index", server.address, folder)
    first = target.start(*arguments, "--timeout", "600")
    assert server.stalled.wait(300)
    second = target.start(*arguments)
    read_until("waiting: another process fills", second)
    server.go.set()
    said = [process.communicate(timeout=300) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert there(folder)
    assert len(server.ranges(".whl")) == 1
    assert "was there already" not in said[0][0]
    assert "was there already" in said[1][0]


@pytest.mark.parametrize("installer", INSTALLERS)
def test_two_installs_at_once(installer: str, server: Server, target: Target) -> None:
    server.fault(".whl", hold=600_000)
    arguments = ("install", "--index", server.address, "--installer", installer)
    patient = {"PIP_DEFAULT_TIMEOUT": "600", "UV_HTTP_TIMEOUT": "600"}
    first = target.start(*arguments, **patient)
    assert server.stalled.wait(300)
    others = [target.start(*arguments, **patient) for _ in range(2)]
    for process in others:
        read_until("waiting: another process installs into", process)
    server.go.set()
    all_three = (first, *others)
    said = [process.communicate(timeout=300) for process in all_three]
    assert [process.returncode for process in all_three] == [0, 0, 0], said
    assert target.installed["scaled-mask-softmax"] == FULL
    assert target.has(build(target.folder.parent))


def kill(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_download_that_is_killed_and_repeated(server: Server, target: Target, folder: Path) -> None:
    server.fault(".whl", stall=600_000)
    process = target.start("download", "--index", server.address, folder)
    assert server.stalled.wait(300)
    deadline = time.monotonic() + 300
    while not part(folder).exists() or part(folder).stat().st_size < 300_000:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kill(process)
    assert not there(folder)
    kept = part(folder).stat().st_size
    server.go.set()
    server.faults.clear()
    server.asked.clear()
    assert target.run("download", "--index", server.address, folder).returncode == 0
    assert there(folder)
    assert server.ranges(".whl") == [f"bytes={kept}-"]


@pytest.mark.parametrize("installer", INSTALLERS)
def test_an_install_that_is_killed_and_repeated(installer: str, server: Server, target: Target) -> None:
    target.unpack("1.0.0")
    server.fault(".whl", stall=600_000)
    arguments = ("install", "--index", server.address, "--installer", installer)
    process = target.start(*arguments)
    assert server.stalled.wait(300)
    kill(process)
    assert target.installed["scaled-mask-softmax"] == "1.0.0"
    server.go.set()
    server.faults.clear()
    done = target.run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert target.installed["scaled-mask-softmax"] == FULL


@pytest.mark.parametrize("installer", INSTALLERS)
def test_the_remains_of_an_install_that_was_killed_while_it_wrote(
    installer: str, server: Server, target: Target
) -> None:
    """Metadata without RECORD, which pip refuses to replace, and the folders that it had put aside."""
    target.unpack("1.0.0")
    (target.site / "scaled_mask_softmax-1.0.0.dist-info/RECORD").unlink()
    aside = target.site / "~caled_mask_softmax"
    aside.mkdir()
    if installer == "pip":
        refused = [
            target.python,
            "-m",
            "pip",
            "install",
            "--force-reinstall",
            "--no-deps",
            "--no-index",
            build(target.folder),
        ]
        done = subprocess.run(refused, env=target.environment(), capture_output=True, text=True)
        assert done.returncode != 0
        assert "RECORD" in done.stderr
        # The way out where this command is gone too.
        again = [target.python, "-m", "pip", "install", "--ignore-installed", "--no-deps", "--no-index"]
        subprocess.run([*again, build(target.folder)], env=target.environment(), capture_output=True, check=True)
        assert target.has(build(target.folder))
        assert target.run("doctor", "--no-import").returncode == 1
    done = target.run("install", "--index", server.address, "--installer", installer)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the remains of an installation that was cut off" in done.stdout
    assert target.installed == {"torch": "2.14.1", "scaled-mask-softmax": FULL}
    assert not aside.exists()


# Between here and the server


def test_a_proxy(server: Server, target: Target, folder: Path) -> None:
    with proxy(server.address) as between:
        for name in ("http_proxy", "HTTP_PROXY"):
            variables = {name: between.address, "NO_PROXY": "", "no_proxy": ""}
            if name == "HTTP_PROXY":
                # urllib reads it too; pip and curl take the lower case one alone for http.
                shutil.rmtree(folder)
            done = target.run("download", "--index", "http://index.example", folder, **variables)
            assert done.returncode == 0, done.stderr
            assert there(folder)
    assert any(path.endswith(urllib.parse.quote(WHEEL)) for path in between.asked)


def test_install_through_a_proxy(server: Server, target: Target) -> None:
    with proxy(server.address) as between:
        done = target.run(
            "install", "--index", "http://index.example", http_proxy=between.address, PIP_TRUSTED_HOST="index.example"
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert target.installed["scaled-mask-softmax"] == FULL


def test_plain_http_that_pip_does_not_take(server: Server, target: Target) -> None:
    """pip's word for it is one of the channel; the way out is another."""
    with proxy(server.address) as between:
        arguments = ("install", "--index", "http://index.example", "--installer", "pip")
        done = target.run(*arguments, http_proxy=between.address)
    assert done.returncode == 6, done.stdout + done.stderr
    assert "pip takes nothing over plain http unless PIP_TRUSTED_HOST names the host" in done.stderr


def test_a_proxy_that_is_not_there(server: Server, target: Target, folder: Path) -> None:
    dead = {"http_proxy": "http://127.0.0.1:1", "NO_PROXY": "", "no_proxy": ""}
    done = target.run("download", "--index", server.address, folder, **dead)
    assert done.returncode == 6
    assert "(http_proxy is set: look at that proxy too)" in done.stderr
    # Hosts that the environment names are asked directly.
    dead["no_proxy"] = "127.0.0.1"
    assert target.run("download", "--index", server.address, folder, **dead).returncode == 0


def test_a_password_goes_to_its_host_alone(site: Path, target: Target, folder: Path) -> None:
    """It is sent, shown to nobody, and not sent along with a redirect to another host."""
    with serve(site) as first, serve(site) as other:
        address = first.address.replace("//", "//me:sec%20ret@")
        done = target.run("download", "--index", address, folder)
        assert done.returncode == 0, done.stderr
        assert set(first.logins) == {"Basic bWU6c2VjIHJldA=="}
        done = target.run("install", "--dry-run", "--index", address)
        assert "sec%20ret" not in done.stdout + done.stderr
        assert "=http://***@127.0.0.1" in done.stdout
        entry = json.loads((site / channels.DATA).read_text())
        entry["channels"][CHANNEL][0]["url"] = (
            f"{other.address}/{CHANNEL}/{channels.PROJECT}/{urllib.parse.quote(WHEEL)}"
        )
        (site / channels.DATA).write_text(json.dumps(entry))
        done = target.run("download", "--index", address, folder.with_name("second"))
        assert done.returncode == 7
        assert other.asked == []


@pytest.mark.parametrize("installer", INSTALLERS)
def test_a_password_is_in_no_arguments(installer: str, server: Server, target: Target) -> None:
    """Those of a program are seen by every user of the machine, so the installer gets it another way."""
    server.fault(".whl", stall=300_000)
    variables = {"SCALED_MASK_SOFTMAX_INDEX": server.address.replace("//", "//me:sec%20ret@")}
    process = target.start("install", "--installer", installer, **variables)
    assert server.stalled.wait(300)
    arguments = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(path.parent.name)) == process.pid:
                arguments.append(path.read_bytes())
    assert any(b"scaled-mask-softmax==" in line for line in arguments)
    assert not any(b"sec" in line for line in arguments)
    server.go.set()
    server.faults.clear()
    output, errors = process.communicate(timeout=300)
    assert "sec%20ret" not in output + errors
    done = target.run("install", "--installer", installer, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sec%20ret" not in done.stdout
    assert "Basic bWU6c2VjIHJldA==" in server.logins
    assert target.installed["scaled-mask-softmax"] == FULL


@pytest.mark.parametrize(
    "address",
    [
        "https://me:secret#1@127.0.0.1:1/",
        "https://me:secret/1@127.0.0.1:1/",
        "https://me:secret?1@127.0.0.1:1/",
        "https://me:secret 1@127.0.0.1:1/",
        "https://me:secret@[::1",
        "https://me:secret@127.0.0.1:99999/",
        "https://me:secret@",
        "HTTPS://me:secret@127.0.0.1:1/",
        "https://me:sec@secret@127.0.0.1:1/",
        "ftp://me:secret@host/",
        "me:secret@host/x",
        "git+https://me:secret@host/x",
    ],
)
def test_a_password_that_makes_no_address_is_not_shown(address: str, target: Target) -> None:
    for given in ({}, {"SCALED_MASK_SOFTMAX_INDEX": address}):
        done = target.run("channels", *([] if given else ["--index", address]), **given)
        assert done.returncode == 6
        assert "secret" not in done.stdout + done.stderr
    doctor = target.run("doctor", "--no-import", SCALED_MASK_SOFTMAX_INDEX=address)
    assert "secret" not in doctor.stdout


@pytest.mark.parametrize(
    "address", ["https://", "http:127.0.0.1", "http://127.0.0.1:1/\nx", "http://host:port/", "file://host/x"]
)
def test_what_is_no_address(address: str, target: Target) -> None:
    done = target.run("channels", "--index", address)
    assert done.returncode == 6
    assert "is no address" in done.stderr or "a file: address has none" in done.stderr
    assert done.stderr.count("\n") == 1


# An index that means harm


def change(site: Path, channel: str | None = None, **fields: Any) -> None:
    """Lets the index describe the wheel in another way."""
    path = site / channels.DATA
    data = json.loads(path.read_text())
    entry = data["channels"].pop(CHANNEL)[0]
    entry.update(fields)
    data["channels"][channel or CHANNEL] = [entry]
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("transport", ["http", "file"])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"filename": "../../../../.bashrc"}, "'../../../../.bashrc' is no name of a wheel"),
        ({"filename": "/etc/cron.d/x"}, "is no name of a wheel"),
        ({"filename": "evil-1.0.0+cu130torch2.14-py3-none-any.whl"}, "is no name of a wheel"),
        ({"filename": f"{WHEEL}\n"}, "is no name of a wheel"),
        ({"filename": 7}, "is no name of a wheel"),
        ({"channel": "whl/cu126/torch2.14"}, "is listed in whl/cu126/torch2.14, which is not its channel"),
        ({"channel": "../../outside"}, "'../../outside' is no name of a channel"),
        ({"version": "9.9.9+cu130torch2.14"}, "is not its channel"),
        ({"url": "../../../../../../etc/passwd"}, "leads to"),
        ({"url": f"../../../../../elsewhere/{WHEEL}"}, ""),
        ({"url": f"ftp://index.example/{urllib.parse.quote(WHEEL)}"}, "which is not followed"),
        ({"url": f"http://index.example/{urllib.parse.quote(WHEEL)}"}, "which is not followed"),
        ({"sha256": "0" * 63}, "has no sha256"),
        ({"sha256": None}, "has no sha256"),
        ({"size": -1}, "cannot have -1 bytes"),
        ({"size": 1 << 50}, "cannot have"),
        ({"size": "1e9"}, "cannot have"),
        ({"url": "https://[::1"}, "lacks what every entry has"),
    ],
)
def test_a_hostile_index(
    fields: dict[str, Any], text: str, transport: str, site: Path, server: Server, target: Target, folder: Path
) -> None:
    """It is refused as a whole, before anything is fetched or written."""
    change(site, **fields)
    address = server.address if transport == "http" else str(site)
    for command in (
        ["install", "--index", address],
        ["channels", "--index", address],
        ["download", "--index", address, folder],
    ):
        done = target.run(*command)
        # A link above the root of a server is one within the server.
        within = not text and transport == "http"
        assert done.returncode == (6 if within and command[0] == "download" else 0 if within else 7), done.stderr
        assert (text or ("leads out of the folder" if not within else "")) in done.stderr
    assert not there(folder)
    assert not (folder.parent / "outside").exists()


def test_a_wheel_that_is_a_link_out_of_the_folder(site: Path, target: Target, folder: Path, tmp_path: Path) -> None:
    wheel = site / CHANNEL / channels.PROJECT / WHEEL
    wheel.rename(tmp_path / WHEEL)
    wheel.symlink_to(tmp_path / WHEEL)
    done = target.run("download", "--index", site, folder)
    assert done.returncode == 7
    assert "leads out of the folder" in done.stderr


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", '{"channels": 7}', '{"channels": {"whl/cu130/torch2.14": [7]}}', "\udcff"]
)
def test_an_index_that_is_none(text: str, site: Path, target: Target) -> None:
    (site / channels.DATA).write_bytes(text.encode("utf-8", "surrogateescape"))
    done = target.run("channels", "--index", site)
    assert done.returncode in (6, 7)
    assert "is no index of this project" in done.stderr or "lacks what every entry has" in done.stderr


@pytest.mark.parametrize("number", [2, 10**30, "2", None, [1]])
def test_an_index_of_a_later_format(number: object, site: Path, target: Target, folder: Path) -> None:
    """It is not guessed at."""
    data = json.loads((site / channels.DATA).read_text())
    for told in (number, channels.FORMAT):
        (site / channels.DATA).write_text(json.dumps({**data, "format": told}))
        done = target.run("download", "--index", site, folder)
        assert done.returncode == (0 if told == channels.FORMAT else 6)
        assert ("and this command reads format 1: install a newer scaled-mask-softmax" in done.stderr) is (told != 1)
        assert there(folder) is (told == channels.FORMAT)


def test_one_name_twice(site: Path, target: Target, folder: Path) -> None:
    """Which of two hashes is right, nobody knows."""
    data = json.loads((site / channels.DATA).read_text())
    (entry,) = data["channels"][CHANNEL]
    data["channels"][CHANNEL].append({**entry, "sha256": "0" * 64})
    (site / channels.DATA).write_text(json.dumps(data))
    done = target.run("download", "--index", site, folder)
    assert done.returncode == 7
    assert f"lists {WHEEL} twice" in done.stderr


def test_an_index_that_writes_to_the_terminal(site: Path, target: Target) -> None:
    change(site, yanked="\x1b]0;owned\x07\x1b[2J<script>\nverdict    fits")
    done = target.run("channels", "--index", site)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "(withdrawn: ?]0;owned??[2J<script>?verdict    fits)" in done.stdout


@pytest.mark.parametrize("path", ["index.json", ".whl"])
@pytest.mark.parametrize(
    "to", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://169.254.169.254/latest", "http://[::1"]
)
def test_redirects_that_are_not_followed(path: str, to: str, server: Server, target: Target, folder: Path) -> None:
    server.fault(path, redirect=to)
    done = target.run("download", "--index", server.address, folder)
    assert done.returncode in (6, 7)
    assert "not followed" in done.stderr or "not allowed" in done.stderr
    assert not there(folder)


@pytest.mark.parametrize("path", ["index.json", ".whl"])
def test_redirects_in_a_circle(path: str, server: Server, target: Target, folder: Path) -> None:
    server.fault(path, redirect=f"/elsewhere/{path}")
    done = target.run("download", "--index", server.address, folder)
    assert done.returncode == 6
    assert "redirects in a circle" in done.stderr
    assert not there(folder)


def test_a_redirect_within_the_host(server: Server, site: Path, target: Target, folder: Path) -> None:
    (site / "moved").mkdir()
    (site / CHANNEL / channels.PROJECT / WHEEL).rename(site / "moved" / WHEEL)
    server.fault(f"{channels.PROJECT}/{WHEEL}", redirect=f"/moved/{urllib.parse.quote(WHEEL)}")
    assert target.run("download", "--index", server.address, folder).returncode == 0
    assert there(folder)


@pytest.mark.parametrize(
    ("origin", "target", "followed"),
    [
        ("https://a.example/x", "https://b.example/y", True),
        ("http://a.example/x", "https://b.example/y", True),
        ("http://a.example/x", "http://a.example/y", True),
        ("http://a.example/x", "http://A.EXAMPLE/y", True),
        ("http://a.example/x", "http://a.example:8080/y", False),
        ("http://a.example/x", "http://b.example/y", False),
        ("https://a.example/x", "http://a.example/x", False),
        ("https://a.example/x", "file:///x", False),
        ("https://a.example/x", "javascript:alert(1)", False),
        ("file:///srv/x", "https://b.example/y", True),
        ("file:///srv/x", "http://b.example/y", False),
    ],
)
def test_where_links_and_redirects_may_lead(origin: str, target: str, followed: bool) -> None:
    assert may_lead(origin, target) is followed


def test_interrupted_at_the_keyboard(server: Server, target: Target, folder: Path) -> None:
    server.fault(".whl", stall=600_000)
    process = target.start("download", "--index", server.address, folder)
    assert server.stalled.wait(300)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors.strip().splitlines()[-1]) == (130, "scaled-mask-softmax download: interrupted")
    assert not there(folder)


def test_the_documented_faults() -> None:
    """Each names a test that there is, and each fault that is tested is documented or a detail of another."""
    page = (ROOT / "docs/install/finder.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (`test_\w+`(?:, `test_\w+`)*) \|$", page, re.MULTILINE)
    named = re.findall(r"test_\w+", " ".join(rows))
    source = "".join(
        (ROOT / f"tests/test_{name}.py").read_text(encoding="utf-8") for name in ("finder", "finder_faults")
    )
    assert len(rows) == page.count("| `test_") > 25
    assert [name for name in named if f"def {name}(" not in source] == []
