"""python vllm_process.py MODEL RESULT OPTIONS: answers of vLLM on the CPU, with vmmkv's tiers if OPTIONS has any, as JSON.

Runs in an environment of its own, with vLLM and without what tests use. RESULT gets, for each turn, tokens, cached tokens and
the connector's metrics.
"""

import json
import os
import random
import sys

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="INFO"
)

PREFIX, NUM_PROMPTS = 1040, 6


def main(model: str, result: str, options: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapters = json.loads(os.environ["ADAPTERS"])

    transfer = {
        "kv_connector": "VmmkvConnector",
        "kv_role": os.environ["KV_ROLE"],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": json.loads(options),
    }
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1200,
        enforce_eager=True,
        block_size=32,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=int(os.environ["KV_BYTES"]),
        tensor_parallel_size=int(os.environ["RANKS"]),
        seed=0,
        disable_log_stats=False,
        **({"enable_lora": True, "max_loras": 2, "max_lora_rank": 8} if adapters else {}),
        **({"kv_transfer_config": transfer} if json.loads(options) else {}),
    )
    chance = random.Random(0)
    prefix = [chance.randint(3, 500) for _ in range(PREFIX)]
    prompts = [{"prompt_token_ids": prefix + [chance.randint(3, 500) for _ in range(50)]} for _ in range(NUM_PROMPTS)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    loras = [LoRARequest(str(number), number, path) for number, path in enumerate(adapters, 1)] or [None]
    of_prompts = [loras[number % len(loras)] for number in range(NUM_PROMPTS)]
    turns = []
    for _ in range(2):  # of the second, vLLM's own cache has been emptied
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=of_prompts)
        turns.append(
            {
                "tokens": [list(each.outputs[0].token_ids) for each in outputs],
                "cached": [each.num_cached_tokens for each in outputs],
                "metrics": metrics(),
            }
        )
        assert llm.reset_prefix_cache()
    with open(result, "w", encoding="utf-8") as file:
        json.dump(turns, file)
    llm.llm_engine.engine_core.shutdown()


def metrics() -> dict[str, float]:
    """The connector's metrics by name, and by name and tier."""
    from prometheus_client import REGISTRY

    samples = [sample for family in REGISTRY.collect() for sample in family.samples if sample.name.endswith("_total")]
    found = [sample for sample in samples if sample.name.startswith("vllm:vmmkv_")]
    return {" ".join(filter(None, (sample.name, sample.labels.get("tier")))): sample.value for sample in found}


if __name__ == "__main__":
    main(*sys.argv[1:])
