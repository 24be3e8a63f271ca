"""Tables of results: what they say, how bars are judged, and that published figures are those of the reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scaled_mask_softmax.bench import cases, command, results, tables, timing

ROOT = Path(__file__).parents[1]
REPORTS = sorted((ROOT / "benchmarks" / "reports").glob("*.json"))
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "docs" / "performance.md"]


def cell(kind: str = "plain", columns: int = 128, direction: str = "forward", **ours: Any) -> dict[str, Any]:
    return {
        "suite": "sweep",
        "kind": kind,
        "dtype": "float16",
        "shape": [2, 3, columns, columns],
        "direction": direction,
        "clock": "kernels",
        "input_bytes": 12 * columns * columns,
        "times": {"ours": {"seconds": 1e-3, "p10": 1e-3, "p90": 1e-3, "ratio_to_ours": 1.0, **ours}},
    }


def made(*cells: dict[str, Any], kind: str = "cuda") -> results.Results:
    environment = {"kind": kind, "device": "AVX2", "torch": "2.14.1", "version": "1.0.0", "native": True}
    return results.Results(environment, {f"cell {index}": one for index, one in enumerate(cells)})


@pytest.mark.parametrize(
    ("environment", "group"),
    [
        ({"kind": "cuda", "device": "NVIDIA H200"}, "cuda"),
        ({"kind": "cpu", "device": "AVX2", "threads": 1}, "cpu"),
        ({"kind": "cpu", "device": "AVX2", "threads": 2}, "cpu-2"),
        ({"kind": "cpu", "device": "AVX512", "threads": 1}, "cpu-avx512"),
        ({"kind": "cpu", "device": "AVX512", "threads": 2}, "cpu-avx512-2"),
    ],
)
def test_groups(environment: dict[str, Any], group: str) -> None:
    assert tables.group(results.Results(environment, {})) == group


def verdict(found: results.Results, what: str) -> list[str]:
    (row,) = (line for line in tables.bars(found).splitlines() if line.startswith(f"| {what}"))
    return [part.strip() for part in row.strip("|").split("|")][1:]


def test_bars_name_the_farthest_cell() -> None:
    found = made(
        cell(share_of_floor=0.99),
        cell(columns=256, share_of_floor=0.96),
        cell(columns=512, share_of_floor=0.93),
        cell(columns=64, share_of_floor=0.1),  # below the range
        cell(columns=1001, share_of_floor=0.2),  # odd lengths have a bar of their own
        cell("causal", share_of_floor=0.5),
        cell(direction="forward+backward", share_of_floor=0.4),
    )
    assert verdict(found, "forward, plain: ") == [">= 0.95", ">= 0.98", "2 of 3, aim 1", "0.93", "cell 2"]
    assert verdict(found, "forward, causal, Sk 128") == [">= 0.82", ">= 0.93", "0 of 1, aim 0", "0.5", "cell 5"]
    assert verdict(found, "forward, padding") == [">= 0.95", "", "not measured", "", ""]
    assert verdict(found, "forward + backward, plain")[2:4] == ["0 of 1, aim 0", "0.4"]


def test_an_odd_length_is_compared_with_the_next_whole_one() -> None:
    shares = {60: 0.1, 64: 0.98, 1000: 0.95, 1001: 0.9, 1024: 0.96, 1025: 0.8, 1088: 0.9, 4097: 0.5}
    odd = "Sk no multiple of 64: share beside that of the next multiple"
    for kind, direction in (("plain", "forward"), ("causal+mask", "forward+backward")):
        found = made(*(cell(kind, columns, direction, share_of_floor=share) for columns, share in shares.items()))
        assert verdict(found, odd) == [">= 0.893", "", "2 of 3", "0.8889", "cell 5"]  # 4,160 was not measured
    assert verdict(made(cell(columns=1025, share_of_floor=0.8), cell(columns=1024, share_of_floor=0.9)), odd)[2:] == [
        "not measured",
        "",
        "",
    ]
    lengths = {columns for columns in cases.COLUMNS if columns >= 128 and columns % 64 != 0}
    assert lengths == set(cases.ODD_COLUMNS)
    assert {1024, 1088, 4160} == {cases.next_whole(columns) for columns in lengths} <= set(cases.COLUMNS)


def test_both_sides_of_a_threshold_are_compared() -> None:
    def sides(shorter: float, longer: float, **facts: Any) -> list[dict[str, Any]]:
        pair = cell(columns=256, share_of_floor=shorter), cell(columns=264, share_of_floor=longer)
        return [{**one, "suite": "thresholds", **facts} for one in pair]

    alone = {**cell(columns=1024, share_of_floor=0.1), "suite": "thresholds"}
    failed = sides(0.9, 0.9, kind="causal+mask")
    failed[1]["times"]["ours"] = {"failed": "not timed"}
    elsewhere = [cell(columns=256, share_of_floor=0.2), cell(columns=264, share_of_floor=0.9)]  # in the sweep
    found = made(*sides(0.95, 0.8), *sides(0.8, 0.9, kind="causal"), *sides(0.9, 0.9, dtype="float32"), alone)
    found = made(*found.cells.values(), *failed, *elsewhere)
    assert verdict(found, "either side of a threshold") == [">= 0.85", "", "2 of 3", "0.8421", "cell 0"]
    assert verdict(made(alone, *elsewhere), "either side of a threshold")[2:] == ["not measured", "", ""]


def test_bars_of_odd_lengths_rivals_and_memory() -> None:
    odd = cell(columns=1001, share_of_floor=0.9)
    even = cell(columns=1024, share_of_floor=0.98, peak_bytes=12 * 1024 * 1024)
    odd["times"]["eager"] = {"ratio_to_ours": 0.9}
    odd["times"]["softmax"] = {"ratio_to_ours": 0.95}
    even["times"]["compile"] = {"ratio_to_ours": 2.0}
    dropout = {**cell("dropout", direction="forward+backward", peak_bytes=3 * 12 * 128 * 128), "suite": "dropout"}
    found = made(odd, even, cell(direction="forward+backward", columns=64, peak_bytes=3 * 12 * 64 * 64), dropout)
    assert verdict(found, "Sk no multiple of 64")[2:] == ["1 of 1", "0.9184", "cell 0"]
    assert verdict(found, "time beside that of the best rival")[2:] == ["1 of 2", "1.111", "cell 0"]
    assert verdict(found, "peak memory, forward")[2:] == ["1 of 1", "1", "cell 1"]
    assert verdict(found, "peak memory, with backward")[2:] == ["0 of 1", "1.5", "cell 2"]
    assert verdict(found, "peak memory with dropout, with backward")[2:] == ["1 of 1", "1", "cell 3"]


def test_bars_of_the_cpu() -> None:
    fused = cell("causal+mask")
    fused["times"]["softmax"] = {"ratio_to_ours": 0.8}
    both = cell("padding", direction="forward+backward")
    both["times"]["softmax"] = {"ratio_to_ours": 2.0}
    small = {**cell(columns=8), "suite": "small", "clock": "host"}
    small["times"]["eager"] = {"ratio_to_ours": 2.0}
    small["times"]["softmax"] = {"ratio_to_ours": 0.4}
    found = made(fused, small, both, kind="cpu")
    assert verdict(found, "causal + mask: beside torch.softmax") == ["<= 1", "", "0 of 1", "1.25", "cell 0"]
    assert verdict(found, "each kind, forward")[2:] == ["0 of 1", "1.25", "cell 0"]
    assert verdict(found, "each kind, with backward")[2:] == ["1 of 1", "0.5", "cell 2"]
    assert verdict(found, "[1,1,8,8] forward: beside eager")[2:] == ["1 of 1", "0.5", "cell 1"]
    assert verdict(found, "[1,1,8,8] forward: beside torch.softmax")[2:] == ["0 of 1", "2.5", "cell 1"]


def test_figures_of_a_table() -> None:
    found = made(cell(columns=1024, share_of_floor=0.976), cell("causal", 1024, "forward+backward", share_of_floor=0.9))
    head, _, row = tables.floor(found, "float16").splitlines()
    assert head.count("|") == row.count("|") == len(tables.TABLE_CASES) + 2
    assert row.split("|")[1:3] == [" 1,024 ", " 0.98 "]
    assert row.split("|")[-2] == " 0.90 "
    with pytest.raises(results.Mismatch, match="no case of the sweep was measured in float32"):
        tables.floor(found, "float32")
    other = cell()
    other["times"]["softmax"] = {"ratio_to_ours": 1.234}
    row = "| cell 0 | [2, 3, 128, 128] | 1.000 ms | 1.23x |  |  |"
    assert tables.times(made(other, cell()), lambda one: one is other).splitlines()[2:] == [row]
    head, _, row = tables.beside_softmax(made(other, kind="cpu"), "float16").splitlines()
    assert head.startswith("| Sk | plain, forward |")
    assert row.split("|")[1:4] == [" 128 ", " 1.23x ", "  "]


def test_only_the_blocks_of_the_same_device_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled_here = "a\n<!-- bench: cuda bars -->\nxyz\n<!-- end of bench -->\nb\n"
    text = f"{filled_here}<!-- bench: cpu bars -->\n<!-- end of bench -->\n"
    found = made(cell(share_of_floor=0.99))
    new = tables.filled(text, found)
    assert "xyz" not in new
    assert new.startswith("a\n<!-- bench: cuda bars -->\n| bar |")
    assert new.endswith("|\n<!-- end of bench -->\nb\n<!-- bench: cpu bars -->\n<!-- end of bench -->\n")
    assert tables.filled(new, found) == new
    with pytest.raises(results.Mismatch, match="no table 'cuda bats'"):
        tables.filled(text.replace("cuda bars", "cuda bats"), found)
    page, report = tmp_path / "page.md", tmp_path / "report.json"
    page.write_text(text, "utf-8")
    found.write(report)
    monkeypatch.setattr(timing, "keep_memory", lambda: None)
    assert command.main(["--no-run", "--merge", str(report), "--fill", str(page)]) == 0
    assert page.read_text("utf-8") == new


def test_published_figures_are_those_of_the_reports() -> None:
    """To write them anew: scaled-mask-softmax bench --no-run --json REPORT --fill README*.md docs/performance.md"""
    groups = set()
    for report in REPORTS:
        found = results.read(report)
        groups.add(tables.group(found))
        for document in DOCUMENTS:
            text = document.read_text("utf-8")
            assert tables.filled(text, found) == text, f"{document.name} does not show {report.name}"
    published = {name.split()[0] for document in DOCUMENTS for name in tables.blocks(document.read_text("utf-8"))}
    assert published == groups
    assert len(groups) == len(REPORTS), "one report a group, as a document has one table for each"
