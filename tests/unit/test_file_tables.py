"""The laws of the tables that say what each file is: all files are in them, and nothing else is."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def files(folder: str) -> set[str]:
    """The modules and packages of a folder, without the package's own file."""
    here = ROOT / folder
    packages = {path.parent.name for path in here.glob("*/__init__.py")}
    return {path.stem for path in here.glob("*.py")} - {"__init__"} | packages


def test_every_kernel_is_in_the_readme() -> None:
    table = (ROOT / "kernels" / "README.md").read_text().partition("| file | what it is |")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)\.py`", "".join(line.split("|")[1] for line in table.splitlines() if line.count("|") > 2))
    assert set(named) == files("kernels")
    assert len(named) == len(set(named))


@pytest.mark.parametrize("folder", ["server/engine", "server/engine/decoder", "bench/suites/serve"])
def test_every_module_is_in_the_docstring_of_its_package(folder: str) -> None:
    text = (ROOT / folder / "__init__.py").read_text().partition('"""')[2].partition('"""')[0]
    missing = {name for name in files(folder) - {"__main__"} if not re.search(rf"\b{name}\b", text)}
    assert not missing, f"{folder}/__init__.py does not say what these are: {', '.join(sorted(missing))}"
