"""The matrix holds what the project promises, and a broken one is refused with the table's name."""

import copy
import json
import os
import re
import subprocess
import sys

import pytest
from packaging.utils import parse_wheel_filename

from release import ROOT, index, matrix
from release.matrix import MatrixError, tomllib


@pytest.fixture
def data():
    return tomllib.loads(matrix.MATRIX_FILE.read_text(encoding="utf-8"))


def test_promises():
    loaded = matrix.load()
    assert list(loaded.torch) == ["2.11", "2.12", "2.13", "2.14", "2.15"]
    assert list(loaded.platforms) == ["x86_64", "aarch64"]
    assert loaded.manylinux == "manylinux_2_28"
    assert {version for torch in loaded.torch.values() for version in torch.python} == {
        "3.10", "3.11", "3.12", "3.13", "3.14"
    }  # fmt: skip
    assert loaded.torch["2.15"].default == "cu132"
    assert all(loaded.torch[minor].default == "cu130" for minor in ("2.11", "2.12", "2.13", "2.14"))
    assert "3.10" not in loaded.torch["2.15"].python


def test_cells():
    loaded = matrix.load()
    cell = loaded.cell("2.14", "cu130", "x86_64")
    assert cell.label == "cu130torch2.14"
    assert cell.architectures == "7.5;8.0;8.6;9.0;10.0;12.0+PTX"
    assert "11.0" in loaded.cell("2.14", "cu130", "aarch64").architectures
    assert loaded.cell("2.13", "cpu", "x86_64").label == "cputorch2.13"
    assert loaded.cell(machine="x86_64").torch.minor == loaded.default_torch
    labels = [(cell.label, cell.platform) for cell in loaded.cells()]
    assert len(set(labels)) == len(labels) == 2 * sum(len(torch.cuda) for torch in loaded.torch.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2.9",), "torch 2.9 is not in the matrix, which has 2.11"),
        (("2.15", "cu130"), "torch 2.15 is not published for cu130, only for cu132, cpu"),
        (("2.14", "cu130", "riscv64"), "platform riscv64 is not in the matrix"),
    ],
)
def test_impossible_cells(arguments, message):
    with pytest.raises(MatrixError, match=re.escape(message)):
        matrix.load().cell(*arguments)


def test_version_is_held_here_alone():
    version = matrix.load().version
    assigned = re.compile(rf"version\w*\W+{re.escape(version)}\b", re.IGNORECASE)
    for pattern in ("pyproject.toml", "CMakeLists.txt", "cmake/*", "src/**/*.cpp", "release/*.py", "python/**/*.py"):
        for path in ROOT.glob(pattern):
            assert not assigned.search(path.read_text(encoding="utf-8")), path


def test_every_cell_is_in_the_printed_table():
    loaded = matrix.load()
    lines = matrix.table(loaded, loaded.cells()).splitlines()
    assert len(lines) == 2 + len(loaded.cells())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("version"), "missing version"),
        (lambda d: d.update(extra=1), "unknown extra"),
        (lambda d: d.update(version="1.0"), "version = '1.0'"),
        (lambda d: d.update(default_torch="9.9"), "default_torch 9.9 has no table"),
        (lambda d: d["torch"]["2.14"].update(release="2.15.0"), 'torch."2.14": release 2.15.0'),
        (lambda d: d["torch"]["2.14"].update(default="cu126"), "must be the first of cuda"),
        (lambda d: d["torch"].update({"2": d["torch"].pop("2.12")}), "'2' is no minor release of torch"),
        (lambda d: d["torch"]["2.14"].update(cuda=["cu130", "cu199"]), "no table for cu199"),
        (lambda d: d["torch"]["2.14"].update(cuda=["cu130", "cu130"]), "without duplicates"),
        (lambda d: d["torch"]["2.14"].update(python=["3.x"]), "'3.x' in python"),
        (lambda d: d["cuda"]["cu130"].update(toolkit="13.2"), "cuda.cu130: toolkit 13.2 belongs to cu132"),
        (lambda d: d["cuda"]["cu130"].update(architectures="9.0;8.0+PTX"), "must ascend"),
        (lambda d: d["cuda"]["cu130"].update(architectures="8.0;9.0"), "+PTX on the newest only"),
        (lambda d: d["cuda"]["cu130"].pop("max_gcc"), "cuda.cu130: missing max_gcc"),
        (lambda d: d["cuda"]["cu130"].update(min_driver="580"), "min_driver must be a positive integer, not '580'"),
        (lambda d: d["cuda"]["cu130"].update(max_gcc=True), "max_gcc must be a positive integer, not True"),
        (lambda d: d["cuda"]["cu130"].update(source="internet"), "source = 'internet'"),
        (lambda d: d["cuda"]["cu130"].update(architectures="7.0;8.0+PTX"), "13.0 toolkit does not compile 7.0"),
        (lambda d: d["cuda"]["cu126"].update(architectures="9.0;10.0+PTX"), "12.6 toolkit does not compile 10.0"),
        (lambda d: d["cuda"]["cu130"].update(architectures="9.0;14.0+PTX"), "14.0 in architectures has no table"),
        (lambda d: d["cuda"]["cu130"].update(architectures_aarch64="8.0"), "architectures_aarch64 must ascend"),
        (lambda d: d["cuda"]["cu130"].update(architectures_riscv64="8.0+PTX"), "unknown architectures_riscv64"),
        (lambda d: d["torch"]["2.14"].update(python=["3.10", "3.12"]), "python must ascend without a gap"),
        (lambda d: d["platform"]["x86_64"].update(image="quay.io/pypa/manylinux_2_28_x86_64:latest"), "image = "),
        (
            lambda d: d["platform"]["x86_64"].update(image=d["platform"]["aarch64"]["image"]),
            "is not of manylinux_2_28_x86_64",
        ),
        (lambda d: d["runtime"].update(image="docker.io/library/python:3.13-slim"), "runtime: image = "),
        (lambda d: d["runtime"].update(python="3.12"), "runtime: image = "),
        (lambda d: d["runtime"].pop("python"), "runtime: missing python"),
        (lambda d: d["torch"]["2.14"].update(proven={"riscv64": ["cpu"]}), "proven: unknown riscv64"),
        (lambda d: d["torch"]["2.14"].update(proven={"x86_64": ["cu128"]}), "proven cu128 is not in cuda"),
        (lambda d: d["platform"]["x86_64"].pop("runner"), "platform.x86_64: missing runner"),
        (lambda d: d["architecture"].update({"6.0": {"gpus": "P100"}}), "no CUDA release is built for it"),
        (lambda d: d["torch"]["2.11"].update(cuda=["cu130", "cpu"]), "cuda.cu128: no torch is published for it"),
    ],
)
def test_broken_matrices(data, change, message):
    broken = copy.deepcopy(data)
    change(broken)
    with pytest.raises(MatrixError, match=re.escape(message)):
        matrix.parse(broken)


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('release = "2.14.1"', 'release = "2.15.0"', 'release = "2.15.0"', "release 2.15.0 is not of this minor"),
        ("min_driver = 580", "min_driver = -1", "min_driver = -1", "cuda.cu130: min_driver must be"),
        ("max_gcc = 13", "max_cc = 13", "[cuda.cu126]", "cuda.cu126: missing max_gcc"),
        ('version = "1.0.0"', 'version = "1"', 'version = "1"', "matrix: version = '1'"),
        ('runner = "ubuntu-24.04-arm"', "runner = 1", "runner = 1", "platform.aarch64: runner = 1"),
        ('python = "3.13"', 'python = "3"', 'python = "3"', "runtime: python = '3'"),
        ('default_torch = "2.14"', 'default_torch = "2.9"', 'default_torch = "2.9"', "default_torch 2.9 has no table"),
    ],
)
def test_an_error_names_the_line(old, new, line, message):
    text = matrix.MATRIX_FILE.read_text(encoding="utf-8").replace(old, new, 1)
    number = text.splitlines().index(line) + 1
    with pytest.raises(MatrixError, match="^" + re.escape(f"release/matrix.toml, line {number}: ") + ".*") as raised:
        matrix.read(text, "release/matrix.toml")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "value", ["0", "1.5", "nan", "2026-11-30", '""', '"\u0663.\u0663"', "[[1]]", "[{ a = 1 }]", "{ a = 1 }"]
)
def test_a_wrong_value_of_any_key_names_its_line(value):
    lines = matrix.MATRIX_FILE.read_text(encoding="utf-8").splitlines()
    keys = {number: line.partition(" = ")[0] for number, line in enumerate(lines, 1) if re.match(r"[\w.]+ = ", line)}
    assert len(keys) > 70
    for number, key in keys.items():
        if key == "gpus" and value.startswith('"\u0663'):
            continue  # any text names GPUs
        text = "\n".join([*lines[: number - 1], f"{key} = {value}", *lines[number:]])
        with pytest.raises(MatrixError) as raised:
            matrix.read(text, "m.toml")
        assert str(raised.value).startswith(f"m.toml, line {number}: "), (key, str(raised.value))


@pytest.mark.parametrize("name", ["architecture", "cuda", "platform", "runtime", "torch"])
@pytest.mark.parametrize("value", ["1", "[]", '"x"', "{ x = 1 }"])
def test_what_is_no_table_names_the_line(name, value):
    text = matrix.MATRIX_FILE.read_text(encoding="utf-8")
    others = re.sub(rf"^\[{name}\b.*\n(?:[^\[].*\n|\n)*", "", text, flags=re.MULTILINE)
    with pytest.raises(MatrixError, match=rf"^m\.toml, line 1: (matrix: )?{name}"):
        matrix.read(f"{name} = {value}\n{others}", "m.toml")


@pytest.mark.parametrize("header", ["[torch.'2.14'] # a comment", '[ torch . "2.14" ]'])
def test_a_table_is_found_however_its_header_is_spelt(header):
    text = matrix.MATRIX_FILE.read_text(encoding="utf-8").replace('[torch."2.14"]', header)
    text = text.replace('release = "2.14.1"', 'release = "2.15.1"')
    number = text.splitlines().index('release = "2.15.1"') + 1
    with pytest.raises(MatrixError, match=rf"^m\.toml, line {number}: "):
        matrix.read(text, "m.toml")


@pytest.mark.parametrize("text", ['version = "1.0.0"\nmanylinux = \n', 'version = "1.0.0"\n= 1\n'])
def test_what_is_no_toml_names_the_line(text):
    with pytest.raises(MatrixError, match=r"^m\.toml: .*line 2"):
        matrix.read(text, "m.toml")


@pytest.mark.parametrize("value", ["[" * 5000, "1" * 5000], ids=["deep", "long"])
def test_what_the_toml_reader_gives_up_on(value):
    with pytest.raises(MatrixError, match=r"^m\.toml: "):
        matrix.read(f"version = {value}", "m.toml")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(MatrixError, match=r"/absent\.toml cannot be read as UTF-8 text: .*No such file"):
        matrix.load(tmp_path / "absent.toml")
    with pytest.raises(MatrixError, match=r"cannot be read as UTF-8 text: .*Is a directory"):
        matrix.load(tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes('version = "1.0.0" # \u00fc\n'.encode("latin-1"))
    with pytest.raises(MatrixError, match=r"/latin\.toml cannot be read as UTF-8 text: .*position 20"):
        matrix.load(latin)


def test_cells_can_be_chosen():
    loaded = matrix.load()
    assert [cell.label for cell in loaded.cells("2.14", "cu126")] == ["cu126torch2.14"] * 2
    assert {cell.platform for cell in loaded.cells(machine="aarch64")} == {"aarch64"}
    with pytest.raises(MatrixError, match=r"no cell of the matrix is for 2\.15, cu126"):
        loaded.cells("2.15", "cu126")


def test_torch_comes_from_the_registry_only_where_it_is_the_default():
    loaded = matrix.load()
    assert loaded.torch_index(loaded.cell("2.14", "cu130", "x86_64")) == ""
    assert loaded.torch_index(loaded.cell("2.14", "cu126", "x86_64")) == f"{loaded.torch_channels}/cu126"
    assert loaded.torch_index(loaded.cell("2.14", "cpu", "x86_64")) == f"{loaded.torch_channels}/cpu"


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "release", "matrix", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_json_for_workflows():
    loaded = matrix.load()
    output = command("--json")
    assert output.count("\n") == 1
    include = json.loads(output)["include"]
    assert [(row["torch"], row["cuda"], row["platform"]) for row in include] == [
        (cell.torch.minor, cell.cuda_label, cell.platform) for cell in loaded.cells()
    ]
    assert all(row["runner"] == loaded.platforms[row["platform"]].runner for row in include)
    assert {row["runner"] for row in include if row["platform"] == "aarch64"} == {"ubuntu-24.04-arm"}
    default = loaded.torch[loaded.default_torch]
    chosen = json.loads(
        command("--json", "--torch", "default", "--cuda", "cpu", "--platform", "x86_64", "--per-python")
    )
    assert [row["python"] for row in chosen["include"]] == list(default.python)
    (only,) = json.loads(command("--json", "--torch", "default", "--cuda", "default", "--platform", "x86_64"))[
        "include"
    ]
    assert (only["torch"], only["cuda"]) == (default.minor, default.default)
    # What an empty input of a workflow gives.
    assert command("--json", "--torch", "", "--cuda", "") == output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--per-python"], "error: --per-python and --per-label are for the entries of --json: give that too"),
        (["--per-label", "--wheels"], "error: --per-python and --per-label are for the entries of --json"),
        (["--cuda", "cu199"], "error: no cell of the matrix is for cu199: python -m release matrix lists all"),
    ],
)
def test_a_wrong_command(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "release", "matrix", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_a_reader_that_has_enough():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "release", "matrix"], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_wheels_of_a_release():
    loaded = matrix.load()
    names = command("--wheels").split()
    assert len(set(names)) == len(names) == sum(len(cell.torch.python) for cell in loaded.cells())
    assert f"scaled_mask_softmax-{loaded.version}+cu130torch2.14-cp311-cp311-manylinux_2_28_aarch64.whl" in names
    assert not [name for name in names if "torch2.15-cp310" in name]
    for name in names:
        _, version, _, _ = parse_wheel_filename(name)
        assert index.channel(name) == "whl/{}/torch{}".format(*str(version.local).split("torch"))
