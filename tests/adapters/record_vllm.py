"""python -m tests.adapters.record_vllm PACKAGES: names that hooks.py asks for, of the vLLM in a folder of packages.

Writes tests/adapters/vllm_names/VERSION.txt. Each part of it is a file of vLLM, with lines of the classes, methods and fields
that are asked for: no types, no defaults, no texts and no code. An attribute that a method sets is written as a field.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

from vmmkv.adapters.vllm import hooks

RECORDS = Path(__file__).parent / "vllm_names"
DECORATORS = ("cached_property", "classmethod", "property", "staticmethod", "abstractmethod")


class Recorder(hooks.Sources):
    """Sources that note which classes and imports are looked at."""

    def __init__(self, packages: Path) -> None:
        super().__init__(packages)
        self.packages = packages
        self.imports = defaultdict[str, list[str]](list)
        """Lines by module."""
        self.asked_of: dict[str, tuple[str, ast.ClassDef | ast.Module, set[str]]] = {}
        """Module, definition and names that are asked for of each class and module, by its full name."""
        self.asked: set[str] = set()

    def definition(self, owner: str) -> tuple[str, ast.ClassDef | ast.Module] | None:
        found = super().definition(owner)
        if found is not None:
            module, node = found
            name = f"{module}.{node.name}" if isinstance(node, ast.ClassDef) else module
            if name != owner:
                self.imports[owner.rpartition(".")[0]].append(f"from {module} import {owner.rpartition('.')[2]}")
            self.asked_of.setdefault(name, (module, node, set()))[2].update(self.asked)
        return found

    def record(self) -> str:
        sources = hooks.Sources(self.packages)
        for way in hooks.WAYS:
            table = min((names for names, _ in way.needs), key=lambda names: len([*sources.differences(names)]))
            for owner, wanted in table.items():
                self.asked = {word for each in wanted for word in re.findall(r"^\w+|(?<=')\w+", each)}
                self.members(owner)
        files = defaultdict[str, list[str]](list, {module: [*dict.fromkeys(lines)] for module, lines in self.imports.items()})
        for name, (module, node, asked) in self.asked_of.items():
            files[module] += lines_of(node, asked, is_extended=name in hooks.EXTENDED)
        parts = ["# vllm/__init__.py", "# vllm/_version.py", f"__version__ = '{hooks.version_of(self.packages)}'"]
        for module, lines in sorted(files.items()):
            is_package = self.packages.joinpath(*module.split(".")).is_dir()
            parts += [f"# {module.replace('.', '/')}{'/__init__.py' if is_package else '.py'}", *lines]
        return "\n".join(parts) + "\n"


def lines_of(node: ast.ClassDef | ast.Module, asked: set[str], *, is_extended: bool) -> list[str]:
    """A class or module with those of its members that are asked for, and its abstract methods if the adapter extends it."""
    members: dict[str, list[str]] = {}
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    for each in node.body:
        targets = each.targets if isinstance(each, ast.Assign) else [each.target] if isinstance(each, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and target.id in asked:
                members[target.id] = [f"{target.id}: ..."]
    for method in methods:
        names = {ast.unparse(decorator).rpartition(".")[2] for decorator in method.decorator_list}
        if method.name in asked or (is_extended and "abstractmethod" in names):
            members[method.name] = [
                *(f"@{name}" for name in DECORATORS if name in names),
                f"def {method.name}({parameters(method)}): {words(method, asked) or '...'}",
            ]
        for inner in ast.walk(method):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and inner.attr in asked:
                members.setdefault(inner.attr, [f"{inner.attr}: ..."])
    lines = [line for each in members.values() for line in each]
    if isinstance(node, ast.Module):
        return lines
    bases = ", ".join(base.id for base in node.bases if isinstance(base, ast.Name))
    head = f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    return [head, *(f"    {line}" for line in lines)] if lines else [f"{head} ..."]


def parameters(method: ast.FunctionDef) -> str:
    """The names of a method's parameters; `...` stands for a default."""
    given = method.args
    for each in ast.walk(given):
        if isinstance(each, ast.arg):
            each.annotation = None
    given.defaults = [ast.Constant(...) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(...) for default in given.kw_defaults]
    return ast.unparse(given)


def words(method: ast.FunctionDef, asked: set[str]) -> str:
    """Texts in a method's code that are asked for."""
    found = {each.value for each in ast.walk(method) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return "; ".join(map(repr, sorted(found & asked)))


def parts_of(record: str) -> dict[str, str]:
    """The files of a record by path."""
    _, *parts = re.split(r"^# (vllm/\S+)\n", record, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def unpack(parts: dict[str, str], packages: Path) -> Path:
    """Write files into a folder of packages."""
    for name, text in parts.items():
        path = packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return packages


if __name__ == "__main__":
    packages = Path(sys.argv[1])
    (RECORDS / f"{hooks.version_of(packages)}.txt").write_text(Recorder(packages).record(), encoding="utf-8")
