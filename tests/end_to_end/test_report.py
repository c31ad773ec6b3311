"""All quick suites on the CPU: their rows, and the report of them as a browser shows it."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bench.decode_loop import Mode
from bench.hf import PARTS, decode, fitting, memory
from bench.hf.caches import DYNAMIC, STATIC, SYSTEMS, VMMKV
from bench.serve import JUMPS_GAIN, MASKS_COST
from bench.serve.compared_sizes import ComparedSizes
from bench.serve.models import model_of
from bench.serve.padding import digest_of, tokenizer_file
from bench.suites import ALL

ROOT = Path(__file__).resolve().parents[2]
PHONE_WIDTH = 390
FIELDS = (
    *("suite", "workload", "system", "metric", "unit", "p20", "p50", "p80", "p99", "n", "bound"),
    *("device", "driver", "versions", "commit", "seed", "quick", "date"),
)

_SERVED = "tiny-llama-3-1-8b"
FIGURES = {
    "alloc": {
        *("driver-calls-calls", "append-over-static", "append-step"),
        *(f"elastic-{phase}{of}" for phase in ("shrink", "regrow", "two-caches") for of in ("", "-step")),
    },
    "waste": {"waste-waste", "waste-admitted-sequences"},
    "kernels": {"kernels-decode-wide", "kernels-prefill-wide"},
    "prefix": {f"prefix-{of}" for of in ("total", "memory-held", "attach", "attention", "tree")},
    "serve": {
        "serve-throughput",
        *(f"serve-{part}-{_SERVED}-{unit}" for part in ("closed", "outside", "http", "grammar") for unit in ("tok-s", "ms")),
        *(
            f"serve-rates-{_SERVED}-chat-{of}-{kind}"
            for of in ("poisson", "burstiness-4")
            for kind in ("done", "latency", "all")
        ),
    },
    "hf": {f"hf-{of}" for of in ("decode", "waste", "longest", "admitted")},
    "quality": set(),
    "memory-map": {"map-vmmkv", "map-paged"},
    "runs": set(),
}
"""Of a quick run, by the page's sections in their order: their names, without the device's."""
TABLES = {"alloc": 3, "waste": 1, "kernels": 2, "prefix": 5, "serve": 14, "hf": 4}
"""Of rows, by section: one for each suite, or part of one."""

# A page that opens the report in a frame as wide as a phone, unfolds all of it, and leaves what it measures in its own title.
PROBE = """<!DOCTYPE html><title>none</title>
<iframe src="report.html" width="WIDTH" height="800" onload="
  const page = this.contentDocument;
  page.querySelectorAll('details').forEach(one => one.open = true);
  const tall = name => [...page.querySelectorAll(name)].filter(one => one.getBoundingClientRect().height > 30).length;
  document.title = JSON.stringify({
    figures: tall('figure svg'), tables: tall('table'), wide: page.documentElement.scrollWidth,
    sections: [...page.querySelectorAll('section')].map(one => [
      one.id, one.querySelectorAll('figure').length, one.querySelectorAll('table.rows').length
    ]),
  });
"></iframe>"""


@dataclass(frozen=True, slots=True)
class Browser:
    """Chromium, without a window."""

    program: str
    profile: Path

    def run(self, page: Path, *options: str) -> tuple[str, list[str]]:
        """What it prints, and what the page said on its console."""
        command = [self.program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.profile}"]
        command += [
            "--enable-logging=stderr",
            "--virtual-time-budget=5000",
            "--hide-scrollbars",
            "--allow-file-access-from-files",
        ]
        done = subprocess.run(
            [*command, *options, page.as_uri()], capture_output=True, text=True, errors="replace", timeout=120, check=True
        )
        return done.stdout, re.findall(r"CONSOLE.*", done.stderr)

    def shot(self, page: Path, to: Path, *options: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
        """Its picture: height, width, colours."""
        _, console = self.run(page, f"--screenshot={to}", *options)
        assert console == []
        return np.asarray(Image.open(to).convert("RGB"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no chromium here: tests/end_to_end/get-chromium.sh installs it, as root on Debian")
    return Browser(program, tmp_path_factory.mktemp("profile"))


@dataclass(frozen=True, slots=True)
class QuickRun:
    """Everything that is quick, once."""

    folder: Path
    said: str
    progress: str

    def rows(self, suite: str, part: str = "") -> list[dict[str, Any]]:
        """Of a suite, or of those whose workload has a word in its name."""
        rows = map(json.loads, (self.folder / f"{suite}.jsonl").read_text().splitlines())
        return [row for row in rows if part in row["workload"]]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> QuickRun:
    folder = tmp_path_factory.mktemp("bench")
    done = bench(f"run --quick --device cpu --commit tested --seed 7 --out {folder}")
    return QuickRun(folder, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def report(quick: QuickRun) -> Path:
    """The page of it."""
    bench(f"report {quick.folder} --out {quick.folder}")
    return quick.folder / "report.html"


def bench(arguments: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done


# the rows


@pytest.mark.parametrize("suite", ALL)
def test_every_suite_writes_rows_that_are_whole_and_none_has_failed(quick: QuickRun, suite: str) -> None:
    rows = quick.rows(suite)
    assert rows
    for row in rows:
        assert tuple(row) == FIELDS
        assert (row["suite"], row["commit"], row["seed"], row["quick"]) == (suite, "tested", 7, True)
        assert row["metric"] != "failed", row["workload"]
        assert row["n"] > 0 or (suite, row["unit"]) == ("waste", "times"), "who gives way may do so while nobody ends"
        assert row["p20"] <= row["p50"] <= row["p80"] <= row["p99"]
        assert set(row["versions"]) == {"torch", "triton", "cuda_bindings", "vmmkv", "python"}
    names = [(row["workload"], row["system"], row["metric"]) for row in rows]
    assert len(set(names)) == len(names), "two rows have one name"


def test_append_runs_every_mode(quick: QuickRun) -> None:
    coming = [row for row in quick.rows("append") if row["workload"].endswith("coming and going")]
    assert {row["system"] for row in coming} == {mode.value for mode in Mode}
    stalled = {row["system"]: row["p50"] for row in coming if row["metric"] == "stalled"}
    assert stalled["off"] > 0
    assert stalled["static"] == 0
    for mode in ("slack", "adopted"):
        assert any(row["metric"] == "pumped" and row["p99"] > 0 for row in coming if row["system"] == mode)


def test_kernels_leave_out_what_does_not_apply(quick: QuickRun) -> None:
    workloads: dict[str, set[str]] = {}
    for row in quick.rows("kernels"):
        workloads.setdefault(row["workload"], set()).add(row["system"])
    assert workloads["wide decode 2x96"] >= {"SDPA, malloc", "reference, malloc, again", "reference, paged 16"}
    assert not any(system.startswith("SDPA") for system in workloads["wide prefill mixed"] | workloads["wide decode skewed"])
    for name in ("FlashAttention-3", "FlashInfer"):
        assert f"absent: kernels {name}: its kernels do not run on a CPU" in quick.said


def test_prefix_has_every_part_and_every_system(quick: QuickRun) -> None:
    rows = quick.rows("prefix")
    cold = {row["system"] for row in rows if row["workload"] == "wide 4 requests of 100 + 12 tokens, 4 out, cold"}
    assert cold == {"none", "paged 16", *(f"vmmkv {name}" for name in ("chooser", "alias", "compute"))}
    warm = {row["system"] for row in rows if row["workload"] == "wide 4 requests of 100 + 12 tokens, 4 out, warm"}
    assert warm == {"paged 16", *(f"vmmkv {name}" for name in ("chooser", "alias", "adopt"))}
    for method in ("alias", "adopt"):
        taken = [row["p50"] for row in rows if (row["system"], row["metric"]) == (f"vmmkv {method}", f"by {method}")]
        assert taken and all(share > 0 for share in taken)
    assert {row["system"] for row in rows if row["workload"].startswith("wide attach ")} == {
        *("alias, in single pages", "alias", "compute", "adopt")
    }
    assert any(row["system"] == "radix tree" for row in rows)
    assert {row["system"] for row in rows if row["workload"] == "wide 4 requests of 20 + 12 tokens, 4 out, cold"} == {
        *("paged 16", "vmmkv chooser", "vmmkv alias")
    }
    assert "attention over aliases, times as fast as over copies" not in quick.said, "promised of another shape"


def test_serve_has_every_part_and_checks_its_answers(quick: QuickRun) -> None:
    parts = ("mixed", "single", "first", "long", "shared cold", "shared warm", "step", "host 64", "host 512")
    elsewhere = ("closed", "rates", "bursts", "outside", "http", "grammar")
    found = {row["workload"].removeprefix("tiny llama-3.1-8b ").partition(":")[0] for row in quick.rows("serve")}
    assert parts and found - set(elsewhere) == set(parts)
    rows = [row for row in quick.rows("serve") if row["workload"].removeprefix("tiny llama-3.1-8b ").partition(":")[0] in parts]
    assert {row["system"] for row in rows} == {"vmmkv"}
    assert {row["bound"] for row in rows} == {None}, "a CPU has none"
    assert {row["n"] for row in rows if row["metric"] == "total"} == {2}
    assert {row["p20"] for row in rows if row["metric"] == "same answers in all runs"} == {100}
    attached = {row["workload"].split()[3].rstrip(":"): row["p50"] for row in rows if row["metric"] == "prompt tokens attached"}
    assert attached["warm"] > 90
    assert "absent: breakdown" in quick.said
    assert "checked: tiny llama-3.1-8b mixed: 10 answered with exactly" in quick.said
    assert "tiny llama-3.1-8b, single, run 2 of 2" in quick.progress


def test_serve_compares_every_system_on_every_workload(quick: QuickRun) -> None:
    sizes = ComparedSizes.of(model_of("wide", tiny=True), 0, small=True, max_num_batched_tokens=None)
    engines = {"vmmkv", "paged 16", "static 512"}
    for workload in sizes.closed:
        mine = quick.rows("serve", f"tiny llama-3.1-8b closed: {workload.name}: ")
        assert engines <= {row["system"] for row in mine}
        same = {row["system"]: row["p50"] for row in mine if row["metric"] == "same answers as vmmkv"}
        assert same.keys() >= engines - {"vmmkv"} and all(share == 100 for share in same.values())
        first = {row["system"]: row["n"] for row in mine if row["metric"] == "first token"}
        assert all(first[system] == 2 * len(workload.asks) for system in engines), "two runs"
    rates = {row["workload"] for row in quick.rows("serve", " rates: ")}
    assert len(rates) == len(sizes.rates) + len(sizes.bursts)
    goodputs = [row for row in quick.rows("serve") if row["metric"] == "goodput"]
    assert len(goodputs) == len(rates) * len(engines) and all(row["p50"] > 0 for row in goodputs)
    agreeing = [row for row in quick.rows("serve", " rates: ") if row["metric"] == "same answers as vmmkv"]
    assert len(agreeing) == len(rates) * (len(engines) - 1) and all(row["p50"] == 100 for row in agreeing)


def test_what_the_server_says_over_http_is_what_the_engine_says(quick: QuickRun) -> None:
    rows = quick.rows("serve", "tiny llama-3.1-8b http: ")
    found = {(row["system"], row["metric"]): row["p50"] for row in rows}
    assert {system for system, metric in found if metric == "throughput"} == {"vmmkv", "vmmkv serve"}
    assert found["vmmkv serve", "same answers as vmmkv"] == found["vmmkv", "same answers in all runs"] == 100
    assert {row["workload"].rpartition(", ")[2] for row in rows} == {f"tokenizer {digest_of(tokenizer_file(None))}"}


def test_masks_and_jumps_stand_beside_what_they_are_held_against(quick: QuickRun) -> None:
    rows = quick.rows("serve", " grammar: ")
    parts = {row["workload"].removeprefix("tiny llama-3.1-8b grammar: ").partition(":")[0] for row in rows}
    assert parts == {"masks, 1 at once", "jumps, 1 at once", "masks, 4 at once", "jumps, 4 at once"}
    assert all(row["workload"].endswith(f", tokenizer {digest_of(tokenizer_file(None))}") for row in rows)
    found = {(row["workload"].split()[3], row["system"], row["metric"]): row["p50"] for row in rows}
    assert found["jumps,", "jump-forward", "steps saved"] > 0
    assert found["jumps,", "jump-forward", "forced"] >= 50
    ratios = [row for row in rows if row["metric"] in (MASKS_COST, JUMPS_GAIN)]
    assert len(ratios) == len(parts) and all(row["p20"] < row["p80"] for row in ratios), "a sample a request"
    assert {system for part, system, _ in found if part == "masks,"} == {"free text", "masks"}
    assert "all runs say the same" in quick.said


def test_hf_has_rows_of_all_systems_in_all_parts(quick: QuickRun) -> None:
    found: dict[str, set[tuple[str, str]]] = {part: set() for part in PARTS}
    for row in quick.rows("hf"):
        (part,) = (part for part in PARTS if f" {part}: " in row["workload"])
        found[part].add((row["system"], row["metric"]))
    assert {system for system, _ in found["decode"]} == set(SYSTEMS)
    for metric in (decode.STEP, decode.RATE, decode.PREFILL):
        assert {(system, metric) for system in SYSTEMS} <= found["decode"]
    assert all(row["p20"] == 100 for row in quick.rows("hf") if row["metric"] == decode.SAME)
    metrics = {"memory": [memory.PEAK, memory.WASTE, memory.LAYER], "longest": [fitting.LONGEST], "mixed": [fitting.ADMITTED]}
    for part, of_part in metrics.items():
        assert found[part] == {(system, metric) for system in SYSTEMS for metric in of_part}
    counted = {(row["system"], row["metric"]): row for row in quick.rows("hf") if row["bound"] is not None}
    assert 1.4 < ratio(counted[DYNAMIC, memory.LAYER]) < 1.6, "keys are copied while the values are there too"
    assert ratio(counted[VMMKV, memory.LAYER]) == pytest.approx(1, abs=0.01)
    assert 0.8 < ratio(counted[VMMKV, fitting.LONGEST]) <= 1 and ratio(counted[STATIC, fitting.LONGEST]) > 0.99
    assert counted[VMMKV, fitting.ADMITTED]["p50"] > counted[STATIC, fitting.ADMITTED]["p50"]


def ratio(row: dict[str, Any]) -> float:
    return float(row["p50"] / row["bound"])


# the page


def test_the_page_has_the_sections_and_figures_of_a_quick_run(report: Path) -> None:
    sections = dict(re.findall(r'<section id="([^"]+)"(.*?)</section>', report.read_text(), re.DOTALL))
    assert list(sections) == list(FIGURES)
    assert {name: text.count("<figure ") for name, text in sections.items()} == {
        name: len(figures) for name, figures in FIGURES.items()
    }
    stems = [path.stem.rpartition("-quick-")[2] for path in (report.parent / "figures").iterdir()]
    assert sorted(stems) == sorted(set().union(*FIGURES.values()))


def test_every_figure_and_table_is_there_and_fits_a_phone(report: Path, browser: Browser) -> None:
    probe = report.with_name("probe.html")
    probe.write_text(PROBE.replace("WIDTH", str(PHONE_WIDTH)))
    printed, console = browser.run(probe, "--dump-dom")
    assert console == []
    title = re.search(r"<title>(.*?)</title>", printed)
    assert title is not None
    seen = json.loads(unescape(title[1]))
    assert seen["figures"] == sum(map(len, FIGURES.values())), "all of them are drawn"
    assert seen["tables"] == report.read_text().count("<table") >= sum(TABLES.values())
    assert seen["wide"] <= PHONE_WIDTH, "what is wide scrolls in its own box"
    assert seen["sections"] == [[name, len(figures), TABLES.get(name, 0)] for name, figures in FIGURES.items()]


@pytest.mark.parametrize("width", [1200, PHONE_WIDTH])
def test_it_is_drawn_dark_on_light_and_light_on_dark(report: Path, browser: Browser, tmp_path: Path, width: int) -> None:
    size = f"--window-size={width},3000"
    light = browser.shot(report, tmp_path / "light.png", size)
    dark = browser.shot(report, tmp_path / "dark.png", size, "--blink-settings=preferredColorScheme=0")
    for picture in (light, dark):
        assert picture.shape == (3000, width, 3)
        colours = np.unique(picture @ np.array([1 << 16, 1 << 8, 1]))
        assert len(colours) > 50, "nothing is drawn"
    assert np.median(light) > 200
    assert np.median(dark) < 60
    assert (dark > 240).mean() < 0.05, "a figure has a white ground"


def test_an_error_on_the_console_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "wrong.html"
    page.write_text("<script>nothing.at.all</script>")
    _, console = browser.run(page, "--dump-dom")
    assert "nothing is not defined" in "".join(console)
