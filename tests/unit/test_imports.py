"""The law of imports: they point downwards only, and importing vmmkv starts nothing.

Proven on the syntax trees of all files, so that an import inside a function counts as well.
"""

import ast
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LAYERS = (("units", "errors"), ("memory",), ("kernels",), ("adapters",), ("server",), ("testing",), ("cli", "__main__"))
"""Packages from bottom to top. A module may import from its own layer and from those below it."""

LAYER_OF = {name: index for index, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    """Every module of vmmkv by name, each once: the two folders at the top under the names that the symlinks give."""
    found = {}
    for folder, prefix in (("vmmkv", "vmmkv"), ("kernels", "vmmkv.kernels"), ("server", "vmmkv.server")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder != "vmmkv" or parts[0] not in ("kernels", "server"):
                found[".".join([prefix, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imports(path: Path, module: str) -> Iterator[str]:
    """The absolute names of what a file imports; `from a import b` counts as a.b where that is a module, else as a."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (name if (name := f"{source}.{alias.name}") in MODULES else source for alias in node.names)


def layer_name(module: str) -> str | None:
    """The layer of a module; the library's own modules (cache, prefix, memory and the like) are one layer."""
    parts = module.split(".")
    return None if len(parts) == 1 else parts[1] if parts[1] in LAYER_OF else "memory"


@functools.cache
def every_import() -> list[tuple[str, str]]:
    return [(module, target) for module, path in MODULES.items() for target in imports(path, module)]


def test_imports_point_downwards() -> None:
    upwards = [
        f"{module} imports {target}"
        for module, target in every_import()
        if (target.split(".")[0] == "vmmkv")
        and (importer := layer_name(module))
        and (imported := layer_name(target))
        and LAYER_OF.get(imported, -1) > LAYER_OF.get(importer, len(LAYERS))
    ]
    assert upwards == []


def test_modules_import_modules_and_not_the_package() -> None:
    """The package's names are those of its modules, so an import of one from below is a circle.

    `vmmkv/server/fetch.py` and the command line stand above it.
    """
    circles = [
        module
        for module, target in every_import()
        if target == "vmmkv" and LAYER_OF.get(layer_name(module) or "", len(LAYERS)) < LAYER_OF["server"]
    ]
    assert circles == []


def test_kernels_know_tensors_and_not_caches() -> None:
    allowed = ("vmmkv.kernels", "vmmkv.units", "vmmkv.errors")
    strangers = [
        f"{module} imports {target}"
        for module, target in every_import()
        if module.startswith("vmmkv.kernels") and target.split(".")[0] == "vmmkv" and not target.startswith(allowed)
    ]
    assert strangers == []


def test_one_module_of_the_cuda_driver_imports_cuda_bindings() -> None:
    users = {module for module, target in every_import() if target.split(".")[0] == "cuda"}
    assert len(users) <= 1
    assert all(module.startswith("vmmkv.driver.cuda") for module in users)


def test_nothing_imports_the_folders_at_the_top_by_their_short_names() -> None:
    """A package named `kernels` on the path breaks several releases of transformers; ours is vmmkv.kernels."""
    files = [*MODULES.items(), *((path.stem, path) for folder in ("bench", "tests") for path in (ROOT / folder).rglob("*.py"))]
    short = [
        path for module, path in files for target in imports(path, module) if target.split(".")[0] in ("kernels", "server")
    ]
    assert short == []
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_one_function_has_transformers_read_a_directory() -> None:
    """It forbids code that lies there. GenerationConfig runs none, and may read by itself."""
    readers = [
        name
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr == "from_pretrained"
        and not (isinstance(node.value, ast.Attribute) and node.value.attr == "GenerationConfig")
    ]
    assert readers == ["vmmkv.server.models"]


WHAT_STARTED = """
import json, logging, sys, threading
import torch  # what torch does is torch's

def handlers():
    loggers = {"root": logging.root, **logging.Logger.manager.loggerDict}
    return {name for name, logger in loggers.items() if getattr(logger, "handlers", ())}

before = threading.active_count(), handlers(), set(sys.modules)
import vmmkv
assert {type(getattr(vmmkv, name)) for name in vmmkv.__all__}
print(json.dumps({
    "threads": threading.active_count() - before[0],
    "handlers": sorted(handlers() - before[1]),
    "modules": sorted(set(sys.modules) - before[2]),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def test_importing_vmmkv_starts_no_thread_no_logging_and_no_cuda() -> None:
    child = subprocess.run(
        [sys.executable, "-c", WHAT_STARTED],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    started = json.loads(child.stdout)
    modules = started.pop("modules")
    assert started == {"threads": 0, "handlers": [], "cuda": False}
    assert not [name for name in modules if name.startswith("cuda.bindings")]
    assert not {name.split(".")[0] for name in modules} & {"transformers", "triton", *SERVER_EXTRA}


SERVER_EXTRA = {"fastapi", "jinja2", "msgspec", "prometheus_client", "pydantic", "structlog", "tokenizers"}
SERVER_EXTRA |= {"transformers", "zmq"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("vmmkv", {"torch"}),
        ("vmmkv.driver", {"vmmkv.driver.cuda", "vmmkv.driver.host"}),
        ("vmmkv.cli.main", {"torch", *SERVER_EXTRA}),
        ("vmmkv.server", {"torch", *SERVER_EXTRA}),
        ("vmmkv.server.llm", {"pydantic", "fastapi", "starlette", "uvicorn", "zmq"}),
        ("vmmkv.server.launch", {"torch"}),
    ],
)
def test_a_module_imports_nothing_that_it_can_do_without(module: str, absent: set[str]) -> None:
    """torch takes three seconds and 200 MiB; the command line works without the server extra, LLM without HTTP packages."""
    code = f"import sys, {module}; sys.exit(bool(set(sys.modules) & {absent!r}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=120).returncode == 0


def test_the_server_package_names_what_it_offers() -> None:
    import vmmkv.server

    assert "LLM" in dir(vmmkv.server)
    with pytest.raises(ImportError, match="Enigne"):
        from vmmkv.server import Enigne  # type: ignore[attr-defined]  # noqa: F401


def test_a_missing_package_is_one_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import vmmkv.server

    def absent(module: str) -> None:
        raise ModuleNotFoundError("No module", name="xgrammar")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ImportError, match=r"^LLM needs xgrammar.* in a checkout: pip install '\.\[server,hf\]'$") as caught:
        vmmkv.server.LLM  # noqa: B018
    assert caught.value.__suppress_context__
