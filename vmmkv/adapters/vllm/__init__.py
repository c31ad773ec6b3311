"""vLLM over vmmkv's tiers: prefixes outlive vLLM's own cache, its process, and its machine.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "VmmkvConnector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_host_budget": "16GiB", "kv_disk": "/var/kv", "kv_disk_budget": "200GiB"}}'

connector   VmmkvConnector: what vLLM calls, in its scheduler and in its worker
plugin      the connector's name, for vLLM, a check of its options, and elastic memory
statistics  counters in vLLM's log and its `/metrics`
secondary   VmmkvSecondaryTier: the same tiers behind vLLM's own OffloadingConnector; these four, `identity`
            and two modules of elastic/ import vLLM, and no others do
jobs        ChunkJobs: a thread that moves records between a Store and memory of the host; for `secondary`
schedule    Schedule: which requests load, store and wait, by their tokens; in the scheduler
namespaces  Namespaces: what KV depends on beside tokens and model: salts, and adapters of LoRA
directory   Directory: which records there are, as the scheduler knows
identity    all by which KV of equal tokens differs between engines
worth       Worth: what is faster to load than to compute
blocks      BlockMover: records between a Store and vLLM's blocks; in the worker
elastic/    memory under vLLM's KV cache that comes and goes while it serves
hooks       names of vLLM that all this uses, and a check of vLLM's sources for them: `vmmkv doctor vllm`
"""
