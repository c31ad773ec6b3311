"""Parsing the command line, and what every command does with errors."""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from vmmkv.cli import fetch, plan, serve
from vmmkv.errors import VmmkvError

DESCRIPTION = """\
KV-cache memory for LLM inference: each sequence has one contiguous range of addresses, and physical memory is mapped
under it as it grows."""

EXAMPLES = """\
examples:
  vmmkv serve                                   serve SmolLM2-135M on http://127.0.0.1:8000
  vmmkv plan --model ./my-model --memory 80GiB  how many sequences fit
  vmmkv fetch smollm2-135m                      bring the small model here, and print where it is

environment:
  VMMKV_CACHE_DIR   where fetched models are kept (default: ~/.cache/vmmkv)
  VMMKV_LOG_LEVEL   debug, info, warning or error (default: info)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 for an error that was printed, 2 for wrong usage, 130 for Ctrl-C."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except (VmmkvError, ValueError) as error:
        print(f"vmmkv {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nvmmkv {arguments.command}: interrupted", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="vmmkv", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"vmmkv {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (serve, plan, fetch):
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.SUMMARY, epilog=module.EXAMPLES, formatter_class=raw
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("vmmkv")
    except importlib.metadata.PackageNotFoundError:
        return "(a checkout that is not installed)"
