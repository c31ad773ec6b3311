"""The part `attach`: what it costs to attach a prefix of each length by each method. No model; the rows are random.

Driver time is what the driver's calls take of the host; the device's copies are in the other figure, until the device is idle.
"""

from collections.abc import Callable
from typing import Final

from bench.prefix.context import Context
from bench.prefix.contiguous import Sharing, Vmmkv
from bench.prefix.filling import check_rows, fill
from bench.prefix.systems import TokenIds
from bench.timing import WrongNumbers, now_us
from vmmkv.prefix import AttachMethod

_FIRST_HITS: Final = 3
"""Prefixes in single pages, as tokens that come one by one leave them."""
_LONG_TOKENS: Final = 65536
"""From so many on, one prefix: to fill it takes longer than to attach it."""
_LEAST_SAMPLES: Final = 3
_MOST_SAMPLES: Final = 300
_SPARE_TOKENS: Final = 16
FIRST: Final = "alias, in single pages"
AGAIN: Final = "alias"
_ENDED: Final = ((AGAIN, AttachMethod.ALIAS), ("compute", AttachMethod.COMPUTE))
"""Whose sequences are closed each time; those that adopt are parked again."""


def workload(context: Context, num_tokens: int) -> str:
    """How rows name it."""
    return context.named(f"attach {num_tokens} tokens")


def num_steps(context: Context) -> int:
    """How often `begin` is told."""
    return len(context.sizes.attach_prefixes)


def run(context: Context, begin: Callable[[str], None]) -> None:
    """Every length."""
    for num_tokens in context.sizes.attach_prefixes:
        begin(workload(context, num_tokens))
        with context.guarded(workload(context, num_tokens)):
            max_tokens = num_tokens + _SPARE_TOKENS
            # The source, one that attaches, and some that retire.
            num_pages = 4 * context.pages_for(max_tokens) + 64
            system = context.open_vmmkv(Sharing.CHOOSER, slots=8, max_tokens=max_tokens, num_pages=num_pages)
            try:
                _Attaching(context, system, num_tokens).run()
            finally:
                system.close()


class _Attaching:
    """Prefixes of one length."""

    def __init__(self, context: Context, system: Vmmkv, num_tokens: int) -> None:
        self._context, self._system, self._num_tokens = context, system, num_tokens
        self._prefix = context.tokens(num_tokens, 4)
        self._driver_us: dict[str, list[float]] = {}
        self._whole_us: dict[str, list[float]] = {}
        self._maps: dict[str, list[float]] = {}

    def run(self) -> None:
        """Every method, and its rows."""
        num_prefixes = _FIRST_HITS if self._num_tokens < _LONG_TOKENS else 1
        for number in range(num_prefixes):
            tokens = self._context.tokens(self._num_tokens + 1, 4, number)
            self._prefix = tokens[:-1]
            source = self._fill(page_by_page=True)
            self._end(self._attach(FIRST, tokens, AttachMethod.ALIAS, source))
            self._end(source)
        tokens = self._context.tokens(self._num_tokens + 1, 4, num_prefixes)
        self._prefix = tokens[:-1]
        source = self._fill(page_by_page=False)
        for name, method in _ENDED:
            self._sample(name, tokens, method, source, self._end)
        self._park(self._attach(None, tokens, AttachMethod.ALIAS, source))
        self._sample("adopt", tokens, AttachMethod.ADOPT, source, self._park)
        name = workload(self._context, self._num_tokens)
        for system in self._driver_us:
            self._context.add(name, system, "in the driver", "us", self._driver_us[system])
            self._context.add(name, system, "until the device is done", "us", self._whole_us[system])
            self._context.add(name, system, "maps", "calls", self._maps[system])

    def _fill(self, *, page_by_page: bool) -> int:
        """In single pages, or in large extents where a prompt fills them."""
        context, seed = self._context, self._context.settings.seed
        return fill(self._system, context.shape, context.device, self._prefix, seed=seed, page_by_page=page_by_page)

    def _sample(self, name: str, tokens: TokenIds, method: AttachMethod, source: int, end: Callable[[int], None]) -> None:
        until_us = now_us() + 1e6 * self._context.sizes.attach_seconds
        for number in range(_MOST_SAMPLES):
            if number >= _LEAST_SAMPLES and now_us() > until_us:
                break
            end(self._attach(name, tokens, method, source))

    def _attach(self, name: str | None, tokens: TokenIds, method: AttachMethod, source: int) -> int:
        """Attach, time it under a name, and find it right the first time. Computing needs memory: mapping it is counted."""
        system, context = self._system, self._context
        context.synchronize()
        maps, spent_us, began_us = system.driver.calls["map"], system.driver.spent_us, now_us()
        attached = system.prefix_cache.attach(tokens, max_tokens=len(tokens) + _SPARE_TOKENS - 1, method=method)
        sequence = attached.sequence
        if method is AttachMethod.COMPUTE:
            sequence.grow(self._num_tokens)
        driver_us = system.driver.spent_us - spent_us
        context.synchronize()
        whole_us = now_us() - began_us
        system.sequences[sequence.slot] = sequence
        wanted = 0 if method is AttachMethod.COMPUTE else self._num_tokens
        if attached.method is not method or attached.num_tokens != wanted:
            raise WrongNumbers(f"{attached.num_tokens} tokens attached by {attached.method}; wanted {wanted} by {method}")
        if name is not None:
            if name not in self._driver_us and wanted:
                check_rows(system, context.shape, sequence.slot, source, wanted)
            self._driver_us.setdefault(name, []).append(driver_us)
            self._whole_us.setdefault(name, []).append(whole_us)
            self._maps.setdefault(name, []).append(float(system.driver.calls["map"] - maps))
        return sequence.slot

    def _end(self, slot: int) -> None:
        """Close it, with all that it has mapped."""
        self._system.sequences.pop(slot).close()
        self._context.synchronize()
        self._system.cache.drain()

    def _park(self, slot: int) -> None:
        """End it so that it can be adopted."""
        self._context.synchronize()
        self._system.prefix_cache.park(self._system.sequences.pop(slot), self._prefix)
