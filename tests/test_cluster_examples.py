"""The examples for clusters are those that docs/install/clusters.md prints; make clusters tries them in a Slurm."""

import os
import re

import pytest

from release import ROOT

FOLDER = ROOT / "docs/install/cluster"
PAGE = (ROOT / "docs/install/clusters.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["modulefile", "prolog"])
def test_the_page_prints_the_example(name):
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    shown = [line for line in lines if not re.match(r"# ", line)]
    assert f"```text\n{chr(10).join(shown)}\n```\n" in PAGE
    assert os.access(FOLDER / "prolog", os.X_OK)


def test_the_rehearsal_tries_every_example():
    rehearsal = (ROOT / ".ci/cluster-rehearsal").read_text(encoding="utf-8")
    job = (FOLDER / "train.sbatch").read_text(encoding="utf-8")
    for path in FOLDER.iterdir():
        assert path.name in rehearsal + job
    # The way that the page tells sets what the job asks for.
    asked = set(re.findall(r'"\$\{(\w+):\?', job))
    assert asked == {"PYTHON", "CHANNEL", "VERSION"}
    (told,) = re.findall(r"```sh not-run\n([^`]*train\.sbatch\n)```", PAGE)
    assert asked == set(re.findall(r"\b([A-Z]+)=", told))
