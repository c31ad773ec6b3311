"""Memory under vLLM's KV cache that comes and goes while it serves: `--additional-config '{"vmmkv_elastic": {...}}'`.

memory   ElasticBlocks: addresses for all blocks, memory for groups of them under a budget; read this first
pool     ElasticBlockPool: vLLM's pool of blocks over it
kept     KeptBlocks: cached blocks in a holder's memory, for the next engine
control  BudgetControl: a thread by which `vmmkv resize` and an arbiter change the budget
options  what the option says
engine   what changes in an engine of vLLM that has the option

`pool` and `engine` import vLLM, and no others do. The arbiter is in `vmmkv.holder`.
"""

import logging


def install() -> None:
    """Let engines of this process be elastic, if they ask for it. Idempotent. Cost: vLLM's engine is imported."""
    try:
        from vmmkv.adapters.vllm.elastic.engine import install_in_vllm
    except (ImportError, AttributeError) as error:
        logging.getLogger("vllm.vmmkv").warning(
            "vmmkv has no elastic memory for this vLLM, and an engine with the option vmmkv_elastic goes without: %s; see "
            "`vmmkv doctor vllm`",
            error,
        )
        return
    install_in_vllm()
