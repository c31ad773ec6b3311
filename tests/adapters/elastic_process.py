"""python elastic_process.py MODEL OPTIONS: vLLM on the CPU that answers requests on stdin, elastic if OPTIONS has any.

Runs in an environment of its own, with vLLM and without what tests use. A request is a line of JSON: `seed` of the prompts,
their `count`, the tokens `out`, and `resize`, bytes by the number of a step. The answer is a line ANSWER with `tokens`.
"""

import json
import os
import random
import sys
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="INFO"
)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # with it, vLLM's worker on a CPU is another process than its scheduler

PROMPT_TOKENS = 1000


def main(model: str, options: str) -> None:
    from vllm import LLM, SamplingParams

    from vmmkv.holder.control import BudgetClient

    elastic = json.loads(options)
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1200,
        enforce_eager=True,
        block_size=32,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
        **({"additional_config": {"vmmkv_elastic": elastic}} if elastic else {}),
    )
    engine = llm.llm_engine
    say("READY")
    for line in sys.stdin:
        asked = json.loads(line)
        chance = random.Random(asked["seed"])
        params = SamplingParams(temperature=0.0, max_tokens=asked["out"], ignore_eos=True, detokenize=False)
        for number in range(asked["count"]):
            prompt = {"prompt_token_ids": [chance.randint(3, 500) for _ in range(PROMPT_TOKENS)]}
            engine.add_request(f"{asked['seed']}-{number}", prompt, params)
        client = BudgetClient(elastic["control"]) if asked.get("resize") else None
        tokens: dict[str, list[int]] = {}
        cached: dict[str, int] = {}
        step, states = 0, list[dict[str, Any]]()
        while engine.has_unfinished_requests():
            if client is not None and str(step) in asked["resize"]:
                client.resize(asked["resize"][str(step)])
            for out in engine.step():
                number = out.request_id.rpartition("-")[2]
                tokens[number], cached[number] = list(out.outputs[0].token_ids), out.num_cached_tokens
            if client is not None:
                states.append(dict(client.state()))
            step += 1
        say(
            "ANSWER "
            + json.dumps(
                {"tokens": tokens, "cached": cached, "steps": step, "mapped": [each["mapped_bytes"] for each in states]}
            )
        )
    engine.engine_core.shutdown()


def say(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
