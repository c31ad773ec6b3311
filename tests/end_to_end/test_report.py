"""All quick suites on the CPU, and the report of their rows as a browser shows it."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bench.suites import ALL

ROOT = Path(__file__).resolve().parents[2]
PHONE_WIDTH = 390

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


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of everything that is quick."""
    out = tmp_path_factory.mktemp("bench")
    bench(f"run --quick --device cpu --commit tested --out {out}")
    bench(f"report {out} --out {out}")
    return out / "report.html"


def bench(arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_every_quick_suite_writes_rows_and_none_has_failed(report: Path) -> None:
    for suite in ALL:
        rows = [json.loads(line) for line in (report.parent / f"{suite}.jsonl").read_text().splitlines()]
        assert rows
        assert not [row["workload"] for row in rows if row["metric"] == "failed"]


def test_every_figure_and_table_is_there_and_fits_a_phone(report: Path, browser: Browser) -> None:
    probe = report.with_name("probe.html")
    probe.write_text(PROBE.replace("WIDTH", str(PHONE_WIDTH)))
    printed, console = browser.run(probe, "--dump-dom")
    assert console == []
    title = re.search(r"<title>(.*?)</title>", printed)
    assert title is not None
    seen = json.loads(unescape(title[1]))
    text = report.read_text()
    assert seen["figures"] == text.count("<figure ") == len(list((report.parent / "figures").iterdir())) > 10
    assert seen["tables"] == text.count("<table") > 10
    assert seen["wide"] <= PHONE_WIDTH, "what is wide scrolls in its own box"
    sections = {name: (figures, tables) for name, figures, tables in seen["sections"]}
    for name in ("alloc", "waste", "kernels", "prefix", "serve"):
        assert min(sections[name]) > 0, name
    assert sections["quality"] == (0, 0)
    assert sections["memory-map"] == (2, 0)


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
