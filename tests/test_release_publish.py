"""Publishing a release and asking for a new torch, with a gh that keeps releases, pages and issues in folders."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from release import ROOT, matrix, rehearsal, wheel_file
from tests import tiny_wheels

CELLS = ["2.14/cu130/3.11", "2.13/cpu/3.11"]
# As the real one: a release that is none is an error. An upload stops after the file that FAILS names.
GH = """#!/bin/sh
echo "$*" >>"$STATE/log"
case "$1 $2" in
  "release view") [ -f "$STATE/draft" ] && cat "$STATE/draft" ;;
  "release create") mkdir "$STATE/assets" && echo true >"$STATE/draft" ;;
  "release upload")
    shift 3
    for file; do
      [ "$file" = --clobber ] || cp "$file" "$STATE/assets/" || exit
      [ "$file" != "$FAILS" ] || exit 1
    done ;;
  "release edit") echo false >"$STATE/draft" ;;
  "auth setup-git") ;;
  "repo clone") git clone --quiet --branch pages "$STATE/pages.git" "$4" ;;
  api*) echo https://owner.example/name ;;
  "issue list") grep -Fx "${6#in:title }" "$STATE/issues" | tr -d '"' ;;
  "issue create") echo "\\"$4\\"" >>"$STATE/issues" ;;
  *) exit 99 ;;
esac
"""


@pytest.fixture
def state(tmp_path):
    """What gh keeps, with an empty branch of pages."""
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "issues").touch()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/gh"
    program.write_text(GH)
    program.chmod(0o755)
    pages = ["git", "init", "--quiet", "--bare", "--initial-branch", "pages", folder / "pages.git"]
    subprocess.run(pages, check=True)
    work = tmp_path / "first"
    subprocess.run(["git", "clone", "--quiet", folder / "pages.git", work], check=True, capture_output=True)
    who = ["-c", "user.name=first", "-c", "user.email=first@localhost"]
    subprocess.run(["git", *who, "commit", "--quiet", "--allow-empty", "-m", "empty"], cwd=work, check=True)
    subprocess.run(["git", "push", "--quiet", "origin", "HEAD:pages"], cwd=work, check=True)
    return folder


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a small matrix and a staged release of stand-ins."""
    root = tmp_path / "checkout"
    for name in (".ci", "release", "python"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    small = rehearsal.small(
        matrix.MATRIX_FILE.read_text(encoding="utf-8"), "1.2.3", CELLS, "manylinux_2_34", "9.0", "x86_64"
    )
    (root / "release/matrix.toml").write_text(small, encoding="utf-8")
    data = matrix.read(small, "small")
    assets = root / "build/staged/assets"
    for name in matrix.wheels(data, data.cells(proven=True)):
        _, version, tag = name.removesuffix(".whl").split("-", 2)
        tiny_wheels.wheel(assets, version, tag)
    tiny_wheels.wheel(assets, "1.2.3")
    for wheel in sorted(assets.iterdir()):
        (assets / f"{wheel.name}.metadata").write_bytes(wheel_file.read(wheel).metadata)
    tiny_wheels.source(assets, "1.2.3")
    (assets / "SHA256SUMS").write_text("sums")
    return root


def run(checkout, state, script, **variables):
    env = {
        "PATH": f"{state.parent / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(state),
        "STATE": str(state),
        "FAILS": "",
        "REPOSITORY": "owner/name",
        **variables,
    }
    return subprocess.run([checkout / ".ci" / script], env=env, capture_output=True, text=True)


def published(state):
    """The index on the branch of the pages, and how many commits that has."""

    def git(*arguments):
        return subprocess.run(
            ["git", "-C", state / "pages.git", *arguments], capture_output=True, text=True, check=True
        ).stdout

    return json.loads(git("show", "pages:index.json")), int(git("rev-list", "--count", "pages"))


def test_a_release_is_published_once(checkout, state):
    assets = checkout / "build/staged/assets"
    done = run(checkout, state, "publish", TAG="v1.2.3")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in assets.iterdir()} == {path.name for path in (state / "assets").iterdir()}
    data, commits = published(state)
    files = {entry["filename"]: entry for entries in data["channels"].values() for entry in entries}
    assert files.keys() == {path.name for path in assets.iterdir() if path.suffix in (".whl", ".gz")}
    for name, entry in files.items():
        assert entry["url"] == f"https://github.com/owner/name/releases/download/v1.2.3/{name.replace('+', '%2B')}"
    assert (data["address"], commits) == ("https://owner.example/name/", 2)
    # Again: nothing is uploaded, and nothing committed.
    (state / "log").unlink()
    done = run(checkout, state, "publish", TAG="v1.2.3")
    assert done.returncode == 0, done.stderr
    assert "release upload" not in (state / "log").read_text()
    assert published(state)[1] == 2


def test_a_release_whose_upload_failed_is_completed(checkout, state):
    assets = checkout / "build/staged/assets"
    second = sorted(assets.iterdir())[1].relative_to(checkout)
    assert run(checkout, state, "publish", TAG="v1.2.3", FAILS=str(second)).returncode != 0
    assert (state / "draft").read_text() == "true\n"
    done = run(checkout, state, "publish", TAG="v1.2.3")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in assets.iterdir()} == {path.name for path in (state / "assets").iterdir()}
    assert (state / "draft").read_text() == "false\n"


def test_a_file_of_a_released_name_that_differs_is_refused(checkout, state):
    assert run(checkout, state, "publish", TAG="v1.2.3").returncode == 0
    before = published(state)
    tiny_wheels.wheel(checkout / "build/staged/assets", "1.2.3", payload=b"other")
    done = run(checkout, state, "publish", TAG="v1.2.3")
    assert done.returncode != 0
    assert "a released file never changes" in done.stderr
    assert published(state) == before


def test_a_new_torch_becomes_one_issue(checkout, state):
    # What the registry has is asked of it elsewhere.
    python = state.parent / "bin/python3"
    python.write_text("#!/bin/sh\necho torch 2.99.1\necho torch 2.98.0\n")
    python.chmod(0o755)
    titles = ['"Wheels for torch 2.99.1"', '"Wheels for torch 2.98.0"']
    for _ in range(2):
        done = run(checkout, state, "new-torch-issue")
        assert done.returncode == 0, done.stderr
        assert (state / "issues").read_text().splitlines() == titles
    python.write_text("#!/bin/sh\necho the matrix has the newest torch releases\n")
    assert run(checkout, state, "new-torch-issue").returncode == 0
    assert (state / "issues").read_text().splitlines() == titles
