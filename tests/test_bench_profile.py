"""Profiling a case: what is refused without the tools, and how launches are counted."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from scaled_mask_softmax.bench import profile
from scaled_mask_softmax_cli.__main__ import main

CASE = "float16 Sk=2048 causal forward"


def test_a_case_is_found_by_its_name_or_an_unambiguous_part() -> None:
    # Its name is also a part of "... forward+backward" and of the headline case's.
    assert profile.find_case(CASE).name == CASE
    assert profile.find_case("bfloat16 Sk=1001 padding forward+").backward
    with pytest.raises(profile.Refused, match="no case matches 'Sk=3 '"):
        profile.find_case("Sk=3 ")
    with pytest.raises(profile.Refused, match="cases match 'causal'"):
        profile.find_case("causal")


def test_without_a_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["profile", CASE]) == profile.USAGE
    assert "there is no CUDA device" in capsys.readouterr().err


def test_without_ncu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    assert main(["profile", CASE]) == profile.USAGE
    error = capsys.readouterr().err
    assert "ncu (Nsight Compute) is not on PATH" in error
    assert "--no-ncu" in error
    assert list(tmp_path.iterdir()) == []


def event(name: str, microseconds: float, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(elapsed_us=lambda: microseconds))


def test_launches_a_step() -> None:
    events = [event("copy", 1.0), event("softmax", 4.0), event("softmax", 6.0), event("aten::add", 9.0, DeviceType.CPU)]
    found = profile.launches([*events, *events])
    assert found == {"softmax": (4, 20.0), "copy": (2, 2.0)}
    lines = profile.summary("ours", found, 2)
    assert lines[0] == "ours: 3 launches and 11.0 us on the device a step"
    assert lines[1].split() == ["2", "x", "5.0", "us", "softmax"]
    assert profile.summary("ours", {}, 2) == ["ours: 0 launches and 0.0 us on the device a step"]


def tool(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    path.chmod(0o755)
    return str(path)


def test_ncu_is_asked_for_the_sections(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ncu = tool(tmp_path / "ncu", f'echo "$@" >> {log}; echo details')
    assert profile.ncu_report(ncu, profile.find_case(CASE), tmp_path / "r.ncu-rep") == "details\n"
    first, second = log.read_text("utf-8").splitlines()
    assert all(f"--section {section}" in first for section in profile.SECTIONS)
    assert first.endswith(f"-m scaled_mask_softmax.bench.profile {CASE} --step")
    assert second == f"--import {tmp_path / 'r.ncu-rep'} --page details"


def test_what_ncu_says_when_it_fails(tmp_path: Path) -> None:
    ncu = tool(tmp_path / "ncu", "echo '==ERROR== ERR_NVGPUCTRPERM'; exit 3")
    with pytest.raises(profile.Refused, match="status 3: ==ERROR== ERR_NVGPUCTRPERM"):
        profile.ncu_report(ncu, profile.find_case(CASE), tmp_path / "r.ncu-rep")


def test_ncu_of_a_toolkit_off_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    ncu = tool(tmp_path / "bin" / "ncu", "true")
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert profile.find_ncu() == ncu


@pytest.mark.usefixtures("cuda")
def test_a_trace_counts_one_kernel_each_way(tmp_path: Path) -> None:
    case = profile.find_case("small float16 Sk=64 mask-b1qk forward+backward host")
    lines = profile.trace(case, profile.OPERATOR, tmp_path / "t.json")
    assert lines[0].startswith("ours: 2 launches")
    assert (tmp_path / "t.json").stat().st_size > 0
