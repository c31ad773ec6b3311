"""VmmkvSecondaryTier: vmmkv's tiers behind vLLM's own `OffloadingConnector`, as a tier of its `TieringOffloadingSpec`.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184,
            "secondary_tiers": [{"type": "VmmkvSecondaryTier", "module_path": "vmmkv.adapters.vllm.secondary",
                "kv_disk": "/var/kv", "kv_disk_budget": "200GiB"}]}}'

vLLM moves KV between its GPUs and a tier of host memory, and from there to this one and back. Its scheduler calls all methods.
"""

import ctypes
import hashlib
import itertools
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from vmmkv.adapters.tier_options import TierOptions, fingerprint_of
from vmmkv.adapters.vllm.jobs import ChunkJobs, Chunks
from vmmkv.tiers import Store
from vmmkv.tiers.record import KEY_BYTES


@dataclass(slots=True)
class _Request:
    """Chunks that a request has to do with, by vLLM's keys."""

    used: dict[bytes, None] = field(default_factory=dict)
    """Chunks that it found here, or stored."""
    failed: set[bytes] = field(default_factory=set)
    """Chunks that were found and could not be loaded. For this request they are not here: vLLM would try them for ever."""


class VmmkvSecondaryTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks of vLLM in vmmkv's tiers, a record each. Options beside vLLM's own: see `TierOptions`.

    Raises: ValueError, TierUnavailable and BudgetError at the start, for what it cannot serve, in a sentence.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        given = TierOptions.of(options, where="secondary_tiers")
        weights = given.fingerprint or fingerprint_of(offloading_spec.config.model.name, None)
        identity = repr((weights, self.block_size_bytes, *_layout_of(offloading_spec)))
        self._identity: Final = hashlib.blake2b(identity.encode(), digest_size=KEY_BYTES).digest()
        self._requests: dict[str, _Request] = {}
        self._submitted: dict[int, TransferJob] = {}
        """Jobs under way, by their numbers."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(primary_kv_view))
        with ExitStack() as opened:
            tiers = given.tiers(Chunks(address, self.block_size_bytes, [0]).record_bytes, has_host=True)
            for tier in tiers:
                opened.callback(tier.close)
            self.store: Final = Store(tiers)
            self._jobs: Final = ChunkJobs(self.store, address, self.block_size_bytes)
            self._opened = opened.pop_all()

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Look a chunk up, without waiting: RETRY while a store is asked. See SecondaryTierManager."""
        request = self._requests.get(req_context.req_id, _Request())
        if key in request.failed or not self._jobs.takes_jobs:
            return LookupResult.MISS
        found = self.store.lookup([self._record_of(key)])
        if found is None:
            return LookupResult.RETRY
        if not found[0]:
            return LookupResult.MISS
        request.used[key] = None
        return LookupResult.HIT

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to store chunks. See SecondaryTierManager."""
        request = self._requests.get(job_metadata.req_context.req_id, _Request())
        request.used.update(dict.fromkeys(job_metadata.keys))
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to load chunks. See SecondaryTierManager."""
        self._submit(job_metadata, is_load=True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Report the jobs that have ended. See SecondaryTierManager."""
        reports = []
        for number, found, seconds in self._jobs.results():
            job = self._submitted.pop(number)
            good = [*itertools.compress(job.keys, found)]
            is_good = len(good) == len(found)
            if not is_good and job.is_promotion and (request := self._requests.get(job.req_context.req_id)):
                request.failed.update(set(job.keys).difference(good))
            reports.append(
                JobResult(
                    job_id=number,
                    success=is_good,
                    successful_keys=None if is_good else good,
                    transfer_time=seconds,
                    transfer_bytes=len(good) * self.block_size_bytes,
                )
            )
        return reports

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Begin with a request. See SecondaryTierManager."""
        self._requests.setdefault(req_context.req_id, _Request())
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Let go of a request. Its chunks count as used now, the last one as the one to evict first."""
        if request := self._requests.pop(req_context.req_id, None):
            used = sorted(request.used, key=lambda key: req_context.get_offload_key_position(key) or 0)
            self.store.lookup([self._record_of(key) for key in used])

    def drain_jobs(self) -> None:
        """Wait until all jobs have ended: 30 s at most, after which they are given up. See SecondaryTierManager."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """End the jobs, for 5 s at most, and close the tiers. Idempotent. See SecondaryTierManager."""
        self._jobs.close()
        self._opened.close()

    def _submit(self, job: TransferJob, *, is_load: bool) -> None:
        self._submitted[job.job_id] = job
        self._jobs.submit(job.job_id, [self._record_of(key) for key in job.keys], job.chunk_ids.tolist(), is_load=is_load)

    def _record_of(self, key: bytes) -> bytes:
        """The key of a chunk's record: vLLM's hash of the tokens, and the number of the group, for this model and layout."""
        return hashlib.blake2b(key, key=self._identity, digest_size=KEY_BYTES).digest()


def _layout_of(spec: Any) -> tuple[object, ...]:
    """Everything that vLLM tells of the bytes of a chunk."""
    config, parallel = spec.config, spec.config.parallel
    return (
        config.model.dtype,
        config.kv_cache_layout,
        config.canonical_layout,
        spec.replicated_layout,
        config.worker_kv_bytes_per_block,
        config.cache.tokens_per_hash,
        config.cache.blocks_per_chunk,
        [(group.group_id, group.tokens_per_block, group.layer_names) for group in config.groups],
        (parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size),
    )
