"""Examples of the documents run, links lead somewhere, tables of the guides name what the code has, the site builds."""

import contextlib
import importlib.util
import io
import pkgutil
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import vmmkv.errors
import vmmkv_server
from bench import tables
from bench.rows import read as read_rows
from vmmkv.cli.main import main
from vmmkv.config import read_environment
from vmmkv.testing.checks import CHECKS
from vmmkv_server.http.schemas import ChatRequest, CompletionRequest
from vmmkv_server.models import KNOWN_MODELS, model_dir
from vmmkv_server.structured_output.json_schema import SERVED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [
    *PAGES,
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "bench/README.md", "kernels/README.md")),
]
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A block of Python in a page."""

    page: Path
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def examples() -> Iterator[Example]:
    for page in [ROOT / "README.md", *PAGES]:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            yield Example(page=page, line=text.count("\n", 0, block.start(1)) + 1, code=block[1])


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "tools" / f"{name}.py")
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


def is_long(example: Example) -> bool:
    """Does it start a model? The README's do as well, but a first trial begins there."""
    return "LLM(" in example.code and example.page.name != "README.md"


EXAMPLES = [pytest.param(each, id=str(each), marks=[pytest.mark.nightly] if is_long(each) else []) for each in examples()]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run_and_print_what_they_promise(example: Example, tmp_path: Path) -> None:
    if "LLM(" in example.code and not model_dir(KNOWN_MODELS["smollm2-135m"], read_environment()).is_dir():
        pytest.skip("smollm2-135m is not here: run `vmmkv fetch smollm2-135m`")
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
def test_plans_are_what_the_command_prints(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert f"$ vmmkv {command}\n{capsys.readouterr().out.rstrip()}\n```" in read("guides/capacity.md")


def anchors_of(text: str) -> set[str]:
    """Those of headings, as Python-Markdown makes them, and those of the API's objects, by the first part of their names."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain} | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_links_and_their_anchors_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for path, anchor in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]*))?\)", text):
        target = page.parent.joinpath(path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), path
        if anchor:
            known = anchors_of(target.read_text(encoding="utf-8"))
            assert any(anchor == one or anchor.startswith(f"{one}.") for one in known), f"{path}#{anchor}: {sorted(known)}"


def test_tables_of_figures_are_those_of_the_newest_rows() -> None:
    """`python -m bench report bench/results --docs .` writes them."""
    if not (results := ROOT / "bench" / "results").is_dir():
        pytest.skip("an sdist has no rows")
    rows = read_rows([results])
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert tables.filled(text, rows) == text, name
    marks = "".join((ROOT / name).read_text(encoding="utf-8") for name in tables.DOCUMENTS)
    assert all(f"<!-- rows: {name} -->" in marks for name in (*tables.TABLES, tables.LOSSES))


def test_every_page_is_in_the_navigation_once_and_nothing_else_is() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")
    listed = sorted(in_nav(CONFIG["nav"]))
    assert listed == sorted([*(str(page.relative_to(DOCS)) for page in PAGES), *tool("hooks").BROUGHT.values()])


def test_every_picture_is_shown() -> None:
    shown = {
        Path(path).name for page in PAGES for path in re.findall(r"!\[[^\]]+\]\(([^)]*pictures/[^)]*)\)", page.read_text())
    }
    assert shown == {picture.name for picture in PICTURES}


def test_the_linter_of_commits_is_the_one_of_make_check() -> None:
    (version,) = re.findall(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["rev"] for repo in config["repos"] if "ruff" in repo["repo"]] == [f"v{version}"]


def test_a_hosted_machine_runs_make_test() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert any(step.get("run", "").startswith("make test") for step in workflow["jobs"]["test"]["steps"])


def test_the_changelog_has_the_version_in_one_line_a_change() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {vmmkv.__version__}\n" in text
    released = text[text.index(f"## {vmmkv.__version__}") :]
    assert all(line.startswith(("#", "- ", "The first version")) for line in released.splitlines() if line)


def test_the_public_names_are_in_the_reference() -> None:
    pages = "".join(read(f"reference/{name}.md") for name in ("cache", "prefix", "engine"))
    assert "::: vmmkv.errors" in pages
    for name in vmmkv.__all__:
        assert f"::: vmmkv.{name}\n" in pages or f"`{name}`" in pages or hasattr(vmmkv.errors, name), name
    for name in vmmkv_server.__all__:
        assert re.search(rf"^::: vmmkv_server\.[\w.]+\.{name}$", pages, re.MULTILINE), name


@pytest.mark.parametrize("name", re.findall(r"^::: (\S+)$", "".join(map(Path.read_text, PAGES)), re.MULTILINE))
def test_names_of_the_reference_are_there(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None


def test_the_table_of_options_is_what_is_declared() -> None:
    """`python docs/tools/options.py` writes it."""
    page = read("guides/server/options.md")
    assert tool("options").filled(page) == page


def test_the_table_of_metrics_is_what_a_server_exports() -> None:
    """`python docs/tools/metrics.py` writes it."""
    page = read("guides/server/metrics.md")
    assert tool("metrics").filled(page) == page


def test_the_server_guide_has_every_keyword_of_schemas_that_is_served() -> None:
    (listed,) = re.findall(r"^\| of \| keywords \|.*?\n\n", read("guides/server/api.md"), re.DOTALL | re.MULTILINE)
    assert set(SERVED) <= set(re.findall(r"`([$\w]+)`", listed))


def test_the_server_guide_has_every_parameter() -> None:
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields} - {"model", "messages", "prompt"}
    fields |= {"name", "store: false", "skip_special_tokens: true"}  # of a message, and of one value
    missing = {field for field in fields if f"`{field}`" not in read("guides/server/api.md")}
    assert not missing


def test_the_guide_for_kernels_has_every_check_and_no_other() -> None:
    (table,) = re.findall(r"^\| check \|.*?\n\n", read("guides/kernel-authors.md"), re.MULTILINE | re.DOTALL)
    assert re.findall(r"`([^`]+)`", table) == list(CHECKS)


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    """mkdocs warns of a dead link or anchor."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    pages = {
        page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name not in ("404.html", "report.html")
    }
    assert len(pages) == len(list(in_nav(CONFIG["nav"])))
    for page, text in pages.items():
        fetched = re.search(r"<(?!a )[^>]* (?:href|src)=\"(?:https?:)?//[^\"]*", text)  # a link is followed by readers alone
        assert fetched is None, f"{page.relative_to(site)} has {fetched}"
        assert "mermaid" not in text, "the theme would fetch it"
    assert "<svg" in pages[site / "index.html"], "pictures are part of the page"
