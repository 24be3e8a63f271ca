"""The index's landing page as HTML: what it says, and that nothing in index.json can become markup or script.

That it works in a browser is tests/browser/'s to say (make page-tests).
"""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from release import index, landing, matrix
from release.index import ChannelError, Entry
from release.matrix import tomllib

LOADED = matrix.load()
HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onfocus='alert(1)",
    "<!--",
    "{pip}",
]


def entry(name, **changes):
    version = name.split("-")[1].removesuffix(".tar.gz")
    facts = {
        "filename": name,
        "version": version,
        "url": name.replace("+", "%2B"),
        "sha256": hashlib.sha256(name.encode()).hexdigest(),
        "size": 3 * 10**6,
        "metadata_sha256": "0" * 64,
        "requires_python": ">=3.10",
        "architectures": [] if "+cpu" in name else ["8.0", "9.0"],
        "ptx": [] if "+cpu" in name else ["9.0"],
        "yanked": None,
    }
    return Entry(**{**facts, **changes})


def channels(*entries):
    found = {}
    for each in entries:
        found.setdefault(index.channel(each.filename), {})[each.filename] = each
    return found


def name(cuda="cu130", torch="2.14", python="3.11", version="1.0.0", platform="manylinux_2_28_x86_64"):
    tag = "cp" + python.replace(".", "")
    return f"scaled_mask_softmax-{version}+{cuda}torch{torch}-{tag}-{tag}-{platform}.whl"


class Page(HTMLParser):
    """What is in a page: its elements, and the text of its scripts and of everything else."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.text, self._inside = [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside.append(tag)
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._inside.pop()

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data
        else:
            self.text += data

    def every(self, tag):
        return [attributes for found, attributes in self.elements if found == tag]


def test_without_a_script_it_is_tables():
    page = Page(landing.page(channels(*(entry(wheel) for wheel in matrix.wheels(LOADED, LOADED.cells()))), []))
    text = " ".join(page.text.split())
    for cell in LOADED.cells():
        assert f'--index-url INDEX/whl/{cell.cuda_label}/torch{cell.torch.minor}/ "scaled-mask-softmax==' in text
        assert f"torch {cell.torch.minor}, {cell.cuda_label}{cell.platform}, glibc 2.28 or newer" in text
        assert f"{cell.torch.python[0]} to {cell.torch.python[-1]}" in text
    assert "8.0, 9.0; PTX 9.0" in text
    assert "CPU only" in text
    assert "3.0 MB" in text
    # A script shows the selector; it is not there for who has none.
    (selector,) = [attributes for attributes in page.every("section") if attributes.get("id") == "selector"]
    assert "hidden" in selector
    assert len(page.every("tr")) == 2 + len(LOADED.cells()) + len(matrix.wheels(LOADED, LOADED.cells()))
    assert all(head["scope"] in ("col", "row") for head in page.every("th"))


def test_it_needs_nothing_from_elsewhere():
    page = Page(landing.page(channels(entry(name())), [], "https://index.example/"))
    assert not [tag for tag, _ in page.elements if tag in ("link", "img", "iframe", "object", "embed", "base")]
    assert not [attributes for _, attributes in page.elements if "src" in attributes or "style" in attributes]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", "".join(page.scripts))


def test_the_newest_that_is_not_withdrawn():
    found = channels(
        entry(name(version="1.0.0")),
        entry(name(version="1.10.0")),
        entry(name(version="1.9.0")),
        entry(name(version="1.11.0"), yanked="wrong rows"),
        entry(name(version="1.9.0", python="3.12")),
    )
    offered = landing.newest(landing.every(found))
    assert [(wheel.python, wheel.version) for wheel in offered] == [("3.11", "1.10.0"), ("3.12", "1.9.0")]
    text = Page(landing.page(found, [])).text
    assert "withdrawn: wrong rows" in text
    assert '1.11.0+cu130torch2.14"' not in text


def test_what_fits_every_torch():
    """The newest source distribution that is not withdrawn, in lines with INDEX/ or the index's address."""
    plain = [
        entry(f"scaled_mask_softmax-{version}-py3-none-any.whl", version=version) for version in ("1.0.0", "1.1.0")
    ]
    sources = [
        entry("scaled_mask_softmax-1.0.0.tar.gz", version="1.0.0"),
        entry("scaled_mask_softmax-1.1.0.tar.gz", version="1.1.0", yanked="wrong rows"),
    ]
    page = Page(landing.page(channels(entry(name()), *plain, *sources), []))
    assert (
        '--index-url INDEX/plain/ "scaled-mask-softmax==1.0.0"\nscaled-mask-softmax build --index INDEX/ ' in page.text
    )
    (template,) = [attributes["data-lines"] for attributes in page.every("code") if "data-lines" in attributes]
    assert template.count("{index}") == 2
    hrefs = [attributes["href"] for attributes in page.every("a")]
    assert "plain/scaled-mask-softmax/scaled_mask_softmax-1.0.0.tar.gz" in hrefs
    assert "plain/scaled-mask-softmax/scaled_mask_softmax-1.0.0.tar.gz.metadata" not in hrefs
    assert "plain/scaled-mask-softmax/scaled_mask_softmax-1.0.0-py3-none-any.whl.metadata" in hrefs
    assert sources[0].sha256 in page.text
    told = Page(landing.page(channels(*sources), [], "https://index.example/")).text
    assert "scaled-mask-softmax build --index https://index.example/ --install" in told
    # Without a source distribution there is nothing to build.
    assert "build --index" not in Page(landing.page(channels(entry(name()), *plain), [])).text


def test_what_is_missing_and_what_is_not_there():
    assert "There is no wheel here yet." in Page(landing.page({}, [])).text
    assert name(python="3.14") in Page(landing.page(channels(entry(name())), [name(python="3.14")])).text


@pytest.mark.parametrize("python", [["3.11"], ["3.12", "3.10", "3.11"], ["3.10", "3.13", "3.14"]])
def test_spans_of_pythons(python):
    expected = {1: "3.11", 3: "3.10 to 3.12"}[len(python)] if "3.13" not in python else "3.10, 3.13 to 3.14"
    assert landing._span(python) == expected


def test_the_lines():
    (wheel,) = landing.newest(landing.every(channels(entry(name("cu126", python="3.12")))))
    filled = {tool: landing.filled(tool, wheel, "https://index.example/") for tool in landing.LINES}
    assert not [tool for tool, lines in filled.items() if re.search(r"\{\w+\}", lines)]
    channel, full = "https://index.example/whl/cu126/torch2.14/", "scaled-mask-softmax==1.0.0+cu126torch2.14"
    file = f"{channel}scaled-mask-softmax/{wheel.entry.url}#sha256={wheel.entry.sha256}"
    assert filled["pip"] == f'python -m pip install --no-deps --index-url {channel} "{full}"'
    assert filled["docker"].splitlines()[-1].startswith("RUN python -m pip install --no-cache-dir --no-deps")
    assert filled["requirements"].splitlines()[-1] == f"scaled-mask-softmax @ {file}"
    assert f"      - scaled-mask-softmax @ {file}" in filled["conda"]
    assert "  - python=3.12\n" in filled["conda"]
    uv, poetry = (tomllib.loads(filled[f"{tool}-project"]) for tool in ("uv", "poetry"))
    for project in (uv, poetry):
        assert project["project"]["dependencies"] == [full, "torch==2.14.*"]
    assert uv["tool"]["uv"]["index"] == [{"name": "scaled-mask-softmax", "url": channel, "explicit": True}]
    assert poetry["tool"]["poetry"]["source"][0]["url"] == channel
    # A wheel that lies elsewhere is named where it lies.
    elsewhere = f"https://files.example/v1/{wheel.entry.url}"
    (other,) = landing.newest(landing.every(channels(entry(wheel.entry.filename, url=elsewhere))))
    assert f"@ {elsewhere}#sha256=" in landing.filled("requirements", other, "https://index.example/")


def unchecked(each, **changes):
    """An entry as no check would let it through, for the page alone."""
    for field, value in changes.items():
        object.__setattr__(each, field, value)
    return each


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_becomes_markup(text):
    """Even what the checks of index.json refuse is shown as text."""
    known = channels(
        entry(name()), entry(name(python="3.12"), yanked="reason"), entry("scaled_mask_softmax-1.0.0.tar.gz")
    )
    plain = landing.page(known, ["missing"], "https://a/")
    hostile = [
        unchecked(entry(name()), version=text, url=text, sha256=text, architectures=[text], ptx=[text]),
        entry(name(python="3.12"), yanked=text),
    ]
    found = {f"whl/cu130/torch2.14{text}": {each.filename: each for each in hostile}}
    found[landing.PLAIN] = {
        "x": unchecked(entry("scaled_mask_softmax-1.0.0.tar.gz"), version=text, url=text, sha256=text, yanked=None)
    }
    page, expected = Page(landing.page(found, [text], f"https://a/{text}")), Page(plain)
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in expected.elements]
    assert [sorted(attributes) for _, attributes in page.elements] == [sorted(each) for _, each in expected.elements]
    assert text in page.text
    # The data reaches the script as data.
    style, data, script = page.scripts
    assert (style, script) == (expected.scripts[0], expected.scripts[2])
    assert json.loads(data)["wheels"][0][5] == text


def test_the_policy_lets_only_our_script_run():
    page = Page(landing.page(channels(entry(name())), []))
    (policy,) = [meta["content"] for meta in page.every("meta") if "Content-Security-Policy" in meta.values()]
    style, _, script = page.scripts
    for kind, text in {"style": style, "script": script}.items():
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


BAD = {
    "filename": ["../x.whl", name().replace("cp311-cp311", "cp311-.."), name() + "\n", name("cu130", "2.14<b>"), 7],
    "version": ["1.0.0", "1.0.0+cu130torch2.15", None],
    "url": [
        "javascript:alert(1)//" + name(),
        "../../" + name(),
        "//evil.example/" + name(),
        'https://a/"/' + name(),
        "",
    ],
    "sha256": ["", "0" * 63, "g" * 64, None],
    "metadata_sha256": ["<script>"],
    "size": [-1, "1", 1.5, True],
    "requires_python": ['>=3.10" onclick="x', "\n", None],
    "architectures": ["9.0", ["<b>"], [9.0, "x"], None],
    "ptx": [["9.0;"]],
    "yanked": [True, 1],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in BAD for value in BAD[field]])
def test_an_index_json_that_lies_is_refused(tmp_path, field, value):
    good = vars(entry(name()))
    data = {"channels": {"whl/cu130/torch2.14": [{**good, field: value}]}, "expected_missing": []}
    (tmp_path / "index.json").write_text(json.dumps(data))
    with pytest.raises(ChannelError, match="is none of ours"):
        index.Index(tmp_path)
    data["channels"]["whl/cu130/torch2.14"] = [good]
    (tmp_path / "index.json").write_text(json.dumps(data))
    assert [each.filename for each in index.Index(tmp_path).entries()] == [name()]


@pytest.mark.parametrize(
    "data",
    [
        {"channels": {"whl/../..": [vars(entry(name()))]}, "expected_missing": []},
        {"channels": {"whl/cu126/torch2.14": [vars(entry(name()))]}, "expected_missing": []},
        {"channels": {}, "expected_missing": [1]},
        {"channels": {}, "expected_missing": [], "address": 1},
        {"channels": {}, "expected_missing": [], "address": "javascript:alert(1)/"},
        [],
    ],
)
def test_an_index_json_of_another_shape_is_refused(tmp_path, data):
    (tmp_path / "index.json").write_text(json.dumps(data))
    with pytest.raises(ChannelError, match="is none of ours"):
        index.Index(tmp_path)


def test_the_address_is_remembered(tmp_path):
    address = "https://index.example/kernels/"
    with index.update(tmp_path) as found:
        found.channels = channels(entry(name()))
        found.set_address(address)
    with index.update(tmp_path) as found:
        assert found.address == address
    text = Page((tmp_path / "index.html").read_text()).text
    assert f"--index-url {address}whl/cu130/torch2.14/" in text
    assert "INDEX/" not in text
    for wrong in ("https://index.example", "ftp://index.example/", "https://index.example/ x/"):
        with pytest.raises(ChannelError, match="http, https or file address that ends in /"):
            index.Index(tmp_path).set_address(wrong)
