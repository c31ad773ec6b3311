"""deploy/nginx.conf in front of the server: answers, streams, limits."""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.support import Running, eventually, running_server

CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not (shutil.which("nginx") or Path("/usr/sbin/nginx").exists()), reason="nginx is not installed"),
]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Running]]:
    """The address of an nginx, and the server behind it."""
    folder = tmp_path_factory.mktemp("nginx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running_server(sockets=True) as server:
        site = (
            CONFIG.read_text().replace("listen 443 ssl;", f"listen 127.0.0.1:{port};").replace("llm.example.org;", "localhost;")
        )
        site = site.replace("127.0.0.1:8000", server.url.removeprefix("http://"))
        site = "\n".join(line for line in site.splitlines() if "ssl_certificate" not in line)
        temporary = "".join(
            f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        config = folder / "nginx.conf"
        config.write_text(
            f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
            f"http {{\naccess_log off;\n{temporary}{site}\n}}\n"
        )
        nginx = shutil.which("nginx") or "/usr/sbin/nginx"
        with subprocess.Popen([nginx, "-c", config, "-e", folder / "error.log"]) as process:
            try:
                url = f"http://127.0.0.1:{port}"

                def answers() -> bool:
                    try:
                        return httpx.get(f"{url}/health").status_code == 200
                    except httpx.TransportError:
                        return False

                assert eventually(answers), (folder / "error.log").read_text()
                yield url, server
            finally:
                process.terminate()


BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


def test_answers_and_streams_pass_the_proxy(proxied: tuple[str, Running]) -> None:
    url, _ = proxied
    whole = httpx.post(f"{url}/v1/chat/completions", json=BODY)
    assert whole.status_code == 200 and len(whole.headers["x-request-id"]) == 32
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole.json()["choices"][0]["message"]["content"]


def test_a_large_body_and_a_flood_are_refused_by_the_proxy(proxied: tuple[str, Running]) -> None:
    url, _ = proxied
    large = httpx.post(f"{url}/v1/chat/completions", content=b"x" * (17 << 20))
    assert large.status_code == 413
    with httpx.Client() as client:
        codes = [client.get(f"{url}/version").status_code for _ in range(60)]
    assert 429 in codes and 200 in codes
