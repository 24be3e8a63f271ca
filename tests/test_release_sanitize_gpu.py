"""make sanitize-gpu, with a stand-in for compute-sanitizer: what it runs where, what it makes of it, and loud ends."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checks import DTYPES_AND_KINDS, short

from release import ROOT, sanitize_gpu, toolkit, verify
from release.progress import StepError
from release.sanitize_gpu import Gpu

PYTHON = Path(sys.executable)
GPUS = [Gpu("0", 16 << 30), Gpu("GPU-2", 16 << 30)]
TESTS = [
    *(f"tests/test_sanitizer.py::test_every_kernel[cuda-{group}]" for group in ("float16-none", "bfloat16-float32")),
    *(f"tests/test_sink.py::test_with_everything_else[cuda-{n}-float16-none]" for n in (1, 1029)),
    "tests/test_sanitizer.py::test_edges[cuda]",
    "tests/test_errors.py::test_operator[cuda-mask: a name with spaces]",
]
GROUPS = {"float16-none": 3, "bfloat16-float32": 1, "others": 2}

# Notes how it was called, and behaves as BEHAVIOUR says for "tool group".
STAND_IN = """
import json, os, pathlib, subprocess, sys, time
arguments = sys.argv[1:]
tool = arguments[arguments.index("--tool") + 1]
tests = [argument for argument in arguments if "::" in argument]
noted = pathlib.Path(os.environ["NOTED"])
started = time.time()
names = ("CUDA_VISIBLE_DEVICES", "PYTORCH_NO_CUDA_MEMORY_CACHING", "OMP_NUM_THREADS", "SMS_REQUIRE_GPU")
how = json.loads(os.environ.get("BEHAVIOUR", "{}")).get(f"{tool} {len(tests)}", "")
passed, findings, status = len(tests), 0, 0
if how == "finds":
    findings, status = 2, 97
elif how == "fails":
    passed, status = passed - 1, 1
    print("FAILED tests/test_sink.py::test")
elif how == "skips":
    passed -= 1
elif how == "hangs":
    child = subprocess.Popen(["sleep", "600"])
    (noted / "child").write_text(str(child.pid))
    time.sleep(600)
print("========= COMPUTE-SANITIZER")
others = {"fails": "1 failed, ", "skips": "1 skipped, "}.get(how, "")
print(f"{others}{passed} passed in 0.12s" if passed else "no tests ran in 0.01s")
if how in ("silent", "crashes"):
    status = 255 if how == "crashes" else 0
elif tool == "racecheck":
    print(f"========= RACECHECK SUMMARY: {findings} hazards displayed ({findings} errors, 0 warnings)")
else:
    print(f"========= ERROR SUMMARY: {findings} error{'s' * (findings != 1)}")
time.sleep(0.05)
call = {"arguments": arguments, "tests": tests, "tool": tool, "from": started, "to": time.time()}
(noted / f"{os.getpid()}.json").write_text(json.dumps(call | {name: os.environ.get(name) for name in names}))
sys.exit(status)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    program = tmp_path / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "noted").mkdir()
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    monkeypatch.setattr(sanitize_gpu, "WORK", tmp_path / "work")
    monkeypatch.setattr(sanitize_gpu, "gpus", lambda python: GPUS)
    monkeypatch.setattr(sanitize_gpu, "collect", lambda python, options: TESTS)
    return str(program)


def noted(tmp_path):
    return [json.loads(path.read_text()) for path in (tmp_path / "noted").glob("*.json")]


def test_each_tool_runs_every_group_once_on_all_gpus(stand_in, tmp_path, capsys):
    sanitize_gpu.run(PYTHON, stand_in, [], 4)
    calls = noted(tmp_path)
    assert sorted((call["tool"], len(call["tests"])) for call in calls) == sorted(
        (tool, count) for tool in sanitize_gpu.TOOLS for count in GROUPS.values()
    )
    for tool in sanitize_gpu.TOOLS:
        assert sorted(test for call in calls if call["tool"] == tool for test in call["tests"]) == sorted(TESTS)
    for call in calls:
        assert call["PYTORCH_NO_CUDA_MEMORY_CACHING"] == call["OMP_NUM_THREADS"] == call["SMS_REQUIRE_GPU"] == "1"
        given = " ".join(call["arguments"])
        assert f"--tool {call['tool']} --error-exitcode 97 --port " in given
        assert f" {PYTHON} -m pytest -q -p no:xdist -p no:cacheprovider tests/" in given
        assert ("--kernel-name kns=sms" in given) == (call["tool"] != "initcheck")
    assert {call["CUDA_VISIBLE_DEVICES"] for call in calls} == {"0", "GPU-2"}
    ports = [call["arguments"][call["arguments"].index("--port") + 1] for call in calls]
    for one, port in zip(calls, ports):
        together = [p for other, p in zip(calls, ports) if other["from"] <= one["from"] <= other["to"]]
        assert len(together) <= 4
        assert together.count(port) == 1
    output = capsys.readouterr().out
    assert "over 6 tests, 12 processes, 4 at a time" in output
    for tool in sanitize_gpu.TOOLS:
        (row,) = (line.split() for line in output.splitlines() if line.startswith(f"{tool} "))
        assert (row[1:5], row[-1]) == (["3", "6", "6", "0"], "clean")


def test_tools_can_be_chosen(stand_in, tmp_path):
    sanitize_gpu.run(PYTHON, stand_in, ["racecheck"])
    assert {call["tool"] for call in noted(tmp_path)} == {"racecheck"}


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("finds", "2 findings"),
        ("fails", "2 of 3 tests passed"),
        ("skips", "2 of 3 tests passed"),
        ("silent", "exit status 0 without a summary of {tool}'s"),
        ("crashes", "exit status 255 without a summary of {tool}'s"),
    ],
)
@pytest.mark.parametrize("tool", sanitize_gpu.TOOLS)
def test_a_problem_of_one_process_fails_the_command(stand_in, monkeypatch, capsys, tmp_path, tool, how, problem):
    monkeypatch.setenv("BEHAVIOUR", json.dumps({f"{tool} 3": how}))
    with pytest.raises(StepError, match=r"^1 of 12 processes of compute-sanitizer have a problem$"):
        sanitize_gpu.run(PYTHON, stand_in, [])
    output = capsys.readouterr().out
    log = tmp_path / "work" / "logs" / "sanitize-gpu" / f"{tool}-float16-none.log"
    assert f"{tool} float16-none: {problem.format(tool=tool)}; {log}\n" in output
    assert log.read_text().splitlines()[-1] in output
    for line in output.splitlines():
        if line.startswith(tuple(f"{name} " for name in sanitize_gpu.TOOLS)) and "float16" not in line:
            assert line.endswith("  1 processes with a problem" if line.startswith(tool) else "  clean")


def ends(process):
    """Whether it is gone, or waits to be reaped, within some seconds."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_process_that_hangs_is_ended_with_what_it_started(stand_in, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sanitize_gpu, "_LIMIT_SECONDS", 15.0)
    monkeypatch.setenv("BEHAVIOUR", json.dumps({"memcheck 1": "hangs"}))
    with pytest.raises(StepError, match="1 of 3 processes"):
        sanitize_gpu.run(PYTHON, stand_in, ["memcheck"])
    assert "memcheck bfloat16-float32: not done after 15." in capsys.readouterr().out
    assert ends(int((tmp_path / "noted" / "child").read_text()))


def test_an_interrupt_ends_what_runs(stand_in, monkeypatch, tmp_path):
    monkeypatch.setenv("BEHAVIOUR", json.dumps({"memcheck 1": "hangs"}))

    def interrupts(text):
        if "[2/3]" in text:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(sanitize_gpu, "say", interrupts)
    started = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            sanitize_gpu.run(PYTHON, stand_in, ["memcheck"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 60
    assert ends(int((tmp_path / "noted" / "child").read_text()))


def test_processes_at_a_time_follow_cores_and_memory(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    small, large = Gpu("small", 3 << 30), Gpu("large", 140 << 30)
    assert sanitize_gpu._slots([small], None) == [small]
    assert sanitize_gpu._slots([large], None) == [large] * 6
    assert sanitize_gpu._slots([small, large], None) == [small, *[large] * 5]
    assert sanitize_gpu._slots([large, large], 3) == [large] * 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert sanitize_gpu._slots([small, large], None) == [small, large]


def fake_python(tmp_path, text, status=0):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\nexit {status}\n")
    program.chmod(0o755)
    return program


def test_gpus_are_those_that_torch_sees(tmp_path, monkeypatch):
    python = fake_python(tmp_path, json.dumps(["2.14.1", "1.0.0", [5, 7]]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sanitize_gpu.gpus(python) == [Gpu("0", 5), Gpu("1", 7)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")
    assert sanitize_gpu.gpus(python) == [Gpu("3", 5), Gpu("GPU-7", 7)]
    none = fake_python(tmp_path, json.dumps(["2.14.1", "1.0.0", []]))
    with pytest.raises(StepError, match=r"compute-sanitizer needs a GPU, and torch 2\.14\.1 of \S+ sees none"):
        sanitize_gpu.gpus(none)
    with pytest.raises(StepError, match="cannot use torch and scaled_mask_softmax"):
        sanitize_gpu.gpus(fake_python(tmp_path, "", 1))


def test_no_test_of_a_gpu_is_an_error(tmp_path):
    with pytest.raises(StepError, match="pytest collects no test of a GPU: tests/test_sink"):
        sanitize_gpu.collect(fake_python(tmp_path, "tests/test_sink.py::test[cpu-1]"), [])
    found = "\n".join(["tests/test_sink.py::test[cpu-1]", *TESTS, "7 tests collected"])
    assert sanitize_gpu.collect(fake_python(tmp_path, found), []) == TESTS


def test_every_marked_test_has_its_group():
    """Of the ids as pytest gives them here, those of a GPU differ in their first word."""
    command = sanitize_gpu._pytest(PYTHON, "-m", "sanitizer", "--collect-only")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "SMS_REQUIRE_GPU": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    assert all("[cpu" in test for test in ids)
    groups = sanitize_gpu.groups(ids)
    assert set(groups) == {f"{short(dtype)}-{kind}" for dtype, kind in DTYPES_AND_KINDS} | {"others"}
    files = {test.partition("::")[0] for test in groups["float16-same"]}
    assert files >= {
        f"tests/test_{name}.py" for name in ("sanitizer", "dropout", "mask_gradient", "sink", "exclusions")
    }
    assert sum(map(len, groups.values())) == len(set(ids))


def test_the_filter_is_a_part_of_every_kernels_name():
    assert all(sanitize_gpu.KERNELS in name for name in verify.policy_kernels())


def test_compute_sanitizer_is_found_or_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    if not any(Path("/usr/local/cuda").glob("*/compute-sanitizer")):
        with pytest.raises(StepError, match=r"compute-sanitizer is not here: .* Give SANITIZER=path"):
            sanitize_gpu.locate(None)
    with pytest.raises(StepError, match=r"SANITIZER=/no/such is no program"):
        sanitize_gpu.locate("/no/such")
    for folder in ("cuda/compute-sanitizer", "cuda/bin", "bin", "other"):
        program = tmp_path / folder / "compute-sanitizer"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        assert sanitize_gpu.locate(str(program) if folder == "other" else None) == program


def test_a_machine_without_a_gpu_fails_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(toolkit, "local_gpus", list)
    with pytest.raises(StepError, match=r"compute-sanitizer needs a GPU, and nvidia-smi lists none here"):
        sanitize_gpu.check_machine("/bin/true")


@pytest.mark.parametrize("arguments", [["--installed"], []])
def test_the_command_without_a_gpu(stand_in, tmp_path, arguments):
    """Of the package as it is installed here; or before anything is built."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": str(tmp_path), "PIP_NO_INDEX": "1"}
    command = [sys.executable, "-m", "release", "sanitize-gpu", f"--compute-sanitizer={stand_in}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: compute-sanitizer needs a GPU, and ")
    assert noted(tmp_path) == []
