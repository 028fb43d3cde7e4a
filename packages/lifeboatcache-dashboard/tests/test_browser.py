"""The pages in a real browser: with and without JavaScript, both themes, narrow and wide."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import CLI, until
from published import MadeUpHome, agent_facts, engine_facts
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from vllm_server import free_port

from lifeboat_cache.config import load_config
from lifeboat_cache.dashboard.history import History

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver"
)

PAGES = ("/", "/?range=24h", "/targets", "/contents", "/recovery", "/processes", "/configure")
STORED = Path(__file__).parents[2] / "lifeboatcache-core/tests/golden/format-1"

Browser = webdriver.Chrome


def start_browser(directory: Path, *, javascript: bool = True) -> Browser:
    options = webdriver.ChromeOptions()
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={directory}",
    ):
        options.add_argument(flag)
    if not javascript:
        options.add_experimental_option(
            "prefs", {"profile.managed_default_content_settings.javascript": 2}
        )
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = str(CHROMIUM)
    return webdriver.Chrome(options=options, service=Service(str(DRIVER)))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = start_browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def plain_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One that runs no JavaScript of pages."""
    browser = start_browser(tmp_path_factory.mktemp("profile"), javascript=False)
    yield browser
    browser.quit()


@pytest.fixture
def address(home: Path, made: MadeUpHome) -> Iterator[str]:
    """A dashboard in a process of its own, in front of a busy home."""
    port = free_port()
    shutil.copytree(STORED, home / "kv")
    (home / "lifeboat.yaml").write_text(
        f"# Ours.\nstorage:\n  tiers:\n    - name: nvme  # fast\n      type: filesystem\n"
        f"      path: {home}/kv\n      capacity_gb: 400\ndashboard: {{port: {port}}}\n"
    )
    history = History(home / "dashboard" / "history")
    for ago in range(900, 0, -10):
        values = {"lookups": -3.0 * ago, "lookup_hits": -2.0 * ago, "loaded_bytes": -9e6 * ago}
        history.add(time.time() - ago, values)
    history.close()
    lost = {"seconds": 600, "store_dropped": {"busy": 3}, "load_failed": {}}
    made.publish(engine_facts(recent=lost, counts={"store_outcome:busy": 3}), since=60)
    reading = {"done": False, "blocks": 50_000, "seconds": 0.0, "bad_entries": 2}
    made.publish(engine_facts(1, state="recovering", recovery=reading), since=5)
    made.publish(agent_facts(), "agent")
    process = subprocess.Popen(
        [sys.executable, "-c", CLI, "dashboard"],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    address = f"http://localhost:{port}"

    def there() -> bool:
        try:
            return bool(urllib.request.urlopen(f"{address}/healthz", timeout=5).status == 200)
        except OSError:
            return False

    until(there, "the dashboard")
    yield address
    process.kill()
    process.wait()


def look(browser: Browser, *, width: int, dark: bool) -> None:
    """Set the size of the window and the colours that the system asks for."""
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def text_of(browser: Browser, selector: str) -> str:
    """Text of the first such element; empty while there is none."""
    try:
        return browser.find_element(By.CSS_SELECTOR, selector).text
    except (NoSuchElementException, StaleElementReferenceException):
        return ""


#: What must have a name.
NAMED = "a, button, input, select, svg[role]"

#: Texts whose contrast with what lies behind them is too low: WCAG's AA.
LOW_CONTRAST = """
const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (one) => {
  for (; one; one = one.parentElement) {
    const found = numbers(getComputedStyle(one).backgroundColor);
    if (found.length < 4 || found[3] > 0.9) return found;
  }
  return [255, 255, 255];
};
const bad = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const one = walk.currentNode.parentElement;
  const text = walk.currentNode.data.trim();
  const box = one.getBoundingClientRect();
  if (!text || !box.width || one.closest("noscript, option, [hidden]")) continue;
  const style = getComputedStyle(one);
  if (style.visibility === "hidden" || one.closest(":disabled")) continue;
  const [a, b] = [light(numbers(style.color)), light(behind(one))].sort((x, y) => y - x);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  if ((a + 0.05) / (b + 0.05) < (large ? 3 : 4.5)) bad.push(text.slice(0, 40));
}
return bad;
"""


@pytest.mark.parametrize("javascript", [True, False], ids=["javascript", "plain"])
def test_every_page_in_both_themes_narrow_and_wide(
    request: pytest.FixtureRequest, address: str, javascript: bool
) -> None:
    browser: Browser = request.getfixturevalue("browser" if javascript else "plain_browser")
    for width, dark in ((360, True), (1400, False), (1400, True), (360, False)):
        look(browser, width=width, dark=dark)
        for page in PAGES:
            browser.get(address + page)
            where = (page, width, dark)
            assert len(browser.find_elements(By.TAG_NAME, "h1")) == 1, where
            wide = browser.execute_script(
                "return document.documentElement.scrollWidth - innerWidth"
            )
            assert wide <= 0, f"{where}: scrolls sideways by {wide}"
            background = browser.execute_script(
                "return getComputedStyle(document.body).backgroundColor"
            )
            assert (background == "rgb(15, 21, 27)") == dark, where
            assert browser.execute_script(LOW_CONTRAST) == [], where
            if width < 600 or dark:
                continue  # names have neither
            for one in browser.find_elements(By.CSS_SELECTOR, NAMED):
                if one.is_displayed():
                    assert one.accessible_name, (where, one.get_attribute("outerHTML"))
    problems = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]  # type: ignore[no-untyped-call]
    assert problems == [], "nothing is refused by the policy, nothing fails"


def test_it_is_used_with_the_keyboard(browser: Browser, address: str) -> None:
    look(browser, width=1400, dark=False)
    browser.get(address)
    focused: list[str] = []
    for _ in range(12):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        one = browser.switch_to.active_element
        focused.append(one.accessible_name)
        assert one.value_of_css_property("outline-style") == "solid", focused
    assert focused[0] == "Skip to the content"
    assert focused[2:8] == [
        "Overview",
        "Targets",
        "Contents",
        "Recovery",
        "Processes",
        "Configure",
    ]
    browser.get(f"{address}/processes")
    browser.switch_to.active_element.send_keys(Keys.TAB)
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.switch_to.active_element.get_attribute("id") == "main"


def test_pages_refresh_themselves_and_plots_say_what_is_pointed_at(
    browser: Browser, address: str, made: MadeUpHome
) -> None:
    look(browser, width=1400, dark=False)
    browser.get(address)

    assert text_of(browser, ".lead").startswith("2 engines")
    made.publish(engine_facts(2))
    until(lambda: text_of(browser, ".lead").startswith("3 engines"), "the page to refresh itself")
    field = browser.find_element(By.CSS_SELECTOR, ".field")
    ActionChains(browser).move_to_element_with_offset(field, 150, 0).perform()
    tip = field.find_element(By.CSS_SELECTOR, ".tip")
    assert "found 67 %" in tip.text


def test_the_theme_is_kept_without_javascript(plain_browser: Browser, address: str) -> None:
    look(plain_browser, width=1400, dark=False)
    plain_browser.get(f"{address}/targets")
    plain_browser.find_element(By.CSS_SELECTOR, "button[value=dark]").click()
    until(lambda: text_of(plain_browser, "html[data-theme=dark] h1"), "the other colours")
    assert plain_browser.current_url == f"{address}/targets"
    assert plain_browser.execute_script(LOW_CONTRAST) == []
    plain_browser.find_element(By.CSS_SELECTOR, "button[value=auto]").click()


def test_what_is_typed_is_checked_and_saved_after_it_was_shown(
    browser: Browser, address: str, home: Path
) -> None:
    look(browser, width=1400, dark=False)
    browser.get(f"{address}/configure")
    save = browser.find_element(By.CSS_SELECTOR, ".save-button")
    assert not save.is_displayed()
    workers = browser.find_element(By.NAME, "engine.io_workers")
    workers.send_keys("160")

    def said() -> str:
        row = browser.find_element(By.CSS_SELECTOR, '[data-field="engine.io_workers"]')
        return row.find_element(By.CSS_SELECTOR, ".problem").text

    until(lambda: "a whole number from 1 to 64" in said(), "the schema's words")
    assert not save.is_displayed()
    # Enter saves nothing that nobody has looked at.
    workers.send_keys(Keys.ENTER)
    workers.clear()
    workers.send_keys("16")
    codec = Select(browser.find_element(By.NAME, "compression.ladder.local"))
    codec.select_by_visible_text("lbq4")
    until(save.is_displayed, "that it can be saved")

    def shown() -> str:
        return browser.find_element(By.CSS_SELECTOR, ".review").text

    until(lambda: "+  io_workers: 16" in shown() and "+    local: lbq4" in shown(), "the diff")
    assert "restart required" in shown()
    assert "applied at once" in shown()
    before = (home / "lifeboat.yaml").read_text()
    save.click()
    until(lambda: "saved=restart" in browser.current_url, "that it is saved")
    config = load_config().config
    assert (config.engine.io_workers, config.compression.ladder.local) == (16, "lbq4")
    assert (home / "lifeboat.yaml").read_text().startswith(before)
    assert (home / "lifeboat.yaml.previous").read_text() == before


def test_two_people_edit(browser: Browser, plain_browser: Browser, address: str) -> None:
    for one in (browser, plain_browser):
        look(one, width=1400, dark=False)
        one.get(f"{address}/configure")
    policy = Select(browser.find_element(By.NAME, "eviction.policy"))
    policy.select_by_visible_text("none")
    save = browser.find_element(By.CSS_SELECTOR, ".save-button")
    until(save.is_displayed, "that it can be saved")
    save.click()
    until(lambda: "saved=live" in browser.current_url, "that it is saved")
    # The other one has the page from before, and no JavaScript.
    plain_browser.find_element(By.NAME, "engine.io_workers").send_keys("4")
    plain_browser.find_element(By.CSS_SELECTOR, ".review-button").send_keys(Keys.ENTER)
    until(lambda: "io_workers: 4" in text_of(plain_browser, ".diff"), "the lines that change")
    assert "changed in the meantime" in text_of(plain_browser, "[role=alert]")
    assert "eviction" not in text_of(plain_browser, ".changes")
    plain_browser.find_element(By.CSS_SELECTOR, ".save-button").send_keys(Keys.ENTER)
    until(lambda: "saved=" in plain_browser.current_url, "that it is saved")
    config = load_config().config
    assert config.eviction.policy == "none"
    assert config.engine.io_workers == 4


def test_purging_asks_first(plain_browser: Browser, address: str, home: Path) -> None:
    look(plain_browser, width=1400, dark=False)
    segments = list((home / "kv").glob("*/*.segment"))
    assert segments
    plain_browser.get(f"{address}/contents")
    plain_browser.find_element(By.CSS_SELECTOR, "form.purge button").click()
    until(lambda: text_of(plain_browser, "h1").startswith("Purge "), "the question")
    assert all(path.exists() for path in segments)
    plain_browser.find_element(By.CSS_SELECTOR, "button.danger").click()
    until(lambda: text_of(plain_browser, "h1").startswith("Purged"), "the answer")
    assert not any(path.exists() for path in segments)


def test_a_page_of_somebody_else_cannot_change_anything(
    browser: Browser, address: str, home: Path, tmp_path: Path
) -> None:
    import functools
    import http.server

    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "index.html").write_text(
        f'<form method="post" action="{address}/configure"><input name="action" value="save">'
        f'<input name="eviction.policy" value="none"><button>win</button></form>'
        f'<iframe src="{address}/"></iframe>'
    )
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "evil")
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.get(f"{address}/configure")  # so that there is a session to be abused
        browser.get(f"http://127.0.0.1:{server.server_port}/")
        browser.find_element(By.TAG_NAME, "button").click()
        until(lambda: "Not allowed" in text_of(browser, "h1"), "the answer")
        server.shutdown()
    assert load_config().config.eviction.policy == "lru"
