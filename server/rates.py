"""What the engine did in a while, from two of its snapshots; and the line that says so in the log."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Final, Self

from vmmkv.server.client import EngineClient
from vmmkv.server.protocol import Snapshot

EVERY_S: Final = 10.0
"""Between two lines of the log, while something happens."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Between two moments."""

    generated_per_s: float
    """Tokens."""
    prompt_per_s: float
    """Tokens of prompts computed."""
    hit_rate: float | None
    """Of the prompt tokens that began in this while, the share that was known; None if none began."""

    @classmethod
    def between(cls, old: Snapshot, new: Snapshot, took_s: float) -> Self:
        """Of two snapshots, `took_s` apart."""
        took_s = max(took_s, 1e-3)
        hits = new.prefix_hit_tokens - old.prefix_hit_tokens
        asked = hits + new.prefix_missed_tokens - old.prefix_missed_tokens
        return cls(
            generated_per_s=(new.generated_tokens - old.generated_tokens) / took_s,
            prompt_per_s=(new.prompt_tokens - old.prompt_tokens) / took_s,
            hit_rate=hits / asked if asked else None,
        )


async def tell(engine: EngineClient, *, every_s: float = EVERY_S) -> None:
    """Log a line every so often, for ever; none where nothing ran, waited or was computed since the last one."""
    last = engine.snapshot
    while True:
        await asyncio.sleep(every_s)
        new = engine.snapshot
        if last is not None and new is not None and (new.running or new.waiting or _has_worked(last, new)):
            rates = Rates.between(last, new, every_s)
            told = {
                "running": new.running,
                "waiting": new.waiting,
                "generated_tok_s": round(rates.generated_per_s, 1),
                "prompt_tok_s": round(rates.prompt_per_s, 1),
                "kv_used": round(new.kv_used_bytes / max(1, new.kv_budget_bytes), 3),
            }
            hits = {} if rates.hit_rate is None else {"prefix_hit_rate": round(rates.hit_rate, 3)}
            log.info("serving", extra=told | hits)
        last = new


def _has_worked(old: Snapshot, new: Snapshot) -> bool:
    return (new.generated_tokens, new.prompt_tokens) != (old.generated_tokens, old.prompt_tokens)
