"""The page of a report in a real browser: it draws, sorts and reads on a phone, and stays small."""

import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_report import write_results

from quest_bench import store, worker
from quest_bench.plan import Plan, catalogue, describe_cell, parse_settings
from quest_bench.report import write_report
from quest_bench.store import Stored

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")


@pytest.fixture(scope="module")
def browser():
    installed = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        path = str(own) if own.is_file() else installed
        if path is None:
            pytest.skip("no browser: playwright install chromium, or apt-get install chromium")
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = playwright.chromium.launch(executable_path=path, args=arguments)
        yield running
        running.close()


SMALL_TEXT = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || parent.closest("script, noscript, style")) continue;
    const box = parent.getBoundingClientRect();
    if (!box.width || !parent.checkVisibility()) continue;
    const svg = parent.ownerSVGElement;
    const scale = svg && svg.viewBox.baseVal.width ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    const size = parseFloat(getComputedStyle(parent).fontSize) * scale;
    if (size < 11) found.push([size, walker.currentNode.textContent]);
  }
  return found;
}"""


CUT_OFF = """() => [...document.querySelectorAll("td")].filter(cell => cell.getBoundingClientRect().right > innerWidth)
  .map(cell => cell.innerText)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_in_a_browser(fake, browser, width, scheme):
    scores = {"standard": [50.0, 52.0, 54.0], "quest": [55.0, 57.5, 58.5], "qnorm": [50.0, math.nan, 49.0]}
    write_results(Path("out"), ["scale=1,2"], scores)
    text = write_report(Path("out"), "standard").resolve()
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    problems = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: problems.append(r.url) if not r.url.startswith(("file:", "blob:", "data:")) else None)
    page.goto(text.as_uri())
    for chart in page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        chart.locator("svg").first.wait_for(timeout=60_000)
    assert problems == []
    assert page.locator(".chart").count() == 5
    assert page.evaluate(SMALL_TEXT) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.locator(".chart svg").evaluate_all("found => found.map(one => one.getBoundingClientRect().right)")
    assert max(boxes) <= width
    assert page.evaluate(CUT_OFF) == []
    table = page.locator("section table").first
    if width < 900:  # a row is a card, with a label before each value
        assert table.locator("td[data-label=seeds]").first.is_visible()
        page.close()
        return
    heading = table.locator("th", has_text="mean")
    for order in (sorted, lambda values: sorted(values, reverse=True)):
        heading.locator("button").click()
        means = [float(cell.split()[0]) for cell in table.locator("tbody tr td:nth-child(3)").all_inner_texts()]
        assert means == order(means)
    assert heading.get_attribute("aria-sort") == "descending"
    page.close()


@pytest.mark.slow
def test_500_cells_with_10000_points_are_below_a_megabyte(fake):
    """Curves and noise differ, so that nothing compresses for being alike."""
    draw = np.random.default_rng(0)
    suite = catalogue().suites["fake/suite"]
    settings = parse_settings(suite, ["scale=1,2,3,4,5,6"])
    plan = Plan(suite, {"one": None}, ["standard", "quest", "qnorm", "qknorm"], range(21), settings)
    facts = {"details": {}, "seconds": 2.0, "machine": worker.machine()}
    cells = []
    for cell in plan.cells(Path("out")):
        loss = 1 / (1 + np.arange(10_000) / draw.uniform(300, 900)) + draw.random(10_000) / 10
        result = {"metrics": {"score": 50 + draw.random()}, "series": {"loss": loss}, **facts}
        cells.append(Stored(cell.workdir.parent, describe_cell(cell), result, None))
    assert len(cells) == 504
    Path("out").mkdir()
    store.write_table(cells, Path("out/results.parquet"))
    assert write_report(Path("out"), "standard").stat().st_size < 1_000_000
