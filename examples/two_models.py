"""Two models on one GPU: two caches share one pool.

    python examples/two_models.py

A static split would give each model half of the memory, whatever its load. Here a cache takes pages as its sequences grow.
Under pressure, parked sequences of either cache are evicted; running sequences are not.
"""

import torch

from vmmkv import MIB, Evicted, KVCache, KVLayout, OutOfPages, Pool, Sequence

BUDGET_BYTES = 48 * MIB
LARGE = KVLayout.uniform(layers=16, kv_heads=8, head_dim=64, dtype=torch.bfloat16)  # 32 KiB a token: 64 in a page
SMALL = KVLayout.uniform(layers=8, kv_heads=2, head_dim=64, dtype=torch.float16)  # 4 KiB a token: 512 in a page


def write(cache: KVCache, sequence: Sequence, num_tokens: int) -> None:
    """Write keys and values as a model would. All numbers are the slot's, so that they can be checked later."""
    sequence.grow(num_tokens)
    for layer in cache.layout.group_of:
        for view in (sequence.k(layer), sequence.v(layer)):
            view[sequence.length : num_tokens] = float(sequence.slot)
    sequence.advance(num_tokens - sequence.length)


def show(pool: Pool, when: str, **caches: KVCache) -> None:
    """Print the memory of each cache."""
    mapped = {name: cache.stats().mapped_bytes for name, cache in caches.items()}
    parts = ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in mapped.items())
    print(f"{when}: {parts}; {(pool.budget_bytes - pool.held_bytes) / MIB:.0f} of {pool.budget_bytes / MIB:.0f} MiB are left")
    assert pool.created_bytes <= BUDGET_BYTES


def main() -> None:
    """First the large model takes most of the memory, then the small one."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with (
        Pool(device, BUDGET_BYTES) as pool,
        KVCache(LARGE, pool, slots=8, max_tokens=8192) as large,
        KVCache(SMALL, pool, slots=8, max_tokens=65536) as small,
    ):
        chats = [large.open() for _ in range(5)]
        for chat in chats:
            write(large, chat, 250)  # 4 pages
        write(small, helper := small.open(), 1000)  # 2 pages
        show(pool, "the large model is asked", large=large, small=small)

        kept = [chat.park() for chat in chats[1:]]  # answered; kept for the next turn of each chat
        write(small, helper, 8000)  # 16 pages in all: three parked chats go, the oldest first
        show(pool, "the small model is asked", large=large, small=small)
        assert all((helper.k(layer)[:8000] == helper.slot).all() for layer in small.layout.group_of)

        try:
            large.adopt(kept[0])
        except Evicted as error:
            print(f"  gone, and to be computed again: {error}")
        else:
            raise AssertionError("the oldest parked sequence was to make room")
        again = large.adopt(kept[-1])
        assert (again.k(3)[:250] == again.slot).all()
        print(f"  still there: the newest chat, {again.length} tokens, without a copy")

        try:
            write(small, helper, 12_000)  # 24 pages: all there are, and two sequences of the large model run
        except OutOfPages as error:
            print(f"  refused, and nothing has changed: {error}")
        assert helper.length == 8000

        helper.close()
        write(large, chats[0], 900)
        show(pool, "the large model is asked again", large=large, small=small)
        large.check()
        small.check()


if __name__ == "__main__":
    main()
