"""The law of docstrings: each names its subject, so that it is understood where it stands alone."""

import ast
import re
from collections.abc import Iterator

from tests.sources import MODULES, ROOT

DIALECT = re.compile(
    r"(Of|What|See|Theirs|Ours|Whether|Those|These|This|That|Where|When|Who|Whom|Whose|Whoever|Which|How|They|It|Its|Their)\b"
)
"""First words that stand for a subject which a reader would have to look for."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring: of modules, classes and functions, and those behind an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.body:
                if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
                    yield each.lineno, each.value.value.strip()


def test_a_docstring_begins_with_its_subject() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in MODULES.values()
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if DIALECT.match(text)
    ]
    assert found == []
