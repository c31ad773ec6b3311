"""An engine of SGLang on a GPU with HiCache over vmmkv, in a process of its own: answer some prompts, and say what was cached.

python sglang_engine.py FOLDER SHAPE        FOLDER/kv is the disk tier; one line of JSON is printed, behind "ANSWERS"
"""

import json
import sys
import time

SHARED_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 4096, 64, 16
PROMPTS = 4
WRITTEN_S = 5.0
"""Time within which what was computed is in host memory, and from there in the storage. SGLang does not say when."""


def prompts(vocabulary: int) -> list[list[int]]:
    """Prompts that share their beginning."""
    shared = [(7 * at * at + 3 * at) % (vocabulary - 10) + 5 for at in range(SHARED_TOKENS)]
    return [shared + [(at * at + 31 * number) % (vocabulary - 10) + 5 for at in range(OWN_TOKENS)] for number in range(PROMPTS)]


def main(folder: str, shape: str) -> None:
    """Answer all prompts, one after the other."""
    import sglang

    from bench.systems.models import model_of

    storage = {
        **{"backend_name": "vmmkv", "module_path": "vmmkv.adapters.sglang.hicache", "class_name": "VmmkvHiCache"},
        **{"interface_v1": 1, "kv_disk": f"{folder}/kv", "kv_disk_budget": "8GiB", "fingerprint": "random"},
    }
    model = model_of(shape, tiny=False)
    with model.directory() as path:
        engine = sglang.Engine(
            model_path=str(path),
            load_format="dummy",
            skip_tokenizer_init=True,
            context_length=16384,
            mem_fraction_static=0.7,
            attention_backend="fa3",
            sampling_backend="pytorch",
            grammar_backend="none",
            dtype="bfloat16",
            page_size=64,
            enable_hierarchical_cache=True,
            hicache_size=16,
            hicache_mem_layout="page_first",
            hicache_write_policy="write_through",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(storage),
        )
        answers = []
        for prompt in prompts(model.vocabulary):
            began_s = time.perf_counter()
            given = engine.generate(
                input_ids=prompt, sampling_params={"temperature": 0.0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
            )
            seconds = time.perf_counter() - began_s
            answers.append({"tokens": given["output_ids"], "cached": given["meta_info"]["cached_tokens"], "seconds": seconds})
        time.sleep(WRITTEN_S)
        print("ANSWERS", json.dumps(answers), flush=True)
        engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
