"""SGLang over vmmkv's tiers: pages of HiCache outlive SGLang's memory, its process, and its machine.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --page-size 64
        --hicache-mem-layout page_first --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "vmmkv", "module_path": "vmmkv.adapters.sglang.hicache", "class_name": "VmmkvHiCache",
        "interface_v1": 1, "kv_disk": "/var/kv", "kv_disk_budget": "200GiB"}'

hicache   VmmkvHiCache: what SGLang's threads call; it imports SGLang
"""
