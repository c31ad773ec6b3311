"""The site says what is so: its examples run, its links lead somewhere, its tables are those of the code."""

import contextlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import vmmkv.errors
from bench import suites
from vmmkv.cli import serve
from vmmkv.server import metrics
from vmmkv.server.config import OPTIONS
from vmmkv.server.http.app import DEFAULT_COMPLETION_TOKENS
from vmmkv.server.http.schemas import ChatRequest, CompletionRequest
from vmmkv.server.structured_output import schema as schemas_served
from vmmkv.testing.checks import CHECKS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A block of Python in a page, and the comment before it that says what it needs."""

    page: Path
    line: int
    note: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(DOCS)}:{self.line}"


def examples() -> Iterator[Example]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"(?:<!-- (.*?) -->\n)?```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            yield Example(page=page, line=text.count("\n", 0, block.start(2)) + 1, note=block[1] or "", code=block[2])


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS))


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "tools" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_nav(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from in_nav(part)


CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("example", list(examples()), ids=str)
def test_examples_run_and_print_what_they_promise(example: Example, tmp_path: Path) -> None:
    if example.note.startswith("not run: "):
        compile(example.code, str(example), "exec")
        pytest.skip(example.note.removeprefix("not run: "))
    assert not example.note
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", example.code, re.MULTILINE)
    printed = of_program(example, tmp_path) if "__main__" in example.code else of_block(example)
    assert printed.strip().splitlines() == promised


def of_block(example: Example) -> str:
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.filterwarnings("error", category=ResourceWarning)
        exec(compile(example.code, str(example), "exec"), {"__name__": "example"})
    return printed.getvalue()


def of_program(example: Example, folder: Path) -> str:
    """What stands behind `__main__` starts processes, which want a file to read."""
    file = folder / "example.py"
    file.write_text(example.code, encoding="utf-8")
    run = subprocess.run([sys.executable, str(file)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("command", re.findall(r"^\$ vmmkv (plan .*)$", read("guides/capacity.md"), re.MULTILINE))
def test_plans_are_what_the_command_prints(command: str) -> None:
    run = subprocess.run([sys.executable, "-m", "vmmkv", *shlex.split(command)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"$ vmmkv {command}\n{run.stdout.rstrip()}\n```" in read("guides/capacity.md")


def anchors_of(text: str) -> set[str]:
    """Those of headings, as Python-Markdown makes them, and those of the API's objects, by the first part of their names."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain} | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_their_anchors_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for path, anchor in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]*))?\)", text):
        target = page.parent.joinpath(path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), path
        if anchor:
            known = anchors_of(target.read_text(encoding="utf-8"))
            assert any(anchor == one or anchor.startswith(f"{one}.") for one in known), f"{path}#{anchor}: {sorted(known)}"


def test_every_page_is_in_the_navigation_once_and_nothing_else_is() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")
    listed = sorted(in_nav(CONFIG["nav"]))
    assert listed == sorted([*map(name_of, PAGES), *hooks().BROUGHT.values()])


@pytest.mark.parametrize("picture", PICTURES, ids=name_of)
def test_pictures_have_a_title_and_a_text_that_follows_the_page(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    title, desc = root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")
    assert root.tag == f"{SVG}svg" and title and desc
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert root.get("aria-labelledby") == f"{picture.stem}-title {picture.stem}-desc"
    assert all(str(one).startswith(f"{picture.stem}-") for one in ids), "two pictures of a page must not share an id"
    texts = list(root.iter(f"{SVG}text"))
    assert texts and all(text.get("fill") == "currentColor" for text in texts)
    _, _, width, height = map(float, root.get("viewBox", "").split())
    for text in texts:
        assert 0 <= float(text.get("x", -1)) <= width and 0 <= float(text.get("y", -1)) <= height


def test_every_picture_is_shown() -> None:
    shown = {
        Path(path).name for page in PAGES for path in re.findall(r"!\[[^\]]+\]\(([^)]*pictures/[^)]*)\)", page.read_text())
    }
    assert shown == {picture.name for picture in PICTURES}


def test_the_site_fetches_nothing() -> None:
    assert CONFIG["theme"]["font"] is False
    assert "extra_javascript" not in CONFIG and "offline" not in CONFIG["plugins"], "that plugin loads a script from elsewhere"
    assert not any("mermaid" in page.read_text(encoding="utf-8") for page in PAGES), "the theme would fetch it"


def test_the_public_names_are_in_the_reference() -> None:
    pages = "".join(read(f"reference/{name}.md") for name in ("cache", "prefix", "engine"))
    drawn = vmmkv.errors.__doc__ or ""
    assert "::: vmmkv.errors" in pages
    for name in vmmkv.__all__:
        assert f"::: vmmkv.{name}\n" in pages or f"`{name}`" in pages or re.search(rf"\b{name}\b", drawn), name
    for name in vmmkv.server.__all__:
        assert re.search(rf"^::: vmmkv\.server\.\w+\.{name}$", pages, re.MULTILINE), name


def test_the_server_guide_has_every_option_and_no_other() -> None:
    flags = {"--config", *(serve.flags(one)[-1] if one.default is True else one.flag for one in OPTIONS)}
    assert set(re.findall(r"^\| `(--[a-z-]+)", read("guides/server.md"), re.MULTILINE)) == flags


def test_the_server_guide_has_every_metric_and_no_other() -> None:
    exported = {f"vmmkv_{name}" for name, _ in metrics._GAUGES.values()}
    exported |= {f"vmmkv_{name}_total" for name, _ in metrics._COUNTERS.values()}
    exported |= {"vmmkv_engine_ready", "vmmkv_stall_seconds_total", "vmmkv_driver_calls_total", "vmmkv_requests_total"}
    exported |= {"vmmkv_requests_refused_total"}
    exported |= {"vmmkv_request_duration_seconds", "vmmkv_time_to_first_token_seconds"}
    exported |= {"vmmkv_inter_token_latency_seconds", "vmmkv_request_queue_time_seconds", "vmmkv_kv_shared_bytes"}
    exported |= {"vmmkv_attaches_total", "vmmkv_attach_seconds_total", "vmmkv_kv_usage_ratio"}
    assert set(re.findall(r"`(vmmkv_[a-z_]+)(?:\{\w+\})?`", read("guides/server.md"))) == exported


def test_the_server_guide_has_every_keyword_of_schemas_that_is_served() -> None:
    (listed,) = re.findall(r"Of JSON schemas is served .*?exclusive kin", read("guides/server.md"), re.DOTALL)
    # oneOf is known to be refused with a reason; the others are said in words.
    others = {"oneOf", "definitions", "exclusiveMinimum", "exclusiveMaximum"}
    assert schemas_served.SERVED - others <= set(re.findall(r"`([$\w]+)`", listed))


def test_the_server_guide_says_how_long_a_completion_is() -> None:
    assert f"has {DEFAULT_COMPLETION_TOKENS} tokens at most as a completion" in read("guides/server.md")


def test_the_server_guide_has_every_parameter() -> None:
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields} - {"model", "messages", "prompt"}
    missing = {field for field in fields if f"`{field}`" not in read("guides/server.md")}
    assert not missing


def limits_in(schema: Any) -> Iterator[float]:
    """The ends of what a parameter may be, but for those of 32 bits and more, which no one meets."""
    if isinstance(schema, dict):
        names = ("minimum", "exclusiveMinimum", "maximum", "maxItems", "maxLength", "maxProperties")
        yield from (schema[name] for name in names if name in schema and abs(schema[name]) < 2**31 - 1)
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from limits_in(part)


def test_the_server_guide_has_every_range() -> None:
    rows = re.findall(r"^\| (`[a-z_]+`.*?) \| (.*) \|$", read("guides/server.md"), re.MULTILINE)
    limited = set()
    for asked in (ChatRequest, CompletionRequest):
        for name, schema in asked.model_json_schema()["properties"].items():
            said = " ".join(range_ for names, range_ in rows if f"`{name}`" in names)
            limits = set(limits_in(schema)) - {0, 1}  # that much is nothing to say of a count
            limited |= {name} if limits else set()
            missing = {f"{limit:,g}" for limit in limits if not re.search(rf"(?<![\d.,]){limit:,g}(?![\d.,]*\d)", said)}
            assert name in ("prompt", "messages") or not missing, (name, missing)
    assert {"temperature", "top_logprobs", "stop"} <= limited


def test_the_guide_for_kernels_has_every_check_and_no_other() -> None:
    table = re.findall(r"^\| (`.*`) \|", read("guides/kernel-authors.md"), re.MULTILINE)
    assert re.findall(r"`([^`]+)`", "".join(table)) == list(CHECKS)


def test_the_benchmark_guide_has_every_suite() -> None:
    listed = re.findall(r"^\| `([a-z_]+)` \|", read("guides/benchmarks.md"), re.MULTILINE)
    assert listed == list(suites.SUITES)


class Built(HTMLParser):
    """Ids and links of a page of the built site."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if name in ("href", "src") and value:
                self.links.append(value)


def test_the_site_is_built_without_a_warning_and_has_no_dead_link(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        if not importlib.util.find_spec(package.split(".")[0]):
            pytest.skip(f"{package} is not installed: pip install '.[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    pages = {page: Built(page) for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(pages) == len(list(in_nav(CONFIG["nav"])))
    for page, built in pages.items():
        for link in built.links:
            if link.startswith("data:"):  # it has what it shows in itself
                continue
            assert not re.match(r"(https?:)?//", link), f"{page.relative_to(site)} leads to {link}, outside of the site"
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{page.relative_to(site)}: {link}"
            if anchor and target in pages:
                assert anchor in pages[target].ids, f"{page.relative_to(site)}: {link}"
    assert "<svg" in (site / "index.html").read_text(encoding="utf-8"), "pictures are part of the page"
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any(entry["location"].startswith("faq.html") for entry in index["docs"])
