"""The command line: parsing, and errors of all commands."""

import functools
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Annotated, Final, NoReturn

import typer
from rich.markup import escape

from vmmkv.cli import chat, doctor, fetch, hold, plan, resize, serve
from vmmkv.errors import VmmkvError
from vmmkv_server.console import end

DESCRIPTION = """\
KV-cache memory for LLM inference: each sequence has one contiguous range of addresses, and physical memory is mapped
under it as it grows."""

EXAMPLES = """\
examples:
  vmmkv serve                                   serve SmolLM2-135M on http://127.0.0.1:8000
  vmmkv chat                                    talk to it
  vmmkv plan --model ./my-model --memory 80GiB  how many sequences fit
  vmmkv hold --socket ./kv.sock --budget 64GiB  own KV memory that outlives the engine
  vmmkv resize /run/kv.sock 8GiB                what an elastic engine under vLLM may map
  vmmkv fetch smollm2-135m                      bring the small model here, and print where it is
  vmmkv doctor vllm                             what works in the vLLM that is installed

environment:
  VMMKV_CACHE_DIR   where fetched models are kept (default: ~/.cache/vmmkv)
  VMMKV_...         every option of serve: see vmmkv serve --help
"""

_COMMANDS: Final = (serve, chat, plan, fetch, hold, resize, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 for an error that was printed, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        _app()(args=None if argv is None else list(argv), prog_name="vmmkv")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    raise AssertionError("every command ends with a status")


def command() -> NoReturn:
    """Run `vmmkv` as a process."""
    end(main())


def _app() -> typer.Typer:
    app = typer.Typer(
        help=DESCRIPTION,
        epilog=escape(EXAMPLES),
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    app.callback()(_all_commands)
    for module in _COMMANDS:
        name = module.__name__.rpartition(".")[2]
        app.command(name, help=module.SUMMARY, epilog=escape(module.EXAMPLES))(_guarded(name, module))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            version = importlib.metadata.version("vmmkv")
        except importlib.metadata.PackageNotFoundError:
            version = "(a checkout that is not installed)"
        print(f"vmmkv {version}")
        raise typer.Exit(0)


def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Take the options of `vmmkv` itself."""


def _guarded(name: str, module: ModuleType) -> Callable[..., None]:
    """Wrap a command: its errors are a line each, and its status is the process's."""

    @functools.wraps(module.run)
    def run(*args: object, **options: object) -> None:
        try:
            status: int = module.run(*args, **options)
        except (VmmkvError, ValueError) as error:
            print(f"vmmkv {name}: {error}", file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            print(f"\nvmmkv {name}: interrupted", file=sys.stderr)
            status = 130
        raise typer.Exit(status)

    return run
