"""Memory under vLLM's KV cache that comes and goes while it serves: `--additional-config '{"vmmkv_elastic": {...}}'`.

memory   ElasticBlocks: addresses for all blocks, memory for groups of them under a budget; read this first
pool     ElasticBlockPool: vLLM's pool of blocks over it
kept     KeptBlocks: cached blocks in a holder's memory, for the next engine
control  BudgetControl: a thread by which `vmmkv resize` and an arbiter change the budget
options  what the option says
engine   what changes in an engine of vLLM that has the option

`pool` and `engine` import vLLM, and no others do. The arbiter is in `vmmkv.holder`.
"""

from typing import Any

from vmmkv.adapters.vllm.elastic.options import OPTION


def install() -> None:
    """Let engines of this process be elastic, if they ask for it. Idempotent. Cost: vLLM's engine is imported."""
    try:
        from vmmkv.adapters.vllm.elastic.engine import install_in_vllm
    except (ImportError, AttributeError) as error:
        _refuse_engines(str(error))
        return
    install_in_vllm()


def _refuse_engines(reason: str) -> None:
    """Let no engine with the option start: vLLM lacks a name that elastic memory needs."""
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.__init__

    def initialize(core: Any, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        if OPTION in (vllm_config.additional_config or {}):
            raise ValueError(f"vmmkv has no elastic memory for this vLLM: {reason}; see `vmmkv doctor vllm`")
        original(core, vllm_config, *arguments, **named)

    EngineCore.__init__ = initialize
