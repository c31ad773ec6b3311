"""vLLM over vmmkv's tiers: prefixes outlive vLLM's own cache, its process, and its machine.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "VmmkvConnector",
        "kv_connector_module_path": "vmmkv.adapters.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_host_budget": "16GiB", "kv_disk": "/var/kv", "kv_disk_budget": "200GiB"}}'

connector   VmmkvConnector: what vLLM calls, in its scheduler and in its worker; the only module that imports vLLM
schedule    Schedule: which requests load, store and wait, by their tokens; in the scheduler
blocks      BlockMover: records between a Store and vLLM's blocks; in the worker
options     the tiers, by the words of `vmmkv serve`
"""
