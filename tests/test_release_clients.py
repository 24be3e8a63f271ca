"""What installers make of a channel: over HTTP and from a folder, beside channels and torches that they must not take.

The pip of this environment is tried always; `make clients` fetches the others and names their folder in SMS_CLIENTS.
"""

import base64
import functools
import hashlib
import http.server
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import installers
import pytest

from release import index, landing

CLIENTS = Path(os.environ["SMS_CLIENTS"]) if "SMS_CLIENTS" in os.environ else None


def of_clients(name, values):
    """Parametrizes a test of what `make clients` fetches; elsewhere there is no such test."""
    return pytest.mark.parametrize(name, values) if CLIENTS else lambda test: None


PIPS = ["pip", *(sorted(path.name for path in CLIENTS.glob("pip-*")) if CLIENTS else [])]
INSTALLERS = [*PIPS, *(["uv"] if CLIENTS else [])]
# Older than the standard for metadata beside a wheel.
OLDEST = "pip-21.2.4"
FULL = "scaled-mask-softmax==1.0.0+cu130torch2.14"


# That of a native wheel for this Python and machine.
NATIVE = "cp{0}{1}-cp{0}{1}-linux_{2}".format(*sys.version_info[:2], platform.machine())


def make_wheel(folder, name, version, requires=(), tag="py3-none-any"):
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\nRequires-Python: >=3.10\n"
    text += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    files = {
        f"{name}/__init__.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": text,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    rows = ""
    for file, contents in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(contents.encode()).digest()).rstrip(b"=").decode()
        rows += f"{file},sha256={digest},{len(contents)}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, contents in {**files, f"{info}/RECORD": f"{rows}{info}/RECORD,,\n"}.items():
            archive.writestr(file, contents)
    return path


def ours(folder, version, torch="2.14"):
    major, minor = torch.split(".")
    return make_wheel(folder, "scaled_mask_softmax", version, [f"torch<{major}.{int(minor) + 1},>={torch}"], NATIVE)


class Log(http.server.SimpleHTTPRequestHandler):
    def log_message(self, form, *values):
        self.server.asked.append(self.path)


@pytest.fixture
def site(tmp_path):
    """A channel with a good and a withdrawn version, and a neighbour whose version is higher."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    good, bad = ours(folder, "1.0.0+cu130torch2.14"), ours(folder, "1.0.1+cu130torch2.14")
    site = tmp_path / "a site"
    index.write(site, [good, bad, ours(folder, "1.0.2+cu126torch2.14"), ours(folder, "1.0.2+cu130torch2.15", "2.15")])
    found = index.Index(site)
    found.yank("1.0.1", "wrong rows")
    found.write()
    return site


@pytest.fixture(params=["http", "file"])
def root(request, site):
    """The site's address, and what was asked of its server (None without one)."""
    if request.param == "file":
        yield site.as_uri(), None
        return
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Log, directory=str(site))) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", server.asked
        server.shutdown()
        thread.join()


class Target:
    """A virtual environment with a torch in it, and an installer that works on it."""

    def __init__(self, folder, client, torch):
        self.client, self.folder, self.variables = client, folder, {}
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv/bin/python"
        (self.packages,) = (folder / "venv").glob("lib/*/site-packages")
        if client == "pip":
            # This environment's pip, without its neighbours.
            (folder / "pip").mkdir()
            (folder / "pip/pip").symlink_to(installers.pip_folder())
        with zipfile.ZipFile(make_wheel(folder, "torch", torch)) as archive:
            archive.extractall(self.packages)

    def install(self, channel, *arguments):
        return self.run("--index-url", f"{channel}/", *arguments)

    def run(self, *arguments):
        """The installer's command to install."""
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}
        if self.client == "uv":
            command = [CLIENTS / "bin/uv", "pip", "install", "--python", self.python, "--no-cache"]
        else:
            env["PYTHONPATH"] = str(self.folder / "pip" if self.client == "pip" else CLIENTS / self.client)
            command = [self.python, "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check"]
        return subprocess.run([*command, *arguments], env={**env, **self.variables}, capture_output=True, text=True)

    @property
    def installed(self):
        found = importlib.metadata.distributions(path=[str(self.packages)])
        return {distribution.name: distribution.version for distribution in found}


@pytest.fixture
def target(tmp_path):
    def make(client, torch="2.14.1"):
        return Target(tmp_path, client, torch)

    return make


@pytest.mark.parametrize("client", INSTALLERS)
def test_the_printed_command_beside_decoys(root, target, client):
    here, (address, asked) = target(client), root
    done = here.install(f"{address}/whl/cu130/torch2.14", "--no-deps", FULL)
    assert done.returncode == 0, done.stderr
    assert here.installed == {"torch": "2.14.1", "scaled-mask-softmax": "1.0.0+cu130torch2.14"}
    if asked is not None:
        assert not [path for path in asked if "cu126" in path or "torch2.15" in path]


@pytest.mark.parametrize("client", INSTALLERS)
def test_torch_stays_as_it_is(root, target, client):
    here, (address, _) = target(client), root
    done = here.install(f"{address}/whl/cu130/torch2.14", FULL)
    assert done.returncode == 0, done.stderr
    assert here.installed == {"torch": "2.14.1", "scaled-mask-softmax": "1.0.0+cu130torch2.14"}


@pytest.mark.parametrize("client", INSTALLERS)
def test_another_torch_fails_loudly_and_stays(root, target, client):
    here, (address, asked) = target(client, torch="2.13.0"), root
    done = here.install(f"{address}/whl/cu130/torch2.14", FULL)
    assert done.returncode != 0
    assert "torch" in done.stderr
    assert here.installed == {"torch": "2.13.0"}
    if asked is not None and client != OLDEST:
        # From the wheel's metadata alone.
        assert {path.rpartition(".")[2] for path in asked if ".whl" in path} == {"metadata"}


@pytest.mark.parametrize("client", INSTALLERS)
def test_a_withdrawn_release(root, target, client):
    here, (address, _) = target(client), root
    channel = f"{address}/whl/cu130/torch2.14"
    assert here.install(channel, "--no-deps", "scaled-mask-softmax").returncode == 0
    assert here.installed["scaled-mask-softmax"] == "1.0.0+cu130torch2.14"
    # Who asks for it exactly gets it, and is told.
    done = here.install(channel, "--no-deps", "scaled-mask-softmax==1.0.1+cu130torch2.14")
    assert done.returncode == 0
    assert "wrong rows" in done.stdout + done.stderr
    assert here.installed["scaled-mask-softmax"] == "1.0.1+cu130torch2.14"


@pytest.mark.parametrize("client", INSTALLERS)
def test_a_channel_that_was_copied_elsewhere(site, target, tmp_path, client):
    mirror = tmp_path / "mirror of one channel"
    shutil.copytree(site / "whl/cu130/torch2.14", mirror)
    shutil.rmtree(site)
    here = target(client)
    done = here.install(mirror.as_uri(), "--no-deps", FULL)
    assert done.returncode == 0, done.stderr
    assert here.installed["scaled-mask-softmax"] == "1.0.0+cu130torch2.14"


@pytest.mark.parametrize("client", INSTALLERS)
def test_a_tampered_wheel_is_refused(root, site, target, client):
    here, (address, _) = target(client), root
    (wheel,) = site.glob("whl/cu130/torch2.14/*/scaled_mask_softmax-1.0.0+*.whl")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("scaled_mask_softmax/more.py", "import os\n")
    done = here.install(f"{address}/whl/cu130/torch2.14", "--no-deps", FULL)
    assert done.returncode != 0
    assert "hash" in done.stderr.lower()
    assert here.installed == {"torch": "2.14.1"}


def offered(site):
    """What the landing page offers of the good channel."""
    return next(
        wheel
        for wheel in landing.newest(landing.every(index.Index(site).channels))
        if (wheel.torch, wheel.cuda) == ("2.14", "cu130")
    )


@pytest.mark.parametrize("tool", ["pip", "docker", "requirements", "conda", *(["uv"] if CLIENTS else [])])
def test_the_lines_of_the_landing_page(root, site, target, tmp_path, tool):
    here, (address, _) = target("uv" if tool == "uv" else "pip"), root
    lines = landing.filled(tool, offered(site), f"{address}/")
    if tool in ("requirements", "conda"):
        # What conda gives to pip is a file of requirements too.
        text = (
            lines
            if tool == "requirements"
            else re.search(r"- pip:\n((?:      - .*\n?)+)", lines)[1].replace("      - ", "")
        )
        (tmp_path / "requirements.txt").write_text(text)
        done = here.run("--requirement", tmp_path / "requirements.txt")
    else:
        words = shlex.split(lines.rpartition("RUN ")[2] if tool == "docker" else lines)
        assert words[: words.index("install") + 1] in (["python", "-m", "pip", "install"], ["uv", "pip", "install"])
        done = here.run(*words[words.index("install") + 1 :])
    assert done.returncode == 0, done.stderr
    assert here.installed == {"torch": "2.14.1", "scaled-mask-softmax": "1.0.0+cu130torch2.14"}


# The driver's CUDA (None: no GPU), and what is right for it of torch 2.14's cpu, cu126, cu130 and cu132.
DRIVERS = {"12.6": "cu126", "12.9": "cu126", "13.0": "cu130", "13.2": "cu132", None: "cpu"}


@of_clients("driver", DRIVERS)
def test_variants(tmp_path, target, driver):
    from release import matrix, variants  # needs a TOML parser

    folder = tmp_path / "wheels"
    folder.mkdir()
    wheels = [ours(folder, f"1.0.0+{label}torch2.14") for label in ("cpu", "cu126", "cu130", "cu132")]
    (channel,) = variants.write(matrix.load(), tmp_path / "site", wheels)
    here = target("uv")
    here.variables = {"NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION": driver} if driver else {}
    done = here.install(channel.as_uri(), "--preview-features", "wheel-variants", "scaled-mask-softmax")
    assert done.returncode == 0, done.stderr
    assert here.installed == {"torch": "2.14.1", "scaled-mask-softmax": "1.0.0+torch2.14"}
    assert (
        f"VERSION = '1.0.0+{DRIVERS[driver]}torch2.14'"
        in (here.packages / "scaled_mask_softmax/__init__.py").read_text()
    )


# What surrounds the landing page's lines in a project: what it is, and a registry that is not the ordinary one.
PROJECTS = {
    "uv": """
[[tool.uv.index]]
name = "registry"
url = "{registry}"
default = true
""",
    "poetry": """
torch = {{ source = "registry" }}

[[tool.poetry.source]]
name = "registry"
url = "{registry}"
priority = "primary"

[tool.poetry]
package-mode = false
""",
}


class Project:
    """A project with the landing page's lines, whose registry offers torches that the wheel is not for too."""

    def __init__(self, folder, client, wheel, address, registry, channel=None):
        self.client, self.folder, self.home = client, folder, folder.parent / "home"
        self.python, self.lock_file = sys.executable, folder / f"{client}.lock"
        folder.mkdir()
        lines = landing.filled(f"{client}-project", wheel, f"{address}/")
        if channel:
            lines = lines.replace(f"{address}/{wheel.channel}", f"{channel}/")
        project = '[project]\nname = "user"\nversion = "1"\nrequires-python = ">=3.10"\n'
        more = PROJECTS[client].format(registry=registry)
        if client == "poetry":
            # Its sources are told below its dependencies.
            more, _, rest = more.partition("\n\n")
            lines = lines.replace("\n\n[[tool.poetry.source]]", f"{more}\n\n[[tool.poetry.source]]", 1)
            more = rest
        (folder / "pyproject.toml").write_text(f"{lines.replace('[project]', project.strip(), 1)}\n\n{more}")

    def _run(self, *arguments):
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "POETRY_VIRTUALENVS_IN_PROJECT": "1"}
        command = [CLIENTS / "bin" / self.client, *arguments]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)

    def lock(self):
        if self.client == "poetry":
            assert self._run("env", "use", self.python).returncode == 0
        done = self._run("lock", *(["--python", self.python] if self.client == "uv" else []))
        assert done.returncode == 0, done.stdout + done.stderr
        return self.lock_file.read_text()

    def install(self):
        """What the lock file holds, and nothing of what was cached when it was made."""
        self.home = self.folder.parent / "another home"
        return self._run(*(["sync", "--frozen", "--python", self.python] if self.client == "uv" else ["install"]))

    @property
    def installed(self):
        packages = (self.folder / ".venv").glob("lib/*/site-packages")
        found = [item for path in packages for item in importlib.metadata.distributions(path=[str(path)])]
        return {item.name: item.version for item in found if item.name in ("torch", "scaled-mask-softmax")}


@pytest.fixture
def registry(site):
    """The folder of a registry that has older and newer torches."""
    folder = site / "registry/torch"
    folder.mkdir(parents=True)
    for version in ("2.13.0", "2.14.1", "2.15.0"):
        make_wheel(folder, "torch", version)
    links = [f'<a href="{path.name}">{path.name}</a>' for path in sorted(folder.glob("*.whl"))]
    (folder / "index.html").write_text("".join(links))
    return folder.parent


@pytest.fixture
def served(site, registry):
    """The site's address, the registry's below it."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Log, directory=str(site))) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


TOOLS = of_clients("client", sorted(PROJECTS))
RIGHT = {"torch": "2.14.1", "scaled-mask-softmax": "1.0.0+cu130torch2.14"}


@TOOLS
def test_projects_lock_and_install(site, served, tmp_path, client):
    """A lock file takes the torch that the wheel is for, though the registry offers a newer one; it installs."""
    project = Project(tmp_path / "project", client, offered(site), served, f"{served}/registry/")
    lock = project.lock()
    (wheel,) = site.glob("whl/cu130/torch2.14/*/scaled_mask_softmax-1.0.0+*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in lock
    done = project.install()
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.installed == RIGHT


@TOOLS
def test_projects_and_withdrawn_releases(site, served, tmp_path, client):
    """A range does not take one, and who has locked one that is withdrawn later still installs it."""
    project = Project(tmp_path / "project", client, offered(site), served, f"{served}/registry/")
    path = project.folder / "pyproject.toml"
    path.write_text(path.read_text().replace(FULL, "scaled-mask-softmax>=1.0.0,<2"))
    lock = project.lock()
    assert RIGHT["scaled-mask-softmax"] in lock
    assert "1.0.1" not in lock
    found = index.Index(site)
    found.yank("1.0.0", "wrong columns")
    found.write()
    done = project.install()
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.installed == RIGHT


@TOOLS
def test_projects_from_a_channel_that_was_copied_elsewhere(site, served, registry, tmp_path, client):
    wheel, folders = offered(site), {"channel": site / "whl/cu130/torch2.14", "torches": registry}
    mirror = tmp_path / "mirror" if client == "uv" else site / "mirror"
    for name, folder in folders.items():
        shutil.copytree(folder, mirror / name)
    shutil.rmtree(site / "whl")
    shutil.rmtree(registry)
    # Poetry reads no folders.
    address = mirror.as_uri() if client == "uv" else f"{served}/mirror"
    project = Project(tmp_path / "project", client, wheel, served, f"{address}/torches/", f"{address}/channel")
    project.lock()
    done = project.install()
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.installed == RIGHT


@TOOLS
def test_projects_refuse_a_tampered_wheel(site, served, tmp_path, client):
    project = Project(tmp_path / "project", client, offered(site), served, f"{served}/registry/")
    project.lock()
    (wheel,) = site.glob("whl/cu130/torch2.14/*/scaled_mask_softmax-1.0.0+*.whl")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("scaled_mask_softmax/more.py", "import os\n")
    done = project.install()
    assert done.returncode != 0
    assert "hash" in (done.stdout + done.stderr).lower()
    assert "scaled-mask-softmax" not in project.installed
