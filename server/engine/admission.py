"""Whom to let in: the most pressing priority, then the longest known prefix (SGLang), then who came first."""

import numpy as np

from vmmkv.server.engine.kv import Prefixes
from vmmkv.server.engine.ledger import TokenIds
from vmmkv.server.engine.requests import Request

_LOOKED_AT = 32
"""How many of the waiting are looked at for the longest known prefix."""

_MOST_OVERTAKEN = 16
"""By how many a waiting request may be overtaken, for a longer prefix, before it goes first."""


_LEAST_AWAITED = 256
"""Tokens that a running request must be about to make known, for another to wait for them: a template or two is computed again
sooner than waited for."""


class Admission:
    """The choice among those that wait when a step is planned. What is known of a prompt is looked up once in a plan.

    waiting: first come first; those that are let in leave it.
    """

    def __init__(self, waiting: list[Request], running: list[Request], prefix: Prefixes | None) -> None:
        most = min((request.ask.priority for request in waiting), default=0)
        self._pressing = [request for request in waiting if request.ask.priority == most]
        self._prefilling = [request for request in running if request.is_prefilling]
        self._prefix = prefix
        self._num_known: dict[Request, int] = {}

    def next(self) -> Request | None:
        """Whose turn it is; None if all had better wait.

        Whoever would compute what a running request computes already waits for that, and is passed over.
        """
        if not self._pressing:
            return None
        oldest = self._pressing[0]
        if self._prefix is None or oldest.num_overtaken >= _MOST_OVERTAKEN:
            return oldest
        best: Request | None = None
        longest = -1
        for request in self._pressing[:_LOOKED_AT]:
            num_known = self._num_known.get(request)
            if num_known is None:
                num_known = self._prefix.match(request.attachable, namespace=request.namespace)
                self._num_known[request] = num_known
            if num_known > longest and not self._is_on_its_way(request, num_known):
                best, longest = request, num_known
        return best

    def admitted(self, request: Request) -> None:
        """It runs now; whoever came before it was overtaken."""
        place = self._pressing.index(request)
        for passed in self._pressing[:place]:
            passed.num_overtaken += 1
        del self._pressing[place]
        if request.is_prefilling:
            self._prefilling.append(request)

    def _is_on_its_way(self, request: Request, num_known: int) -> bool:
        """Does a running request compute more of its prompt than is known by now?"""
        first, wanted = request.prompt[0], request.attachable
        return any(
            other.prompt[0] == first
            and other.namespace == request.namespace
            and _num_common(other.prompt, wanted) >= num_known + _LEAST_AWAITED
            for other in self._prefilling
        )


def _num_common(one: TokenIds, other: TokenIds) -> int:
    """How many of the first tokens are the same."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(np.argmax(differs)) if length else 0
    return first if length and differs[first] else length
