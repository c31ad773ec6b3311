"""Laws of the Host header: a page of another site does not reach the server through a browser of its machine."""

import httpx
import pytest

from tests.server.support import Running, running_server
from vmmkv.server.config import FrontConfig
from vmmkv.server.hosts import Hosts

FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "[::1",
    "evil.example:x",
]


@pytest.mark.parametrize("header", [*FOREIGN, "", "a b"])
def test_a_foreign_name_is_refused_and_sees_nothing(server: Running, header: str) -> None:
    for path in ("/", "/health", "/v1/models", "/metrics"):
        refused = httpx.get(f"{server.url}{path}", headers={"Host": header})
        if refused.headers["content-type"].startswith("text/plain"):  # h11 knows that it is none
            assert refused.status_code == 400
            continue
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_host"), path


@pytest.mark.parametrize(
    "header", ["localhost", "LOCALHOST:80", "localhost.", "a.localhost:1", "127.0.0.1:9", "[::1]:8000", "10.1.2.3"]
)
def test_who_calls_by_an_address_or_localhost_is_answered(server: Running, header: str) -> None:
    assert httpx.get(f"{server.url}/v1/models", headers={"Host": header}).status_code == 200


def test_a_name_that_is_allowed_is_answered_and_no_other() -> None:
    with running_server(front=FrontConfig(allowed_hosts=("LLM.example.org",))) as server:
        for header, status in (("llm.example.org:443", 200), ("other.example.org", 403)):
            assert httpx.get(f"{server.url}/health", headers={"Host": header}).status_code == status


def test_beyond_this_machine_any_name_will_do_until_one_is_given() -> None:
    assert Hosts(own="0.0.0.0", listens_here=False).allow(b"any.example")
    assert not Hosts(("one.example",), own="0.0.0.0", listens_here=False).allow(b"any.example")
    assert Hosts(own="my-box").allow(b"my-box:8000"), "the server was told to listen to it"
    assert Hosts().allow(None), "no browser leaves it out"


@pytest.mark.parametrize("name", ["", "*", "http://a.example", "a.example:80", "a b", "-a"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="--allowed-host"):
        FrontConfig(allowed_hosts=(name,))
