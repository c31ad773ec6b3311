"""`vmmkv doctor`: which uses of vmmkv work in another engine that is installed."""

from pathlib import Path
from typing import Annotated, Literal

import typer

SUMMARY = "say which uses of vmmkv work in the vLLM that is installed, and why others do not"

EXAMPLES = """\
examples:
  vmmkv doctor vllm                    the vLLM that this Python would import
  vmmkv doctor vllm --path ./packages  the one in a folder of packages

vLLM's sources are read, and nothing of them is run. Exit status 0 if the KV
connector works, 1 if not. The connector makes the same check when it starts.
"""


def run(
    engine: Annotated[Literal["vllm"], typer.Argument(metavar="ENGINE", help="the engine: vllm", show_default=False)],
    path: Annotated[
        Path | None,
        typer.Option("--path", metavar="DIR", help="a folder of packages with it, such as site-packages", show_default=False),
    ] = None,
) -> int:
    """Print a line for each use of vmmkv in an engine."""
    from vmmkv.adapters.vllm.hooks import examine, packages_with_vllm, trial_of, version_of

    if path is not None and not (path / engine).is_dir():
        raise typer.BadParameter(f"{path} has no folder {engine}; give a folder of packages, such as site-packages")
    packages = path or packages_with_vllm()
    if packages is None:
        raise ValueError("this Python has no vLLM; run it in vLLM's environment, or give --path a folder of packages")
    verdicts = examine(packages)
    version = version_of(packages)
    print(f"vLLM {version} in {packages / engine}")
    print(f"  {trial_of(version) or 'vmmkv has not been tried with it: a yes says that its names match'}")
    for each in verdicts:
        print(f"  {each.name:20} {'yes' if each.works else 'no':4} {each.reason}")
    return 0 if verdicts[0].works else 1
