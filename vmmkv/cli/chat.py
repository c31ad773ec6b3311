"""`vmmkv chat`: a conversation with a running server, in the terminal."""

import contextlib
from collections.abc import Mapping
from typing import Annotated, Final

import typer
from rich.console import Console

from vmmkv.cli.chat_client import ChatClient, ServerError
from vmmkv.server.config import API_KEY_VARIABLE, URL_VARIABLE
from vmmkv.server.console import DeferredInterrupt

SUMMARY = "talk to a running server, in the terminal"

EXAMPLES = """\
examples:
  vmmkv chat                            with `vmmkv serve` on this machine
  vmmkv chat --url http://gpu-box:8000 --system "Be brief."
  vmmkv chat --temperature 0            always the likeliest token
  VMMKV_API_KEY=... vmmkv chat --url https://example.org
                                        `ps` shows flags, and no variables

in the conversation:
  /reset   forget what was said, but for the system message
  /exit    leave; so does Ctrl-D
  Ctrl-C   stop the answer; what it has said so far stays
"""

_PROMPT: Final = "> "
_SERVERS: Final[Mapping[str, str]] = {"show_default": "the server's"}


def run(
    url: Annotated[
        str, typer.Option(envvar=URL_VARIABLE, metavar="URL", help="the server's address")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar=API_KEY_VARIABLE, metavar="KEY", help="if the server asks for one", show_default=False)
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="a system message, to begin with", show_default="none")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=2, metavar="X", help="0 for the likeliest tokens, above 1 for odd ones", **_SERVERS),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1,
            metavar="P",
            help="draw from the likeliest tokens that have so much of the chance",
            **_SERVERS,
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="of an answer at most", **_SERVERS)] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="equal ones give equal answers", **_SERVERS)] = None,
) -> int:
    """Talk until the input ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (from now on `input` has a history, and lines can be edited)

    console, errors = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    client = ChatClient(url, api_key)
    try:
        model = client.model()
    except ServerError as error:
        raise ValueError(printable(str(error))) from error
    hello = f"{printable(model)} at {url}; /reset forgets, /exit leaves, Ctrl-C stops an answer"
    console.print(hello, style="dim", markup=False)
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    given = {name: value for name, value in sampling.items() if value is not None}
    Conversation(client, model, system, console, errors, given).go_on()
    return 0


class Conversation:
    """What was said, who hears what comes next, and how tokens of answers are chosen."""

    def __init__(
        self,
        client: ChatClient,
        model: str,
        system: str | None,
        console: Console,
        errors: Console,
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        self._client, self._model, self._console, self._errors = client, model, console, errors
        self._sampling = dict(sampling or {})
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = self._opening.copy()

    def go_on(self) -> None:
        """Read and answer, until /exit or the end of the input."""
        while True:
            try:
                said = input(_PROMPT).strip()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print("\n/exit leaves", style="dim")
                continue
            if said == "/exit":
                return
            if said == "/reset":
                self.messages = self._opening.copy()
                self._console.print("forgotten", style="dim")
            elif said.startswith("/"):
                self._errors.print(f"there is no {said.split()[0]}; there are /reset and /exit", markup=False)
            elif said:
                self._answer(said)

    def _answer(self, said: str) -> None:
        """One exchange. What the server refused was not said: the next attempt begins where this one did."""
        messages = [*self.messages, {"role": "user", "content": said}]
        answer = ""
        try:
            with contextlib.closing(self._client.answer(self._model, messages, **self._sampling)) as pieces:
                for piece in pieces:
                    with DeferredInterrupt():  # a console that stops within a piece prints nothing more, ever
                        answer += piece
                        self._console.print(printable(piece), end="", markup=False)
        except KeyboardInterrupt:
            self._console.print(" [stopped]", style="dim", markup=False, end="")
        except ServerError as error:
            if answer:
                self._console.print()
            self._errors.print(printable(str(error)), style="red", markup=False)
            return
        self._console.print()
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def printable(text: str) -> str:
    """Without what would move the cursor or change the terminal: what a model says is not trusted, nor a server."""
    return "".join(one for one in text if one.isprintable() or one in "\n\t")
