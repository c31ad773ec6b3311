"""`vmmkv chat`: a conversation with an OpenAI-compatible server, in the terminal."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
from rich.console import Console
from typer import Option

from vmmkv.cli import printable
from vmmkv_server.config import API_KEY_VARIABLE, URL_VARIABLE

SUMMARY = "talk to a running server, in the terminal"
EXAMPLES = """\
examples:
  vmmkv chat                            with `vmmkv serve` on this machine
  vmmkv chat --url http://gpu-box:8000 --system "Be brief." --temperature 0.7
  VMMKV_API_KEY=... vmmkv chat --url https://example.org  # `ps` shows flags, not variables
in the conversation: /reset forgets all but the system message, /exit or Ctrl-D leaves, Ctrl-C stops the answer
"""
_OUT, _ERRORS = (Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True) for stderr in (False, True))


def run(
    url: Annotated[str, Option(envvar=URL_VARIABLE, help="the server's address")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, Option(envvar=API_KEY_VARIABLE, help="if the server asks for one", show_default=False)] = "",
    system: Annotated[str, Option(help="a system message, to begin with", show_default="none")] = "",
    temperature: Annotated[float, Option(min=0, max=2, help="0 for the likeliest tokens")] = 0.0,
    top_p: Annotated[float | None, Option(min=0.001, max=1, help="sample from this much of the probability")] = None,
    max_tokens: Annotated[int, Option(min=1, help="of an answer at most")] = 512,
    seed: Annotated[int | None, Option(help="equal seeds give equal answers")] = None,
) -> int:
    """Read messages and print answers until the input ends. Options that are None are the server's."""
    if not re.match(r"https?://[^/]", url):
        raise ValueError(f"--url {url!r} is no address; write it as http://127.0.0.1:8000")
    if not re.fullmatch(r"[\x21-\x7e]*", api_key := api_key.strip()):
        raise ValueError("--api-key has spaces, or what is no ASCII, in it: no server has such a key")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (history for `input`)
    options = {"stream": True, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    body: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    headers = {"Connection": "close"}  # else the server closes it while the next message is typed
    headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base, timeout = url.rstrip("/").removesuffix("/v1"), httpx.Timeout(None, connect=10)
    try:
        client = httpx.Client(base_url=base, headers=headers, timeout=timeout)
        body["model"] = str(json.loads("".join(_lines(client, "GET", "/v1/models")))["data"][0]["id"])
    except (httpx.InvalidURL, ImportError, LookupError, TypeError) as error:  # ImportError: of a proxy's protocol
        raise ValueError(f"{url} cannot be used, or names no model ({error}); is it an OpenAI-compatible server?") from error
    _OUT.print(printable(f"{body['model']} at {url}; /reset forgets, /exit leaves, Ctrl-C stops an answer"), style="dim")
    messages = opening = [{"role": "system", "content": system}] if system else []
    with contextlib.closing(client), contextlib.suppress(EOFError):
        while (said := input("> ").strip()) != "/exit":
            if said == "/reset":
                messages = opening
                _OUT.print("forgotten", style="dim")
            elif said.startswith("/"):
                _ERRORS.print(f"there is no {said.split()[0]}; there are /reset and /exit")
            elif said:
                messages = _exchange(client, body | {"messages": [*messages, {"role": "user", "content": said}]}) or messages
    _OUT.print("bye", style="dim")  # Ctrl-D left the cursor behind the prompt
    return 0


def _exchange(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, str]]:
    """Print the answer as it comes. Returns the messages with it; an empty list if the server failed."""
    answer, is_cut, is_behind_reasoning = "", False, False
    try:
        for line in _lines(client, "POST", "/v1/chat/completions", body):
            field, _, data = line.partition(":")  # without a field it is a comment
            if (data := data.strip()) == "[DONE]":
                break
            event = json.loads(data) if field == "data" and data.startswith("{") else {}
            if "error" in event:
                raise ValueError(printable(str(event["error"].get("message", event["error"]))))
            for choice in event.get("choices", ()):
                delta = choice.get("delta", {})
                is_cut |= choice.get("finish_reason") == "length"
                if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
                    _OUT.print(printable(reasoning), end="", style="dim")
                    is_behind_reasoning = True
                if piece := delta.get("content") or "":
                    print("\n" * is_behind_reasoning + printable(piece), end="", flush=True)
                    answer, is_behind_reasoning = answer + piece, False
        else:
            raise ValueError("the answer has no end: the server went away")
        print()
        if is_cut:
            _OUT.print(f"(cut at {body['max_tokens']} tokens; --max-tokens)", style="dim")
    except KeyboardInterrupt:
        _OUT.print(" [stopped]", style="dim")
    except ValueError as error:
        _ERRORS.print(f"{answer and chr(10)}{error}", style="red")
        return []
    return [*body["messages"], {"role": "assistant", "content": answer}]


def _lines(client: httpx.Client, method: str, path: str, body: Any = None) -> Iterator[str]:
    """The lines of a response as they come. Raises: ValueError for a server that does not answer, or refuses."""
    try:
        with client.stream(method, path, json=body) as response:
            if response.status_code != 200:
                text = response.read().decode(errors="replace")
                with contextlib.suppress(ValueError, LookupError, TypeError):
                    text = json.loads(text)["error"]["message"]
                hint = "; give its key with --api-key or VMMKV_API_KEY" if response.status_code in (401, 403) else ""
                raise ValueError(printable(f"{text or response.reason_phrase} (status {response.status_code}){hint}"))
            held = ""
            for text in response.iter_text():  # iter_lines would split at U+2028 too, which JSON does not escape
                *lines, held = (held + text).split("\n")
                yield from lines
            yield held
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ValueError(
            f"no server answers at {client.base_url} ({error}); start one with `vmmkv serve`, or name another with --url"
        ) from error
    except httpx.HTTPError as error:
        raise ValueError(f"the connection broke: {error}") from error
