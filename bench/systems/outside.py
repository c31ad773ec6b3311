"""Systems that serve without the engine: transformers by `generate`, and vLLM.

transformers runs over the engine's own weights, under its names for them. Nothing but weights is kept between two runs, so that
each has the whole budget. vLLM takes all memory, as its users open it.
"""

import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StaticCache

from bench.harness import Settings, WrongNumbers, release_memory
from bench.systems.engine import Options, of_users
from bench.systems.models import ServedModel, Weights
from bench.systems.runs import LIKELIEST, Begin, LogProbs, Served, ServedRun, Turns
from bench.workloads import Ask, TokenIds, Workload, at_once
from vmmkv import KVLayout
from vmmkv_server.engine.models.decoder import DecoderConfig, Unsupported

_WARM_TOKENS: Final = 6
"""Torch compiles one step, runs the next, records the one behind it, and then replays that."""
_VLLM_TOKENS: Final = 40_960
"""The longest request that vLLM is opened for: more tokens than any has."""
_VLLM_STORES_S: Final = 30.0
"""Time within which vLLM must have stored what it offloads."""


# weights


@contextmanager
def no_grad() -> Iterator[None]:
    """Not inference mode: tensors made in it cannot be written outside, and transformers writes from threads of its own."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _ours(weights: Weights) -> tuple[DecoderConfig, dict[str, torch.Tensor]]:
    """The engine's decoder, and its weights by transformers' names. Raises: Unsupported if the engine runs other code."""
    decoder = weights.source._decoder
    if decoder is None:
        raise Unsupported(f"{weights.model.name} runs by transformers' own code in the engine: there are no weights to share")
    return decoder.config, decoder.weights.named(decoder.config)


def save_weights(weights: Weights, folder: Path) -> None:
    """Write them beside a config.json, under transformers' names, and forget them."""
    with closing(weights):
        _, tensors_by_name = _ours(weights)
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors_by_name.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@no_grad()
def as_transformers(weights: Weights) -> Any:
    """A model whose parameters are views of the decoder's tensors, fused ones among them. It costs no memory.

    Raises: Unsupported if the engine runs other code, or transformers' model has other tensors.
    """
    _, tensors_by_name = _ours(weights)
    config = AutoConfig.from_pretrained(weights.config.model, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=weights.source.dtype)
    unknown = model.load_state_dict(tensors_by_name, strict=False, assign=True).unexpected_keys
    model.tie_weights()  # a missing head is the embedding, or found below
    rotary = model.model.rotary_emb  # its angles are in no state_dict: they follow from the configuration
    model.model.rotary_emb = type(rotary)(config=config).to(weights.device)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if differing := [*unknown, *(name for name, tensor in tensors.items() if tensor.is_meta)]:
        raise Unsupported(f"transformers' {config.model_type} has other tensors than the decoder: {', '.join(differing[:4])}")
    # The configuration's end tokens would end answers. Token 0 stands where a batch has nothing.
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.requires_grad_(False).eval()


# one batch after the other


class StaticBatches:
    """`model.generate` over a StaticCache: waiting requests in order, as many as fit, until the longest answer is done.

    Prompts are padded on the left. All batches of a run have one size, so that nothing is compiled or allocated between them:
    empty rows are computed too. All else is transformers' default: attention by SDPA, prompts in one piece, and on a GPU
    compiled decode steps; compiling is not timed. A DynamicCache, whose steps are not compiled, has half the speed or less.
    """

    def __init__(self, name: str, weights: Weights, limits: Options) -> None:
        self.name: Final = name
        self.dtype: Final = weights.source.dtype
        self._model, self._max_tokens = as_transformers(weights), limits["max_tokens"]
        row_bytes = KVLayout.from_config(self._model.config, self._model.dtype).row_bytes
        self._most_rows: Final = min(limits["max_num_seqs"], limits["kv_budget_bytes"] // (self._max_tokens * row_bytes))

    def run(self, workload: Workload, *, keep: bool = False) -> ServedRun:
        """All requests, in order; none waits for another. There are no prefixes to `keep`. See System."""
        waiting, served = deque(workload.asks), list[Served]()
        num_rows = min(self._most_rows, len(waiting))
        with no_grad(), self._cache() as cache:
            self._answer([[0, 0]] + [[0]] * (num_rows - 1), _WARM_TOKENS, cache)
            began_s = time.perf_counter()
            while waiting:
                batch = self._next_batch(waiting, num_rows)
                empty = [[0]] * (num_rows - len(batch))
                prompts = [ask.prompt.tolist() for ask in batch]
                longest = max(ask.num_out for ask in batch)
                steps = self._answer(prompts + empty, longest, cache)
                if len(steps) != longest:
                    raise WrongNumbers(f"answers have {len(steps)} tokens of {longest}")
                for row, ask in enumerate(batch):
                    own = [(tokens[row], at_s - began_s) for at_s, tokens in steps[: ask.num_out]]
                    served.append(Served(0.0, len(ask.prompt), *map(list, zip(*own, strict=True))))
        return ServedRun(served, max(each.token_s[-1] for each in served))

    def begins(self, prompts: Sequence[TokenIds], num_tokens: int) -> list[Begin]:
        """See SharedSystem."""
        config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, return_dict_in_generate=True, output_scores=True)
        with no_grad(), self._cache() as cache:
            padded = self._padded([prompt.tolist() for prompt in prompts])
            given = self._model.generate(**padded, generation_config=config, past_key_values=cache)
            values, ids = torch.log_softmax(torch.stack(given.scores, 1), dim=-1).topk(LIKELIEST)  # [B, num_tokens, LIKELIEST]
        begins = zip(given.sequences[:, -num_tokens:].tolist(), ids.tolist(), values.tolist(), strict=True)
        return [(tokens, [dict(zip(*each, strict=True)) for each in zip(*found, strict=True)]) for tokens, *found in begins]

    def close(self) -> None:
        """Nothing of its own is left: the weights are the engine's."""
        self._model = None

    def _next_batch(self, waiting: deque[Ask], num_rows: int) -> list[Ask]:
        """Waiting requests in order, until one does not fit beside the padding of the others."""
        batch: list[Ask] = []
        longest_prompt = longest_out = 0
        while waiting and len(batch) < num_rows:
            longest_prompt = max(longest_prompt, len(waiting[0].prompt))
            longest_out = max(longest_out, waiting[0].num_out)
            if longest_prompt + longest_out > self._max_tokens:
                break
            batch.append(waiting.popleft())
        assert batch, "each request alone fits into max_tokens"
        return batch

    def _answer(self, prompts: list[list[int]], num_out: int, cache: StaticCache) -> list[tuple[float, list[int]]]:
        """Of each step, when its tokens were there, and the tokens, one a prompt."""
        steps = _Steps()
        config = GenerationConfig(max_new_tokens=num_out, do_sample=False)
        self._model.generate(**self._padded(prompts), generation_config=config, past_key_values=cache, streamer=steps)
        cache.reset()
        return steps.taken

    def _padded(self, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self._model.device
        return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}

    @contextmanager
    def _cache(self) -> Iterator[StaticCache]:
        """Without memory until its first use."""
        cache = StaticCache(self._model.config, max_cache_len=self._max_tokens)
        try:
            yield cache
        finally:
            cache.layers.clear()
            release_memory(self._model.device)


class _Steps:
    """A BaseStreamer of transformers: the prompts first, then one token of each sequence at a time, on the host."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, list[int]]] = []
        self._has_prompts = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompts:
            self.taken.append((time.perf_counter(), value.tolist()))
        self._has_prompts = True

    def end(self) -> None:
        pass


# an engine of its own


class Vllm:
    """vLLM in this process, as a user opens it.

    Set are the limits, the share of memory, and `skip_tokenizer_init`, since there is no tokenizer. `run` is the loop of
    `LLM.generate`, which tells nothing before the end. By DELTA and `stream_interval` this one is told each first token, and
    then all others at once: that takes no more of the host's time.
    """

    def __init__(self, model: ServedModel, settings: Settings, **options: Any) -> None:
        """Open it over the engine's weights, or over its own random ones if `load_format="dummy"` is among `options`.

        `options`: further ones of `vllm.LLM`, or others in place of the limits and the share of memory.
        """
        vllm = import_module("vllm")
        self._params: Final = vllm.SamplingParams
        self._tokens: Final = import_module("vllm.inputs").tokens_input
        self._delta: Final = import_module("vllm.sampling_params").RequestOutputKind.DELTA
        with model.directory() as folder:
            if options.get("load_format") != "dummy":
                save_weights(Weights(model, settings), folder)
                release_memory(settings.device)
            self._llm: Any = vllm.LLM(
                str(folder),
                skip_tokenizer_init=True,
                seed=settings.seed,
                stream_interval=_VLLM_TOKENS,
                **{
                    "gpu_memory_utilization": 0.9,
                    "max_model_len": min(model.reach, _VLLM_TOKENS),
                    "max_num_seqs": of_users(settings)["max_num_seqs"],
                    **options,
                },
            )
        self.name: Final = f"vLLM {vllm.__version__}"
        self.dtype: Final[torch.dtype] = self._llm.model_config.dtype
        self.num_kv_tokens: Final[int] = self._llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens

    def run(self, workload: Workload, *, num_scored: int = 0, keep: bool = False, **sampling: Any) -> ServedRun:
        """See UsersSystem. No request has a seed: vLLM draws for each that has one by a kernel of its own."""
        if not keep:
            self.forget()
        common = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "output_kind": self._delta, **sampling}
        requests = [
            (
                str(index),
                self._tokens(ask.prompt.tolist()),
                self._params(max_tokens=ask.num_out, logprobs=LIKELIEST if index < num_scored else None, **common),
            )
            for index, ask in enumerate(workload.asks)
        ]
        turns, engine = Turns(workload.asks), self._llm.llm_engine
        likeliest: list[LogProbs] = [{}] * num_scored
        cached_tokens = 0
        gc.collect()
        began_s = time.perf_counter()
        for request in requests:
            engine.add_request(*request)
        while engine.has_unfinished_requests():
            outputs, now_s = engine.step(), time.perf_counter() - began_s
            for output in outputs:
                index, (answer,) = int(output.request_id), output.outputs
                served = turns.served[index]
                if not served.tokens:
                    cached_tokens += output.num_cached_tokens
                    if index < num_scored:
                        likeliest[index] = {token: found.logprob for token, found in answer.logprobs[0].items()}
                served.tokens += answer.token_ids
                served.token_s += [now_s] * len(answer.token_ids)
                if output.finished:
                    turns.end(index)
        return ServedRun(turns.served, turns.seconds, cached_tokens=cached_tokens, likeliest=likeliest)

    def likeliest(self, prompts: Sequence[TokenIds]) -> list[LogProbs]:
        """See UsersSystem."""
        return self.run(at_once(prompts, 1), num_scored=len(prompts)).likeliest

    def forget(self) -> None:
        """Empty the prefix cache, when what is being stored in host memory is there. Raises: WrongNumbers."""
        until_s = time.perf_counter() + _VLLM_STORES_S
        while not self._llm.reset_prefix_cache():
            self._llm.llm_engine.step()
            if time.perf_counter() > until_s:
                raise WrongNumbers(f"{self.name} does not forget its prefixes: requests of another run are left")

    def connector_counts(self) -> str:
        """Describe what vmmkv's connector has counted and measured, for the text of a failure; empty without it."""
        connector = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        if connector is None:
            return ""
        worth = connector._schedule.worth
        loads = {tier: f"{rate.measured_per_s / 1e9:.1f} GB/s" for tier, rate in worth.loads.items()}
        return f"{dict(connector._schedule.counts)}, prefill {worth.prefill.measured_per_s:.0f} tok/s, loads {loads}"

    def block_pool(self) -> Any:
        """vLLM's pool of blocks, which is vmmkv's with elastic memory. The engine is in this process."""
        return self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool

    def close(self) -> None:
        """End it, and give its memory back. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
