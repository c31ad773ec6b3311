"""The engine process: `python -m vmmkv_server.engine --socket ADDRESS`, started by `vmmkv serve`.

Its input is an EngineConfig as JSON, whose model is a directory: no other user of this machine sees that.

Exit codes: 0 it was asked to finish; 1 it could not start; `LOST` its device's context is lost, or another rank.
"""

import argparse
import gc
import logging
import math
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec
import zmq

from vmmkv import VmmkvError
from vmmkv.units import format_bytes
from vmmkv_server.config import EngineConfig
from vmmkv_server.console import end
from vmmkv_server.engine.administration import SLICE_US, MapMaker, manage
from vmmkv_server.engine.errors import EngineDied
from vmmkv_server.engine.loading import Loaded, current, load
from vmmkv_server.logs import configure_logging
from vmmkv_server.protocol import LOST, AskMap, FromEngine, LoadFailed, Manage, Shutdown, decode_to_engine, encode

log = logging.getLogger("vmmkv_server.engine")

_CHECK_MS: Final = 1000
"""While there is no work, the time between two looks at the other ranks and the holder of the memory."""

STORE_S: Final = 0.5
"""Time for stores to tiers when the engine ends; the server waits a second for it."""


def main() -> int:
    """Load, then loop until told to finish."""
    parser = argparse.ArgumentParser(prog="python -m vmmkv_server.engine", description=__doc__)
    parser.add_argument("--socket", required=True, help="the ZeroMQ address that the HTTP process has bound")
    arguments = parser.parse_args()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    configure_logging(config.log_level, config.log_format)
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.connect(arguments.socket)
        try:
            return serve(config, socket)
        except EngineDied as error:
            log.critical("%s", error, exc_info=True)
            return LOST
        except Exception as error:
            log.error("the engine ends: %s: %s", type(error).__name__, error, exc_info=True)
            return 1


def serve(config: EngineConfig, socket: "zmq.Socket[Any]") -> int:
    """Load a model and serve requests from the socket until told to finish. Returns the exit code."""

    def send(message: FromEngine) -> None:
        socket.send(encode(message))

    try:
        loaded = load(config, send)
    except (VmmkvError, ValueError, OSError, EngineDied) as error:
        send(LoadFailed(reason=str(error)))
        log.debug("the engine cannot start", exc_info=True)
        return 1
    send(loaded.ready)
    with current(loaded.memory.device):
        run(loaded, socket, send)
    return 0


def run(loaded: Loaded, socket: "zmq.Socket[Any]", send: Callable[[FromEngine], None]) -> None:
    """Serve requests until told to finish, then give all memory back."""
    loaded.engine.settle()
    collect_what_is_new()
    log.info(
        "KV cache: %s in %s on %s, %s tokens in all; the model runs by the code of %s",
        format_bytes(loaded.ready.limits.budget_bytes),
        loaded.ready.kv_cache_dtype,
        loaded.ready.device,
        loaded.ready.limits.pool_tokens,
        loaded.ready.implementation,
    )
    engine = loaded.engine
    mapper = MapMaker(loaded.memory.cache, engine.request_in, send)
    while receive(loaded, mapper, socket):
        engine.step()
        mapper.work(SLICE_US)
        if not engine.has_work:
            engine.settle()
            mapper.work(math.inf)
    engine.store_all(STORE_S)
    loaded.close()


def collect_what_is_new() -> None:
    """Have garbage collections walk only what is new, not what has been loaded: 0.2 s between two steps for 400,000 objects."""
    gc.callbacks.append(freeze_survivors)
    gc.collect()
    gc.collect()  # a full one is due when new objects are a quarter of what the last one left: this one leaves nothing
    gc.set_threshold(*gc.get_threshold()[:2], 2)


def freeze_survivors(phase: str, info: dict[str, int]) -> None:
    """Freeze what a full garbage collection has left, so that the next one walks only what is new. For `gc.callbacks`.

    The prefix tree grows to hundreds of thousands of objects, and traversing it stops the engine: 0.3 s for 50,000 nodes.
    Frozen objects are freed by their reference counts. A frozen cycle is not freed; requests leave none.
    """
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


def receive(loaded: Loaded, mapper: MapMaker, socket: "zmq.Socket[Any]") -> bool:
    """Take the messages that have come, and wait for one only if there is no work. False when told to finish."""
    engine = loaded.engine
    wait = not engine.has_work
    if wait:
        engine.store_all(wait=lambda: socket.poll(1))
        engine.prepare(wait=lambda: socket.poll(0))
        while not socket.poll(_CHECK_MS):
            if loaded.ranks is not None:
                loaded.ranks.check()
            if engine.holder_is_gone:
                engine.report()
    while wait or socket.poll(0):
        message = decode_to_engine(socket.recv())
        if isinstance(message, Shutdown):
            return False
        if isinstance(message, AskMap):
            mapper.ask()
            if wait:
                mapper.work(math.inf)
                return True  # ranks, holder and stores are looked at again
            continue
        if isinstance(message, Manage):
            socket.send(encode(manage(loaded, message)))
        else:
            engine.receive(message)
        wait = False
    return True


if __name__ == "__main__":
    end(main())
