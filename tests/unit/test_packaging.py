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

from tests.sources import MODULES, ROOT, SOURCE_ROOTS

LOOK = """
import importlib, importlib.resources, importlib.util, json, sys
from importlib.machinery import PathFinder
import vmmkv, vmmkv.cli.main, vmmkv_server.models

def find(name):  # find_spec would import the packages above, transformers with one of them
    above = name.rpartition(".")[0]
    return PathFinder.find_spec(name, find(above).submodule_search_locations) if above else importlib.util.find_spec(name)

print(json.dumps({
    "where": vmmkv.__file__,
    "missing": [name for name in sys.argv[1:] if find(name) is None],
    "typed": [(importlib.resources.files(name) / "py.typed").is_file() for name in ("vmmkv", "vmmkv_kernels", "vmmkv_server")],
    "leaked": [name for name in ("kernels", "server", "bench", "tests") if importlib.util.find_spec(name)],
}))
"""


def in_wheel(path: Path) -> str:
    """The name of a source file in a wheel."""
    return str(path.relative_to(next(root for root in reversed(SOURCE_ROOTS) if path.is_relative_to(root))))


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
    assert seen["typed"] == [True] * 3
    return seen


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, so that building leaves nothing here."""
    target = tmp_path_factory.mktemp("checkout") / "vmmkv"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "results")
    shutil.copytree(ROOT, target, ignore=ignored)
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


def test_the_source_roots_are_said_alike() -> None:
    said = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    roots = said["hatch"]["build"]["dev-mode-dirs"]
    assert roots == said["pytest"]["ini_options"]["pythonpath"] == said["ruff"]["src"]
    assert [ROOT / root for root in roots] == SOURCE_ROOTS
    packages = [Path(package) for package in said["hatch"]["build"]["targets"]["wheel"]["packages"]]
    assert [str(package.parent) for package in packages] == roots
    assert {package.name for package in packages} == {module.split(".")[0] for module in MODULES}


def test_the_wheel_holds_each_module_once_and_nothing_else_at_the_top(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"vmmkv", "vmmkv_kernels", "vmmkv_server", "vmmkv-0.1.0.dist-info"}
    assert sorted(name for name in names if name.endswith(".py")) == sorted(in_wheel(path) for path in MODULES.values())
    page = {in_wheel(path) for path in (ROOT / "server/vmmkv_server/http/page").iterdir() if path.is_file()}
    assert page and {name for name in names if "/page/" in name} == page
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_holds_files_and_no_links(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if member.issym() or member.islnk()] == []
    files = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert {str(path.relative_to(ROOT)) for path in MODULES.values()} <= files
    assert {"LICENSE", "README.md", "Makefile", "constraints.txt", "vmmkv/py.typed", "tests/unit/test_packaging.py"} <= files


@pytest.mark.parametrize("of", ["wheel", pytest.param("checkout", marks=pytest.mark.nightly)])
def test_an_install_works(of: str, built: Path, checkout: Path, environment: Path, tmp_path: Path) -> None:
    install(environment, *built.glob("*.whl") if of == "wheel" else [checkout])
    seen = look(environment, tmp_path)
    assert Path(seen["where"]).is_relative_to(environment.parent.parent)
    assert seen["leaked"] == []
    assert run(environment.parent / "vmmkv", "--version", cwd=tmp_path) == "vmmkv 0.1.0\n"


@pytest.mark.nightly
def test_an_editable_install_works_from_anywhere(checkout: Path, environment: Path, tmp_path: Path) -> None:
    install(environment, "--editable", checkout)
    assert checkout.name == "vmmkv", "which hides no package from a program in its parent folder"
    for cwd in (tmp_path, checkout, checkout.parent):
        assert Path(look(environment, cwd)["where"]) == checkout / "vmmkv" / "__init__.py"


@pytest.mark.parametrize("elsewhere", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_bare_checkout_works_by_its_source_roots(checkout: Path, environment: Path, tmp_path: Path, elsewhere: bool) -> None:
    roots = os.pathsep.join(str(checkout / root.relative_to(ROOT)) for root in SOURCE_ROOTS)
    seen = look(environment, tmp_path if elsewhere else checkout, PYTHONPATH=roots)
    assert Path(seen["where"]) == checkout / "vmmkv" / "__init__.py"
