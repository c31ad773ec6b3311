"""Every way to get vmmkv imported: wheel, sdist, `pip install .`, `-e .`, and a checkout that is not installed.

Nothing is downloaded: builds run without isolation, installations without dependencies, which the fresh environments
see through a .pth file.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_imports import MODULES, ROOT

LOOK = """
import importlib, importlib.resources, importlib.util, json, sys
from importlib.machinery import PathFinder
import vmmkv, vmmkv.cli.main, vmmkv.server.models

def find(name):  # find_spec would import the packages above, transformers with one of them
    above = name.rpartition(".")[0]
    return PathFinder.find_spec(name, find(above).submodule_search_locations) if above else importlib.util.find_spec(name)

print(json.dumps({
    "where": vmmkv.__file__,
    "missing": [name for name in sys.argv[1:] if find(name) is None],
    "typed": importlib.resources.files("vmmkv").joinpath("py.typed").is_file(),
    "leaked": [name for name in ("kernels", "server", "bench", "tests") if importlib.util.find_spec(name)],
}))
"""

MODULE_OF = {str(path.relative_to(ROOT)): module for module, path in MODULES.items()}
"""The module that each source file is, by the file's path; `__init__` files are their packages."""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command to its end, with no import path but what is given; its output, or a failed test that shows it."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    child = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=280,
    )
    assert child.returncode == 0, child.stdout[-5000:]
    return child.stdout


def look(python: str | Path, cwd: Path, **environment: str) -> dict[str, Any]:
    """What an interpreter finds of vmmkv."""
    seen: dict[str, Any] = json.loads(run(python, "-c", LOOK, *MODULES, cwd=cwd, **environment).splitlines()[-1])
    assert seen["missing"] == []
    assert seen["typed"]
    return seen


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with its symlinks, so that building leaves nothing here."""
    target = tmp_path_factory.mktemp("checkout") / "vmmkv"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "results")
    shutil.copytree(ROOT, target, symlinks=True, ignore=ignored)
    if not (target / "README.md").exists():
        (target / "README.md").touch()
    return target


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the checkout, and the wheel of that sdist."""
    target = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", target, checkout, cwd=target)
    return target


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The interpreter of a fresh environment: it has the dependencies, and not vmmkv."""
    directory = tmp_path / "environment"
    venv.create(directory, with_pip=False, symlinks=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    # Paths added so are searched last, and .pth files in them are not read: an editable vmmkv there is not seen.
    paths = [path for path in sys.path if path.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(paths) + "\n")
    return directory / "bin" / "python"


def install(python: Path, *what: str | Path) -> None:
    """`pip install`, with this interpreter's pip, into another environment."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *what, cwd=python.parent)


def test_every_folder_with_modules_is_declared() -> None:
    declared = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    packages = {name if file.endswith("__init__.py") else name.rpartition(".")[0] for file, name in MODULE_OF.items()}
    assert packages - declared == set(), "add them to [tool.setuptools] packages in pyproject.toml"


def test_symlinks_are_relative() -> None:
    assert {name: os.readlink(ROOT / "vmmkv" / name) for name in ("kernels", "server")} == {
        "kernels": "../kernels",
        "server": "../server",
    }


def test_the_wheel_holds_each_module_once_and_nothing_at_the_top(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"vmmkv", "vmmkv-0.1.0.dist-info"}
    expected = {f"vmmkv/{file}" if not file.startswith("vmmkv/") else file for file in MODULE_OF}
    assert {name for name in names if name.endswith(".py")} == expected
    assert "vmmkv/py.typed" in names
    page = {f"vmmkv/server/http/page/{path.name}" for path in (ROOT / "server" / "http" / "page").iterdir() if path.is_file()}
    assert page and {name for name in names if "/page/" in name} == page
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_holds_files_and_no_links(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if member.issym() or member.islnk()] == []
    files = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert MODULE_OF.keys() <= files
    assert {"LICENSE", "README.md", "Makefile", "constraints.txt", "vmmkv/py.typed", "tests/unit/test_packaging.py"} <= files


@pytest.mark.parametrize("of", ["wheel", pytest.param("checkout", marks=pytest.mark.nightly)])
def test_an_install_works(of: str, built: Path, checkout: Path, environment: Path, tmp_path: Path) -> None:
    install(environment, *built.glob("*.whl") if of == "wheel" else [checkout])
    seen = look(environment, tmp_path)
    assert Path(seen["where"]).is_relative_to(environment.parent.parent)
    assert seen["leaked"] == []
    assert run(environment.parent / "vmmkv", "--version", cwd=tmp_path) == "vmmkv 0.1.0\n"


@pytest.mark.nightly
def test_an_editable_install_works_from_elsewhere_and_from_the_root(checkout: Path, environment: Path, tmp_path: Path) -> None:
    install(environment, "--editable", checkout)
    for cwd in (tmp_path, checkout):
        assert Path(look(environment, cwd)["where"]) == checkout / "vmmkv" / "__init__.py"


@pytest.mark.parametrize("elsewhere", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_bare_checkout_works(checkout: Path, environment: Path, tmp_path: Path, elsewhere: bool) -> None:
    seen = look(environment, tmp_path, PYTHONPATH=str(checkout)) if elsewhere else look(environment, checkout)
    assert Path(seen["where"]) == checkout / "vmmkv" / "__init__.py"
