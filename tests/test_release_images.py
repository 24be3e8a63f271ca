"""Pushing and tagging runtime images, with a docker that only says what it was asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from release import ROOT, matrix

LOADED = matrix.load()
TAG = f"ghcr.io/owner/name:{LOADED.version}-torch2.14-cu130"
# A registry is a file with the images that are in it; a login needs the token.
DOCKER = """#!/bin/sh
echo "$*" >>"$LOG"
case "$1 $2 $3" in
  "buildx imagetools inspect") for image; do :; done; grep -qx "$image" "$REGISTRY" && echo sha256:abc ;;
  "buildx imagetools create") echo "$5" >>"$REGISTRY" ;;
  push*) echo "$2" >>"$REGISTRY" ;;
  login*) read -r token && [ "$token" = secret ] ;;
  *) exit 99 ;;
esac
"""


@pytest.fixture
def run(tmp_path):
    program, registry, log = tmp_path / "docker", tmp_path / "registry", tmp_path / "log"
    program.write_text(DOCKER)
    program.chmod(0o755)
    registry.touch()

    def run(script):
        log.write_text("")
        env = {
            "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "LOG": str(log),
            "REGISTRY": str(registry),
            "TORCH": "2.14",
            "CUDA": "cu130",
            "IMAGE": "ghcr.io/Owner/Name",
            "ACTOR": "somebody",
            "GH_TOKEN": "secret",
        }
        done = subprocess.run([ROOT / ".ci" / script], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "secret" not in done.stdout + log.read_text()
        return done.stdout, log.read_text().splitlines(), registry.read_text().split()

    return run


def test_an_image_is_pushed_once_and_given_by_digest(run):
    reference = f"{TAG}-{LOADED.cell().platform}"
    output, asked, there = run("push-image")
    assert output.splitlines()[-2:] == ["name=ghcr.io/owner/name", "digest=sha256:abc"]
    assert "login --username somebody --password-stdin ghcr.io" in asked
    assert f"push {reference}" in asked
    assert there == [reference]
    # Again, as after a failure: what is there stays.
    output, asked, there = run("push-image")
    assert "digest=sha256:abc" in output
    assert not [line for line in asked if line.startswith("push")]
    assert there == [reference]


def test_the_tag_of_all_platforms_is_written_once(run):
    platforms = [cell.platform for cell in LOADED.cells("2.14", "cu130", proven=True)]
    created = " ".join(["buildx imagetools create --tag", TAG, *(f"{TAG}-{name}" for name in platforms)])
    _, asked, there = run("tag-image")
    assert created in asked
    assert there == [TAG]
    output, asked, there = run("tag-image")
    assert created not in asked
    assert f"{TAG} is there" in output
    assert there == [TAG]
