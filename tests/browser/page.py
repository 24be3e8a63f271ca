"""The landing page in Chromium: what it prints, for whom it works, and that nothing hostile runs.

`make page-tests` brings the browser, its driver and axe-core, and runs this file by its name.
"""

import base64
import functools
import http.server
import os
import threading
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from release import landing, matrix
from tests.test_release_landing import HOSTILE, channels, entry, name, unchecked

LOADED = matrix.load()
SCREENSHOTS = Path(os.environ["SMS_SCREENSHOTS"]) if os.environ["SMS_SCREENSHOTS"] else None
WIDE, PHONE = (1100, 900), (390, 844)
# The torch of which `wheels` has little, so that a choice is narrowed.
LONELY = "2.15"


@pytest.fixture(scope="module")
def wheels():
    """Every wheel of the matrix, of one torch for CUDA and one platform only; a withdrawn one; plain ones."""
    names = [file for file in matrix.wheels(LOADED, LOADED.cells()) if f"torch{LONELY}" not in file]
    names += [file for file in matrix.wheels(LOADED, LOADED.cells(LONELY, machine="x86_64")) if "cpu" not in file]
    found = [entry(file) for file in names]
    plain = [entry("scaled_mask_softmax-1.0.0-py3-none-any.whl"), entry("scaled_mask_softmax-1.0.0.tar.gz")]
    return channels(*found, *plain, entry(name(version="0.9.0"), yanked="wrong rows"))


@pytest.fixture(scope="module")
def site(wheels, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "index.html").write_text(landing.page(wheels, [name(python="3.9")]), encoding="utf-8")
    return folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, form, *values):
        pass


@pytest.fixture(scope="module")
def address(site):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def start(script=True):
    options = webdriver.ChromeOptions()
    options.binary_location = os.environ["SMS_BROWSER"]
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    if not script:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    return webdriver.Chrome(options, webdriver.ChromeService(os.environ["SMS_DRIVER"]))


@pytest.fixture(scope="module")
def driver():
    found = start()
    yield found
    found.quit()


@pytest.fixture
def browser(driver, address):
    """At the page, as a reader with a light, wide window."""
    look(driver, WIDE, "light")
    driver.get("about:blank")
    driver.get(address)
    driver.get_log("browser")
    return driver


def look(browser, size, scheme):
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})


def choose(browser, **choice):
    for group, value in choice.items():
        browser.find_element(By.CSS_SELECTOR, f'[name="{group}"][value="{value}"]').click()


def chosen(browser):
    return [radio.get_attribute("value") for radio in browser.find_elements(By.CSS_SELECTOR, "input:checked")]


def printed(browser):
    return browser.find_element(By.ID, "lines").get_attribute("textContent")


def said(browser):
    return browser.find_element(By.ID, "status").text


def answered(browser):
    """What the page says once the clipboard has taken the lines or not, which comes after the click has returned."""
    return WebDriverWait(browser, 30).until(said)


@pytest.mark.parametrize("tool", landing.LINES)
def test_it_prints_the_lines(browser, address, wheels, tool):
    """The script's lines are Python's, with the address that the page was read from."""
    offered = landing.newest(landing.every(wheels))
    choose(browser, tool=tool)
    # One of each torch and CUDA, all Pythons and platforms among them.
    for at, wheel in enumerate(offered):
        if at % 7 == 0:
            choose(browser, torch=wheel.torch, cuda=wheel.cuda, platform=wheel.platform, python=wheel.python)
            assert printed(browser) == landing.filled(tool, wheel, address)
    assert browser.get_log("browser") == []


def test_only_what_exists_is_offered(browser):
    choose(browser, torch="2.14", cuda="cu126", platform="aarch64", python="3.10")
    assert said(browser) == ""
    choose(browser, torch=LONELY)
    assert chosen(browser) == [LONELY, "cu132", "x86_64", "3.14", "pip"]
    assert said(browser) == (
        "cu126 is not built for that: cu132 instead. aarch64 is not built for that: x86_64 instead. "
        "3.10 is not built for that: 3.14 instead."
    )
    off = {radio.get_attribute("value") for radio in browser.find_elements(By.CSS_SELECTOR, "input:disabled")}
    assert {"cu130", "cpu", "aarch64", "3.10"} <= off
    # A click on what is off changes nothing.
    before = printed(browser)
    browser.execute_script("document.querySelector('[value=aarch64]').closest('label').click()")
    assert printed(browser) == before


def test_a_choice_has_an_address(browser, address):
    choose(browser, torch="2.13", cuda="cu126", platform="aarch64", python="3.12", tool="uv")
    link = browser.current_url
    assert link == f"{address}#torch=2.13&cuda=cu126&platform=aarch64&python=3.12&tool=uv"
    before = printed(browser)
    browser.get("about:blank")
    browser.get(link)
    assert printed(browser) == before
    browser.get(f"{address}#torch=9.9&cuda=%22%3E%3Cscript%3Ealert(1)%3C/script%3E&tool=__proto__")
    assert chosen(browser) == ["2.13", "cu126", "aarch64", "3.12", "uv"]
    assert printed(browser) == before


def test_copy(browser, address):
    browser.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": address},
    )
    browser.execute_script("document.execCommand = () => { throw new Error('the fallback') }")
    choose(browser, tool="conda")
    browser.find_element(By.ID, "copy").click()
    assert answered(browser) == "Copied."
    assert browser.execute_async_script("navigator.clipboard.readText().then(arguments[0])") == printed(browser)
    choose(browser, tool="pip")
    assert said(browser) == ""


def test_without_a_clipboard_the_lines_are_selected(browser):
    browser.execute_script(
        "Object.defineProperty(navigator, 'clipboard', {value: undefined}); document.execCommand = () => false;"
    )
    browser.find_element(By.ID, "copy").click()
    assert answered(browser) == "Selected: press Ctrl+C to copy."
    assert browser.execute_script("return getSelection().toString()") == printed(browser)


def test_for_another_torch(browser, address):
    """The lines that build name the address that the page was read from."""
    (lines,) = browser.find_elements(By.CSS_SELECTOR, "[data-lines]")
    assert lines.text == (
        f'python -m pip install --no-deps --index-url {address}plain/ "scaled-mask-softmax==1.0.0"\n'
        f"scaled-mask-softmax build --index {address} --install"
    )


def test_from_a_folder(browser, site, wheels):
    browser.get((site / "index.html").as_uri())
    first = landing.newest(landing.every(wheels))[0]
    assert printed(browser) == landing.filled("pip", first, f"{site.as_uri()}/")


def test_with_the_keyboard(browser):
    """Every group by Tab, a choice by arrows, Copy by the space bar; the focus is always to be seen."""

    def press(*keys):
        webdriver.ActionChains(browser).send_keys(*keys).perform()

    stops = []
    for _ in range(12):
        press(Keys.TAB)
        focus = browser.switch_to.active_element
        stops.append(focus.get_attribute("name") or focus.get_attribute("id") or focus.tag_name)
        ring = focus.find_element(By.XPATH, "..") if focus.tag_name == "input" else focus
        assert ring.value_of_css_property("outline-style") == "solid", stops
        if stops[-1] == "torch":
            press(Keys.ARROW_RIGHT)
        elif stops[-1] == "copy":
            press(Keys.SPACE)
            assert answered(browser) in ("Copied.", "Selected: press Ctrl+C to copy.")
            break
    assert stops == ["torch", "cuda", "platform", "python", "tool", "copy"]
    assert chosen(browser)[0] == "2.14"


def test_for_a_screen_reader(browser):
    """The accessibility tree names every group, and what changes is announced."""
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    found = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if "role" in node}
    groups = {text for role, text in found if role == "group"}
    assert {"torch", "CUDA", "Platform", "Python", "With"} <= groups
    assert {("radio", "2.14"), ("radio", "none (CPU)"), ("button", "Copy"), ("region", "What exists")} <= found
    assert "status" in {role for role, _ in found}
    assert ("heading", "Install scaled-mask-softmax") in found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_axe_is_clean(browser, size, scheme):
    look(browser, size, scheme)
    for details in browser.find_elements(By.TAG_NAME, "summary"):
        details.click()
    browser.execute_script(Path(os.environ["SMS_AXE"]).read_text(encoding="utf-8"))
    result = browser.execute_async_script("axe.run().then(arguments[0])")
    found = [(each["id"], [node["html"] for node in each["nodes"]]) for each in result["violations"]]
    assert found == []
    # What it could not judge is no pass, but for columns that a phone scrolls to: the wide page shows them all.
    unsure = [node for each in result["incomplete"] for node in each["nodes"]]
    hidden = ".scroll td, .scroll td *, .scroll th" if size == PHONE else "none"
    inside = "return document.querySelector(arguments[0])?.matches(arguments[1])"
    assert [node for node in unsure if not browser.execute_script(inside, node["target"][0], hidden)] == []
    assert len(result["passes"]) > 20


def test_it_follows_the_color_scheme(browser):
    def lightness():
        text = browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
        return sum(int(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]) / 3

    assert lightness() > 200
    look(browser, WIDE, "dark")
    assert lightness() < 50


def test_a_phone_scrolls_down_only(browser):
    look(browser, PHONE, "light")
    for summary in browser.find_elements(By.TAG_NAME, "summary"):
        summary.click()
    width = "return [document.scrollingElement.scrollWidth, document.scrollingElement.clientWidth]"
    assert browser.execute_script(width) == [PHONE[0], PHONE[0]]
    boxes = [label.size["height"] for label in browser.find_elements(By.TAG_NAME, "label")]
    assert min(boxes) >= 24  # what a finger hits (WCAG 2.2, 2.5.8)


def test_without_a_script(address, wheels):
    browser = start(script=False)
    try:
        browser.get(address)
        assert not browser.find_element(By.ID, "selector").is_displayed()
        (table, *_) = [each for each in browser.find_elements(By.TAG_NAME, "table") if each.is_displayed()]
        assert '--index-url INDEX/whl/cu130/torch2.14/ "scaled-mask-softmax==' in table.text
        browser.find_element(By.TAG_NAME, "summary").click()
        assert "[[tool.poetry.source]]" in browser.find_element(By.TAG_NAME, "details").text
        (lines,) = browser.find_elements(By.CSS_SELECTOR, "[data-lines]")
        assert lines.text.endswith("\nscaled-mask-softmax build --index INDEX/ --install")
    finally:
        browser.quit()


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_hostile_runs(browser, site, address, text):
    """The text reaches the page as it is, past index.json's own checks, and stays text."""
    wheel = unchecked(entry(name()), version=text, url=text, sha256=text, architectures=[text], yanked=None)
    found = {"whl/cu130/torch2.14": {"a": wheel, "b": entry(name(python="3.12"), yanked=text)}}
    found[landing.PLAIN] = {"c": unchecked(entry("scaled_mask_softmax-1.0.0.tar.gz"), version=text, sha256=text)}
    file = site / f"hostile-{HOSTILE.index(text)}.html"
    file.write_text(landing.page(found, [text]), encoding="utf-8")
    browser.get(address + file.name)
    for summary in browser.find_elements(By.TAG_NAME, "summary"):
        summary.click()
    choose(browser, tool="requirements")
    # Any alert would have failed the commands above.
    assert text in printed(browser)
    assert text in browser.find_element(By.TAG_NAME, "body").text
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 2
    assert browser.get_log("browser") == []


def test_the_policy_stops_what_would_get_in(browser, site, address):
    """If text did become markup, the browser would refuse to run it."""
    page = (site / "index.html").read_text(encoding="utf-8")
    injected = "<img src=x onerror='window.ran = 1'><script>window.ran = 2</script></main>"
    (site / "injected.html").write_text(page.replace("</main>", injected), encoding="utf-8")
    browser.get(f"{address}injected.html")
    assert browser.execute_script("return window.ran") is None
    assert any("Content Security Policy" in line["message"] for line in browser.get_log("browser"))
    assert printed(browser)


@pytest.mark.skipif(SCREENSHOTS is None, reason="asked for with SCREENSHOTS")
@pytest.mark.parametrize(
    ("file", "size", "scheme"),
    [("page", WIDE, "light"), ("page-phone", PHONE, "light"), ("page-dark", WIDE, "dark")],
    ids=["desktop", "phone", "dark"],
)
def test_screenshots(browser, file, size, scheme):
    look(browser, size, scheme)
    choose(browser, torch="2.14", cuda="cu130")
    options = {"format": "webp", "quality": 80}
    picture = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", options)["data"])
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    (SCREENSHOTS / f"{file}.webp").write_bytes(picture)
    assert 5_000 < len(picture) < 100_000
