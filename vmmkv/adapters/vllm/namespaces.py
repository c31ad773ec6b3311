"""Namespaces: what a request's KV depends on beside its tokens and the engine's model. It imports no vLLM."""

import logging
import os
from typing import Any

from vmmkv.adapters.tier_options import fingerprint_of

log = logging.getLogger("vllm.vmmkv")

Namespace = tuple[str | None, ...]
"""Salt of a request, and of its adapter name and fingerprint."""


class Namespaces:
    """Namespaces of requests. An adapter is told by its name and files, as they are when its first request comes.

    Its files must not change while the engine runs: vLLM computes on with those that it has loaded.
    """

    def __init__(self) -> None:
        self._fingerprints: dict[tuple[int, str, str], str | None] = {}
        """Fingerprints of adapters by their number, name and path; None for one that is not kept."""

    def of(self, request: Any) -> Namespace | None:
        """The namespace of a vLLM request; None if its KV is not kept. Cost: for an adapter's first some reads of 4 KiB."""
        adapter = request.lora_request
        if adapter is None:
            return (request.cache_salt,)
        known = adapter.lora_int_id, adapter.lora_name, adapter.lora_path
        if known not in self._fingerprints or adapter.load_inplace:
            self._fingerprints[known] = _fingerprint_of(adapter)
        fingerprint = self._fingerprints[known]
        return None if fingerprint is None else (request.cache_salt, adapter.lora_name, fingerprint)


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
