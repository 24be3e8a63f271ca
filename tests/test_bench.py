"""The bench: its arithmetic, what it refuses, and its files. Tiny sizes, on the CPU."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import json
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stand_in
import torch

from scaled_mask_softmax import _C
from scaled_mask_softmax.bench import cells, command, peers, reference, report, results, thresholds, timing
from scaled_mask_softmax.bench.cases import (
    DROPOUT,
    DROPOUT_P,
    DTYPES,
    KINDS,
    SUITES,
    THRESHOLD_DTYPES,
    THRESHOLD_KINDS,
    Case,
    all_cases,
    sweep_case,
    threshold_cases,
)
from scaled_mask_softmax.bench.problems import make_problem, run, step

TINY = ["--device", "cpu", "--bytes", "4096", "--each", "0.001", "--suite", "sweep", "--dtype", "float32"]
TWO = [*TINY, "--columns", "8", "--case", "plain", "causal", "--direction", "forward", "--peers", "eager", "softmax"]


@pytest.fixture(autouse=True)
def own_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that runs the tests keeps its own way with memory."""
    monkeypatch.setattr(timing, "keep_memory", lambda: None)


def case(kind: str, backward: bool = False, columns: int = 24, suite: str = "sweep") -> Case:
    queries = 1 if kind == "decode" else columns
    return Case(suite, kind, "float16", 2, 3, queries, columns, backward)


def test_floor_bytes() -> None:
    scores = 2 * 3 * 24 * 24 * 2
    assert case("plain").floor_bytes() == 2 * scores
    assert case("plain", backward=True).floor_bytes() == 5 * scores
    assert case("mask-bhqk").floor_bytes() == 3 * scores
    assert case("mask-b1qk").floor_bytes() == 2 * scores + scores // 3
    assert case("mask-qk").floor_bytes() == 2 * scores + scores // 6
    assert case("padding").floor_bytes() == 2 * scores + 2 * 24
    # Rows of 1 to 16 halves take one sector of 32 bytes; those of 17 to 24 take two, but are 48 bytes long at most.
    live = 16 * 32 + 8 * 48
    assert case("causal").floor_bytes() == 6 * live + scores
    assert case("causal", backward=True).floor_bytes() == 3 * 6 * live + 2 * scores
    assert case("causal+mask").floor_bytes() == (6 + 2) * live + scores
    assert case("decode").floor_bytes() == 2 * (2 * 3 * 24 * 2)


def test_cases_are_distinct_and_large_enough() -> None:
    every = list(all_cases("cuda", 1 << 29))
    assert len({one.name for one in every}) == len(every)
    assert all(one.score_bytes >= 1 << 29 for one in every if one.suite in ("sweep", "dropout", "thresholds"))
    assert tuple(dict.fromkeys(one.suite for one in every)) == SUITES, "shards of the older ones keep their cases"


THRESHOLD_QUESTIONS = [*((kind, False) for kind in THRESHOLD_KINDS), ("plain", True)]


@pytest.mark.parametrize("capability", [75, 80, 86, 90, 100, 120])
def test_both_sides_of_each_threshold(capability: int) -> None:
    for dtype in DTYPES:
        for kind, backward in THRESHOLD_QUESTIONS:
            chosen = list(threshold_cases(kind, dtype, backward, 1 << 29, capability))
            assert 8 <= len(chosen) <= 40
            by_columns = {one.columns: one for one in chosen}
            assert len(by_columns) == len(chosen)
            for one in chosen:
                assert 128 <= one.columns <= 131072
                assert one.columns % 8 == 0
                sides = [by_columns[columns] for columns in (one.columns - 8, one.columns + 8) if columns in by_columns]
                assert sides, "each length has its other side"
                for other in sides:
                    assert (one.batch, one.heads) == (other.batch, other.heads)
                    assert (one.queries == one.columns) == (other.queries == other.columns)
                    assert one.queries == one.columns or one.queries == other.queries


def test_a_threshold_is_another_kernel_and_not_one_more_warp() -> None:
    pairs = thresholds.lengths("forward", "float16", "none", False, 90)

    def strategy(columns: int) -> str:
        return str(_C.plan("forward", columns, "float16", "none", False, 90)["strategy"])

    strategies = [(strategy(shorter), strategy(shorter + 8)) for shorter in pairs]
    assert ("warp_rows", "warp_rows") in strategies
    assert ("warp_rows", "block_row") in strategies
    assert ("block_row", "block_row") not in strategies
    assert ("block_row", "cluster_row") in strategies
    assert ("cluster_row", "cluster_row") in strategies
    # A scan of every length finds them too, at the first length of the other kernel, or of those of whole vectors.
    for shorter in pairs:
        plans = [_C.plan("forward", columns, "float16", "none", False, 90) for columns in (shorter, shorter + 1)]
        if plans[0] == plans[1]:
            longer = _C.plan("forward", shorter + 8, "float16", "none", False, 90)
            assert (longer["lanes"], longer["vectors"]) == (16, 2), "a shape for whole vectors alone"


def threshold_list(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    capsys.readouterr()
    assert command.main(["--device", "cuda", "--suite", "thresholds", "--list", *arguments]) == command.OK
    return capsys.readouterr().out.splitlines()


def test_thresholds_are_listed_in_shards_and_by_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    names = threshold_list(capsys)
    assert {name.split()[1] for name in names} == set(THRESHOLD_DTYPES)
    assert {f"thresholds float16 Sk={columns} causal+mask forward" for columns in (256, 264)} <= set(names)
    assert sorted(threshold_list(capsys, "--shard", "1/2") + threshold_list(capsys, "--shard", "2/2")) == sorted(names)
    others = threshold_list(capsys, "--dtype", "bfloat16", "--columns", "256", "264")
    assert "thresholds bfloat16 Sk=264 plain forward+backward" in others
    assert len(others) == 2 * len(THRESHOLD_QUESTIONS)


def test_thresholds_are_of_native_kernels_for_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--device", "cpu", "--suite", "thresholds", "--list"]) == command.USAGE
    assert "--suite thresholds: the length of a row decides over CUDA kernels alone" in capsys.readouterr().err
    assert command.main(["--device", "cpu", "--list"]) == command.OK
    assert "thresholds" not in capsys.readouterr().out
    monkeypatch.setattr(thresholds, "known", lambda: False)
    assert command.main(["--device", "cuda", "--suite", "thresholds", "--list"]) == command.USAGE
    assert "--suite thresholds needs the native library" in capsys.readouterr().err
    assert command.main(["--device", "cuda", "--list"]) == command.OK
    assert "thresholds" not in capsys.readouterr().out


def test_a_threshold_has_a_share_of_the_floor() -> None:
    for one in list(threshold_cases("plain", "float32", True, 4096, 90))[:2]:
        cell = cells.measure(one, [], "cpu", 0.001)
        assert cell["suite"] == "thresholds"
        assert cell["times"]["ours"]["share_of_floor"] > 0


@pytest.mark.parametrize("peer", [peers.OPERATOR, peers.PEERS["eager"], peers.PEERS["softmax"]], ids=lambda p: p.name)
@pytest.mark.parametrize("kind", KINDS)
def test_right_results_pass(kind: str, peer: peers.Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SLICE", 100)  # many slices, of batches and of queries
    problem = make_problem(case(kind, backward=True), "cpu")
    outcome = run(problem, step(problem, peer.operator(problem)))
    reference.verify(problem, outcome, alone=peer.alone, rival=peer.rival)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["ours", "eager", "compile"])
def test_dropout_is_verified_by_its_pattern(name: str, dtype: str) -> None:
    """Ours by the cells that the generator's state chooses, a rival's by those that it kept."""
    one = sweep_case(DROPOUT, dtype, 24, True, 1 << 14, DROPOUT)
    assert one.name == f"{dtype} Sk=24 dropout forward+backward"
    problem = make_problem(one, "cpu")
    peer = peers.OPERATOR if name == "ours" else peers.PEERS[name]
    forward = cells._forward(problem, peer)
    outcome, keep = cells._run_with_pattern(problem, forward, peer)
    reference.verify(problem, outcome, keep, rival=peer.rival)
    y, dx = outcome
    y = y.detach()
    other = keep.roll(1, -1)
    wrong = {
        "the pattern": ((y, dx), other),
        "the factor": ((y * (1 - DROPOUT_P), dx), keep),
        "the gradient's pattern": ((y, run(problem, forward)[1]), keep),
        "how many are kept": ((torch.softmax(problem.inputs[0].detach() * 0.125, -1), dx), torch.ones_like(keep)),
    }
    for results_, cells_ in wrong.values():
        with pytest.raises(reference.WrongResult):
            reference.verify(problem, results_, cells_, rival=peer.rival)


def test_dropout_is_measured_beside_eager() -> None:
    others = [peers.PEERS[name] for name in ("eager", "softmax", "liger")]
    cell = cells.measure(sweep_case(DROPOUT, "float32", 16, True, 4096, DROPOUT), others, "cpu", 0.001)
    assert cell["times"]["eager"]["ratio_to_ours"] > 0
    assert cell["times"]["ours"]["share_of_floor"] > 0
    assert "share_of_floor" not in cell["times"]["softmax"], "it does less"
    assert cell["times"]["liger"].keys() == {"absent"}
    best = report.best_rival(cell)
    assert best is not None
    assert best[0] == "eager"


@pytest.mark.parametrize("suite", ["sweep", "attention"])
@pytest.mark.parametrize("change", ["mask", "scale", "gradient", "nan"])
def test_wrong_results_are_found(suite: str, change: str) -> None:
    problem = make_problem(case("causal", backward=True, suite=suite), "cpu")
    right = run(problem, step(problem, peers.OPERATOR.operator(problem)))
    wrong = [tensor.detach().clone() for tensor in right]
    if change == "mask":
        wrong = list(run(problem, step(problem, lambda x: torch.softmax(x * 0.125, -1))))
    elif change == "scale":
        wrong[0] *= 1.05
    elif change == "gradient":
        wrong[1][-1, -1, -1] += 1.0
    else:
        wrong[0][-1, -1, -1, 0] = torch.nan
    for rival in (False, True):
        with pytest.raises(reference.WrongResult):
            reference.verify(problem, tuple(wrong), rival=rival)


def test_a_wrong_operator_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peers, "scaled_mask_softmax", lambda x, *_, **__: torch.softmax(x, -1))
    assert command.main([*TWO, "--case", "plain"]) == command.BAD
    output = capsys.readouterr()
    assert "not timed, its result is wrong" in output.out
    assert "1 cases were not timed" in output.err


def test_a_rival_that_fails_leaves_the_others_alone() -> None:
    def breaks(problem: Any) -> Any:
        raise RuntimeError("no such kernel\nmore")

    wrong = peers.Peer("wrong", lambda problem: lambda x: torch.softmax(x, -1))
    cell = cells.measure(
        sweep_case("plain", "float32", 8, False, 4096),
        [wrong, peers.Peer("broken", breaks), peers.PEERS["liger"], peers.PEERS["eager"]],
        "cpu",
        0.001,
    )
    times = cell["times"]
    assert times["wrong"].keys() == {"failed"}
    assert times["broken"] == {"failed": "RuntimeError: no such kernel"}
    assert times["liger"] == {"absent": "CUDA only"}
    assert times["eager"]["seconds"] > 0
    assert times["ours"]["share_of_floor"] == pytest.approx(
        cell["floor_bytes"] / cell["copy_bytes_per_second"] / times["ours"]["seconds"]
    )


def test_shards_resume_and_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [tmp_path / "1.json", tmp_path / "2.json"]
    for index, part in enumerate(parts, 1):
        assert command.main([*TWO, "--shard", f"{index}/2", "--json", str(part)]) == 0
        assert len(results.read(part).cells) == 1
    whole = tmp_path / "whole.json"
    assert command.main(["--no-run", "--merge", *map(str, parts), "--json", str(whole)]) == 0
    merged = results.read(whole)
    assert merged.cells == {**results.read(parts[0]).cells, **results.read(parts[1]).cells}
    capsys.readouterr()
    assert command.main([*TWO, "--json", str(whole)]) == 0
    assert "2 of 2 cases are measured already" in capsys.readouterr().out
    assert results.read(whole) == merged
    other = results.read(parts[1])
    other.environment["torch"] = "1.0"
    with pytest.raises(results.Mismatch, match="torch"):
        merged.merge(other)


def test_peers_are_added_to_cells_of_other_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [tmp_path / "ours.json", tmp_path / "eager.json", tmp_path / "softmax.json"]
    for part, names in zip(parts, (["none"], ["eager"], ["softmax", "liger"])):
        assert command.main([*TWO, "--peers", *names, "--json", str(part)]) == 0
    whole = tmp_path / "whole.json"
    assert command.main(["--no-run", "--merge", *map(str, parts), "--json", str(whole)]) == 0
    for name, cell in results.read(whole).cells.items():
        assert cell["times"].keys() == {"ours", "copy", "eager", "softmax", "liger"}
        for part, taken in zip(parts, ("ours", "eager", "softmax")):
            assert cell["times"][taken] == results.read(part).cells[name]["times"][taken]
    capsys.readouterr()
    assert command.main([*TWO, "--peers", "softmax", "compile", "--json", str(whole)]) == 0
    after = results.read(whole)
    assert all("seconds" in cell["times"]["compile"] for cell in after.cells.values())
    assert command.main([*TWO, "--peers", "eager", "softmax", "compile", "--json", str(whole)]) == 0
    assert "2 of 2 cases are measured already" in capsys.readouterr().out


def test_a_failed_cell_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert command.main([*TWO, "--json", str(path)]) == 0
    broken = results.read(path)
    first = next(iter(broken.cells.values()))
    first["times"] = {"ours": {"failed": "gone"}}
    broken.write(path)
    assert command.main([*TWO, "--json", str(path)]) == 0
    assert all("seconds" in cell["times"]["ours"] for cell in results.read(path).cells.values())


def test_the_budget_of_time_stops_between_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    assert command.main([*TWO, "--seconds", "-1", "--json", str(path)]) == 0
    assert "2 of 2 cases are left" in capsys.readouterr().out
    assert results.read(path).cells == {}
    assert command.main([*TWO, "--seconds", "1e9", "--json", str(path)]) == 0
    assert len(results.read(path).cells) == 2


def kept(tmp_path: Path, error: str) -> Path:
    """The new file that the message names."""
    (path,) = tmp_path.glob("scaled-mask-softmax-bench-*.json")
    assert f" are kept in {path}; --json {path} goes on with them" in error
    return path


@pytest.mark.parametrize("place", ["asked for", "none", "gone"])
def test_what_was_measured_survives_an_interruption(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "r.json"
    measure = cells.measure
    calls = []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            if place == "gone":
                folder.rmdir()
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(cells, "measure", interrupted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        command.main([*TWO, *([] if place == "none" else ["--json", str(path)])])
    error = capsys.readouterr().err
    if place == "asked for":
        assert f"the results of 1 cases are kept in {path}" in error
    else:
        path = kept(tmp_path, error)
    assert len(results.read(path).cells) == 1


def test_what_was_measured_survives_a_failure_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(command, "finish", fails)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert command.main(TWO) == command.USAGE
    error = capsys.readouterr().err
    assert "the disk is full" in error
    assert len(results.read(kept(tmp_path, error)).cells) == 2


def no_matplotlib(name: str, real: Callable[..., Any] = importlib.import_module) -> Any:
    if name.startswith("matplotlib"):
        raise ModuleNotFoundError("No module named 'matplotlib'")
    return real(name)


H200 = str(Path(__file__).parents[1] / "benchmarks" / "reports" / "h200.json")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--json", "missing/r.json"], "--json missing/r.json: there is no folder missing; make it first"),
        (["--json", "."], "Is a directory"),
        (["--json", "page.md"], "page.md holds no results of this version of the bench"),
        (["--fill", "missing.md"], "missing.md"),
        (["--fill", "page.md"], "there is no table 'cpu bats'"),
        (["--compare", "missing.json"], "missing.json"),
        (["--compare", H200], "not comparable: kind 'cpu', was 'cuda'"),
        (["--compare", "other.json"], "there is no case in common"),
        (["--plot", "r.png"], "--plot draws shares of the floor, which mean something on a CUDA device only"),
    ],
    ids=lambda value: "-".join(Path(word).name for word in value) if isinstance(value, list) else "",
)
def test_what_could_fail_at_the_end_is_refused_at_the_start(
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("page.md").write_text("<!-- bench: cpu bats -->\n<!-- end of bench -->\n", "utf-8")
    assert command.main([*TWO, "--case", "padding", "--json", "other.json"]) == command.OK
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(cells, "measure", lambda *_: pytest.fail("a case was measured"))
    capsys.readouterr()
    assert command.main([*TWO, *options]) == command.USAGE
    output = capsys.readouterr()
    assert said in output.err
    assert output.out == ""
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--plot", "r.png"], '--plot needs matplotlib, which the extra [bench] brings: pip install "scaled-mask-'),
        (["--plot", "missing/r.png"], "--plot missing/r.png: there is no folder missing"),
        (["--plot", "folder"], "--plot folder cannot be written: Is a directory"),
        (["--plot", "r.png", "--suite", "small"], "--plot draws cases of the suite sweep, and none is chosen"),
    ],
    ids=["matplotlib", "folder", "file", "suite"],
)
def test_a_plot_that_could_not_be_drawn_is_refused_at_the_start(
    options: list[str],
    said: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    lacks = request.node.callspec.id == "matplotlib"
    monkeypatch.setattr(importlib, "import_module", no_matplotlib if lacks else lambda name: None)
    planned = results.Results({**results.environment("cpu", 0, 0.0), "kind": "cuda"})
    chosen = command.make_parser().parse_args(["--device", "cuda", *options])
    with pytest.raises(command.Refused, match=re.escape(said)):
        command.check(chosen, planned, command.chosen_cases(chosen, 4096))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_device_is_said_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([*TWO, "--threads", str(torch.get_num_threads())]) == command.OK
    said, *lines = capsys.readouterr().out.splitlines()
    assert said.startswith("CPU")
    assert f"torch {torch.__version__}" in said
    assert said.endswith(str(results.environment("cpu", 0, 0.0)["version"]))
    assert len(lines) == 2
    assert "of the floor" not in "".join(lines), "it says something of a CUDA device alone"
    without = TWO[2:]
    assert TWO[:2] == ["--device", "cpu"]
    assert command.main(without) == command.OK
    assert capsys.readouterr().out.splitlines()[0] == f"{said}; torch finds no CUDA device"
    assert command.main(["--device", "cuda", *without]) == command.USAGE
    assert capsys.readouterr().err == "scaled-mask-softmax bench: --device cuda: torch finds no CUDA device\n"
    assert command.main(["--device", "cuda", "--list", *without]) == command.OK
    assert report.device({**results.environment("cpu", 0, 0.0), "kind": "cuda", "device": "NVIDIA H200"}).startswith(
        "NVIDIA H200, torch "
    )


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    assert command.main([*TWO, "--json", str(old)]) == 0
    arguments = ["--no-run", "--json", str(new), "--compare", str(old)]
    before = results.read(old)
    name = next(iter(before.cells))
    for factor, status in [(1.04, command.OK), (1.06, command.BAD)]:
        after = copy.deepcopy(before)
        after.cells[name]["times"]["softmax"]["ratio_to_ours"] /= factor
        after.write(new)
        capsys.readouterr()
        assert command.main(arguments) == status
        assert (f"{name}: 1.06x" in capsys.readouterr().out) == (status == command.BAD)
    assert command.main([*arguments, "--slower", "1.07"]) == command.OK
    after = copy.deepcopy(before)
    after.cells[name]["times"]["ours"] = {"failed": "not timed"}
    after.cells[name]["times"]["softmax"] = {"failed": "not timed"}
    after.write(new)
    assert command.main(arguments) == command.BAD
    results.Results(before.environment).write(new)
    assert command.main(arguments) == command.USAGE, "nothing in common"


@pytest.mark.parametrize(("again", "status"), [(1.0, command.OK), (1.2, command.BAD)])
def test_a_slower_case_is_measured_again(
    again: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    assert command.main([*TWO, "--json", str(path)]) == 0
    before = results.read(path)
    new = copy.deepcopy(before)
    slow, other = new.cells
    new.cells[slow]["times"]["softmax"]["ratio_to_ours"] /= 1.3
    new.write(path)
    old = tmp_path / "old.json"
    before.write(old)
    measured = []

    def measure(case: Case, *_: Any) -> Any:
        measured.append(case.name)
        cell = copy.deepcopy(before.cells[case.name])
        cell["times"]["softmax"]["ratio_to_ours"] /= again
        return cell

    monkeypatch.setattr(cells, "measure", measure)
    assert command.main([*TWO, "--json", str(path), "--compare", str(old)]) == status
    assert measured == [slow] * (1 if again == 1.0 else command.RETRIES)
    assert other not in measured


def test_cells_compare_by_what_was_measured_beside_them() -> None:
    cell = {"times": {"ours": {"seconds": 2.0, "share_of_floor": 0.5}, "softmax": {"ratio_to_ours": 3.0}}}
    assert results.cost(cell, "cuda") == 2.0
    assert results.cost(cell, "cpu") == pytest.approx(1 / 3)
    assert results.cost({"times": {"ours": {"seconds": 2.0}}}, "cuda") == 2.0
    assert results.cost({"times": {"ours": {"seconds": 2.0}}}, "cpu") is None


def test_slices_of_causal_rows_see_what_a_square_sees() -> None:
    long = sweep_case("causal", "float16", 65536, False, 1 << 29)
    assert long.queries < long.columns
    assert long.live_bytes() == pytest.approx(long.queries * long.columns * 2 / 2, rel=0.01)
    decode = sweep_case("decode", "float16", 65536, False, 1 << 29)
    assert decode.live_bytes() == decode.queries * decode.columns * 2
    assert sweep_case("causal", "float32", 16384, False, 1 << 29).diagonal == 0


@pytest.mark.parametrize("kind", ["plain", "causal"])
def test_the_form_in_place(kind: str) -> None:
    problem = make_problem(case(kind, backward=True, suite="headline"), "cpu")
    forward = step(problem, peers.PEERS["in-place"].operator(problem))
    reference.verify(problem, run(problem, forward))
    before = problem.inputs[0].detach().clone()
    run(problem, forward)
    assert torch.equal(problem.inputs[0], before)
    assert peers.PEERS["in-place"].competes(kind) is False


@pytest.mark.parametrize("kind", ["plain", "causal", "padding"])
@pytest.mark.parametrize("name", ["apex", "te", "liger", "quack"])
def test_rivals_of_cuda_say_so(name: str, kind: str) -> None:
    with pytest.raises(peers.Unsupported, match="CUDA only"):
        peers.PEERS[name].operator(make_problem(case(kind, columns=32), "cpu"))


def test_a_gradient_that_a_peer_overwrites_is_its_own() -> None:
    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            y = (x.float() * 0.125).softmax(-1).to(x.dtype)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (y,) = ctx.saved_tensors
            dx = 0.125 * y.float() * (grad.float() - (grad.float() * y.float()).sum(-1, keepdim=True))
            return grad.copy_(dx)

    peer = peers.Peer("overwrites", lambda problem: Overwrites.apply, overwrites_grad=True)
    cell = cells.measure(case("plain", backward=True), [peer, peers.PEERS["eager"]], "cpu", 0.001)
    assert "seconds" in cell["times"]["overwrites"]
    assert "seconds" in cell["times"]["eager"]


def test_headline_arithmetic() -> None:
    text = "\n".join(report.headline(results.Results({})))
    assert "2.15 GB" in text
    assert "0.34" not in text or "340.00 us is impossible" in text
    assert "2.106 ms" in text
    assert "2.870 ms is impossible" in text


def test_a_lack_of_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(cells, "make_problem", fails)
    cell = cells.measure(case("plain"), [], "cpu", 0.001)
    assert cell["times"] == {"ours": {"failed": "OutOfMemoryError: too large"}}
    assert "too large" in report.line("x", cell, "cpu")


def test_command_end_to_end(tmp_path: Path) -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="scaled-mask-softmax")
    call = f"import sys; from {entry.module} import {entry.attr}; sys.exit({entry.attr}())"
    result = stand_in.run(["-c", call, "bench", *TWO, "--json", str(tmp_path / "r.json")])
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("CPU")
    assert result.stdout.count("best rival") == 2
    assert len(json.loads((tmp_path / "r.json").read_text("utf-8"))["cells"]) == 2


def test_freed_memory_is_kept() -> None:
    """After some warm-ups, what is freed and taken again costs no page fault."""
    script = """
import resource, torch
from scaled_mask_softmax.bench import timing
timing.keep_memory()
faults = []
for _ in range(40):
    torch.ones(1 << 22)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-11])
"""
    result = stand_in.run(["-c", script])
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 100  # 10 times 16 MiB are 40,960 pages


def test_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs the extra [bench]")
    assert command.main(["--no-run", "--merge", H200, "--plot", str(tmp_path / "r.png")]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("NVIDIA H200, torch 2.11.0+cu130, ")
    assert " of the floor, " in lines[1]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "selection",
    [
        ["--suite", "sweep", "--bytes", "65536", "--columns", "64", "1001", "--dtype", "float16"],
        ["--suite", "dropout", "--bytes", "65536", "--columns", "128", "--dtype", "float16"],
        ["--suite", "thresholds", "--bytes", "65536", "--columns", "256", "264", "--dtype", "float16"],
        ["--suite", "attention", "--columns", "128"],
        ["--suite", "small", "--columns", "8", "64", "--dtype", "float16"],
    ],
    ids=lambda selection: selection[1],
)
def test_on_a_cuda_device(selection: list[str], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    others = ["eager", "compile"] if selection[1] == "small" else ["eager", "softmax"]
    arguments = ["--device", "cuda", "--each", "0.01", *selection, "--peers", *others, "--json", str(path)]
    assert command.main(arguments) == command.OK
    cells = results.read(path).cells
    assert cells
    for name, cell in cells.items():
        assert not [entry for entry in cell["times"].values() if "failed" in entry], name
        assert cell["times"]["ours"]["seconds"] > 0
        if cell["suite"] in ("sweep", "dropout", "thresholds"):
            outputs = 1 if cell["direction"] == "forward" else 3 if cell["suite"] == "dropout" else 2
            assert cell["times"]["ours"]["peak_bytes"] <= outputs * (2 * math.prod(cell["shape"]) + 512)
            assert cell["times"]["ours"]["share_of_floor"] > 0
