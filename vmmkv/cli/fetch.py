"""`vmmkv fetch`: bring a known model to this machine."""

from typing import Annotated

import typer

SUMMARY = "download a known model, convert it once, and print its directory"

EXAMPLES = """\
examples:
  vmmkv fetch smollm2-135m            nothing is done if it is there and whole
  vmmkv fetch smollm2-135m --verify   hash its weights too
  vmmkv fetch smollm2-135m --force    download and convert it again

An interrupted fetch goes on from what it had verified. Other models need no
fetching: give `vmmkv serve --model` a directory in transformers' format, or a
hub name.
"""


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="the model's name: smollm2-135m", show_default=False)],
    verify: Annotated[
        bool, typer.Option("--verify", help="hash every file of a model that is there, not only the small ones")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="fetch and convert it even if it is there")] = False,
) -> int:
    """Fetch a model; the directory goes to stdout, progress to stderr."""
    from vmmkv.config import read_environment
    from vmmkv_server.config import VARIABLES
    from vmmkv_server.models import KNOWN_MODELS, fetch

    if model not in KNOWN_MODELS:
        raise ValueError(
            f"no model {model!r} to fetch; there is {', '.join(KNOWN_MODELS)}. A directory or a hub name is given to "
            "`vmmkv serve --model` as it is"
        )
    cache_dir = read_environment(others=VARIABLES)
    print(fetch(KNOWN_MODELS[model], cache_dir=cache_dir, force=force, thorough=verify))
    return 0
