"""What an administrator may ask of an engine that runs: forget its prefixes, have another budget."""

import logging

from vmmkv import VmmkvError
from vmmkv.server.engine.loading import Loaded
from vmmkv.server.engine.memory import SlotsInPool
from vmmkv.server.protocol import Forget, Managed, Resize
from vmmkv.units import format_bytes

log = logging.getLogger(__name__)


def manage(loaded: Loaded, message: Forget | Resize) -> Managed:
    """Do it between two steps, and say what there is then; what cannot be done changes nothing.

    Cost: a release for each page that goes back to the device; may wait for the steps under way.
    """
    engine, memory, error = loaded.engine, loaded.memory, None
    before = engine.cache.stats()
    try:
        match message:
            case Forget():
                engine.forget()
            case Resize(budget_bytes=budget_bytes):
                assert isinstance(memory, SlotsInPool), "the server's engine has a pool"
                memory.resize(budget_bytes)
                engine.budget_changed()
                log.info("KV cache: %s from now on, %s tokens in all", format_bytes(memory.budget_bytes), memory.num_tokens)
    except VmmkvError as failure:
        error = str(failure)
    after = engine.cache.stats()
    return Managed(
        error=error,
        freed_bytes=max(0, before.pool_held_bytes - after.pool_held_bytes),
        budget_bytes=memory.budget_bytes,
        pool_tokens=memory.num_tokens,
    )
