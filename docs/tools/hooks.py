"""Hooks of mkdocs: pages from elsewhere in the repository, the report of all rows, and pictures inside the page.

A picture is drawn with `currentColor`, which an image does not inherit: it would be black on a dark page. So
`![...](pictures/NAME.svg)` becomes the drawing in the site, and stays an image in the Markdown.
"""

import contextlib
import io
import posixpath
import re
import sys
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

BROUGHT = {
    "ARCHITECTURE.md": "repository/architecture.md",
    "CHANGELOG.md": "repository/changelog.md",
    "CONTRIBUTING.md": "repository/contributing.md",
    "SECURITY.md": "repository/security.md",
    "bench/README.md": "repository/bench.md",
    "kernels/README.md": "repository/kernels.md",
}
"""Pages that stand elsewhere, by their path in the repository."""
REPORT = "results/report.html"
"""The page that stands for the folder of rows."""

_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#:]+)(#[^)]*)?\)")
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_PICTURE = re.compile(r'<p><img alt="[^"]*" src="[^"]*pictures/([a-z]+)\.svg" ?/?></p>')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of BROUGHT, and the report of all rows."""
    for path, uri in BROUGHT.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    sys.path[:0] = [str(ROOT / source) for source in (".", "kernels", "server")]
    from bench.report import write

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        page = write([ROOT / "bench" / "results"], Path(folder)).read_text(encoding="utf-8")
    files.append(File.generated(config, REPORT, content=page))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links by repository paths to the site's pages. A file that the site has not is named instead."""
    uri = page.file.src_uri
    home = next((path for path, brought in BROUGHT.items() if brought == uri), f"docs/{uri}")

    def led(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), target))
        known = site_uri(path)
        if known is not None:
            return f"{text}({posixpath.relpath(known, posixpath.dirname(uri) or '.')}{anchor})"
        if not (ROOT / path).exists():
            return link[0]  # mkdocs says that it is dead
        words = text.strip("[]")
        return f"`{path}`" if words == path else f"{words} (`{path}`)"

    parts = re.split(f"({_CODE.pattern})", markdown, flags=_CODE.flags)
    return "".join(part if part.startswith("```") else _LINK.sub(led, part) for part in parts)


def site_uri(path: str) -> str | None:
    """The site's address of a file of the repository; None if the site has it not."""
    if path in BROUGHT:
        return BROUGHT[path]
    if path == "bench/results":
        return REPORT
    return path.removeprefix("docs/") if path.startswith("docs/") and (ROOT / path).is_file() else None


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace images of pictures by the drawings."""

    def drawn(image: re.Match[str]) -> str:
        return f'<figure class="picture">{(ROOT / "docs/pictures" / f"{image[1]}.svg").read_text(encoding="utf-8")}</figure>'

    return _PICTURE.sub(drawn, html)
