"""The law of private names: a test comes in by the public door.

A private name begins with one underscore and is defined in this tree. A test file may use those that it defines itself, and
those of its own objects: `self._x` in a class that stands in for a part of the tree. It may read, call, patch or import no
other: neither of the packages, nor of bench, nor of another test file. Names given as text, as to `monkeypatch.setattr`, count.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.sources import MODULES, ROOT, modules

TESTS = sorted((ROOT / "tests").rglob("*.py"))

OURS = {"vmmkv", "vmmkv_server", "vmmkv_kernels", "bench", "docs", "tests"}

BY_NAME = {"setattr", "getattr", "hasattr", "delattr", "object"}
"""Functions that take an attribute's name: builtins, those of monkeypatch, and `mock.patch.object`."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


@functools.cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def defined(tree: ast.Module) -> Iterator[str]:
    """The private names that a file gives to something: to functions, classes, variables, and attributes of its objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            name = node.attr
        else:
            continue
        if is_private(name):
            yield name


@functools.cache
def private_names() -> frozenset[str]:
    """All that are defined in this tree. Private names of other packages, such as `torch._dynamo`, are not its affair."""
    paths = [*MODULES.values(), *modules(ROOT, "bench").values(), *TESTS]
    return frozenset(name for path in paths for name in defined(syntax(path)))


def foreign(tree: ast.Module) -> set[str]:
    """What a file imports from other packages, by the names that it has there."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if (module or alias.name).partition(".")[0] not in OURS:
                    found.add(alias.asname or alias.name.partition(".")[0])
    return found


def taken(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each private name that a file takes from something else than `self`, `cls` or `super()`."""
    others = foreign(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private_names():
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in private_names())
        elif isinstance(node, ast.Call) and (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) in BY_NAME:
            if node.args and ast.unparse(node.args[0]).partition(".")[0] in others:
                continue
            for given in node.args[:2]:
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    name = given.value.rpartition(".")[2]  # counts if there is none in the tree too: it may have been renamed
                    if is_private(name):
                        yield node.lineno, name


def test_no_test_reaches_a_private_name_of_another_file() -> None:
    found = []
    for path in TESTS:
        own = set(defined(syntax(path)))
        for line, name in taken(syntax(path)):
            if name not in own:
                found.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert found == []
