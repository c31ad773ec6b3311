"""The report page: made from whatever rows there are, and nothing of them is embellished or left out."""

import json
import re
import xml.dom.minidom
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench import run
from bench.page import FIGURES, write
from bench.page.charts import bars
from bench.page.charts import lines as line_chart
from bench.page.colours import colours
from bench.page.drawing import COLOURS
from bench.page.figures import figures
from bench.page.lines import lines
from bench.page.memory_map import MAP, map_figures
from bench.page.of_readme import OF_README
from bench.page.promises import over_blocks
from bench.page.scope import scopes
from bench.page.sections import HEADINGS
from bench.page.serving import serving_figures
from bench.recorded import read, standing
from bench.report import Report
from bench.rows import FAILED, Provenance, Row, RowFile
from bench.suites import SUITES
from bench.timing import Summary, exact, summarize

RESULTS = Path(run.__file__).parent / "results"
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """What is in a page: each element closed, ids, and what points to them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.headings: list[int] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.elements.append((tag, given))
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name in ("href", "xlink:href", "src") and value]
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [given for name, given in self.elements if name == tag]


def provenance(date: str = "2026-01-01T00:00:00+00:00", *, device: str = "GPU", quick: bool = False) -> Provenance:
    return Provenance(device=device, driver="1", versions={"torch": "2"}, commit="abc", seed=0, quick=quick, date=date)


def write_rows(folder: Path, *rows: Row, **of_run: Any) -> None:
    Report(RowFile(folder, provenance(**of_run))).add(*rows)


def row(system: str = "vmmkv", p50: float = 1.0, *, suite: str = "serve", workload: str = "w", metric: str = "total") -> Row:
    return Row(suite=suite, workload=workload, system=system, metric=metric, unit="s", summary=exact(p50, 9))


def page_of(folder: Path, out: Path) -> Page:
    return Page(write([folder], out))


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, Path]:
    """The page of the rows that are kept in git, and in no sdist."""
    if not RESULTS.is_dir():
        pytest.skip(f"{RESULTS} is not here: these are no sources from git")
    out = tmp_path_factory.mktemp("page")
    return page_of(RESULTS, out), out


def test_the_page_needs_nothing_from_elsewhere(committed: tuple[Page, Path]) -> None:
    page, _ = committed
    assert page.open == []
    assert page.all("script") == page.all("img") == page.all("iframe") == []
    elsewhere = [link for link in page.links if not link.startswith(("#", "data:", f"{FIGURES}/"))]
    assert elsewhere == []
    assert "@import" not in page.text
    assert re.findall(r"url\((?!#)", page.text) == []


def test_what_a_link_names_is_there_and_no_id_twice(committed: tuple[Page, Path]) -> None:
    page, out = committed
    assert len(set(page.ids)) == len(page.ids)
    inner = {link.removeprefix("#") for link in page.links if link.startswith("#")}
    assert inner <= set(page.ids)
    for link in page.links:
        if link.startswith(FIGURES):
            assert (out / link).read_bytes().startswith(b"\x89PNG")


def test_every_measured_row_of_the_newest_is_in_a_table(committed: tuple[Page, Path]) -> None:
    page, _ = committed
    rows = [one for one in standing(read([RESULTS]).rows) if one.row.metric != FAILED]
    assert len(re.findall(r'<td class="number p50">', page.text)) == len(rows) > 1000


def test_who_cannot_see_or_point_reads_it_too(committed: tuple[Page, Path]) -> None:
    page, _ = committed
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(later <= before + 1 for before, later in zip(page.headings, page.headings[1:], strict=False))
    pictures = page.all("svg")
    assert len(pictures) == len(page.all("figure")) > 10
    assert all(given["role"] == "img" and len(given["aria-label"] or "") > 40 for given in pictures)
    assert all(given.get("scope") for given in page.all("th"))
    boxes = [given for given in page.all("div") if "box" in (given.get("class") or "")]
    assert len(boxes) >= len(page.all("table"))
    assert all(given.get("tabindex") == "0" and given.get("aria-label") for given in boxes), "a box scrolls by keys too"


def test_every_section_has_its_scope_and_every_suite_a_section(committed: tuple[Page, Path]) -> None:
    page, _ = committed
    assert {suite for heading in HEADINGS for suite in heading.suites} == set(SUITES)
    for heading in HEADINGS:
        assert heading.name in page.ids
        start = page.text.index(f'<section id="{heading.name}"')
        section = page.text[start : page.text.index("</section>", start)]
        for suite in heading.suites:
            if (RESULTS / f"{suite}.jsonl").is_file():
                assert f"<strong>{suite}.</strong>" in section


def test_figures_are_whole_and_take_the_colour_of_the_page(committed: tuple[Page, Path]) -> None:
    page, _ = committed
    for svg in re.findall(r"<svg .*?</svg>", page.text, re.DOTALL):
        xml.dom.minidom.parseString(svg)
        assert "currentColor" in svg
        assert "#010203" not in svg
        assert "#ffffff" not in svg, "a white ground is blinding in the dark"


def test_a_bar_of_nothing_and_a_name_with_dollars_can_be_drawn() -> None:
    series = {"one": {"$x$": exact(0, 3), "h": exact(5, 2)}, "other": {"$x$": exact(0, 3)}}
    figure = bars("n", "t", "us", {"": series}, log=True, bounds={"h": 2.0, "in no group": 1.0})
    assert "$x$" in figure.svg
    assert "n = 2 to 3" in figure.caption


def test_only_what_has_a_spread_is_said_to_have_whiskers() -> None:
    single = bars("n", "t", "us", {"": {"one": {"g": exact(5, 3)}}})
    spread = bars("n", "t", "us", {"": {"one": {"g": exact(5, 3)}, "other": {"g": summarize([1.0, 2.0])}}})
    assert "whiskers" not in single.caption and "single figures" in single.caption
    assert "whiskers: p20 to p80" in spread.caption


def test_of_two_samples_the_mean_is_drawn_and_written() -> None:
    assert ">2<" in bars("n", "t", "us", {"": {"one": {"g": summarize([1.0, 3.0])}}}).svg
    ((line,),) = lines(
        [Row(suite="s", workload="w", system="v", metric="m", unit="us", summary=summarize([1.0, 3.0]))]
    ).values()
    assert (line.p20, line.p50, line.p80) == ("1", "2", "3")


def test_what_was_measured_at_one_number_is_points_at_it() -> None:
    at_one = {("first token", "ms"): {name: {2.0: summarize([8.0, 9.0, 12.0])} for name in ("vmmkv", "paged 16")}}
    figure = line_chart("n", "t", at_one, "requests/s offered", log_x=True, log_y=["first token"], tails=["first token"])
    assert figure.caption.startswith("points: medians; whiskers: p20 to p80; dashes: p99")
    axis = re.findall(r"<text[^>]*>([^<]+)</text>", figure.svg)
    assert axis[0] == "2", "the rate alone is on its axis"
    assert "0" in axis and "10" in axis
    at_two = {("first token", "ms"): {"vmmkv": {rate: summarize([8.0, 9.0, 12.0]) for rate in (1.0, 2.0)}}}
    assert line_chart("n", "t", at_two, "x").caption.startswith("lines: medians; bands: p20 to p80")


def luminance(colour: str) -> float:
    """By WCAG 2."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_what_carries_data_is_seen_on_light_and_on_dark() -> None:
    css = (Path(run.__file__).parent / "page" / "page.css").read_text()
    grounds = re.findall(r"--ground: (#[0-9a-f]{6})", css)
    assert len(grounds) == 2
    for colour in COLOURS:
        for ground in grounds:
            dark, light = sorted((luminance(colour), luminance(ground)))
            assert (light + 0.05) / (dark + 0.05) >= 3, f"{colour} on {ground}"


def test_suites_and_systems_without_rows_are_named(tmp_path: Path) -> None:
    write_rows(tmp_path, row("vmmkv"))
    page = page_of(tmp_path, tmp_path / "out")
    assert "<code>waste</code>: no rows" in page.text
    assert "Absent, not measured: paged, static, transformers." in page.text
    write_rows(tmp_path, row("paged 16", workload="other"))
    page = page_of(tmp_path, tmp_path / "out")
    assert "Absent, not measured: static, transformers." in page.text


def test_what_failed_is_said_first_and_until_it_is_mended(tmp_path: Path) -> None:
    write_rows(tmp_path, Row.failed("serve", "w", "vmmkv"), row(workload="v"))
    page = page_of(tmp_path, tmp_path / "out")
    assert "<strong>1 failed.</strong>" in page.text
    assert page.text.index('class="failed"') < page.text.index('class="rows"')
    write_rows(tmp_path, row(workload="v"), date="2026-01-02T00:00:00+00:00")
    assert "<strong>1 failed.</strong>" in page_of(tmp_path, tmp_path / "out").text
    write_rows(tmp_path, row(workload="w"), date="2026-01-03T00:00:00+00:00", quick=True)
    assert "<strong>1 failed.</strong>" in page_of(tmp_path, tmp_path / "out").text, "a quick run mends nothing"
    write_rows(tmp_path, row(workload="w"), date="2026-01-04T00:00:00+00:00")
    assert "failed." not in page_of(tmp_path, tmp_path / "out").text


def test_a_suite_that_failed_is_mended_by_its_mark(tmp_path: Path) -> None:
    def fail(report: Report) -> None:
        report.add(Row.failed("append", "append", "all systems"))

    fail(Report(RowFile(tmp_path, provenance())))
    mark = {"piece": "append", "device": "GPU", "quick": False, "date": "2025-01-01T00:00:00+00:00"}
    marks = tmp_path / "finished.jsonl"
    marks.write_text(json.dumps(mark) + "\n")
    assert "<strong>1 failed.</strong>" in page_of(tmp_path, tmp_path / "out").text, "it had finished once, before"
    marks.write_text(json.dumps(mark | {"date": "2026-02-01T00:00:00+00:00"}) + "\n")
    write_rows(tmp_path, row())
    assert "failed." not in page_of(tmp_path, tmp_path / "out").text


def test_rows_that_lose_say_so() -> None:
    better, worse, alike = row("vmmkv", 1.0), row("vmmkv", 3.0), row("vmmkv", 2.01)
    blocks = row("paged 16", 2.0)
    ((line, of_blocks),) = lines([better, blocks]).values()
    assert (line.against_paged, line.against_best, line.loses) == ("2.00× better", "best", False)
    assert (of_blocks.against_paged, of_blocks.against_best) == ("", "2.00× as bad")
    ((line, _),) = lines([worse, blocks]).values()
    assert (line.against_paged, line.against_best, line.loses) == ("1.50× worse", "1.50× as bad", True)
    ((line, _),) = lines([alike, blocks]).values()
    assert (line.against_paged, line.against_best, line.loses) == ("alike", "alike", False)
    ((line,),) = lines([better]).values()
    assert (line.against_paged, line.against_best) == ("", "")


def test_differences_are_worse_or_better_and_have_no_ratio() -> None:
    def loss(system: str, p50: float) -> Row:
        return row(system, p50, metric="perplexity above exact")

    ((ours, of_blocks),) = lines([loss("vmmkv", 133.0), loss("paged 16", 0.5)]).values()
    assert (ours.against_paged, ours.against_best) == ("worse", "worse")
    assert of_blocks.against_best == "best"


def test_blocks_are_held_against_what_does_the_same() -> None:
    systems = ("decode, vmmkv, 1 layer a page", "decode, paged 16", "FA3, vmmkv, 1 layer a page", "FA3, paged 16")
    ((ours, _, theirs, _),) = lines([row(system, 1.0 + index) for index, system in enumerate(systems)]).values()
    assert ours.against_paged == "2.00× better"
    assert theirs.against_paged == "1.33× better"


def test_where_and_on_what_it_was_measured_stands_at_the_top(tmp_path: Path) -> None:
    write_rows(tmp_path, row())
    write_rows(tmp_path, row("other"), device="CPU", date="2026-03-01T00:00:00+00:00")
    text = page_of(tmp_path, tmp_path / "out").text
    header = text[: text.index("<main")]
    for said in (
        "CPU, driver 1; GPU, driver 1",
        "abc",
        "2026-01-01T00:00:00+00:00 to 2026-03-01T00:00:00+00:00, seed 0",
        "torch 2",
    ):
        assert said in header


def test_commits_are_cut_alike_and_keep_that_they_had_changed(tmp_path: Path) -> None:
    digits = "0123456789abcdef0123456789abcdef01234567"
    for commit in (digits, f"{digits}-changed"):
        Report(RowFile(tmp_path, replace(provenance(), commit=commit))).add(row(commit))
    text = page_of(tmp_path, tmp_path / "out").text
    assert "<dt>Commits</dt><dd>0123456789ab, 0123456789ab-changed</dd>" in text


def test_a_line_that_is_no_row_is_said_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path, row())
    with (tmp_path / "serve.jsonl").open("a") as file:
        file.write("{\n")
    page = page_of(tmp_path, tmp_path / "out")
    said = f"{tmp_path / 'serve.jsonl'}:2: not a row; 1 line is left out"
    assert said in page.text
    assert capsys.readouterr().err == f"{said}\n"


def test_quick_rows_are_called_noise_and_stand_apart(tmp_path: Path) -> None:
    write_rows(tmp_path, row())
    write_rows(tmp_path, row(p50=7.0), quick=True)
    page = page_of(tmp_path, tmp_path / "out")
    assert "1 of the rows were measured with <code>--quick</code>" in page.text
    assert "serve, on GPU</h3>" in page.text
    assert "serve, on GPU (quick: noise)</h3>" in page.text


def test_names_from_rows_are_text_and_never_markup(tmp_path: Path) -> None:
    write_rows(tmp_path, row("<script>alert(1)</script>", workload="a & <b>"))
    page = page_of(tmp_path, tmp_path / "out")
    assert page.all("script") == []
    assert "a &amp; &lt;b&gt;" in page.text


def test_latency_and_throughput_are_drawn_against_the_rate(tmp_path: Path) -> None:
    found = []
    for rate in (1, 2, 4):
        for system in ("vmmkv", "paged 16"):
            for metric, unit in (("throughput", "tok/s"), ("first token", "ms"), ("time per output token", "ms")):
                summary = Summary(p20=rate, p50=rate * 2, p80=rate * 3, p99=rate * 9, n=20)
                name = f"tiny rates: chat, 64 requests, {rate} requests/s"
                found.append(Row(suite="serve", workload=name, system=system, metric=metric, unit=unit, summary=summary))
    closed = "tiny closed: chat, 64 requests"
    found.append(Row(suite="serve", workload=closed, system="vmmkv", metric="throughput", unit="tok/s", summary=exact(5, 2)))
    write_rows(tmp_path, *found)
    page = page_of(tmp_path, tmp_path / "out")
    drawn = [given["id"] for given in page.all("figure")]
    assert drawn == [
        "figure-gpu-serve-closed-tiny-tok-s",
        "figure-gpu-serve-rates-tiny-chat-64-requests-done",
        "figure-gpu-serve-rates-tiny-chat-64-requests-latency",
        "figure-gpu-serve-rates-tiny-chat-64-requests-all",
    ]
    assert "n = 20" in page.text


def served(workload: str, system: str, metric: str, middle: float, *, half: float = 0.0, unit: str = "tok/s") -> Row:
    summary = Summary(p20=middle - half, p50=middle, p80=middle + half, p99=middle + half, n=2)
    return Row(suite="serve", workload=workload, system=system, metric=metric, unit=unit, summary=summary)


def test_what_arrived_is_drawn_where_it_arrived_and_not_where_it_was_asked_for() -> None:
    rows = []
    for asked, came in ((4, 9.25), (8, 12.0)):
        name = f"tiny rates: chat, {asked} requests/s, Poisson"
        rows += [served(name, "vmmkv", "rate", came), served(name, "vmmkv", "goodput", came, unit="requests/s")]
    of_goodput = next(figure for figure in serving_figures(rows, "n") if figure.name.endswith("done"))
    axis = re.findall(r"<text[^>]*>([^<]+)</text>", of_goodput.svg)
    assert axis[:2] == ["9.25", "12"]
    assert "dashed: as much as is offered (goodput)" in of_goodput.caption


def test_systems_without_the_engine_have_a_figure_of_their_own_and_no_share_of_a_bound() -> None:
    systems = ("vmmkv", "transformers DynamicCache")
    rows = [served("tiny outside: chat: 6 requests", system, "throughput", 5.0) for system in systems]
    found = list(serving_figures([replace(each, bound=10.0) for each in rows], "n"))
    assert [figure.name for figure in found] == ["n-outside-tiny-tok-s"]
    assert all(system in found[0].svg for system in systems)


def test_a_bound_that_would_leave_no_bar_to_be_seen_is_named_and_not_drawn() -> None:
    series = {"": {"vmmkv": {"g": exact(5, 3)}}}
    far, near = (bars("n", "t", "tok/s", series, bounds={"g": bound}) for bound in (5000.0, 6.0))
    assert "off the axis: bounds from 5,000" in far.caption and "dashed" not in far.caption
    assert "dashed: the bound" in near.caption and "off the axis" not in near.caption


def test_bars_begin_at_a_power_of_ten_and_at_0_where_all_are_alike() -> None:
    def ticks(*values: float) -> list[str]:
        figure = bars(
            "n", "t", "us", {"": {"one": {str(index): exact(value, 1) for index, value in enumerate(values)}}}, log=True
        )
        found = re.findall(r'xtick_\d+">.*?<text[^>]*>([^<]+)</text>', figure.svg, re.DOTALL)
        return [tick.replace(",", "") for tick in found] + (["log"] if "us, logarithmic" in figure.svg else [])

    assert ticks(19, 2000)[0] == "10" and ticks(19, 2000)[-1] == "log"
    assert ticks(1924, 3653)[0] == "0" and "log" not in ticks(1924, 3653)


def test_what_is_compared_has_the_same_colour_in_every_figure() -> None:
    assert [*colours(["paged 16", "none", "vmmkv"]).values()] == [COLOURS[1], COLOURS[3], COLOURS[0]]
    assert COLOURS[1] not in colours(["vmmkv, at once", "vmmkv, in slack"]).values(), "that is for blocks"
    of_transformers = colours(["transformers DynamicCache", "transformers StaticCache", "vmmkv VmmCache"])
    assert [*of_transformers.values()] == [COLOURS[3], COLOURS[2], COLOURS[0]]
    assert len(set(colours(["vmmkv", *map(str, range(9))]).values())) == 10


def test_batches_of_one_context_are_drawn_apart() -> None:
    rows = [
        Row(
            suite="hf",
            workload=f"m decode: {n} tokens, batch {batch}",
            system="s",
            metric=metric,
            unit=unit,
            summary=exact(n, 1),
        )
        for batch in (1, 8)
        for n in (64, 256)
        for metric, unit in (("peak memory beyond the weights", "GiB"), ("time per token", "ms"))
    ]
    found = figures("hf", rows, "gpu")
    assert [figure.name for figure in found] == ["gpu-hf-decode-m-1", "gpu-hf-decode-m-8"]
    for figure in found:
        texts = re.findall(r"<text[^>]*>([^<]+)</text>", figure.svg)
        assert texts.index("time per token") < texts.index("most memory beyond the weights")
        assert texts[:2] == ["64", "256"], "at what was measured"


def test_numbers_of_an_axis_are_not_written_over_one_another() -> None:
    series = {"s": {number: exact(1, 1) for number in (1024.0, 65536.0, 131072.0)}}
    panels = {(heading, "us"): series for heading in ("one", "other")}
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", line_chart("n", "t", panels, "tokens", log_x=True).svg)
    assert "131,072" in texts and "1,024" in texts and "65,536" not in texts


def test_throughput_against_blocks_says_what_the_intervals_allow() -> None:
    rows = [served("w", "paged 16", "throughput", 100.0, half=1.0)]
    for name, middle, half in (("vmmkv", 98.5, 2.0), ("vmmkv, prefill of blocks", 90.0, 1.0)):
        rows.append(served("w", name, "throughput", middle, half=half))
    open_, lost = over_blocks(rows)
    assert (open_.ratio, open_.low, open_.high) == pytest.approx((0.985, 96.5 / 101, 100.5 / 99))
    assert (open_.verdict, lost.verdict) == ("not kept, within noise", "not kept")
    (kept,) = over_blocks([rows[0], served("w", "vmmkv", "throughput", 120.0)])
    assert kept.verdict == "kept"
    assert over_blocks([served("w", "vmmkv", "throughput", 1.0)]) == []


def test_promises_stand_on_the_page_kept_or_not_or_not_measured(tmp_path: Path) -> None:
    workload = "llama-3.1-8b chat: sizes, 40 GiB"
    for system, waste, admitted in (("vmmkv", 4.002, 99.0), ("paged 16", 1.0, 100.0)):
        for metric, value in (("waste, averaged", waste), ("admitted sequences, averaged", admitted)):
            write_rows(tmp_path, row(system, value, suite="waste", workload=workload, metric=metric))
    section = page_of(tmp_path, tmp_path / "out").text.partition('<table class="promises">')[2].partition("</table>")[0]
    lines_ = [re.sub(r"<[^>]+>", "|", line) for line in section.splitlines() if '<th scope="row"' in line]
    assert len(lines_) == 3
    assert "at most 4" in lines_[0] and "chat: 4.002" in lines_[0] and "|no|" in lines_[0]
    assert "at least 0.98" in lines_[1] and "chat: 0.99" in lines_[1] and "|yes|" in lines_[1]
    assert "at least 3" in lines_[2] and "not measured" in lines_[2]


def test_each_figure_says_of_which_device_commit_and_day_it_is(tmp_path: Path) -> None:
    for commit, day, shape in (("aaa1", "2026-01-01", "one"), ("bbb2", "2026-02-02", "two")):
        of_run = replace(provenance(f"{day}T00:00:00+00:00"), commit=commit)
        Report(RowFile(tmp_path, of_run)).add(
            row("decode, vmmkv", suite="kernels", workload=f"{shape} decode 1x1K", metric="bandwidth")
        )
    text = page_of(tmp_path, tmp_path / "out").text
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text, re.DOTALL)
    assert ["commit aaa1 of 2026-01-01" in caption for caption in captions] == [True, False]
    assert ["GPU, commit bbb2 of 2026-02-02" in caption for caption in captions] == [False, True]
    assert "1 rows of commit bbb2 of 2026-02-02, 1 rows of commit aaa1 of 2026-01-01" in text
    assert 'one decode 1x1K <span class="quiet">(commit aaa1 of 2026-01-01)</span>' in text


def test_the_figures_of_readme_are_copied_under_their_names_and_only_of_full_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rates(p50: float, **of_run: Any) -> None:
        for rate in (1, 2):
            name = f"llama-3.1-8b rates: chat, {rate} requests/s, Poisson"
            write_rows(tmp_path, row(p50=p50, workload=name, metric="goodput"), **of_run)

    docs, out = tmp_path / "docs", tmp_path / "out"
    rates(1.0, quick=True)
    assert run.main(["report", str(tmp_path), "--out", str(out), "--docs", str(docs)]) == 0
    assert "serve-rates.png: not written, since there are no full rows" in capsys.readouterr().out
    assert list(docs.iterdir()) == []
    rates(2.0)
    assert run.main(["report", str(tmp_path), "--out", str(out), "--docs", str(docs)]) == 0
    assert f"{docs / 'serve-rates.png'}: GPU, commit abc of 2026-01-01" in capsys.readouterr().out
    drawn = out / FIGURES / "gpu-serve-rates-llama-3-1-8b-chat-poisson-all.png"
    assert (docs / "serve-rates.png").read_bytes() == drawn.read_bytes()
    with pytest.raises(SystemExit, match="2"):
        run.main(["report", str(tmp_path), "--out", str(out), "--docs", "/dev/null/x"])
    assert "--docs /dev/null/x cannot be written to" in capsys.readouterr().err


def test_every_figure_of_readme_that_is_there_comes_from_the_page() -> None:
    shown = re.findall(r"\]\(docs/figures/([\w-]+)\.png\)", (RESULTS.parents[1] / "README.md").read_text())
    assert set(shown) <= OF_README.keys()


def test_a_suite_that_nobody_knows_gets_a_table_all_the_same(tmp_path: Path) -> None:
    write_rows(tmp_path, row(suite="strange"))
    page = page_of(tmp_path, tmp_path / "out")
    assert "strange" in page.ids


def test_scopes_are_read_from_the_readme_and_never_missing() -> None:
    text = "# B\n\n## Scope\n\nWords.\n\n- **one.** First\n  line.\n- **two, three.** Both.\n\n## Next\n\n- **four.** Not it.\n"
    assert scopes(text) == {"one": "First line.", "two": "Both.", "three": "Both."}
    with pytest.raises(ValueError, match="no item"):
        scopes("# B\n")
    assert {"driver_calls", "append", "kernels", "prefix", "serve", "quality"} <= scopes().keys()


def memory_map() -> dict[str, Any]:
    extents = [{"extent": 1, "start_page": 0, "num_pages": 2, "state": "live", "holders": 2}]
    ahead = [{"extent": 2, "start_page": 2, "num_pages": 1, "state": "ahead", "holders": 1}]
    return {
        "format": 1,
        "commit": "0123456789abcdef0123",
        "date": "2026-11-21T10:00:00+00:00",
        "shape": "tiny",
        "workload": "words",
        "step": 20,
        "page_bytes": 2 << 20,
        "row_bytes": 128 << 10,
        "block_rows": 16,
        "requests": [],
        "prefix_tokens": [],
        "vmmkv": {
            "budget_pages": 8,
            "held_pages": 4,
            "used_pages": 3,
            "free_pages": 4,
            "slot_pages": 4,
            "slots": [
                {"slot": 1, "state": "live", "request": 0, "rows": 30, "extents": extents + ahead},
                {"slot": 2, "state": "live", "request": 1, "rows": 31, "extents": extents},
                {"slot": 3, "state": "free", "request": None, "rows": 0, "extents": []},
            ],
            "tree": [{"extent": 3, "num_pages": 1, "holders": 1}],
        },
        "paged": {
            "num_blocks": 4,
            "block_bytes": 2 << 20,
            "blocks": [
                {"block": 0, "state": "live", "holders": 2, "slots": [1, 2]},
                {"block": 1, "state": "live", "holders": 1, "slots": [1]},
                {"block": 2, "state": "cached", "holders": 1, "slots": []},
                {"block": 3, "state": "free", "holders": 0, "slots": []},
            ],
            "slots": [
                {"slot": 1, "request": 0, "rows": 30, "blocks": [0, 1]},
                {"slot": 2, "request": 1, "rows": 16, "blocks": [0]},
            ],
        },
    }


def test_a_memory_map_beside_the_rows_is_drawn_as_two_frames(tmp_path: Path) -> None:
    write_rows(tmp_path, row())
    (tmp_path / MAP).write_text(json.dumps(memory_map()))
    page = page_of(tmp_path, tmp_path / "out")
    labels = {given["id"]: given for given in page.all("figure")}
    assert labels.keys() == {"figure-map-vmmkv", "figure-map-paged"}
    alts = [given["aria-label"] or "" for given in page.all("svg")]
    assert "3 columns, 4 rectangles, 2 of them shared" in alts[0]
    assert "Of 8 pages of 2 MiB 4 are held, 3 of them by running sequences, and 4 are free" in alts[0]
    assert "3 columns, 4 rectangles, 2 of them shared" in alts[1]
    assert "2 are held by running sequences, 1 are cache and 1 are free" in alts[1]
    assert page.text.count("From commit 0123456789ab of 2026-11-21.") == 2


def test_a_frame_of_a_memory_map_ends_a_little_above_its_highest_rectangle() -> None:
    map_ = memory_map()
    map_["paged"]["blocks"] += [{"block": 4 + n, "state": "cached", "holders": 1, "slots": []} for n in range(100)]
    tops = []
    for figure in map_figures(map_, "here"):
        ticks = [
            float(text) for text in re.findall(r'<g id="[^"]*ytick_\d+">.*?<text[^>]*>([\d.]+)</text>', figure.svg, re.DOTALL)
        ]
        tops.append(max(ticks))
    assert tops == [6, 200], "6 MiB under slots; 101 blocks of 2 MiB in the tree"


def test_a_memory_map_of_another_format_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path, row())
    for wrong, complaint in (
        (memory_map() | {"format": 2}, "of format 2"),
        ({"format": 1}, "without 'vmmkv'"),
        (
            {name: each for name, each in memory_map().items() if name != "commit"},
            "without 'commit'; run the suite waste again",
        ),
    ):
        (tmp_path / MAP).write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=complaint):
            write([tmp_path], tmp_path / "out")


def test_the_command_says_where_the_page_is_and_refuses_what_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path, row())
    out = tmp_path / "out"
    assert run.main(["report", str(tmp_path), "--out", str(out)]) == 0
    assert Path(capsys.readouterr().out.strip()) == out / "report.html"
    with pytest.raises(SystemExit, match="2"):
        run.main(["report", str(tmp_path / "nowhere")])
    assert "no such file or folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run.main(["report", str(tmp_path), "--out", "/dev/null/x"])
    assert "--out /dev/null/x/figures cannot be written to" in capsys.readouterr().err
