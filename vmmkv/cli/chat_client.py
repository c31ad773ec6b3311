"""What `vmmkv chat` asks of a server, over plain HTTP: its model's name, and an answer as it comes."""

import http.client
import json
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, Final
from urllib.parse import urlsplit

_CONNECT_S: Final = 10.0
"""To connect; an answer may take as long as it takes."""


class ServerError(Exception):
    """No server answers there, or it refused what was asked: the message is for whoever asked."""


class ChatClient:
    """One server, by its address with or without `/v1`; each request has a connection of its own."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises: ValueError if that is no address, or no key; the key is in no message."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url!r} is no address; write it as http://127.0.0.1:8000")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._path = urlsplit(self._url).path
        self._headers = {"Content-Type": "application/json"}
        if api_key := (api_key or "").strip():  # a variable that was read from a file may end its line
            if not re.fullmatch(r"[\x21-\x7e]+", api_key):
                raise ValueError("--api-key has spaces, or what is no ASCII, in it: no server has such a key")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port

    def model(self) -> str:
        """The name of the first model that it serves. Raises: ServerError."""
        with closing(self._connect()) as connection:
            found = json.loads(self._ask(connection, "GET", "/v1/models", None).read())
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(f"{self._url} serves no model that it names; is it an OpenAI-shaped server?") from error

    def answer(self, model: str, messages: Sequence[dict[str, str]], **sampling: float) -> Generator[str, None, None]:
        """The assistant's next turn, piece by piece. To leave the iterator is to hang up, and the server stops then.

        `sampling` is what else the request has, such as `temperature`.
        Raises: ServerError, also in the middle of an answer.
        """
        body = json.dumps({"model": model, "messages": list(messages), "stream": True, **sampling}).encode()
        with closing(self._connect()) as connection:
            response = self._ask(connection, "POST", "/v1/chat/completions", body)
            try:
                for line in response:
                    data = line.decode().strip().removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if data and not data.startswith(":"):
                        yield from _pieces(json.loads(data))
            except (OSError, http.client.HTTPException) as error:
                raise ServerError(f"the connection broke: {error}") from error
            raise ServerError("the answer has no end: the server went away")

    def _connect(self) -> http.client.HTTPConnection:
        return self._kind(self._host, self._port, timeout=_CONNECT_S)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        try:
            connection.connect()
            connection.sock.settimeout(None)
            connection.request(method, f"{self._path}{path}", body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"no server answers at {self._url} ({error}); start one with `vmmkv serve`") from error
        if response.status != 200:
            raise ServerError(_refusal(response.status, response.read()))
        return response


def _pieces(event: Any) -> Iterator[str]:
    if "error" in event:
        raise ServerError(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", ()):
        if text := choice.get("delta", {}).get("content"):
            yield str(text)


def _refusal(status: int, body: bytes) -> str:
    """What a server said of itself, in OpenAI's shape if it has that."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace").strip() or http.client.responses.get(status, "no reason given")
    hint = "; give its key with --api-key or VMMKV_API_KEY" if status in (401, 403) else ""
    return f"{message} (status {status}){hint}"
