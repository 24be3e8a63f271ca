"""What a build learns from torch's folder, its version and pins, and its refusal where there is no torch."""

import importlib.util
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from packaging.version import Version

from release import ROOT, matrix, metadata, torch_info
from release.torch_info import TorchError


def fake_torch(folder, version, cuda, hip=None):
    path = folder / "site packages" / "torch"
    (path / "include" / "ATen").mkdir(parents=True)
    lines = ["from typing import Optional", f"__version__ = {version!r}", f"cuda: Optional[str] = {cuda!r}"]
    (path / "version.py").write_text("\n".join([*lines, f"hip: Optional[str] = {hip!r}", ""]), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("version", "cuda", "label", "requirements"),
    [
        ("2.14.1+cu130", "13.0", "cu130torch2.14", ["torch>=2.14,<2.15"]),
        ("2.11.0+cu126", "12.6", "cu126torch2.11", ["torch>=2.11,<2.12"]),
        ("2.14.1", "13.0", "cu130torch2.14", ["torch>=2.14,<2.15"]),
        ("2.13.0+cpu", None, "cputorch2.13", ["torch>=2.13,<2.14"]),
        ("2.14.0a0+b4e4ee8.nv25.11", "13.0", "cu130torch2.14.0a0.b4e4ee8.nv25.11", []),
        ("2.15.0.dev20260516+cu132", "13.2", "cu132torch2.15.0.dev20260516", []),
        ("2.16.0a0+gitABCDEF0", None, "cputorch2.16.0a0.gitabcdef0", []),
    ],
)
def test_label_and_pin(tmp_path, version, cuda, label, requirements):
    info = torch_info.read(fake_torch(tmp_path, version, cuda))
    assert (info.version, info.cuda, info.label, info.requirements) == (version, cuda, label, requirements)
    full = f"1.0.0+{info.label}"
    assert str(Version(full)) == full, "the label is not in its normal form"


def test_later_minors_sort_higher():
    assert Version("1.0.0+cu130torch2.9") < Version("1.0.0+cu130torch2.14") < Version("1.0.0+cu132torch2.15")


@pytest.mark.parametrize(
    ("version", "hip", "message"),
    [("2.10.0+cu128", None, "too old"), ("2.14.0+rocm7.0", "7.0", "ROCm"), (3, None, "does not give")],
)
def test_torch_that_cannot_be_built_for(tmp_path, version, hip, message):
    with pytest.raises(TorchError, match=message):
        torch_info.read(fake_torch(tmp_path, version, None, hip))


def test_torch_without_headers(tmp_path):
    path = fake_torch(tmp_path, "2.14.1", None)
    (path / "include" / "ATen").rmdir()
    with pytest.raises(TorchError, match="no torch with headers"):
        torch_info.read(path)


def test_the_variable_wins(tmp_path, monkeypatch):
    path = fake_torch(tmp_path, "2.12.1+cu126", "12.6")
    monkeypatch.setenv(torch_info.TORCH_VARIABLE, str(path))
    assert torch_info.find().version == "2.12.1+cu126"


def test_torch_is_found_without_importing_it(tmp_path, monkeypatch):
    path = fake_torch(tmp_path, "2.12.1+cu126", "12.6")
    (path / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    monkeypatch.delenv(torch_info.TORCH_VARIABLE, raising=False)
    monkeypatch.syspath_prepend(path.parent)
    assert torch_info.find().path == path


def test_isolated_builds_find_the_target_environment(tmp_path, monkeypatch):
    path = fake_torch(tmp_path, "2.12.1+cu126", "12.6")
    monkeypatch.delenv(torch_info.TORCH_VARIABLE, raising=False)
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sysconfig.get_path", lambda key: str(path.parent))
    assert torch_info.find().path == path


@pytest.fixture
def provider(tmp_path, monkeypatch):
    monkeypatch.setenv(torch_info.TORCH_VARIABLE, str(fake_torch(tmp_path, "2.14.1+cu130", "13.0")))
    monkeypatch.delenv(metadata.PLAIN_VARIABLE, raising=False)
    return metadata.Provider


@pytest.mark.parametrize("state", ["wheel", "editable", "metadata_wheel", "metadata_editable"])
def test_native_metadata(provider, state):
    made = provider()
    made.build_state(state)
    version = matrix.load().version
    expected = {"version": f"{version}+cu130torch2.14", "dependencies": ["torch>=2.14,<2.15"]}
    assert made.dynamic_metadata({}, {}) == expected


def test_source_distribution_metadata(provider):
    made = provider()
    made.build_state("sdist")
    assert made.dynamic_metadata({}, {}) == {"version": matrix.load().version, "dependencies": []}
    assert made.dynamic_wheel({}) == {"dependencies": True}


def test_plain_metadata(provider, monkeypatch):
    monkeypatch.setenv(metadata.PLAIN_VARIABLE, "1")
    monkeypatch.setenv(torch_info.TORCH_VARIABLE, "/nowhere")
    made = provider()
    made.build_state("wheel")
    assert made.dynamic_metadata({}, {}) == {"version": matrix.load().version, "dependencies": []}


def test_without_build_tools_the_backend_names_them():
    done = subprocess.run(
        [sys.executable, "-S", "-c", "from release import backend"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Run pip install scikit-build-core pybind11 cmake ninja" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A Python whose environment has the build backend and no torch; with its variables."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "env", with_pip=False)
    modules = folder / "modules"
    modules.mkdir()
    for name in ("scikit_build_core", "packaging", "pathspec", "exceptiongroup", "tomli"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            (modules / name).symlink_to(Path(spec.origin).parent)
    env = {k: v for k, v in os.environ.items() if k not in (torch_info.TORCH_VARIABLE, metadata.PLAIN_VARIABLE)}
    return folder / "env/bin/python", {**env, "PYTHONPATH": f"{modules}:{ROOT}"}


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"])
def test_without_torch_the_backend_refuses_at_once(bare_python, hook):
    python, env = bare_python
    started = time.monotonic()
    done = subprocess.run(
        [python, "-c", f"from release import backend; backend.{hook}()"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert time.monotonic() - started < 5
    assert done.returncode == 1
    assert done.stderr.strip() == torch_info.NO_TORCH
    for way in ("pip install --no-build-isolation .", "make wheel", torch_info.TORCH_VARIABLE, metadata.PLAIN_VARIABLE):
        assert way in done.stderr


@pytest.fixture(scope="module")
def source_distribution(bare_python, tmp_path_factory):
    """The unpacked source distribution, built where there is no torch."""
    python, env = bare_python
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys; from release import backend; print(backend.build_sdist(sys.argv[1]))"
    done = subprocess.run([python, "-c", code, folder], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    assert archive.name == f"scaled_mask_softmax-{matrix.load().version}.tar.gz"
    subprocess.run(["tar", "-xf", archive, "-C", folder], check=True)
    return folder / archive.name.removesuffix(".tar.gz")


def test_source_distribution_is_complete(source_distribution):
    def files(root):
        patterns = ("src/**/*", "cmake/*.cmake", "release/*.py", "release/*.toml", "release/*.cpp", "python/**/*.py")
        return {path.relative_to(root) for pattern in patterns for path in root.glob(pattern) if path.is_file()}

    assert files(ROOT) <= files(source_distribution)
    for name in ("CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", "PKG-INFO"):
        assert (source_distribution / name).is_file()
    package_info = (source_distribution / "PKG-INFO").read_text(encoding="utf-8")
    assert "\nDynamic: Requires-Dist\n" in package_info
    assert "\nRequires-Dist: torch" not in package_info


def test_plain_wheel_from_the_source_distribution(source_distribution, bare_python, tmp_path):
    python, env = bare_python
    env = {
        **env,
        metadata.PLAIN_VARIABLE: "1",
        "PYTHONPATH": env["PYTHONPATH"].replace(str(ROOT), str(source_distribution)),
    }
    code = "import sys; from release import backend; print(backend.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [python, "-c", code, tmp_path], cwd=source_distribution, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"scaled_mask_softmax-{matrix.load().version}-py3-none-any.whl"
    names = subprocess.run([python, "-m", "zipfile", "-l", wheel], capture_output=True, text=True, check=True).stdout
    assert "_checks.py" in names
    assert "scaled_mask_softmax_cli/_matrix.py" in names
    assert ".so" not in names
    assert "_build_record.py" not in names
