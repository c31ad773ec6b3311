"""Tiers over the clients of stores: a module each, found by its entry point in pyproject.toml, and deletable with that.

redis      RedisTier: a Redis or Valkey server
mooncake   MooncakeTier: a Mooncake store

To add one: a module here with a `SharedTier` (`vmmkv/tiers/shared.py`); its name in the door of `vmmkv.tiers`; its entry point
in pyproject.toml, and there an extra for its client, pinned in constraints.txt and installed by the Makefile; a starter of its
server in `tests/stores.py`, a line in `STORES` of `tests/laws/test_tiers.py`, `tests/laws/test_NAME.py` with `StoreLaws`, and
its entry in `ROOMS` of `tests/deletable.py`; the help of `kv_store` in `vmmkv_server/config.py`, the table of
`docs/guides/tiers.md`, and `docs/reference/prefix.md`.
"""
