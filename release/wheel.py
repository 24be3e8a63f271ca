"""make wheel and make test: from options to a verified, installed, exercised wheel; or to the test suite's verdict."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from . import ROOT, WORK, beside, build, index, preflight, provision, toolkit, verify
from .environments import Environment, cache, create, lint, linters, log, pip, tools
from .matrix import Cell, Matrix, load, test_requirements
from .options import OptionError, Options
from .options import choose as choose_cell
from .preflight import Interpreter
from .progress import StepError, Steps, duration, run, say


def choose(data: Matrix, options: Options, interpreter: Interpreter) -> Cell:
    """The cell that the options, the machine and the matrix lead to. Raises OptionError for an impossible one."""
    torch, cuda = options.torch, options.cuda
    if torch is None and cuda in (None, options.cuda_here) and options.torch_here in data.torch:
        assert options.torch_here is not None
        if options.cuda_here in data.torch[options.torch_here].cuda:
            torch, cuda = options.torch_here, options.cuda_here
    cell = choose_cell(data, torch, cuda)
    if interpreter.version not in cell.torch.python:
        first, last = cell.torch.python[0], cell.torch.python[-1]
        raise OptionError(
            f"torch {cell.torch.minor} is published for Python {first} to {last}, not for {interpreter.version}: "
            f"choose one with PYTHON={last}"
        )
    return cell


def check(options: Options, interpreter: Interpreter, *, compiler: bool = True) -> Cell:
    """The cell, every option being checked as far as that needs nothing fetched; with `compiler`, for a build."""
    cell = choose(load(), options, interpreter)
    if compiler and cell.cuda:
        kit = provision.local_compiler(cell.cuda)
        options.check_archs(kit.compiler if kit else None, cell.architectures)
    return cell


def _check_machine(cell: Cell, interpreter: Interpreter, *, full: bool) -> None:
    compiler = preflight.check_cxx()
    if cell.cuda:
        preflight.check_gcc(compiler, cell.cuda.toolkit, cell.cuda.max_gcc)
    full = full and not provision.has_torch(cell, interpreter)
    preflight.check_disk(cache(), preflight.FULL_DISK_GB if full else preflight.BUILD_DISK_GB)


def _describe(cell: Cell, interpreter: Interpreter) -> str:
    return f"torch {cell.torch.release}, {cell.cuda.label if cell.cuda else 'CPU only'}, Python {interpreter.version}"


def _smoke(environment: Environment, name: str) -> dict[str, object]:
    output = run(
        [environment.python, ROOT / "release" / "smoke.py", "--documents", ROOT],
        what="the smoke job",
        log=log(f"smoke-{name}"),
        cwd=cache(),
        # Threads that spin while they wait make a busy machine many times slower.
        env={"OMP_WAIT_POLICY": "passive", **os.environ},
        show=lambda line: not line.startswith("{"),
    )
    return dict(json.loads(output.splitlines()[-1]))


def _table(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    say("")
    say(title)
    for name, value in rows:
        say(f"  {name.ljust(width)}  {value}")


def wheel(options: Options, interpreter: Interpreter) -> None:
    """Builds, repairs, verifies, publishes into dist/, installs and exercises one wheel."""
    started = time.monotonic()
    data = load()
    cell = check(options, interpreter)
    _check_machine(cell, interpreter, full=options.test)
    name = f"{cell.label}-{interpreter.tag}"
    steps = Steps(7 if options.test else 5)

    say(f"scaled-mask-softmax {data.version} for {_describe(cell, interpreter)}")
    steps.next("torch and compiler")
    parts = build.provide(cell, options, interpreter, tools(interpreter), importable=options.test)

    steps.next("building")
    build_started = time.monotonic()
    raw = build.native(parts, options.archs, WORK / "wheels" / name / "built")
    build_time = time.monotonic() - build_started

    steps.next("repairing: the manylinux tag")
    repaired = build.repair(parts, raw, WORK / "wheels" / name / "repaired")

    steps.next("verifying")
    report = verify.verify(repaired, complete=options.archs is None, torches=[parts.torch.site_packages / "torch"])

    steps.next("writing the channel")
    (channel,) = index.write(ROOT / "dist", [repaired], may_replace=True)
    published = channel / index.PROJECT / repaired.name

    rows = [
        ("wheel", str(published.relative_to(ROOT))),
        ("size", f"{report.size / 1e6:.1f} MB"),
        ("architectures", ", ".join(report.architectures + [f"{arch} PTX" for arch in report.ptx]) or "CPU only"),
        ("kernels", f"{report.kernels} in each architecture" if report.kernels else "-"),
        ("built with", f"{parts.kit.compiler} ({parts.kit.reason})" if parts.kit else "C++ only"),
        ("build time", duration(build_time)),
    ]
    if options.test:
        steps.next("installing with pip, from the channel alone, beside the torch that is there")
        environment = beside.install(name, interpreter, parts.torch, channel, report.version)
        steps.next("training a small attention layer on this repository's documents, beside plain torch")
        result = _smoke(environment, name)
        rows += [(str(key), str(value)) for key, value in result.items()]
        rows.append(("torch", f"{cell.torch.release}, left alone by pip"))
    else:
        rows.append(("NOT TESTED", "built and verified only (TEST=no): never imported"))
    rows.append(("total time", duration(time.monotonic() - started)))
    _table("Done.", rows)
    say("")
    say("Install it, beside its torch, with:")
    say(f"  pip install --no-deps --index-url {channel.as_uri()}/ scaled-mask-softmax=={report.version}")


def channel_of(cell: Cell, site: Path) -> Path:
    """The channel of a cell below `site`, an index. Raises StepError where there is none."""
    channel = site / "whl" / cell.cuda_label / f"torch{cell.torch.minor}"
    if not channel.is_dir():
        raise StepError(
            f"{site} has no channel for {cell.label}, which would be {channel}: stage its wheels there first"
        )
    return channel


def try_out(options: Options, interpreter: Interpreter, site: Path) -> None:
    """Installs the version of the matrix from the channels below `site` beside its torch, and exercises it."""
    data = load()
    cell = choose(data, options, interpreter)
    steps = Steps(3)
    version = f"{data.version}+{cell.label}"
    channel = channel_of(cell, site)
    say(f"scaled-mask-softmax {version} from {site} for {_describe(cell, interpreter)}")
    steps.next("torch")
    torch = provision.torch(cell, interpreter, importable=True)
    steps.next("installing with pip, from the channel alone")
    name = f"{cell.label}-{interpreter.tag}"
    environment = beside.install(name, interpreter, torch, channel.resolve(), version)
    steps.next("training a small attention layer, beside plain torch")
    result = _smoke(environment, name)
    _table("Done.", [(str(key), str(value)) for key, value in result.items()])


def clusters(options: Options, interpreter: Interpreter) -> None:
    """Tries the examples for clusters with the wheel of dist/ and its torch, as root."""
    data = load()
    cell = choose(data, options, interpreter)
    steps = Steps(2)
    say(f"clusters with scaled-mask-softmax {data.version}+{cell.label} for {_describe(cell, interpreter)}")
    steps.next("torch")
    torch = provision.torch(cell, interpreter, importable=True)
    steps.next("the examples of docs/install/cluster/")
    become_root = [] if os.geteuid() == 0 else ["sudo", "-E"]
    command = [*become_root, str(ROOT / ".ci" / "cluster-rehearsal"), str(torch.python), str(ROOT / "dist")]
    if subprocess.run(command).returncode != 0:
        raise StepError("an example for clusters does not work")


def _sanitizer_environment() -> dict[str, str]:
    """What a process needs to load a library with AddressSanitizer into a Python without it."""
    compiler = preflight.cxx_compiler().split()
    libraries = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so"):
        path = subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout
        if not Path(path.strip()).is_absolute():
            raise StepError(f"{compiler[0]} has no {name}: install its sanitizer libraries")
        libraries.append(path.strip())
    return {
        "LD_PRELOAD": " ".join(libraries),
        # Python and torch keep memory until exit; CUDA's reservations lie where the shadow would be protected.
        "ASAN_OPTIONS": "detect_leaks=0:protect_shadow_gap=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


def test(options: Options, interpreter: Interpreter, module: str, arguments: list[str], *, sanitize: bool) -> None:
    """Builds for this machine, installs into an environment with the test dependencies and runs the module there.

    With `sanitize` the C++ code is built with AddressSanitizer and UBSan, and the tests for that run on the CPU.
    """
    data = load()
    cell = check(options, interpreter)
    _check_machine(cell, interpreter, full=True)
    name = f"{cell.label}-{interpreter.tag}"
    archs = options.archs
    gpus = sorted(set(toolkit.local_gpus()))
    if archs is None and cell.cuda:
        # Without a GPU the CUDA code is compiled, for one architecture, and not run.
        archs = ";".join(gpus) or "9.0"
    preload = _sanitizer_environment() if sanitize else {}
    steps = Steps(4)
    say(f"scaled-mask-softmax {data.version} for {_describe(cell, interpreter)}")
    steps.next("torch and compiler")
    parts = build.provide(cell, options, interpreter, tools(interpreter), importable=True)
    steps.next("test dependencies")
    packages = test_requirements()

    def fill(environment: Environment) -> None:
        pip(environment, ["install", *packages], what="installing the test dependencies")

    kind = "sanitize" if sanitize else "test"
    environment = create(WORK / f"{kind}-{name}", interpreter, "\n".join(packages), fill, below=parts.torch)
    steps.next(f"building and installing{f' for {archs}' if archs else ''}{', with sanitizers' if sanitize else ''}")
    raw = build.native(parts, archs, WORK / "wheels" / name / kind, sanitize=sanitize)
    pip(environment, ["install", "--force-reinstall", "--no-deps", raw], what="installing the built wheel")
    steps.next("tests" if module == "pytest" else arguments[0])
    if sanitize:
        arguments = ["-m", "sanitizer", *arguments]
    if module == "pytest" and (sanitize or not gpus):
        # One process a core; with a GPU they would fight over its memory.
        arguments = ["-n", str(os.cpu_count() or 1), *arguments]
    env = {**os.environ, **preload}
    if sanitize:
        env["CUDA_VISIBLE_DEVICES"] = ""
    env["PATH"] = f"{environment.path / 'bin'}:{parts.tools.path / 'bin'}:{env['PATH']}"
    # It shows its own progress, so it gets the terminal.
    os.chdir(ROOT)
    os.execve(environment.python, [str(environment.python), "-m", module, *arguments], env)


def typecheck(options: Options, interpreter: Interpreter) -> None:
    """mypy --strict, seeing the torch of the cell and the build backend."""
    cell = choose(load(), options, interpreter)
    torch = provision.torch(cell, interpreter, importable=True)
    lint(
        linters(interpreter, WORK / f"types-{cell.label}-{interpreter.tag}", ("scikit-build-core>=1.1",), torch), "mypy"
    )
