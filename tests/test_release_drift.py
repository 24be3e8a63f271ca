"""Workflows, Dockerfile and pyproject.toml take every version from the matrix, and hold none themselves."""

import ast
import dataclasses
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from release import ROOT, container, image, matrix, preflight, runtime_image, torch_info
from release.matrix import tomllib

LOADED = matrix.load()
PYTHONS = sorted({python for row in LOADED.torch.values() for python in row.python}, key=lambda text: int(text[2:]))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def versions():
    """Everything in the matrix that must not be written elsewhere."""
    for torch in LOADED.torch.values():
        yield from (torch.minor, torch.release)
    for cuda in LOADED.cuda.values():
        yield from (cuda.label, cuda.toolkit, cuda.toolkit.replace(".", "-"), str(cuda.min_driver))
    for python in PYTHONS:
        yield from (python, "cp" + python.replace(".", ""), "py" + python.replace(".", ""))
    for platform in LOADED.platforms.values():
        yield from (platform.runner, platform.image.partition("@")[2], platform.nvidia_repository)
    name, _, digest = LOADED.runtime_image.partition("@")
    yield from (digest, name.rpartition(":")[2].partition("-")[0])
    yield from (LOADED.manylinux, LOADED.version, "gcc-toolset-13", "gcc-toolset-14")


VERSION = re.compile(r"(?<![\w.])(?:" + "|".join(map(re.escape, sorted(set(versions())))) + r")(?![\w]|\.\d)")


def copies(text):
    # The tag of a pinned action is no version of ours.
    return VERSION.findall(re.sub(r"(?m)@[0-9a-f]{40} # v[\d.]+$", "", text))


@pytest.mark.parametrize(
    "text",
    ["python-version: '3.11'", "torch==2.14.1", "CUDA=cu130", "cuda-nvcc-12-6", "runs-on: ubuntu-24.04-arm", "cp312-*"],
)
def test_a_copy_is_seen(text):
    assert copies(text)


@pytest.mark.parametrize(
    "path",
    [
        *WORKFLOWS,
        *sorted((ROOT / "docker").iterdir()),
        ROOT / ".devcontainer/Dockerfile",
        *sorted((ROOT / ".ci").iterdir()),
    ],
    ids=lambda path: path.name,
)
def test_no_version_is_written_elsewhere(path):
    assert copies(path.read_text(encoding="utf-8")) == []


# A version in a sentence, as an example of one, and the Python that brings a TOML parser.
EXAMPLE = re.compile(r"such as [^:;)]*|PYTHON=[^\s,;]+|python_version [<>=]+ '3\.11'")


def texts(path):
    """The texts of a Python file that are no documentation; what --help shows for a value is an example."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            left_out.add(node.value)
        if isinstance(node, ast.keyword) and node.arg == "metavar":
            left_out.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            yield node.value


# The oldest that the sources themselves are for; f-targets are a fact about compilers.
FLOORS = {
    "release/__main__.py": ["3.10"],
    "release/preflight.py": ["3.10"],
    "release/arch_list.py": ["12.9"],
}


def test_a_copy_in_the_code_is_seen(tmp_path):
    (tmp_path / "a.py").write_text('"""Of 2.14."""\nCELL = "2.14"\nf(metavar="2.14", help="such as 2.14 (or 2.13)")\n')
    assert [copies(EXAMPLE.sub("", text)) for text in texts(tmp_path / "a.py")] == [["2.14"], []]


def test_no_version_is_written_in_the_code():
    found = {}
    folders = [ROOT / name for name in ("release", "python", "docker", "docs")]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for text in texts(path):
            if there := copies(EXAMPLE.sub("", text)):
                found.setdefault(str(path.relative_to(ROOT)), []).extend(there)
    assert found == FLOORS


def test_the_oldest_of_the_code_are_those_of_the_matrix():
    minimum = preflight.MINIMUM_PYTHON
    assert minimum == tuple(map(int, PYTHONS[0].split(".")))
    cmake = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    assert copies(cmake) == [PYTHONS[0]]
    assert f"find_package(Python {PYTHONS[0]} REQUIRED" in cmake
    assert tuple(map(int, next(iter(LOADED.torch)).split("."))) == torch_info.OLDEST


def test_pyproject_holds_the_oldest_python_alone():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)
    assert project["project"]["requires-python"] == f">={PYTHONS[0]}"
    assert project["tool"]["ruff"]["target-version"] == "py" + PYTHONS[0].replace(".", "")
    assert project["tool"]["mypy"]["python_version"] == PYTHONS[0]
    # The Python that brings a TOML parser is a fact of its own.
    rest = text.replace("; python_version < '3.11'", "")
    assert copies(rest) == [PYTHONS[0], "py" + PYTHONS[0].replace(".", ""), PYTHONS[0]]


def test_the_readme_promises_what_the_matrix_holds():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    torches = list(LOADED.torch)
    promise = (
        f"Linux on {' and '.join(LOADED.platforms)}; torch {torches[0]} to {torches[-1]}; "
        f"CPython {PYTHONS[0]} to {PYTHONS[-1]}."
    )
    assert promise in text
    # Commands name a cell that there is.
    named = re.findall(r"TORCH=([\d.]+) CUDA=(\w+) PYTHON=([\d.]+)", text)
    assert named
    for torch, cuda, python in named:
        assert python in LOADED.cell(torch, cuda, "x86_64").torch.python


def test_the_arguments_of_the_runtime_image(monkeypatch):
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    text = runtime_image.DOCKERFILE.read_text(encoding="utf-8")
    declared = re.findall(r"^ARG (.*)$", text, re.MULTILINE)
    used = set(re.findall(r"\$\{(\w+)[}:]", text))
    for cell in LOADED.cells():
        # Its Python is that of wheels that there are.
        assert set(declared) == used == runtime_image.arguments(LOADED, cell).keys()
    default = runtime_image.arguments(LOADED, LOADED.cell("2.14", "cu130", "x86_64"))
    assert (default["TORCH"], default["TORCH_INDEX"], default["VISIBLE_DEVICES"]) == ("torch==2.14.1", "", "all")
    other = runtime_image.arguments(LOADED, LOADED.cell("2.14", "cpu", "x86_64"), source="https://host.example/a/b")
    assert other["TORCH"] == "torch==2.14.1+cpu"
    assert other["TORCH_INDEX"] == f"{LOADED.torch_channels}/cpu"
    assert (other["CHANNEL"], other["WHEEL"]) == (
        "whl/cpu/torch2.14",
        f"scaled-mask-softmax=={LOADED.version}+cputorch2.14",
    )
    assert (other["SOURCE"], other["VISIBLE_DEVICES"]) == ("https://host.example/a/b", "void")


def test_the_runtime_image_needs_its_python():
    old = dataclasses.replace(LOADED, runtime_python="3.9")
    with pytest.raises(matrix.MatrixError, match=r"has Python 3\.9, and torch 2\.14 is built for 3\.10"):
        runtime_image.arguments(old, LOADED.cell("2.14", "cu130", "x86_64"))


def test_the_command_of_the_runtime_image(monkeypatch, capsys, tmp_path):
    from release import __main__ as program

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["release", "runtime-image", "--torch", "2.14", "--cuda", "cu130", *arguments])
        return program.main(), capsys.readouterr()

    assert run("--site", str(tmp_path))[0] == 1
    assert run("--site", str(tmp_path), "--tags")[1].out.splitlines() == [
        f"scaled-mask-softmax:{LOADED.version}-torch2.14-cu130",
        f"scaled-mask-softmax:{LOADED.version}-torch2.14-cu130-x86_64",
    ]
    (tmp_path / "whl/cu130/torch2.14").mkdir(parents=True)
    status, output = run("--site", str(tmp_path), "--engine", "podman", "--name", "ghcr.io/Owner/Name")
    assert status == 0
    words = shlex.split(output.out)
    assert words[:4] == ["podman", "build", "--format", "docker"]
    assert words[words.index("--build-context") + 1] == f"site={tmp_path}"
    assert re.fullmatch(r"org\.opencontainers\.image\.revision=[0-9a-f]{40}", words[words.index("--label") + 1])
    machine = LOADED.cell().platform
    assert words[words.index("--tag") + 1] == f"ghcr.io/owner/name:{LOADED.version}-torch2.14-cu130-{machine}"
    # No tag moves.
    assert "latest" not in output.out


def test_the_contributors_container_starts_from_the_same_image():
    data = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert data["build"]["args"] == {"BASE_IMAGE": LOADED.runtime_image}


def test_what_apptainer_runs_is_in_the_image():
    definition = (ROOT / "docker/runtime.def").read_text(encoding="utf-8")
    dockerfile = runtime_image.DOCKERFILE.read_text(encoding="utf-8")
    folder, name = re.search(r"^COPY (\S+) (\S+)$", dockerfile, re.MULTILINE).group(2, 1)
    (program,) = re.findall(r"^    python (\S+)$", definition, re.MULTILINE)
    assert program == folder + name
    assert f'CMD ["python", "{program}"]' in dockerfile


def test_the_arguments_of_the_dockerfile_are_what_the_matrix_fills():
    text = image.DOCKERFILE.read_text(encoding="utf-8")
    declared = re.findall(r"^ARG (.*)$", text, re.MULTILINE)
    used = set(re.findall(r"\$\{(\w+)[}%]", text)) - {"PATH"}
    for cell in LOADED.cells():
        assert set(declared) == used == image.arguments(LOADED, cell).keys()
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE)[0] == "${BASE_IMAGE}"


def test_the_arguments_of_each_kind_of_cell():
    old = image.arguments(LOADED, LOADED.cell("2.14", "cu126", "aarch64"))
    assert old["GCC_TOOLSET"] == "13"
    assert old["BASE_IMAGE"] == LOADED.platforms["aarch64"].image
    assert old["NVIDIA_REPOSITORY"] == "rhel8/sbsa"
    assert "cuda-nvcc-12-6" in old["TOOLKIT_PACKAGES"].split()
    new = image.arguments(LOADED, LOADED.cell("2.15", "cu132", "x86_64"))
    assert (new["GCC_TOOLSET"], new["TOOLKIT_SOURCE"]) == ("14", "registry")
    assert new["TOOLKIT_PACKAGES"].endswith("==13.2.*")
    none = image.arguments(LOADED, LOADED.cell("2.15", "cpu", "x86_64"))
    assert (none["TOOLKIT_SOURCE"], none["TOOLKIT_PACKAGES"]) == ("none", "")
    for cell in LOADED.cells():
        given = image.arguments(LOADED, cell)
        assert f"AS toolkit-{given['TOOLKIT_SOURCE']}\n" in image.DOCKERFILE.read_text(encoding="utf-8")


def test_the_image_command(monkeypatch, capsys):
    from release import __main__ as program

    line = ["release", "image", "--torch", "2.14", "--cuda", "cu130", "--platform", "x86_64", "--engine", "podman"]
    monkeypatch.setattr("sys.argv", line)
    assert program.main() == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:2] == ["podman", "build"]
    cell = LOADED.cell("2.14", "cu130", "x86_64")
    given = dict(word.split("=", 1) for before, word in itertools.pairwise(words) if before == "--build-arg")
    assert given == image.arguments(LOADED, cell)
    assert words[words.index("--tag") + 1] == image.tag(cell)
    other = image.command(LOADED, cell, base="stand-in:latest")
    assert [word for word in other if word.startswith("BASE_IMAGE=")] == ["BASE_IMAGE=stand-in:latest"]
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda command: calls.append(command) or subprocess.CompletedProcess([], 1))
    monkeypatch.setattr("sys.argv", [*line, "--run"])
    assert program.main() == 1
    assert calls == [words]


def test_what_cibuildwheel_is_told():
    cell = LOADED.cell("2.15", "cpu", "aarch64")
    variables = container.environment(LOADED, cell, cell.torch.python, image.tag(cell), "podman")
    assert variables["CIBW_BUILD"].split() == [f"cp3{minor}-manylinux_aarch64" for minor in (11, 12, 13, 14)]
    assert variables["CIBW_MANYLINUX_AARCH64_IMAGE"] == image.tag(cell)
    assert variables["TORCH_INDEX"] == f"{LOADED.torch_channels}/cpu"
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    # What the compilers made is kept where the image's ccache looks for it.
    assert variables["CIBW_CONTAINER_ENGINE"] == f"podman; create_args: --volume={container.ccache()}:/ccache"
    assert "CCACHE_DIR=/ccache" in image.DOCKERFILE.read_text(encoding="utf-8")
    # What the steps inside read reaches them.
    own = {name for name in variables if not name.startswith("CIBW_")}
    assert own <= set(options["linux"]["environment-pass"])
    used = re.findall(r"container-step (\w+)", str(options))
    assert sorted(used) == sorted(container.STEPS)


def test_the_steps_make_sure_of_torch(monkeypatch, tmp_path):
    """A torch that is not exactly the cell's stops the build and the test."""
    installed = []
    monkeypatch.setattr(container, "pip", lambda where, arguments, what: installed.append(arguments))
    monkeypatch.setenv(container.TORCH, "2.14")
    monkeypatch.setenv(container.CUDA, "cu126")
    monkeypatch.setenv("TORCH_INDEX", "https://torch.example/cu126")
    folder = tmp_path / "torch"
    monkeypatch.setenv("SCALED_MASK_SOFTMAX_TORCH", str(folder))
    (folder / "include/ATen").mkdir(parents=True)
    (folder / "version.py").write_text("__version__ = '2.14.1+cu130'\ncuda = '13.0'\nhip = None\n")
    with pytest.raises(container.StepError, match=r"holds torch 2\.14\.1\+cu130 \(CUDA 13\.0\), not the cell's torch"):
        container.setup()
    assert installed[0] == ["install", *container.TOOLS]
    assert installed[1] == [
        *("install", "--no-deps", "--target", tmp_path, "torch==2.14.1+cu126"),
        *("--extra-index-url", "https://torch.example/cu126"),
    ]
    (folder / "version.py").write_text("__version__ = '2.14.1+cu126'\ncuda = '12.6'\nhip = None\n")
    installed.clear()
    container.setup()
    # It is there: nothing but the tools for this Python is fetched.
    assert installed == [["install", *container.TOOLS]]


WRITES = {
    "release.yml": [
        *("packages", "id-token", "attestations"),  # of each image
        *("contents", "id-token", "attestations"),  # of the release
        "packages",  # its tags
    ],
    "new-torch.yml": ["issues"],
}


def test_what_the_matrix_gives_to_workflows():
    def outputs(**variables):
        done = subprocess.run(
            [ROOT / ".ci/matrix-outputs"],
            env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        pairs = (line.partition("=") for line in done.stdout.splitlines())
        return {name: json.loads(value)["include"] for name, _, value in pairs}

    every, proven = outputs(), outputs(PROVEN="true")
    assert len(every["wheels"]) == len(LOADED.cells())
    assert [row["name"] for row in proven["wheels"]] == [
        f"{cell.label}-{cell.platform}" for cell in LOADED.cells(proven=True)
    ]
    (one,) = outputs(TORCH=LOADED.default_torch, CUDA="cpu")["wheels"][:1]
    assert (one["torch"], one["cuda"]) == (LOADED.default_torch, "cpu")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_thin(path):
    """Actions are pinned by commit, jobs have a time limit, and a step is one command of make or .ci/."""
    text = path.read_text(encoding="utf-8")
    used = [use for use in re.findall(r"uses: (.*)", text) if not use.startswith("./")]
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", use) for use in used)
    commands = re.findall(r"run: (.*)", text)
    assert commands
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for command in commands:
        if command.startswith("make "):
            assert command.split()[1] in targets
        else:
            assert (ROOT / command).is_file()
    assert text.count("runs-on:") == text.count("timeout-minutes:") > 0
    assert "\npermissions: {}\n" in text
    assert "\nconcurrency:\n" in text
    # What may write, and each time why.
    writes = re.findall(r"^\s+(\w[\w-]*): write(?: # .+)?$", text, re.MULTILINE)
    assert writes == WRITES.get(path.name, [])
