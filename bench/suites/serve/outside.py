"""What serves the same requests without the engine: transformers by `generate` and by continuous batching, and vLLM.

transformers runs over the engine's own weights, under its names for them. Nothing but weights is kept between two runs, so that
each has the whole budget.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, StaticCache

from bench.harness import WrongNumbers, release_memory
from bench.suites.serve.models import Weights
from bench.suites.serve.systems import LIKELIEST, EngineLimits, LogProbs, Said, ServedRun, System, Turns, serve
from bench.workloads import TokenIds, Workload
from vmmkv import KVLayout
from vmmkv.server.engine.loading import STEP_TOKENS
from vmmkv.server.engine.models.decoder import DecoderConfig, Unsupported, param_bytes
from vmmkv.units import GIB, format_bytes

_BLOCK_TOKENS: Final = 256
"""Of continuous batching: transformers' default."""
_WARM_TOKENS: Final = 6
"""Torch compiles one step, runs the next, records the one behind it, and then replays that."""
_VLLM_BESIDE_BYTES: Final = 8 * GIB
"""For activations and CUDA graphs, beside weights, K and V."""


def open_outside(weights: Weights, limits: EngineLimits, say: Callable[[str], None]) -> Iterator[System]:
    """Those that can run here; `say` is told of others. Raises: ValueError if the budget does not hold one sequence."""
    model = as_transformers(weights)
    yield Batches("DynamicCache", model, limits)
    yield Batches("StaticCache", model, limits)
    yield ContinuousBatching(model, limits)
    if find_spec("vllm") is None or weights.device.type != "cuda":
        say("absent: vLLM: " + ("it runs on a GPU alone" if find_spec("vllm") else "the package vllm is not installed"))
    else:
        yield Vllm(weights, limits)


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


def row_bytes(model: Any) -> int:
    """K and V of a token in all layers."""
    return KVLayout.from_config(model.config, model.dtype).row_bytes


# one batch after the other


class Batches:
    """`model.generate` over waiting requests in order, as many as fit, until the longest answer is done. See System.

    Prompts are padded on the left. A DynamicCache takes batch x (longest prompt + longest answer) rows, and that must fit into
    the budget. A StaticCache takes batch x max_tokens, and all batches of a run have one size, so that nothing is compiled or
    allocated between them: empty rows are computed too. All else is transformers' default: attention by SDPA, prompts in one
    piece, and on a GPU, over a StaticCache, compiled decode steps; compiling is not timed.
    """

    def __init__(self, kind: Literal["DynamicCache", "StaticCache"], model: Any, limits: EngineLimits) -> None:
        self.name: Final = f"transformers {kind}"
        self._model, self._limits = model, limits
        self._budget_bytes, self._max_tokens = limits.budget_bytes or 0, limits.max_tokens or 0
        self._row_bytes: Final = row_bytes(model)
        self._is_static: Final = kind == "StaticCache"

    def run(self, workload: Workload) -> ServedRun:
        """See System. Raises: ValueError for a request that does not fit into the budget alone."""
        turns, waiting, running = Turns(workload.asks), deque[int](), []
        with no_grad(), self._cache() as cache:
            # Of a conversation, one turn at a time can be there.
            most = min(self._limits.max_num_seqs, sum(ask.after is None for ask in workload.asks))
            num_rows = min(most, self._most_of(self._max_tokens, None)) if self._is_static else None
            if num_rows != 0:
                self._answer([[0, 0]] + [[0]] * ((num_rows or most) - 1), _WARM_TOKENS, cache)
            began_s = time.perf_counter()
            while turns.num_unfinished:
                now_s = time.perf_counter() - began_s
                waiting.extend(turns.arrived(now_s))
                if not waiting:
                    assert turns.next_s is not None, "a request waits for one that is lost"
                    time.sleep(max(0.0, turns.next_s - now_s))
                    continue
                batch = self._next_batch(turns, waiting, num_rows)
                outs = [turns.asks[index].num_out for index in batch]
                empty = [[0]] * (0 if num_rows is None else num_rows - len(batch))
                steps = self._answer([turns.prompts[index] for index in batch] + empty, max(outs), cache)
                for row, index in enumerate(batch):
                    own = steps[: outs[row]]
                    turns.served[index].tokens = [tokens[row] for _, tokens in own]
                    turns.served[index].token_s = [at_s - began_s for at_s, _ in own]
                    turns.end(index)
                running += [sum(step < out for out in outs) for step in range(max(outs))]
        return ServedRun(turns.served, turns.seconds, running)

    def likeliest(self, prompts: Sequence[TokenIds]) -> list[LogProbs]:
        """See System."""
        config = GenerationConfig(max_new_tokens=1, do_sample=False, return_dict_in_generate=True, output_scores=True)
        with no_grad(), self._cache() as cache:
            padded = self._padded([prompt.tolist() for prompt in prompts])
            scores_BV = self._model.generate(**padded, generation_config=config, past_key_values=cache).scores[0]
            values, ids = torch.log_softmax(scores_BV, dim=-1).topk(LIKELIEST)
        return [dict(zip(*each, strict=True)) for each in zip(ids.tolist(), values.tolist(), strict=True)]

    def close(self) -> None:
        """See System. The weights are the engine's."""
        self._model = None

    def _next_batch(self, turns: Turns, waiting: deque[int], num_rows: int | None) -> list[int]:
        """Waiting requests in order, until one does not fit. Raises: ValueError if that is the first."""
        batch: list[int] = []
        longest_prompt = longest_out = 0
        while waiting:
            longest_prompt = max(longest_prompt, len(turns.prompts[waiting[0]]))
            longest_out = max(longest_out, turns.asks[waiting[0]].num_out)
            if len(batch) + 1 > self._most_of(longest_prompt + longest_out, num_rows):
                break
            batch.append(waiting.popleft())
        if not batch:
            raise ValueError(
                f"{self.name}: request {waiting[0]} of {longest_prompt + longest_out} tokens does not fit into max_tokens="
                f"{self._max_tokens} and a budget of {format_bytes(self._budget_bytes)}; raise what is too small"
            )
        return batch

    def _most_of(self, num_tokens: int, num_rows: int | None) -> int:
        """Sequences of so many tokens, padding among them, that fit; `num_rows` are there if that is fixed."""
        if num_rows is not None:
            return num_rows if num_tokens <= self._max_tokens else 0
        return min(self._limits.max_num_seqs, self._budget_bytes // (num_tokens * self._row_bytes))

    def _answer(self, prompts: list[list[int]], num_out: int, cache: StaticCache | None) -> list[tuple[float, list[int]]]:
        """Of each step, when its tokens were there, and the tokens, one a prompt."""
        steps = _Steps()
        config = GenerationConfig(max_new_tokens=num_out, do_sample=False)
        self._model.generate(**self._padded(prompts), generation_config=config, past_key_values=cache, streamer=steps)
        if cache is not None:
            cache.reset()
        return steps.taken

    def _padded(self, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
        longest = max(map(len, prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self._model.device
        return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}

    @contextmanager
    def _cache(self) -> Iterator[StaticCache | None]:
        """A StaticCache, without memory until its first use; None where `generate` makes its own DynamicCache."""
        cache = StaticCache(self._model.config, max_cache_len=self._max_tokens) if self._is_static else None
        try:
            yield cache
        finally:
            if cache is not None:
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


# servers


class ContinuousBatching:
    """transformers' own, over as many blocks of 256 tokens as the budget holds. See System and Server.

    Set are the number of blocks, of requests at once and of tokens a step, as in the engine. All else is its default: prefixes
    are shared by whole blocks, and FlashAttention attends, in CUDA graphs, where its package is installed. Where it is not,
    SDPA does, without graphs, under a mask of all tokens of a step by all rows that any of them reads.
    """

    name: Final = "transformers continuous batching"
    num_running: Final = None

    def __init__(self, model: Any, limits: EngineLimits) -> None:
        block_bytes, budget_bytes = _BLOCK_TOKENS * row_bytes(model), limits.budget_bytes or 0
        self._model, self._limits = model, limits
        self._manager: Any = None
        self._num_blocks: Final = budget_bytes // block_bytes
        if not self._num_blocks:
            raise ValueError(
                f"{self.name}: a block of {_BLOCK_TOKENS} tokens takes {format_bytes(block_bytes)}, and the budget is "
                f"{format_bytes(budget_bytes)}; raise budget_bytes"
            )

    def run(self, workload: Workload) -> ServedRun:
        """See System."""
        with self._opened(wants_logprobs=False):
            return serve(self, workload.asks)

    def likeliest(self, prompts: Sequence[TokenIds]) -> list[LogProbs]:
        """See System. It tells of the likeliest only."""
        found: dict[int, LogProbs] = {}
        with self._opened(wants_logprobs=True):
            for index, prompt in enumerate(prompts):
                self.add(index, prompt.tolist(), 1)
            while len(found) < len(prompts):
                for output in self._outputs(1.0):
                    found[int(output.request_id)] = dict(zip(output.generated_tokens, output.logprobs, strict=True))
        return [found[index] for index in range(len(prompts))]

    def close(self) -> None:
        """See System. The weights are the engine's."""
        self._model = None

    def add(self, index: int, prompt: list[int], num_out: int) -> None:
        """See Server."""
        self._manager.add_request(prompt, request_id=str(index), max_new_tokens=num_out, streaming=True)

    def wait(self, timeout_s: float) -> list[Said]:
        """See Server. The manager works in a thread of its own."""
        outputs = self._outputs(timeout_s)
        return [(int(each.request_id), each.generated_tokens, each.is_finished()) for each in outputs]

    def _outputs(self, timeout_s: float) -> list[Any]:
        """All there are, once there is one. Raises: WrongNumbers if a request has failed, or the thread has ended."""
        outputs: list[Any] = []
        output = self._manager.get_result(timeout=timeout_s)
        while output is not None:
            if output.error is not None:
                raise WrongNumbers(f"request {output.request_id} failed: {output.error}")
            outputs.append(output)
            output = self._manager.get_result(timeout=0)
        if not outputs and not self._manager.is_running():
            raise WrongNumbers(f"its thread has ended: {self._manager.background_thread_status.fatal_error}")
        return outputs

    @contextmanager
    def _opened(self, *, wants_logprobs: bool) -> Iterator[None]:
        """A manager runs, over empty blocks, which are given back at the end."""
        config = ContinuousBatchingConfig(
            block_size=_BLOCK_TOKENS,
            num_blocks=self._num_blocks,
            max_batch_tokens=self._limits.max_num_batched_tokens or STEP_TOKENS[self._model.device.type],
            max_requests_per_batch=self._limits.max_num_seqs,
            return_logprobs=wants_logprobs,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
        with no_grad():
            opened = self._model.continuous_batching_context_manager(greedy, continuous_batching_config=config)
            try:
                with opened as self._manager:
                    yield
            finally:
                self._manager = None
                release_memory(self._model.device)


class Vllm:
    """vLLM's engine over the same weights, as its users call it in a program of their own. See System and Server.

    Set are the limits (`kv_cache_memory_bytes`, `max_model_len`, `max_num_seqs`, and `max_num_batched_tokens` if one is given),
    `gpu_memory_utilization`, since others are on the GPU too, and `skip_tokenizer_init`, since there is none.
    """

    num_running: Final = None

    def __init__(self, weights: Weights, limits: EngineLimits) -> None:
        vllm = import_module("vllm")
        config, tensors_by_name = _ours(weights)
        budget_bytes, step_tokens = limits.budget_bytes or 0, limits.max_num_batched_tokens
        needed_bytes = budget_bytes + param_bytes(config, weights.source.dtype) + _VLLM_BESIDE_BYTES
        total_bytes = torch.cuda.get_device_properties(weights.device).total_memory
        self.name: Final = f"vLLM {vllm.__version__}"
        self._params: Final = vllm.SamplingParams
        with weights.model.directory() as folder:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors_by_name.items()}
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            self._llm: Any = vllm.LLM(
                str(folder),
                skip_tokenizer_init=True,
                kv_cache_memory_bytes=budget_bytes,
                gpu_memory_utilization=needed_bytes / total_bytes,
                max_model_len=limits.max_tokens,
                max_num_seqs=limits.max_num_seqs,
                **({} if step_tokens is None else {"max_num_batched_tokens": step_tokens}),
            )

    def run(self, workload: Workload) -> ServedRun:
        """See System."""
        self._llm.reset_prefix_cache()
        return serve(self, workload.asks)

    def likeliest(self, prompts: Sequence[TokenIds]) -> list[LogProbs]:
        """See System."""
        self._llm.reset_prefix_cache()
        asked = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        params = self._params(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=LIKELIEST)
        firsts = [answer.outputs[0].logprobs[0] for answer in self._llm.generate(asked, params, use_tqdm=False)]
        return [{token: found.logprob for token, found in first.items()} for first in firsts]

    def add(self, index: int, prompt: list[int], num_out: int) -> None:
        """See Server."""
        params = self._params(temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False)
        self._llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)

    def wait(self, timeout_s: float) -> list[Said]:
        """See Server. A step, if there is anything to do."""
        if not self._llm.llm_engine.has_unfinished_requests():
            time.sleep(timeout_s)
            return []
        outputs = self._llm.llm_engine.step()
        return [(int(each.request_id), each.outputs[0].token_ids, each.finished) for each in outputs]

    def close(self) -> None:
        """See System. Its engine runs in a process of its own, which ends."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
