"""The tiers of an engine: those that its configuration asks for, and their memory where an engine has several ranks."""

import contextlib
import functools
import logging
from collections.abc import Sequence

import torch

from vmmkv.tier import Tier
from vmmkv.tiers import DiskTier, HostTier, open_store
from vmmkv.units import format_bytes
from vmmkv_server.config import EngineConfig
from vmmkv_server.engine.ranks import Ranks

log = logging.getLogger(__name__)


def opened(config: EngineConfig, device: torch.device, undo: contextlib.ExitStack) -> list[Tier]:
    """The tiers that were asked for, the fastest first. See `open_tiers` of loading."""
    tiers: list[Tier] = []
    for field, open_tier in (
        ("kv_host_budget_bytes", HostTier),
        ("kv_disk_budget_bytes", functools.partial(DiskTier, config.kv_disk or "")),
    ):
        if (budget_bytes := getattr(config, field)) is not None:
            tier = open_tier(budget_bytes, budget_name=field)
            undo.callback(tier.close)
            tier.open(device)
            tiers.append(tier)
            stats = tier.stats()
            log.info(
                "KV tier %s: %s, %s of it held", stats.name, format_bytes(stats.budget_bytes), format_bytes(stats.held_bytes)
            )
    if config.kv_store is not None:
        store = open_store(config.kv_store)
        undo.callback(store.close)
        store.open(device)
        tiers.append(store)
    return tiers


def mirror(tiers: Sequence[Tier], ranks: Ranks) -> None:
    """Give the other ranks memory beside that of the host tier, as large."""
    for tier in tiers:
        assert isinstance(tier, HostTier), "EngineConfig refuses others, which have rows of one rank alone"
        ranks.have_host_memory(tier.address, tier.budget_bytes)
