"""Laws of a bad day: clients that leave at random moments, and more bodies than may be held."""

import asyncio
import collections
import random

import httpx
import pytest

from tests.server.fake_engine import ready_with
from tests.server.support import Running, eventually, running_server
from vmmkv_server.config import ServeConfig
from vmmkv_server.http.limits import MAX_BODIES

pytestmark = pytest.mark.nightly

NUM_LEAVING = 500


def nothing_is_left(server: Running) -> bool:
    """Neither here nor in the engine."""
    return (
        server.service.queue.num_sequences == 0
        and server.client.waiting_tokens == 0
        and server.client.num_unfinished == 0
        and not server.engine.running
        and server.engine.aborted() <= {request.request_id for request in server.generates}
    )


def test_after_500_clients_that_left_at_random_moments_nothing_is_left_of_them() -> None:
    ready = ready_with(model_tokens=100_000, pool_tokens=100_000)
    with running_server(ready=ready, front=ServeConfig(max_queued_requests=NUM_LEAVING), sockets=True) as server:
        server.engine.endless, server.engine.step_s = True, 0.005
        chance = random.Random(1)

        async def leave(index: int) -> None:
            """Without a word, at any moment from before the request is sent to after its answer."""
            host, port = server.url.removeprefix("http://").split(":")
            is_whole = index % 5 != 0
            # These leave in the middle however slowly all are served: they have had something, and would never have it all.
            goes_on = is_whole and index % 8 in (2, 4, 6)
            asked = {"model": "tiny", "prompt": f"client {index}", "stream": index % 2 == 0}
            asked["max_tokens"] = 90_000 if goes_on else 100
            content = httpx.Request("POST", "http://x", json=asked).content
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            data = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
            await asyncio.sleep(chance.random())
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data if is_whole else data[: chance.randrange(len(data))])
            if goes_on:
                await reader.read(1000)
            try:
                async with asyncio.timeout(chance.random() ** 2):
                    while await reader.read(1000):
                        pass
            except TimeoutError:
                pass
            writer.transport.abort()

        async def storm() -> None:
            await asyncio.gather(*(leave(index) for index in range(NUM_LEAVING)))

        asyncio.run(storm())
        assert eventually(lambda: nothing_is_left(server))
        assert len(server.engine.aborted()) > NUM_LEAVING // 4, "hardly any client left in the middle"
        server.engine.endless = False
        assert server.complete(prompt="abc").json()["choices"][0]["text"] == "abc"


def test_a_flood_of_large_bodies_is_held_in_bounded_memory() -> None:
    """Ten times as much as may be held, sent at once by clients that do not finish."""
    size_bytes = 1 << 20
    with running_server(front=ServeConfig(max_body_bytes=size_bytes), sockets=True) as server:
        sent_bytes = size_bytes - (1 << 16)
        num_clients, num_held = 160, MAX_BODIES * size_bytes // sent_bytes
        num_refused = 0

        async def send(stop: asyncio.Event) -> int:
            nonlocal num_refused
            host, port = server.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            chunk = b"a" * 65_536
            for _ in range(sent_bytes // len(chunk)):
                writer.write(b"10000\r\n" + chunk + b"\r\n")
                await asyncio.sleep(0.001)
                if writer.transport.is_closing():
                    break
            refused = asyncio.create_task(reader.read(12))
            stopped = asyncio.create_task(stop.wait())
            done, _ = await asyncio.wait((refused, stopped), return_when=asyncio.FIRST_COMPLETED)
            status = int(refused.result()[9:12] or b"0") if refused in done else 0
            num_refused += status == 429
            if num_refused == num_clients - num_held:  # all that are to be; only a server that holds too much is waited for
                stop.set()
            refused.cancel()
            writer.transport.abort()
            return status

        async def flood() -> list[int]:
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(60, stop.set)
            return await asyncio.gather(*(send(stop) for _ in range(num_clients)))

        statuses = asyncio.run(flood())
        held = statuses.count(0)
        assert 0 < held <= num_held + 1, collections.Counter(statuses)
        assert statuses.count(429) == len(statuses) - held
        assert eventually(lambda: server.http.get("/health").status_code == 200)
        assert server.complete(prompt="abc").json()["choices"][0]["text"] == "abc"
