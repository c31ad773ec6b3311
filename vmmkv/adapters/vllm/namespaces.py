"""Namespaces and features: what a request's KV depends on beside its tokens and the engine's model. It imports no vLLM."""

import hashlib
import logging
import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

from vmmkv.adapters.tier_options import fingerprint_of

log = logging.getLogger("vllm.vmmkv")

Namespace = tuple[str | None, ...]
"""Salt of a request, and of its adapter name and fingerprint."""


_CONTENT: Final = re.compile(r"(.*:)?[0-9a-f]{64,}", re.DOTALL)
"""A name of an image that tells its content: vLLM's hash of it, behind an adapter's name if that changes what is seen."""


class Namespaces:
    """Namespaces of requests. An adapter is told by its name and files, as they are when its first request comes.

    Its files must not change while the engine runs: vLLM computes on with those that it has loaded.
    """

    def __init__(self) -> None:
        self._fingerprints: dict[tuple[int, str, str], str | None] = {}
        """Fingerprints of adapters by their number, name and path; None for one that is not kept."""
        self._has_warned = False
        """Does the log say that images are not kept which clients name?"""

    def of(self, request: Any) -> Namespace | None:
        """The namespace of a vLLM request; None if its KV is not kept. Cost: for an adapter's first some reads of 4 KiB."""
        if not all(map(_tells_content, request.mm_features)):
            if not self._has_warned:
                log.warning("vmmkv keeps no KV of requests whose images or sounds are named by clients: names tell no content")
            self._has_warned = True
            return None
        adapter = request.lora_request
        if adapter is None:
            return (request.cache_salt,)
        known = adapter.lora_int_id, adapter.lora_name, adapter.lora_path
        if known not in self._fingerprints or adapter.load_inplace:
            self._fingerprints[known] = _fingerprint_of(adapter)
        fingerprint = self._fingerprints[known]
        return None if fingerprint is None else (request.cache_salt, adapter.lora_name, fingerprint)


class Features:
    """Images and sounds of a request, as the keys of its records take them in: see `KeyChain.of`.

        beside = Features(request.mm_features)
        beside(48)  # of those that begin within the first 48 tokens

    Each counts as a whole, with content, offset and length, from the first record that has one of its tokens. vLLM may append
    further ones, to a request of which a client sends tokens later. Cost: some 2 us for each, once.
    """

    def __init__(self, features: Sequence[Any]) -> None:
        self._features = features
        self._offsets: list[int] = []
        self._hashes = [b""]
        """Hashes of no feature, of the first one, of the first two, and so on."""
        self._own = os.urandom(32).hex()
        """Stands for the content of one that is appended and whose name does not tell it: no other request has it."""

    def __call__(self, num_tokens: int) -> bytes:
        """Tell the features that begin within the first so many tokens; no bytes if none does."""
        if len(self._offsets) < len(self._features):
            self._take_in()
        return self._hashes[bisect_left(self._offsets, num_tokens)]

    def _take_in(self) -> None:
        places = sorted(
            (each.mm_position.offset, each.mm_position.length, each.identifier if _tells_content(each) else self._own)
            for each in self._features
        )
        state = hashlib.blake2b(digest_size=32)
        self._offsets, self._hashes = [offset for offset, _, _ in places], [b""]
        for place in places:
            state.update(repr(place).encode())
            self._hashes.append(state.digest())


def _tells_content(feature: Any) -> bool:
    """Does the name of a feature tell its content? Those do not that a client gives, or that vLLM makes of a request's name."""
    return isinstance(feature.identifier, str) and _CONTENT.fullmatch(feature.identifier) is not None


def _fingerprint_of(adapter: Any) -> str | None:
    """A name for an adapter's weights; None if they may change under it, after a line in the log."""
    if adapter.load_inplace:
        reason = "load_inplace may change its weights"
    elif not os.path.isdir(adapter.lora_path):
        reason = f"{adapter.lora_path} is no directory here, whose files tell its weights"
    else:
        return fingerprint_of(adapter.lora_path, None)
    log.warning("vmmkv keeps no KV of the adapter %s: %s", adapter.lora_name, reason)
    return None
