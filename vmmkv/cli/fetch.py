"""`vmmkv fetch`: bring a known model to this machine."""

import argparse

SUMMARY = "download a known model, convert it once, and print its directory"

EXAMPLES = """\
examples:
  vmmkv fetch smollm2-135m            nothing is done if it is there and whole
  vmmkv fetch smollm2-135m --verify   hash its weights too
  vmmkv fetch smollm2-135m --force    download and convert it again

An interrupted fetch goes on from what it had verified. Other models need no fetching: give `vmmkv serve --model` a
directory in transformers' format, or a hub name.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe this command's options."""
    parser.add_argument("model", metavar="MODEL", help="the model's name: smollm2-135m")
    parser.add_argument(
        "--verify", action="store_true", help="hash every file of a model that is there, not only the small ones"
    )
    parser.add_argument("--force", action="store_true", help="fetch and convert it even if it is there")


def run(arguments: argparse.Namespace) -> int:
    """Fetch; the directory goes to stdout, progress to stderr."""
    from vmmkv.config import read_environment
    from vmmkv.server.fetch import fetch
    from vmmkv.server.models import KNOWN_MODELS

    if arguments.model not in KNOWN_MODELS:
        raise ValueError(
            f"no model {arguments.model!r} to fetch; there is {', '.join(KNOWN_MODELS)}. A directory or a hub name is given to "
            "`vmmkv serve --model` as it is"
        )
    cache_dir = read_environment().cache_dir
    print(fetch(KNOWN_MODELS[arguments.model], cache_dir=cache_dir, force=arguments.force, thorough=arguments.verify))
    return 0
