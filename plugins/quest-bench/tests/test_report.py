"""The report of made-up results: numbers, words, and a page that needs nothing else."""

import html.parser
import json
import math
import re
import shutil
import signal
from pathlib import Path

import pandas as pd
import pytest
import vl_convert
from rich.text import Text

from quest_bench import charts, groups, store, worker
from quest_bench.compare import compare_runs
from quest_bench.groups import read_groups
from quest_bench.plan import Plan, catalogue, parse_settings
from quest_bench.report import write_page, write_report
from quest_bench.run import Outcome, Runner
from quest_bench.stats import estimate
from quest_bench.worker import decode, write_json

UNDECIDED = "quest: no significant difference from standard over 3 seeds"
SCORES = {"standard": [50.0, 52.0, 54.0], "quest": [55.0, 57.5, 58.5], "qnorm": [50.0, math.nan, 53.0]}


def write_results(out, settings, scores):
    suite = catalogue().suites["fake/suite"]
    seeds = list(range(max(map(len, scores.values()))))
    plan = Plan(suite, {"one": None}, list(scores), seeds, parse_settings(suite, settings))
    for cell in plan.cells(out):
        cell.workdir.mkdir(parents=True)
        path = store.prepare(cell, suite.metric)
        result = {"metrics": {"score": scores[cell.attention][cell.seed]}}
        result |= {"series": {"loss": [1.0, 0.5, 0.25][: cell.seed + 1]}, "details": {"x": math.nan}, "seconds": 2.0}
        result |= {"peak_rss_mib": 100.0, "device": "cpu", "threads": 1, "finished": "", "versions": {"torch": "2.13"}}
        result |= {"commits": {"quest-core": "a" * 40}, "machine": worker.machine()}
        write_json(path.with_name("result.json"), result)
    run = {"command": "quest bench run <x>", "started": "2025-01-01", "suite": suite.name, "attentions": list(scores)}
    run |= {"suite_info": suite.info, "machine": worker.machine(), "jobs": 2, "threads": 1, "git": None}
    run |= {"interrupted": False, "tasks": ["one"], "seeds": "0-2", "smoke": False, "settings": plan.settings}
    store.write_run(out, {"id": str(settings), **run})


def group_of(scores):
    """Write results of one group, and return the group that is read of them."""
    write_results(Path("out"), [], scores)
    (group,) = read_groups(Path("out"), "standard")
    return group


def report(out="out"):
    """Write the report of a folder, and return its Markdown."""
    write_report(Path(out), "standard")
    return Path(out, "report.md").read_text()


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Leave out the pictures of charts, of which each takes a second, except from the test that looks at them."""
    if "pictures" not in request.node.name:
        monkeypatch.setattr(charts.Chart, "png", lambda chart: b"")


class Tags(html.parser.HTMLParser):
    """Asserts that each element is closed where it was opened; `open` holds those that are not."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in {"meta", "br", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_numbers_are_right(fake):
    group = group_of(SCORES)
    rows = {row.attention: row for row in group.rows}
    assert list(rows) == ["standard", "quest", "qnorm"]
    assert rows["standard"].score.mean == 52.0
    assert rows["standard"].paper == 10.5
    assert rows["quest"].difference.mean == 5.0
    # differences 5, 5.5, 4.5: s = 0.5, half = 4.302653 * 0.5 / sqrt(3)
    assert rows["quest"].difference.high == pytest.approx(5 + 1.242069)
    assert rows["quest"].verdict == "better than standard (p = 0.007)"
    assert group.conclusion.startswith("quest (+5.00 points, +3.76 to +6.24) is better than standard; ")
    assert (rows["qnorm"].finished, rows["qnorm"].failed, rows["qnorm"].score.mean) == (2, 1, 51.5)
    assert rows["quest"].command == "quest bench run fake/suite/one --attention quest --seeds 0-2"


@pytest.mark.parametrize(
    ("standard", "quest", "words"),
    [
        ([50.0, 52.0, 54.0], [51.0, 52.0, 53.0], UNDECIDED),  # paired t
        ([50.0, math.nan, 54.0], [50.0, 51.0, 53.0], UNDECIDED),  # sign
        ([50.0, 52.0, 54.0], [50.0, 52.0, 54.0], "quest has the result of standard on every seed."),
        # Nothing was learned.
        ([42.5] * 3, [42.5] * 3, "quest has the result of standard on every seed, and every cell has 42.50."),
    ],
)
def test_the_headline_says_equal_only_of_equal_values(fake, standard, quest, words):
    """A mean difference of 0, or as many wins as losses, has p = 1 too."""
    group = group_of({"standard": standard, "quest": quest})
    assert group.row("quest").comparison.p == 1
    assert group.conclusion.startswith(words)


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        ({"standard": [50.0], "quest": [51.0]}, "a test needs two seeds in common (quest bench run --seeds 0-4)"),
        ({"standard": [50.0] * 3}, "no other attention was run"),
        ({"quest": [50.0] * 3, "qnorm": [51.0] * 3}, "standard was not run (quest bench report --baseline NAME"),
    ],
)
def test_the_headline_says_why_nothing_is_compared(fake, scores, why):
    assert group_of(scores).conclusion.startswith(f"Nothing is compared with standard: {why}")


def test_further_metrics_of_the_same_cells_have_tables_of_their_own(describe):
    write_results(Path("out"), [], SCORES)
    for path in Path("out").glob("cells/*/result.json"):
        result = decode(path.read_text())
        result["metrics"]["cost"] = 100.0 - result["metrics"]["score"]
        write_json(path, result)
    describe('"also": [{"metric": "cost", "unit": "s", "higher_is_better": False}]')
    score, cost = read_groups(Path("out"), "standard")
    assert (score.title, cost.title) == ("fake/suite/one", "fake/suite/one · cost")
    row = cost.row("quest")
    assert (row.difference.mean, row.paper, cost.suite.unit) == (-5.0, 7.5, "s")
    assert row.verdict.startswith("better")  # a lower cost
    text = report()
    assert text.count("*Over training.*") == 1
    assert "## fake/suite/one · cost" in text


def test_the_power_is_only_that_of_seeds_without_a_failure(fake):
    scores = {"standard": SCORES["standard"], "quest": [51.0, 51.0, 55.0], "qnorm": [49.0, math.nan, 55.0]}
    paired, sign, _ = group_of(scores).conclusion.split("; ")
    known = r"quest: no significant difference from standard over 3 seeds, which can miss differences below \S+ points"
    assert re.fullmatch(known, paired)
    assert sign == "qnorm: no significant difference from standard over 3 seeds"


def test_a_small_mean_has_its_interval():
    assert groups.spread(estimate([5e-4, 6e-4, 7e-4])) == "6.00e-04 ± 2.48e-04"


def test_a_cell_without_a_further_metric_takes_no_part_in_it(describe):
    """A cell that diverged has failed in every metric, also in one that it does not name."""
    describe('"also": [{"metric": "cost"}]')
    write_results(Path("out"), [], {**SCORES, "sigmoid": [1.0, 2.0, 3.0]})
    for cell in store.load_all(Path("out")):
        if cell.spec["attention"] in ("standard", "qnorm") and math.isfinite(cell.result["metrics"]["score"]):
            cell.result["metrics"]["cost"] = 1.0 + cell.spec["seed"]
        elif cell.spec["attention"] == "sigmoid" and cell.spec["seed"]:
            cell.result["metrics"]["cost"] = 1.5 * cell.spec["seed"]
        write_json(cell.folder / "result.json", cell.result)
    _, cost = read_groups(Path("out"), "standard")
    rows = {row.attention: row for row in cost.rows}
    assert (rows["quest"].verdict, rows["quest"].failed, rows["quest"].comparison) == ("not measured", 0, None)
    assert (rows["qnorm"].failed, list(rows["qnorm"].values)) == (1, [0, 1, 2])
    assert (rows["sigmoid"].failed, list(rows["sigmoid"].values)) == (0, [1, 2])
    assert (rows["sigmoid"].comparison.seeds, rows["sigmoid"].comparison.failed) == (2, 0)
    assert "quest" not in cost.conclusion
    assert cost.unfinished == 0
    assert "not measured" in report()


def test_a_stopped_run_counts_the_cells_that_it_never_began(fake, monkeypatch, bench):
    """A seed, an attention and a value of an option, of which nothing was run, and a group that has no table yet."""
    write_results(Path("out"), ["scale=1"], {"standard": SCORES["standard"]})
    monkeypatch.setattr(Runner, "run", lambda *_: Outcome(stopped=signal.SIGTERM))
    command = ["run", "fake/suite/one", "--attention", "standard,quest", "--seeds", "0-3", "--set", "scale=1,2"]
    bench(*command, "--out", "out", status=128 + signal.SIGTERM)
    assert "3 done, 0 running, 0 failed, 13 unfinished" in bench("status", "out")
    text = report()
    assert "3 cells finished, 13 not finished." in text
    assert "> 5 cells of this group did not finish; the same command resumes." in text
    assert "| `quest` | no seed in common with standard | – | – | – | 20.00 | 0/4 |" in text
    assert "scale=2.0" not in text.partition("## How this was run")[0]


def test_compare_shows_means_of_the_seeds_that_it_compares(fake):
    """Whatever seeds the standard attention of each folder has."""
    write_results(Path("a"), [], {"standard": [1.0, math.nan, 3.0], "quest": [40.0, 90.0, 42.0]})
    write_results(Path("b[c]"), [], {"standard": [1.0, 2.0, math.nan], "quest": [41.0, math.nan, 44.0]})
    table = compare_runs(Path("a"), Path("b[c]"))
    assert str(table.columns[4].header) == "b[c]"
    assert isinstance(table.columns[4].header, Text)  # not markup
    cells = list(zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True))
    assert cells[1][1:5] == ("quest", "3", "41.00", "42.50")
    assert cells[1][5].startswith("+1.50 [")


def test_report_is_one_page_with_everything_and_has_pictures(fake):
    write_results(Path("out"), ["scale=1,2"], SCORES)
    cells = sorted(Path("out/cells").iterdir())
    for cell in (*cells[:2], cells[-1]):
        (cell / "result.json").unlink()
    for place in (0, 1):
        store.fail(cells[place], f"ValueError: a <b> of seed {place} | kind")
    (cells[0] / "log.txt").write_text("first\nthe last line\n\n")
    text = write_report(Path("out"), "standard").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    addresses = re.findall(r'<[^>]* (?:src|href)="([^"]*)"', text)
    assert [address for address in addresses if not address.startswith("#")] == []
    assert "@import" not in text
    assert "url(http" not in text
    assert "prefers-color-scheme: dark" in text
    assert text.count('class="chart"') == 5  # the forest, and two groups, each with the metric and the series
    assert "2 failed: ValueError: a &lt;b&gt; of seed … | kind" in text
    assert "the last line" in text
    assert f"cells/{cells[0].name}/log.txt" in text
    assert "15 cells finished, of which 2 diverged, 2 failed, 1 not finished" in re.sub("<[^>]*>", "", text)
    assert "quest bench run &lt;x&gt;" in text
    assert "fake/suite/one · scale=2.0" in text

    markdown = Path("out/report.md").read_text()
    pictures = [line.partition("](")[2].rstrip(")") for line in markdown.splitlines() if line.startswith("![")]
    assert len(pictures) == 5
    for picture in pictures:
        assert (Path("out") / picture).read_bytes().startswith(b"\x89PNG")
    widths = {line.count("|") - line.count("\\|") for line in markdown.splitlines() if line.startswith("| `")}
    assert widths <= {6, 9}
    assert "58.0" not in markdown


def test_at_a_glance_compares_means_of_the_same_seeds(fake):
    """A crashed seed is left out of every mean of its row, and takes no task away from the seeds that won."""
    scores = {"standard": [50.0, 52.0, 54.0], "quest": [55.0, math.nan, 58.5], "qnorm": [math.nan] * 3}
    write_results(Path("out"), ["scale=1,2"], scores)
    group = read_groups(Path("out"), "standard")[0]
    assert group.common == (0, 2)
    assert [group.glance(name).split()[0] for name in ("standard", "quest")] == ["52.00", "56.75"]
    assert group.glance("quest").endswith(", 1 of 3 failed")
    text = report()
    assert "score (%), 2 seeds |" in text
    assert " lost |" not in text  # no ranks of tasks


def test_differences_of_percentages_are_points_everywhere(fake):
    write_results(Path("out"), ["scale=1,2"], {name: SCORES[name] for name in ("standard", "quest")})
    found = read_groups(Path("out"), "standard")
    (spec,) = charts.forest(found, "standard")
    assert [row["mean"] for row in spec["data"]["values"]] == [5.0, 5.0]
    assert spec["layer"][1]["encoding"]["x"]["title"] == "difference in score, points"
    text = report()
    assert "difference (points), 95% interval" in text
    assert "| +5.00 (+3.76 to +6.24) |" in text
    assert "better than standard" in text
    assert "% of standard" not in text


def test_a_report_never_writes_what_it_reads(fake):
    write_results(Path("run"), [], SCORES)
    write_report(Path("run"), "standard")
    Path("kept").mkdir()
    for name in ("results.parquet", "run.json"):
        shutil.copy(Path("run", name), Path("kept", name))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in Path("kept").iterdir()}
    write_report(Path("kept"), "standard")
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before


def test_the_page_of_a_site_has_charts_in_place_of_pictures(fake):
    write_results(Path("run"), ["scale=1,2"], SCORES)
    write_page(Path("run"), Path("page"), "standard")
    text = Path("page/report.md").read_text()
    drawn = json.loads(Path("page/charts.js").read_text().removeprefix("reportCharts = ").removesuffix(";\n"))
    assert re.findall(r'data-spec="(\d+)"', text) == [str(place) for place in range(len(drawn["specs"]))]
    assert "![" not in text
    assert list(Path("page/report").iterdir()) == []
    assert not Path("run/report.md").exists()


@pytest.mark.parametrize(
    ("attentions", "seeds", "settings", "count"),
    [
        ("standard,quest", 1, [], 0),
        ("standard,quest", 3, [], 1),
        ("quest", 3, [], 0),
        ("standard,quest,qnorm", 3, ["scale=1,2"], 4),
    ],
)
def test_the_tested_comparisons_of_all_tables_are_one_family(fake, attentions, seeds, settings, count):
    write_results(Path("out"), settings, {name: SCORES[name][:seeds] for name in attentions.split(",")})
    write_report(Path("out"), "standard")
    for page in ("report.md", "report.html"):
        words = f"the p-values of the {count} comparison{'s' * (count != 1)} of this report"
        assert words in Path("out", page).read_text(encoding="utf-8")
    rows = [row for group in read_groups(Path("out"), "standard") for row in group.rows]
    tested = [row.comparison for row in rows if row.comparison and row.comparison.test]
    smallest = min(tested, key=lambda one: one.p, default=None)
    assert len(tested) == count
    assert smallest is None or smallest.adjusted == pytest.approx(min(1, count * smallest.p))  # Holm's first step


def test_curves_do_not_jump_where_a_seed_stops_early():
    """A seed keeps its last value; a value that is not finite is left out."""
    found = charts._band("quest", [[1.0], [3.0, 5.0, 7.0], [2.0, math.inf, 1.0]], 200)
    assert [point["mean"] for point in found] == [2.0, 3.0, 3.0]
    assert [(point["low"], point["high"]) for point in found] == [(1.0, 3.0), (1.0, 5.0), (1.0, 7.0)]


def test_a_bar_is_cut_off_only_around_a_mean_between_0_and_100(fake):
    group = group_of({"standard": [90.0, 98.0, 99.0], "quest": [-4.0, -3.0, -5.0]})
    inside, outside = charts.scores(group)["layer"][0]["data"]["values"]
    assert (inside["low"] < 90, inside["high"]) == (True, 100)
    assert outside["low"] < -5
    assert -3 < outside["high"] < 0


def test_each_chart_of_curves_names_its_lines(fake):
    names = ["standard", "quest", "qnorm", "qknorm", "qknorm-hs", "qknorm-ds", "sigmoid", "sinkhorn", "linear", "aft"]
    group = group_of({name: [1.0, 2.0, 3.0] for name in names})
    drawn = charts.curves(group, group.cells, ["loss", "loss"], 40)
    for spec in (*drawn, {"concat": drawn}):  # in the page, and as a picture
        svg = vl_convert.vegalite_to_svg(json.dumps({**spec, "config": charts.theme(False)}))
        assert all(f">{name}</text>" in svg for name in names)
        looks = re.findall(r'"line mark"[^>]*stroke="(#\w+)"[^>]*stroke-dasharray="([^"]*)"', svg)
        assert len(set(looks)) == len(names)


def test_parquet_holds_every_cell(fake):
    write_results(Path("out"), ["scale=1,null"], {"standard": [50.0, 52.0, math.nan]})
    write_report(Path("out"), "standard")
    table = pd.read_parquet("out/results.parquet")
    assert len(table) == 6
    assert set(table["option/scale"]) == {"1.0", "null"}
    assert sorted(table["metric/score"].dropna()) == [50.0, 50.0, 52.0, 52.0]
    assert list(table["series/loss"].iloc[0]) == [1.0, 0.5, 0.25][: table["seed"].iloc[0] + 1]


def test_unknown_baseline_is_refused(fake, bench):
    write_results(Path("out"), [], SCORES)
    assert "did you mean 'quest'" in bench("report", "out", "--baseline", "qust", status=2)


def test_a_suite_that_is_gone_is_reported_from_its_run(fake, monkeypatch):
    write_results(Path("out"), [], SCORES)
    monkeypatch.undo()
    monkeypatch.chdir(fake)
    assert "fake/suite" not in catalogue().suites
    assert "A paper, table 1; ± is the range" in write_report(Path("out"), "standard").read_text()


def test_a_task_keeps_the_metric_of_its_own_run(fake, monkeypatch):
    """The tasks of a framework have metrics of their own, which only the records of their runs know."""
    write_results(Path("out"), [], SCORES)
    (run,) = store.read_run(Path("out"))
    other = {"metric": "cost", "higher_is_better": False}
    store.write_run(Path("out"), run | {"id": "2", "tasks": ["two"], "suite_info": run["suite_info"] | other})
    monkeypatch.undo()
    monkeypatch.chdir(fake)
    (group,) = read_groups(Path("out"), "standard")
    assert (group.suite.metric, group.row("quest").difference.mean) == ("score", 5.0)


def test_broken_plots_of_a_suite_are_a_note(describe):
    describe('"plots": "fakebench.tasks:missing"')
    write_results(Path("out"), [], SCORES)
    assert "could not be drawn" in write_report(Path("out"), "standard").read_text()


def test_what_a_metric_is_made_of(fake):
    """Metrics called score/<item> make a table and a figure of their own."""
    write_results(fake, [], {name: SCORES[name] for name in ("standard", "quest")})
    for path in fake.glob("cells/*/result.json"):
        found = decode(path.read_text())
        score = found["metrics"]["score"]
        found["metrics"] |= {"score/first_half": score - 1, "score/second_half": score + 1, "apart": 0.0}
        write_json(path, found)
    group = read_groups(fake, "standard")[0]
    assert [item.name for item in group.items] == ["first half", "second half"]
    assert group.items[0].estimates["standard"].mean == 51.0
    assert group.items[1].differences["quest"].mean == pytest.approx(5.0)
    text = report(fake)
    assert "| first half | 51.00 ± " in text
    assert "| apart |" not in text
    assert [path.name for path in (fake / "report").glob("*by-item.png")] == ["01-one-score-by-item.png"]
