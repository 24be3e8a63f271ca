"""TORCH_CUDA_ARCH_LIST: every spelling that one of torch's parsers takes, and what is refused."""

import re

import pytest

from release import ROOT
from release.arch_list import ArchListError, Compiler, parse

NVCC_13_0 = Compiler(
    "13.0.88", ("7.5", "8.0", "8.6", "8.7", "8.8", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
)
NVCC_12_8 = Compiler("12.8.93", ("5.0", "6.0", "7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.1", "12.0"))
DEFAULT = "7.5;9.0;12.0+PTX"


def read(text, compiler=NVCC_13_0, gpus=()):
    return parse(text, compiler, DEFAULT, lambda: list(gpus))


def cubins(archs):
    return [real for real, _ in archs.cubins]


@pytest.mark.parametrize(
    ("text", "real", "ptx"),
    [
        ("9.0", ["9.0"], []),
        ("9.0+PTX", ["9.0"], ["9.0"]),
        ("8.0;9.0", ["8.0", "9.0"], []),
        ("8.0 9.0", ["8.0", "9.0"], []),
        ("8.0; 9.0", ["8.0", "9.0"], []),
        (" 8.0 ;\t9.0; ", ["8.0", "9.0"], []),
        ("9.0;", ["9.0"], []),
        (";;9.0;;8.0;9.0", ["8.0", "9.0"], []),
        ("10.0;9.0;8.0+PTX", ["8.0", "9.0", "10.0"], ["8.0"]),
        ("9.0a", ["9.0a"], []),
        ("9.0;9.0a", ["9.0", "9.0a"], []),
        ("10.0a+PTX", ["10.0a"], ["10.0a"]),
        ("10.0f", ["10.0f"], []),
        ("12.1f 12.0", ["12.0", "12.1f"], []),
        ("Hopper", ["9.0"], ["9.0"]),
        ("Hopper+PTX", ["9.0"], ["9.0"]),
        ("Ampere", ["8.0", "8.6"], ["8.6"]),
        ("Ampere+Tegra", ["8.7"], ["8.7"]),
        ("Turing;Ada", ["7.5", "8.9"], ["7.5", "8.9"]),
        ("Blackwell", ["10.0", "10.3", "12.0", "12.1"], ["12.1"]),
        ("Blackwell+Tegra", ["11.0"], ["11.0"]),
        ("8.6(8.0)", ["8.6"], []),
        ("8.6(8.0)+PTX", ["8.6"], ["8.0"]),
        ("Common", ["7.5", "9.0", "12.0"], ["12.0"]),
        ("", ["7.5", "9.0", "12.0"], ["12.0"]),
        (" ; ", ["7.5", "9.0", "12.0"], ["12.0"]),
        ("All", list(NVCC_13_0.architectures), ["12.1"]),
        ("Auto", ["7.5", "9.0", "12.0"], ["12.0"]),
    ],
)
def test_spellings(text, real, ptx):
    archs = read(text)
    assert cubins(archs) == real
    assert list(archs.ptx) == ptx


def test_names_follow_the_compiler():
    assert cubins(read("Blackwell", NVCC_12_8)) == ["10.0", "12.0"]
    assert cubins(read("Blackwell+Tegra", NVCC_12_8)) == ["10.1"]
    assert cubins(read("Volta", NVCC_12_8)) == ["7.0"]


def test_flags():
    assert read("9.0+PTX;8.6(8.0);10.0f").flags() == [
        "arch=compute_80,code=sm_86",
        "arch=compute_90,code=sm_90",
        "arch=compute_100f,code=sm_100f",
        "arch=compute_90,code=compute_90",
    ]


def test_a_major_version_is_compiled_once():
    assert read("8.6;8.0;8.9+PTX;9.0;9.0a;10.0").flags() == [
        "arch=compute_80,code=sm_80",
        "arch=compute_80,code=sm_86",
        "arch=compute_80,code=sm_89",
        "arch=compute_90,code=sm_90",
        "arch=compute_90a,code=sm_90a",
        "arch=compute_100,code=sm_100",
        "arch=compute_89,code=compute_89",
    ]


def test_no_source_asks_for_a_minor_version():
    asked = [
        int(number)
        for path in (ROOT / "src").rglob("*.cu*")
        for number in re.findall(r"__CUDA_ARCH__\s*[<>=!]+\s*(\d+)", path.read_text())
    ]
    assert asked
    assert all(number % 100 == 0 for number in asked), asked


def test_text_says_what_is_built():
    assert str(read("9.0+PTX;8.0")) == "8.0;9.0+PTX"
    assert str(read("8.6(8.0)+PTX")) == "8.6;8.0(PTX only)"


@pytest.mark.parametrize("name", ["native", "Auto"])
def test_native_takes_the_gpus_of_this_machine(name):
    archs = read(name, gpus=["9.0", "8.0", "9.0"])
    assert cubins(archs) == ["8.0", "9.0"]
    assert list(archs.ptx) == ["9.0"]


def test_native_without_a_gpu():
    with pytest.raises(ArchListError, match=r"'native' .* needs a GPU"):
        read("native")


@pytest.mark.parametrize(
    "token", ["hopper", "9", "sm_90", "90", "8.0,9.0", "9.0+ptx", "9.0b", "+PTX", "Hoper", "9.0(8.0"]
)
def test_unknown_token_is_named(token):
    with pytest.raises(ArchListError) as error:
        read(f"8.0;{token};10.0")
    assert f"unknown {token!r}" in str(error.value)


@pytest.mark.parametrize("token", ["13.0", "12.2+PTX", "20.0a"])
def test_too_new_names_token_compiler_and_newest(token):
    with pytest.raises(ArchListError) as error:
        read(f"8.0;{token}")
    assert repr(token) in str(error.value)
    assert "too new for nvcc 13.0.88, whose newest is 12.1" in str(error.value)


def test_name_newer_than_the_compiler():
    with pytest.raises(ArchListError, match=r"'Rubin' .* is none of the architectures of nvcc 13\.0\.88"):
        read("Rubin")
    with pytest.raises(ArchListError, match=r"'Blackwell' .* is too new"):
        read("Blackwell", Compiler("12.6.77", ("5.0", "9.0")))


@pytest.mark.parametrize("token", ["7.0", "Volta", "5.0+PTX", "Kepler"])
def test_too_old_names_token_compiler_and_oldest(token):
    with pytest.raises(ArchListError) as error:
        read(token)
    assert repr(token) in str(error.value)
    assert "too old for nvcc 13.0.88, whose oldest is 7.5" in str(error.value)


def test_impossible_targets():
    with pytest.raises(ArchListError, match=r"'a' targets start at 9\.0a"):
        read("8.0a")
    with pytest.raises(ArchListError, match=r"'f' targets start at 10\.0f"):
        read("9.0f")
    with pytest.raises(ArchListError, match=r"'f' targets need CUDA 12\.9"):
        read("10.0f", NVCC_12_8)
    with pytest.raises(ArchListError, match=r"8\.0 cannot run code for 9\.0"):
        read("8.0(9.0)")
