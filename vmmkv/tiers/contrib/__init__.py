"""Tiers over the clients of stores: a module each, found by its entry point in pyproject.toml, and deletable with that.

redis      RedisTier: a Redis or Valkey server
mooncake   MooncakeTier: a Mooncake store
"""
