"""The law of imports: they point downwards only, and importing vmmkv starts nothing.

Proven on the syntax trees of all files, so that an import inside a function counts as well.
"""

import ast
import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.suites import SUITES
from tests.sources import MODULES, ROOT, modules

ALL = MODULES | modules(ROOT, "bench")

LAYERS = (
    ("vmmkv.units", "vmmkv.errors"),
    ("vmmkv_kernels", "vmmkv.arguments", "vmmkv.lifetime", "vmmkv.config", "vmmkv.unmodified", "vmmkv.rate"),
    ("vmmkv.kv_policy", "vmmkv.tier"),
    ("vmmkv.eviction", "vmmkv.model_config"),
    ("vmmkv.layout",),
    ("vmmkv.driver",),
    ("vmmkv.holder",),
    ("vmmkv.memory.extents",),
    ("vmmkv.holder.source",),
    ("vmmkv.memory",),
    ("vmmkv.saved",),
    ("vmmkv.sequence",),
    ("vmmkv.cache",),
    ("vmmkv.tiers",),
    ("vmmkv.prefix.radix_tree",),
    ("vmmkv.prefix.index",),
    ("vmmkv.prefix.tiered",),
    ("vmmkv.tiers.fetch_search",),
    ("vmmkv.tiers.transfers",),
    ("vmmkv.holder.sealed",),
    ("vmmkv.holder.borrowed",),
    ("vmmkv.prefix",),
    ("vmmkv",),
    ("vmmkv.adapters",),
    ("vmmkv.testing",),
    ("vmmkv_server.kv_policy",),
    (
        *("vmmkv_server.sampling_params", "vmmkv_server.config", "vmmkv_server.logs"),
        *("vmmkv_server.latencies", "vmmkv_server.statistics"),
    ),
    ("vmmkv_server.protocol",),
    ("vmmkv_server.console",),
    ("vmmkv_server.models",),
    ("vmmkv_server.tokenizer", "vmmkv_server.structured_output"),
    ("vmmkv_server.chats",),
    ("vmmkv_server.tools",),
    ("vmmkv_server.engine",),
    ("vmmkv_server.llm",),
    ("vmmkv_server",),
    ("vmmkv_server.engine_client",),
    ("vmmkv_server.metrics",),
    ("vmmkv_server.http",),
    ("vmmkv_server.launch",),
    ("vmmkv.cli",),
    ("vmmkv.__main__",),
    ("bench.figures", "bench.rows", "bench.schemas", "bench.workloads"),
    ("bench.harness",),
    ("bench.baselines", "bench.decode_step"),
    ("bench.systems",),
    ("bench.suites", *(f"bench.suites.{name}" for name in SUITES)),
    ("bench",),
)
"""The rooms from bottom to top. A module imports from its own room and from layers below, in functions and for types too."""

ROOMS = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}


def imports(path: Path, module: str) -> Iterator[str]:
    """The absolute names of what a file imports; `from a import b` counts as a.b where that is a module, else as a."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (name if (name := f"{source}.{alias.name}") in ALL else source for alias in node.names)


def room_of(module: str) -> str:
    """The room of a module: the longest name in LAYERS that it is, or is in."""
    return max((room for room in ROOMS if module == room or module.startswith(f"{room}.")), key=len)


@functools.cache
def every_import() -> list[tuple[str, str]]:
    """What each module imports, by name."""
    return [(module, target) for module, path in ALL.items() for target in imports(path, module)]


def own_imports() -> list[tuple[str, str]]:
    """The imports of each other among the packages and bench."""
    return [(module, target) for module, target in every_import() if target in ALL and target != module]


def circles() -> list[list[str]]:
    """Modules that import each other, in groups: what each reaches and is reached by."""
    after = {module: {target for source, target in own_imports() if source == module} for module in ALL}
    reached: dict[str, set[str]] = {}
    for module in ALL:
        found, todo = set[str](), [module]
        while todo:
            todo += (new := after[todo.pop()] - found)
            found |= new
        reached[module] = found
    groups = {tuple(other for other in ALL if each in reached[other] and other in reached[each]) for each in ALL}
    return sorted(sorted(group) for group in groups if group)


def test_every_module_is_in_a_room() -> None:
    """A package's own name is a room of its own, and not that of all that nobody has placed."""
    stray = [module for module in ALL if room_of(module) in ("vmmkv", "vmmkv_server") and module != room_of(module)]
    assert stray == []


def test_imports_point_downwards() -> None:
    upwards = {
        f"{module} imports {target}"
        for module, target in own_imports()
        if ROOMS[room_of(target)] >= ROOMS[room_of(module)] and room_of(target) != room_of(module)
    }
    assert upwards == set()


def test_no_module_imports_one_that_imports_it() -> None:
    assert circles() == []


def test_one_module_of_the_cuda_driver_imports_cuda_bindings() -> None:
    users = {module for module, target in every_import() if target.split(".")[0] == "cuda"}
    assert len(users) <= 1
    assert all(module.startswith("vmmkv.driver.cuda") for module in users)


def test_nothing_imports_the_folders_at_the_top_by_their_short_names() -> None:
    """A package named `kernels` on the path breaks several releases of transformers; ours is vmmkv_kernels."""
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
    assert readers == ["vmmkv_server.models"]


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
        ("vmmkv_server", {"torch", *SERVER_EXTRA}),
        ("vmmkv_server.llm", {"pydantic", "fastapi", "starlette", "uvicorn", "zmq"}),
        ("vmmkv_server.launch", {"torch"}),
    ],
)
def test_a_module_imports_nothing_that_it_can_do_without(module: str, absent: set[str]) -> None:
    """torch takes three seconds and 200 MiB; the command line works without the server extra, LLM without HTTP packages."""
    code = f"import sys, {module}; sys.exit(bool(set(sys.modules) & {absent!r}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=120).returncode == 0


def test_the_server_package_names_what_it_offers() -> None:
    import vmmkv_server

    assert "LLM" in dir(vmmkv_server)
    with pytest.raises(ImportError, match="Enigne"):
        from vmmkv_server import Enigne  # type: ignore[attr-defined]  # noqa: F401


def test_a_missing_package_is_one_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import vmmkv_server

    def absent(module: str) -> None:
        raise ModuleNotFoundError("No module", name="xgrammar")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ImportError, match=r"^LLM needs xgrammar.* in a checkout: pip install '\.\[server,hf\]'$") as caught:
        vmmkv_server.LLM  # noqa: B018
    assert caught.value.__suppress_context__
