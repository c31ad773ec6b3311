"""Tiers: what goes to them and comes back, what that costs, and what is said of bad input.

That bytes are right under any order of calls and failures is proved in tests/laws.
"""

import pytest
import torch

from tests.unit.support import LAYOUT
from vmmkv import HostTier, KVCache, Pool
from vmmkv.prefix import PrefixCache
from vmmkv.units import PAGE_BYTES

PROMPT = [7 * token % 251 for token in range(100)]


@pytest.fixture
def pool(driver):
    pool = Pool("cpu", 32 * PAGE_BYTES, driver=driver)
    yield pool
    pool.close()
    assert (driver.live_handles, driver.live_mappings) == (0, 0)


@pytest.fixture
def cache(pool):
    with KVCache(LAYOUT, pool, slots=4, max_tokens=512) as cache:
        yield cache
        cache.check()


def write(sequence, tokens):
    """Token t's rows are full of t + 1."""
    sequence.grow(len(tokens))
    start = sequence.length
    rows = torch.tensor(tokens[start:], dtype=torch.float32).view(-1, 1, 1) + 1
    for layer in sequence.cache.layout.group_of:
        sequence.k(layer)[start : len(tokens)] = rows
        sequence.v(layer)[start : len(tokens)] = -rows
    sequence.advance(len(tokens) - start)


def assert_reads(sequence, tokens):
    assert sequence.length == len(tokens)
    rows = torch.tensor(tokens, dtype=torch.float32).view(-1, 1, 1) + 1
    for layer in sequence.cache.layout.group_of:
        k, v = sequence.k(layer)[: len(tokens)], sequence.v(layer)[: len(tokens)]
        assert torch.equal(k, rows.expand_as(k))
        assert torch.equal(v, -rows.expand_as(v))


def compute(prefix, tokens, **options):
    """A prompt is computed and released: its full pages are in the tree."""
    sequence = prefix.attach(tokens, **options).sequence
    write(sequence, tokens)
    prefix.release(sequence, tokens)


@pytest.fixture
def host():
    tier = HostTier(64 * PAGE_BYTES)
    yield tier
    tier.close()


def test_what_is_evicted_comes_back_from_the_host(cache, host):
    prefix = PrefixCache(cache, tiers=[host], fingerprint="model")
    compute(prefix, PROMPT)
    prefix.flush()
    assert prefix.evict() == 6
    assert prefix.match(PROMPT) == 0
    fetch = prefix.fetch(PROMPT)
    assert (fetch.num_tokens, fetch.size_bytes, fetch.done) == (96, 6 * PAGE_BYTES, False)
    prefix.flush()
    assert fetch.done
    cache.check()
    attached = prefix.attach(PROMPT)
    assert attached.num_tokens == 96
    assert_reads(attached.sequence, PROMPT[:96])
