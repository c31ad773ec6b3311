"""Parts that the scripts of clients share: the server, a tool of few words, and steps that are reported as lines of JSON."""

import contextlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from typing import Literal

URL, KEY, MODEL = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ["MODEL"]
PROMPT = "What is the weather in Paris?"
COPY = os.environ["COPY"]
"""A prompt that a small model answers with a call, for it copies one."""
MAX_TOKENS = 40
City = Literal["Paris", "Oslo"]
WEATHER = {"Paris": "sunny", "Oslo": "snow"}


class WeakModelError(Exception):
    """The model was free to answer so, and a better one would not have."""


@contextlib.contextmanager
def step(client: str, name: str, *weak: type[Exception]) -> Iterator[None]:
    """Report the block as a step of a client. By the exceptions `weak` the client says that the model answers badly."""
    ok, is_weak, why = True, False, ""
    try:
        yield
    except Exception as error:
        ok, is_weak, why = False, isinstance(error, (WeakModelError, *weak)), f"{type(error).__name__}: {error}"
    report = {"client": client, "version": version(client), "step": name, "ok": ok, "weak": is_weak, "why": why}
    print("", json.dumps(report), sep="\n", flush=True)  # clients print without an end of line


def wanted(is_so: object, what: str) -> None:
    """A small model need not come this far; a good one does."""
    if not is_so:
        raise WeakModelError(what)
