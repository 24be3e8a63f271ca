"""python -m release COMMAND: see --help. Parses with any Python 3, to say which one it needs."""

import argparse
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit("error: Python 3.10 or newer is needed, this is {}.{}: give make PYTHON=3.11".format(*sys.version_info))

from . import ROOT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .matrix import Cell, Matrix
    from .options import Options


def _become(python: Path, more: "list[str]") -> None:
    """Goes on as another Python, with the same command and `more` arguments."""
    command = [str(python), "-m", "release", *sys.argv[1:], *more]
    # The caller's modules must not leak in.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    os.execve(command[0], command, {**env, "PYTHONPATH": str(ROOT)})


def _need(*modules: str, more: bool = True) -> None:
    """Goes on in the environment of the build tools where this one lacks a module, or the `more` that is needed."""
    from . import environments, preflight

    if not more or any(importlib.util.find_spec(name) is None for name in modules):
        _become(environments.tools(preflight.interpreter(None)).python, [])


def _matrix(arguments: argparse.Namespace) -> None:
    if sys.version_info < (3, 11):
        _need("tomli")
    from . import matrix

    if (arguments.per_python or arguments.per_label) and not arguments.json:
        raise matrix.MatrixError("--per-python and --per-label are for the entries of --json: give that too")
    data = matrix.load()
    torch = data.default_torch if arguments.torch == "default" else arguments.torch or None
    cuda = data.cell(torch).cuda_label if arguments.cuda == "default" else arguments.cuda or None
    cells = data.cells(torch, cuda, arguments.platform, proven=arguments.proven)
    if arguments.version:
        print(data.version)
    elif arguments.json:
        print(matrix.workflow(data, cells, per_python=arguments.per_python, per_label=arguments.per_label))
    elif arguments.wheels:
        print("\n".join(matrix.wheels(data, cells)))
    else:
        print(matrix.table(data, cells))


def _chosen_cell(arguments: argparse.Namespace) -> "tuple[Matrix, Cell]":
    from . import matrix, options

    data = matrix.load()
    return data, options.choose(data, arguments.torch or None, arguments.cuda or None, arguments.platform)


def _image(arguments: argparse.Namespace) -> None:
    _need("tomllib" if sys.version_info >= (3, 11) else "tomli")
    from . import image
    from .progress import StepError

    command = image.command(*_chosen_cell(arguments), arguments.engine, arguments.base)
    print(shlex.join(command), flush=True)
    if arguments.run_it and subprocess.run(command).returncode != 0:
        raise StepError(f"{arguments.engine} failed")


def _runtime_image(arguments: argparse.Namespace) -> None:
    _need("tomllib" if sys.version_info >= (3, 11) else "tomli")
    from . import runtime_image
    from .progress import StepError

    data, cell = _chosen_cell(arguments)
    name = arguments.name or runtime_image.NAME
    if arguments.tags:
        cells = data.cells(cell.torch.minor, cell.cuda_label, proven=True)
        print(
            "\n".join(
                [runtime_image.tag(data, cell, name), *(runtime_image.reference(data, each, name) for each in cells)]
            )
        )
        return
    if arguments.reference:
        print(runtime_image.reference(data, cell, name))
        return
    how = {"engine": arguments.engine, "base": arguments.base, "name": name, "source": arguments.source}
    command = runtime_image.command(data, cell, arguments.site, **how)
    print(shlex.join(command), flush=True)
    if arguments.run_it and subprocess.run(command).returncode != 0:
        raise StepError(f"{arguments.engine} failed")


def _container(arguments: argparse.Namespace) -> None:
    _need("tomllib" if sys.version_info >= (3, 11) else "tomli")
    from . import container, image, preflight

    data, cell = _chosen_cell(arguments)
    pythons = arguments.python.split() or cell.torch.python
    variables = container.environment(data, cell, pythons, arguments.image or image.tag(cell), arguments.engine)
    if arguments.archs:
        variables[container.ARCHS] = arguments.archs
    container.build(variables, preflight.interpreter(None), arguments.directory.resolve())


def _container_step(arguments: argparse.Namespace) -> None:
    from . import container
    from .progress import StepError

    step, count = container.STEPS[arguments.step]
    if len(arguments.paths) != count:
        raise StepError(f"step {arguments.step} takes {count} paths")
    step(*arguments.paths)


def _configure(arguments: argparse.Namespace) -> None:
    from . import configure

    configure.write(arguments.output)


def _record(arguments: argparse.Namespace) -> None:
    from . import record

    record.write(arguments.library, arguments.facts, arguments.host_compiler, arguments.output)


def _cell_of(build: "dict[str, Any]") -> "Cell":
    """The cell that a wheel with this build record is of."""
    from . import matrix, torch_info

    return matrix.load().cell(build["torch_minor"], torch_info.cuda_label(build["cuda"]))


def _every_patch(wheel: Path) -> "list[Path]":
    """The folders of every patch release of a wheel's torch that the registry has, fetched without dependencies."""
    import dataclasses

    from . import environments, new_torch, preflight, provision, verify

    cell, interpreter = _cell_of(verify.build_record(wheel)), preflight.interpreter(None)
    releases = [
        release
        for release in new_torch.released(environments.tools(interpreter))
        if release.rpartition(".")[0] == cell.torch.minor
    ]
    print(f"{wheel.name}: against torch {', '.join(releases)}")
    cells = [dataclasses.replace(cell, torch=dataclasses.replace(cell.torch, release=release)) for release in releases]
    found = [provision.torch(each, interpreter, importable=False) for each in cells]
    return [environment.site_packages / "torch" for environment in found]


def _use(wheel: Path, build: "dict[str, Any]") -> None:
    """Installs a wheel beside its torch, which is fetched with its dependencies, and runs it."""
    from . import beside, preflight, provision

    interpreter = preflight.interpreter(build["python"])
    torch = provision.torch(_cell_of(build), interpreter, importable=True)
    beside.use(wheel, build["version"], interpreter, torch)


def _verify(arguments: argparse.Namespace) -> None:
    import functools

    from . import fatbin, wheel_file

    for wheel in arguments.wheels:
        wheel_file.read(wheel)  # before anything is fetched for the checks
    modules = ("elftools", "auditwheel", "tomllib" if sys.version_info >= (3, 11) else "tomli")
    _need(*modules, more=fatbin.cuobjdump() is not None)
    from . import verify

    for wheel in arguments.wheels:
        torches = [*arguments.torch, *(_every_patch(wheel) if arguments.every_patch else [])]
        use = functools.partial(_use, wheel) if arguments.use else None
        report = verify.verify(wheel, complete=arguments.complete, torches=torches, use=use)
        archs = ", ".join(report.architectures) or "CPU only"
        print(f"{wheel.name}: right; {report.size / 1e6:.1f} MB, {archs}, {report.kernels} kernels in each")
        print(f"  passed: {', '.join(report.gates)}")


def _compare(arguments: argparse.Namespace) -> None:
    from . import compare
    from .progress import StepError

    found = compare.differences(arguments.first, arguments.second)
    if found:
        print("\n".join(found))
        raise StepError(f"{arguments.first} and {arguments.second} differ")
    print("the same, byte for byte")


def _check_index(arguments: argparse.Namespace) -> None:
    """Options that go together are there together, and there is something to do."""
    from .options import OptionError

    if bool(arguments.base_url) != (arguments.assets is not None):
        raise OptionError("--base-url says where the files of --assets will lie: give both, or neither")
    if arguments.reason and arguments.yank is None:
        raise OptionError("--reason is why --yank withdraws a version: give --yank VERSION too")
    if arguments.yank == "":
        raise OptionError("--yank is given no version: give one, such as 1.0.0 or 1.0.0+cu130torch2.14")
    if not arguments.wheels and not arguments.directory.is_dir():
        raise OptionError(
            f"{arguments.directory} is no folder, and there is no FILE to lay out in it: give one of them"
        )


def _index(arguments: argparse.Namespace) -> None:
    from . import index

    _check_index(arguments)
    if arguments.release:
        _need("tomllib" if sys.version_info >= (3, 11) else "tomli")
    with index.update(arguments.directory) as found:
        how = {"base_url": arguments.base_url, "assets": arguments.assets}
        channels = dict.fromkeys(found.add(wheel, **how) for wheel in arguments.wheels)
        withdrawn = found.yank(arguments.yank, arguments.reason) if arguments.yank is not None else 0
        if arguments.release:
            from . import matrix

            data = matrix.load()
            names = matrix.wheels(data, data.cells(proven=True))
            found.expect(names, data.version, allow_missing=arguments.release == "partial")
        if arguments.address:
            found.set_address(arguments.address)
        found.check_files()
    if arguments.yank is not None:
        print(f"withdrawn: {withdrawn} files of {arguments.yank}")
    for name in channels:
        print(arguments.directory / name)
    for name in found.missing:
        print(f"missing: {name}")


def _options(arguments: argparse.Namespace) -> "Options":
    """The options, checked as far as that needs no matrix."""
    from .options import Options, yes

    variable = "TORCH_CUDA_ARCH_LIST"
    from_variable = not arguments.archs and os.environ.get(variable)
    options = Options(
        arguments.torch or None,
        arguments.cuda or None,
        arguments.python or None,
        arguments.archs or from_variable or None,
        variable if from_variable else "ARCHS",
        yes("TEST", getattr(arguments, "test", "yes")),
        arguments.torch_here,
        arguments.cuda_here,
    )
    options.check_archs(None, "")
    return options


def _inside(arguments: argparse.Namespace) -> None:
    """Goes on in an environment with the build tools, of the interpreter that is built for."""
    from . import environments, preflight, torch_info

    interpreter = preflight.interpreter(arguments.python)
    preflight.check_cxx()
    if not arguments.torch:
        try:
            here = torch_info.find()
        except torch_info.TorchError:
            here = None
        if here is not None and torch_info.is_release(here.version):
            arguments.torch_here, arguments.cuda_here = here.minor, torch_info.cuda_label(here.cuda)
    if sys.version_info >= (3, 11) or importlib.util.find_spec("tomli") is not None:
        # Before the tools are fetched, where the matrix can be read without them.
        from . import wheel

        compiler = arguments.command not in ("typecheck", "try", "clusters")
        cell = wheel.check(_options(arguments), interpreter, compiler=compiler)
        if arguments.command == "try":
            wheel.channel_of(cell, arguments.site)
    more = ["--interpreter", str(interpreter.executable)]
    if arguments.torch_here:
        more += ["--torch-here", arguments.torch_here, "--cuda-here", arguments.cuda_here]
    _become(environments.tools(interpreter).python, more)


def _sanitize_gpu(arguments: argparse.Namespace, options: "Options", pytest: "list[str]") -> bool:
    """Runs compute-sanitizer over the package that is installed, if that is asked for; else checks the machine."""
    from . import sanitize_gpu
    from .options import OptionError, words

    tools = words("TOOLS", arguments.tools)
    sanitize_gpu.chosen(tools)
    jobs = None
    if arguments.jobs:
        if not arguments.jobs.isdecimal() or int(arguments.jobs) < 1:
            raise OptionError(f"JOBS={arguments.jobs} is no number of processes: give JOBS=8, or leave it out")
        jobs = int(arguments.jobs)
    if options.cuda == "cpu":
        raise OptionError("CUDA=cpu has nothing for compute-sanitizer to see: give make sanitize for the CPU")
    if arguments.installed:
        sanitize_gpu.run(Path(sys.executable), arguments.compute_sanitizer or None, tools, jobs, pytest)
        return True
    if arguments.interpreter is None:
        sanitize_gpu.check_machine(arguments.compute_sanitizer or None)
    return False


def _cell_command(arguments: argparse.Namespace) -> None:
    from .options import words

    options, pytest = _options(arguments), words("PYTEST", getattr(arguments, "pytest", ""))
    measure = [arguments.case] if arguments.command == "profile" else words("BENCH", getattr(arguments, "bench", ""))
    if arguments.command == "sanitize-gpu" and _sanitize_gpu(arguments, options, pytest):
        return
    if arguments.interpreter is None:
        _inside(arguments)
    os.environ.pop("PYTHONPATH", None)
    from . import preflight, wheel

    interpreter = preflight.interpreter(arguments.interpreter)
    if arguments.command == "wheel":
        wheel.wheel(options, interpreter)
    elif arguments.command == "typecheck":
        wheel.typecheck(options, interpreter)
    elif arguments.command == "clusters":
        wheel.clusters(options, interpreter)
    elif arguments.command == "try":
        wheel.try_out(options, interpreter, arguments.site)
    elif arguments.command in ("bench", "profile"):
        wheel.test(options, interpreter, "scaled_mask_softmax_cli", [arguments.command, *measure], sanitize=False)
    elif arguments.command == "sanitize-gpu":
        given = {
            "--compute-sanitizer": arguments.compute_sanitizer,
            "--tools": arguments.tools,
            "--jobs": arguments.jobs,
            "--pytest": arguments.pytest,
        }
        more = [f"{name}={value}" for name, value in given.items() if value]
        wheel.test(options, interpreter, "release", ["sanitize-gpu", "--installed", *more], sanitize=False)
    else:
        wheel.test(options, interpreter, "pytest", pytest, sanitize=arguments.command == "sanitize")


def _lint(arguments: argparse.Namespace) -> None:
    from . import environments, preflight

    tools = environments.linters(preflight.interpreter(None))
    fix = arguments.command == "format"
    commands = [["check", "--fix-only"], ["format"]] if fix else [["check"], ["format", "--check"]]
    for command in commands:
        environments.lint(tools, "ruff", *command, ".")


def _lint_workflows(arguments: argparse.Namespace) -> None:
    from . import environments, preflight

    environments.lint_workflows(preflight.interpreter(None))


def _docs(arguments: argparse.Namespace) -> None:
    from . import environments, preflight

    print(environments.site(preflight.interpreter(None)) / "index.html")


def _new_torch(arguments: argparse.Namespace) -> None:
    _need("tomllib" if sys.version_info >= (3, 11) else "tomli")
    from . import environments, matrix, new_torch, preflight
    from .progress import StepError

    if arguments.minor and not re.fullmatch(r"\d+\.\d+", arguments.minor, re.ASCII):
        raise StepError(f"{arguments.minor} is no minor release of torch: give one such as 2.16")
    if arguments.write and not arguments.minor:
        raise StepError("--write needs to know what to write: give a minor release of torch too, such as 2.16")
    data, tools = matrix.load(), environments.tools(preflight.interpreter(None))
    lacking = new_torch.lacking(data, new_torch.released(tools))
    if not arguments.minor:
        print("\n".join(f"torch {release}" for release in lacking) or "the matrix has the newest torch releases")
        return
    release = next((release for release in lacking if release.rpartition(".")[0] == arguments.minor), None)
    if release is None:
        raise StepError(
            f"the registry has no torch {arguments.minor} that the matrix lacks; python -m release new-torch lists "
            "what it has"
        )
    found = new_torch.published(tools, data, release)
    text = new_torch.updated(matrix.MATRIX_FILE.read_text(encoding="utf-8"), data, found)
    if arguments.write:
        matrix.MATRIX_FILE.write_text(text, encoding="utf-8")
        print(f"{matrix.MATRIX_FILE} has torch {release} now.")
    else:
        print(f"For {matrix.MATRIX_FILE} (--write puts it there):\n\n{new_torch.row(found)}")
    print(new_torch.steps(data, found), end="")


def _variants(arguments: argparse.Namespace) -> None:
    _need("tomllib" if sys.version_info >= (3, 11) else "tomli")
    from . import matrix, variants

    for channel in variants.write(matrix.load(), arguments.directory, arguments.wheels):
        print(channel)


def _stage(arguments: argparse.Namespace) -> None:
    _need("scikit_build_core", "tomllib" if sys.version_info >= (3, 11) else "tomli")
    from . import environments, matrix, preflight, stage

    data = matrix.load()
    if arguments.tag:
        stage.check_tag(data, arguments.tag)
    if not arguments.wheels.is_dir():
        raise stage.StageError(f"{arguments.wheels} is no folder: give the one that holds the release's wheels")
    tools = environments.tools(preflight.interpreter(None))
    wheels = sorted(arguments.wheels.rglob(f"*-{data.version}+*.whl"))
    for path in stage.stage(data, tools, arguments.directory, wheels):
        print(path.name)


def _rehearsal(arguments: argparse.Namespace) -> None:
    _need("tomllib" if sys.version_info >= (3, 11) else "tomli")
    from . import matrix, rehearsal

    cells, try_out = arguments.cells.split(), arguments.try_out.split()
    if not cells:
        python = "{}.{}".format(*sys.version_info)
        cells, try_out = rehearsal.default_cells(matrix.load(), os.uname().machine, python)
    rehearsal.run(cells, arguments.manylinux, arguments.archs, try_out=try_out)


def _clients(arguments: argparse.Namespace) -> None:
    from . import clients, preflight

    clients.run(preflight.interpreter(None), shlex.split(arguments.pytest))


def _page_tests(arguments: argparse.Namespace) -> None:
    from . import browser, preflight

    browser.page_tests(preflight.interpreter(None), shlex.split(arguments.pytest), arguments.screenshots)


def _plain_wheel(arguments: argparse.Namespace) -> None:
    _need("tomllib" if sys.version_info >= (3, 11) else "tomli")
    from . import build, environments, preflight

    interpreter = preflight.interpreter(None)
    print(build.plain(environments.tools(interpreter), arguments.directory.resolve()))


def _folder(text: str) -> Path:
    """A path that is given: an empty one, as of a variable that is not set, would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty: name a folder, such as . for this one")
    return Path(text)


def _cell_choice(command: argparse.ArgumentParser, without: str, more: str = "") -> None:
    command.add_argument("--torch", help=f"minor release, such as 2.14{more}{without}")
    command.add_argument("--cuda", help=f"such as cu130, or cpu{more}{without}")
    command.add_argument("--platform", help=f"such as aarch64{without}")


def _cell_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--torch", help="minor release, such as 2.14")
    command.add_argument("--cuda", help="such as cu130, or cpu")
    command.add_argument("--python", type=lambda text: text or None, help="version such as 3.11, or a path")
    command.add_argument("--archs", help="as TORCH_CUDA_ARCH_LIST, such as 9.0")
    for internal in ("--interpreter", "--torch-here", "--cuda-here"):
        command.add_argument(internal, help=argparse.SUPPRESS)
    command.set_defaults(run=_cell_command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m release", description="Builds and checks wheels.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    command = commands.add_parser("matrix", help="print the release matrix")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--version", action="store_true", help="only the project's version")
    form.add_argument("--json", action="store_true", help="one line, for a workflow's strategy.matrix")
    form.add_argument("--wheels", action="store_true", help="the file names of a release's wheels")
    command.add_argument("--proven", action="store_true", help="only cells that have been built and tested")
    command.add_argument("--per-python", action="store_true", help="with --json: an entry for each Python of a cell")
    command.add_argument("--per-label", action="store_true", help="with --json: an entry for all platforms of a cell")
    _cell_choice(command, "; every one without it", " (or default: what make wheel takes)")
    command.set_defaults(run=_matrix)

    command = commands.add_parser("wheel", help="build, verify, install and exercise a wheel (make wheel)")
    _cell_options(command)
    command.add_argument("--test", default="yes", metavar="yes|no", help="no: build and verify only")

    command = commands.add_parser("image", help="print the command that builds a cell's builder image")
    _cell_choice(command, "; the default of make wheel without it")
    command.add_argument("--engine", choices=["docker", "podman"], default="docker")
    command.add_argument("--base", help="another image than the matrix's to start from")
    command.add_argument("--run", action="store_true", dest="run_it", help="run it too")
    command.set_defaults(run=_image)

    command = commands.add_parser("runtime-image", help="print the command that builds a cell's runtime image")
    _cell_choice(command, "; the default of make wheel without it")
    command.add_argument("--site", type=Path, default=Path("build/staged/site"), help="an index with the cell's wheels")
    command.add_argument("--engine", choices=["docker", "podman"], default="docker")
    command.add_argument("--base", help="another image than the matrix's to start from")
    command.add_argument("--name", default="", help="of the image, such as ghcr.io/owner/name")
    command.add_argument("--source", default="", help="the repository's address, for its label")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--tags", action="store_true", help="print the image of all platforms and each one's instead")
    form.add_argument("--reference", action="store_true", help="print the image of this platform instead")
    form.add_argument("--run", action="store_true", dest="run_it", help="run it too")
    command.set_defaults(run=_runtime_image)

    command = commands.add_parser("container", help="build and test a cell's wheels in its image, with cibuildwheel")
    _cell_choice(command, "; the default of make wheel without it")
    command.add_argument("--python", default="", help='such as "3.11 3.12"; every one without it')
    command.add_argument("--engine", choices=["docker", "podman"], default="docker")
    command.add_argument("--archs", help="as TORCH_CUDA_ARCH_LIST; those of the matrix without it")
    command.add_argument("--image", help="another image than the one that the image command builds")
    command.add_argument("--directory", type=Path, default=Path("dist"), help="for the wheels")
    command.set_defaults(run=_container)

    command = commands.add_parser("container-step", help="(for cibuildwheel) a step inside the container")
    command.add_argument("step", choices=["setup", "torch", "repair", "check"])
    command.add_argument("paths", type=Path, nargs="*")
    command.set_defaults(run=_container_step)

    for name, text in {"test": "the test suite", "sanitize": "CPU tests under AddressSanitizer and UBSan"}.items():
        command = commands.add_parser(name, help=f"build, install and run {text} (make {name})")
        _cell_options(command)
        command.add_argument("--pytest", default="", help="arguments for pytest")

    command = commands.add_parser(
        "sanitize-gpu", help="build, install and run GPU tests under compute-sanitizer (make sanitize-gpu)"
    )
    _cell_options(command)
    command.add_argument("--installed", action="store_true", help="as this Python has it: build and fetch nothing")
    command.add_argument("--tools", default="", help='such as "memcheck racecheck"; all four without it')
    command.add_argument("--jobs", default="", help="processes at a time; one a core without it")
    command.add_argument("--compute-sanitizer", metavar="PATH", help="the program; this machine's without it")
    command.add_argument("--pytest", default="", help='arguments for pytest, such as "-k float16"')

    command = commands.add_parser("bench", help="build, install and measure (make bench)")
    _cell_options(command)
    command.add_argument("--bench", default="", help="arguments for scaled-mask-softmax bench")
    command = commands.add_parser("profile", help="build, install and profile a case (make profile)")
    _cell_options(command)
    command.add_argument("--case", required=True, help="its name, as the bench lists it")

    command = commands.add_parser("typecheck", help="mypy --strict against the torch of a cell (make typecheck)")
    _cell_options(command)

    for name, text in {"lint": "ruff's checks and formatting, changing nothing", "format": "let ruff reformat"}.items():
        commands.add_parser(name, help=f"{text} (make {name})").set_defaults(run=_lint)

    command = commands.add_parser("lint-workflows", help="lint workflows, Dockerfiles and scripts")
    command.set_defaults(run=_lint_workflows)

    command = commands.add_parser("docs", help="build the documentation; a warning is an error (make docs)")
    command.set_defaults(run=_docs)

    command = commands.add_parser("new-torch", help="find torch releases that the matrix lacks, and add one")
    command.add_argument("minor", nargs="?", help="such as 2.16; without it the command lists what the matrix lacks")
    command.add_argument("--write", action="store_true", help="change matrix.toml")
    command.set_defaults(run=_new_torch)

    command = commands.add_parser("variants", help="(a preview) pages from which the installer picks the CUDA")
    command.add_argument("directory", type=Path)
    command.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    command.set_defaults(run=_variants)

    command = commands.add_parser("stage", help="lay out a release from its wheels, if they are all there")
    command.add_argument("wheels", type=_folder, metavar="FOLDER", help="with the wheels, however deep")
    command.add_argument("--directory", type=_folder, default=Path("build/staged"))
    command.add_argument("--tag", help="must be that of the version in the matrix, such as v1.0.0")
    command.set_defaults(run=_stage)

    command = commands.add_parser("try", help="install a staged wheel beside its torch and exercise it")
    command.add_argument("site", type=Path)
    _cell_options(command)

    command = commands.add_parser(
        "clusters", help="try the examples for clusters with a wheel of dist/ (make clusters)"
    )
    _cell_options(command)

    command = commands.add_parser("rehearsal", help="a release of a small matrix, from tags to installs")
    command.add_argument(
        "--cells", default="", help="such as 2.14/cu130/3.11; by default two torch minors on two Pythons, and a CPU one"
    )
    command.add_argument("--try", dest="try_out", default="", help="those of --cells to train with")
    command.add_argument("--archs", default="9.0", help="the small matrix's architectures, without PTX")
    command.add_argument("--manylinux", default="manylinux_2_34", help="what wheels of this machine are tagged")
    command.set_defaults(run=_rehearsal)

    command = commands.add_parser("clients", help="try channels with old and new installers (make clients)")
    command.add_argument("--pytest", default="", help="arguments for pytest")
    command.set_defaults(run=_clients)

    command = commands.add_parser("page-tests", help="try the index's landing page in a browser (make page-tests)")
    command.add_argument("--pytest", default="", help="arguments for pytest")
    command.add_argument("--screenshots", type=Path, metavar="FOLDER", help="put pictures of the page there")
    command.set_defaults(run=_page_tests)

    command = commands.add_parser("plain-wheel", help="build the wheel without native code")
    command.add_argument("directory", type=Path, nargs="?", default=Path("dist"))
    command.set_defaults(run=_plain_wheel)

    command = commands.add_parser("verify", help="check finished wheels")
    command.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    command.add_argument("--complete", action="store_true", help="demand every architecture of the matrix")
    command.add_argument(
        "--torch",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="a torch that must have every symbol that is asked of it; may be repeated",
    )
    command.add_argument(
        "--every-patch", action="store_true", help="fetch each patch release of the wheel's torch, and ask it too"
    )
    command.add_argument("--use", action="store_true", help="install it beside its torch, fetched whole, and run it")
    command.set_defaults(run=_verify)

    command = commands.add_parser("compare", help="what differs between two builds of one wheel")
    command.add_argument("first", type=Path)
    command.add_argument("second", type=Path)
    command.set_defaults(run=_compare)

    command = commands.add_parser("index", help="lay wheels and source distributions out as channels below a directory")
    command.add_argument("directory", type=_folder)
    command.add_argument("wheels", type=Path, nargs="*", metavar="FILE")
    command.add_argument(
        "--release",
        choices=["complete", "partial"],
        help="only wheels of this release: every one, or what is missing is listed in index.json",
    )
    command.add_argument("--base-url", default="", help="where the wheels are, such as a release's page; with --assets")
    command.add_argument("--assets", type=_folder, help="where to put what belongs below --base-url")
    command.add_argument(
        "--address", help="where the landing page will lie, for its tables, such as https://host/path/"
    )
    command.add_argument("--yank", metavar="VERSION", help="withdraw a version, of every label or with its label")
    command.add_argument("--reason", default="", help="for --yank")
    command.set_defaults(run=_index)

    command = commands.add_parser("configure", help="(for CMake) find torch and nvcc, choose architectures")
    command.add_argument("--output", type=Path, required=True)
    command.set_defaults(run=_configure)

    command = commands.add_parser("record", help="(for CMake) read a library back into a build record")
    command.add_argument("--library", type=Path, required=True)
    command.add_argument("--facts", type=Path, required=True)
    command.add_argument("--host-compiler", required=True)
    command.add_argument("--output", type=Path, required=True)
    command.set_defaults(run=_record)
    return parser


def main() -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A path may hold what the terminal's encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args()
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except (ValueError, RuntimeError) as error:
        # What a user can cause is one sentence; a bug keeps its traceback.
        if not type(error).__module__.startswith("release."):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever reads the output has enough of it; Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
