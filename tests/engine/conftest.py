"""An engine in this process: a real model of transformers over a real cache, with its answers in a list."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from tests.attending import attending_by
from tests.engine.decoder_models import VOCABULARY, small
from tests.server.tiny import byte_tokenizer
from vmmkv import KVCache, KVLayout, KVType, Plane, Pool, Sequence
from vmmkv.layout import SCALES, SECTOR_BYTES
from vmmkv.tier import Tier
from vmmkv_kernels.quantise import Kind, dequantise, quantise
from vmmkv_server.engine.engine import Engine
from vmmkv_server.engine.feature import Feature
from vmmkv_server.engine.kv_backend import BackendConfig, KVBackend, OpenBackend, SlotBackend
from vmmkv_server.engine.models.decoder import Decoder, DecoderConfig, DecoderModel, empty
from vmmkv_server.engine.models.transformers import TransformersModel
from vmmkv_server.engine.request import Request, Status
from vmmkv_server.engine.runner import Runner
from vmmkv_server.protocol import Failed, Generate, Message, Output, Outputs
from vmmkv_server.sampling_params import InvalidParam, SamplingParams

PAGE_TOKENS = 2048
"""Of the tiny model's cache."""


@pytest.fixture
def slow_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features are told that a prompt takes longer than a second a token, so that anything is faster than to compute it."""
    tell, now_s = Engine.prefilled, 0.0

    def told(engine: Engine, num_tokens: int, began_s: float, ended_s: float) -> None:
        nonlocal now_s
        began_s, now_s = now_s, now_s + (num_tokens << 20)
        tell(engine, num_tokens << 20, began_s, now_s)

    monkeypatch.setattr(Engine, "prefilled", told)


def tiny_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Random weights, four query heads over two key-value heads; a row of 1 KiB, so that 2,048 tokens fill a page."""
    torch.manual_seed(seed)
    options = {"num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 8192} | changes
    return LlamaForCausalLM(small(LlamaConfig, **options)).eval()


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(vocab_size=258).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def wide_rows(**changes: Any) -> LlamaForCausalLM:
    """A row of 32 KiB, so that 64 tokens fill a page."""
    return tiny_model(hidden_size=32, num_attention_heads=16, num_key_value_heads=16, head_dim=128, **changes)


def windowed(window: int = 30, **changes: Any) -> MistralForCausalLM:
    """Layers that attend to their last rows, of 32 KiB."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
    options = {"num_hidden_layers": 2, "max_position_embeddings": 1024} | sizes | changes
    return MistralForCausalLM(small(MistralConfig, sliding_window=window, **options)).eval()


def layout_of(config: Any, dtype: torch.dtype, kv_kind: Kind | None) -> KVLayout:
    """A model's layout. One of quantised rows has a plane that fills them up to what they are without."""
    plain = KVLayout.from_config(config, dtype)
    if kv_kind is None:
        return plain
    groups = []
    for exact, group in zip(plain.groups, KVLayout.from_config(config, KVType(kv_kind)).groups, strict=True):
        spare_bytes = (exact.layer_bytes - group.layer_bytes) // SECTOR_BYTES * SECTOR_BYTES
        filling = Plane(name="filling", heads=1, dim=spare_bytes, dtype=torch.int8)
        groups.append(dataclasses.replace(group, planes=(*group.planes, filling)))
    return KVLayout(groups=tuple(groups))


def quantising(kind: Kind, attention: Callable[..., Any] = sdpa_attention_forward) -> str:
    """The name of an attention function of transformers, for which K and V are kept quantised: this one, over what is left."""
    name = f"quantising-{kind}-{attention.__name__}"

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        kept = (dequantise(*quantise(x_BKTD, kind)).to(query.dtype) for x_BKTD in (key, value))
        return attention(module, query, *kept, *args, **options)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask if attention is sdpa_attention_forward else eager_mask)
    return name


def decoder_of(model: Any, **options: Any) -> Decoder:
    """The config-driven decoder with the weights of a model of transformers."""
    config = DecoderConfig.of(model.config)
    weights = empty(config, model.device, model.dtype)
    state = model.state_dict()
    with torch.inference_mode():
        for name, tensor in weights.named(config).items():
            tensor.copy_(state[name])
    return Decoder(config, weights, **options)


class Harness:
    """An engine, what it sent, and what transformers itself would say.

    `ours` runs the config-driven decoder instead of transformers' code; `lookahead` steps are under way, as on a GPU.
    Rows quantised to `kv_kind` are as long as others, so that as many fill a page. Grammars are of a `vocabulary`.
    """

    def __init__(
        self,
        model: Any,
        *,
        device: str = "cpu",
        kv_kind: Kind | None = None,
        budget_pages: int = 64,
        slots: int = 8,
        step_tokens: int = 256,
        eos_ids: frozenset[int] = frozenset(),
        share: bool = False,
        ours: bool = False,
        lookahead: int = 2,
        max_tokens: int | None = None,
        max_sequences: int | None = None,
        capture: bool = False,
        open_memory: OpenBackend | None = None,
        tiers: Iterable[Tier] = (),
        kv_policy: str | None = None,
        vocabulary: Callable[[], Any] = lambda: None,
    ) -> None:
        self.model = model.to(device)
        self.kv_kind = kv_kind
        layout = layout_of(model.config, model.dtype, kv_kind)
        max_tokens = max_tokens or model.config.max_position_embeddings
        self.sent: list[Message] = []
        self.cache: Any
        wanted = BackendConfig(
            layout=layout,
            device=torch.device(device),
            max_sequences=slots,
            max_tokens=max_tokens,
            step_tokens=step_tokens,
            shares_prefixes=share,
            budget_bytes=budget_pages * 2**21,
            tiers=list(tiers),
            fingerprint="model",
        )
        if open_memory is None:
            cache = KVCache(layout, Pool(device, budget_pages * 2**21), slots=slots, max_tokens=max_tokens)
            self.memory: KVBackend = SlotBackend(cache, wanted)
        else:
            self.memory = open_memory(wanted)
        self.cache, self.prefix = self.memory.cache or self.memory, self.memory.prefixes
        if self.memory.cache is not None:
            self.pool = self.memory.cache.pool
        rows = self.memory.rows
        runnable = DecoderModel(decoder_of(model), rows) if ours else TransformersModel(model, rows)
        self.runner = Runner(runnable, self.memory, max_rows=slots, max_tokens=step_tokens)
        if capture:
            self.runner.capture()
        self.engine = Engine(
            self.memory,
            self.runner,
            max_sequences=max_sequences,
            eos_ids=eos_ids,
            step_tokens=step_tokens,
            lookahead=lookahead,
            send=self.sent.append,
            vocabulary=vocabulary,
            kv_policy=kv_policy,
        )

    def ask(self, request_id: str, prompt: list[int], max_new_tokens: int = 8, **options: Any) -> None:
        """Queue a request; greedy unless the options say otherwise."""
        message = {name: options.pop(name) for name in ("priority", "cache_salt", "grammar", "gate") if name in options}
        try:
            params = SamplingParams(**{"max_tokens": max_new_tokens, "temperature": 0.0, "seed": 0} | options)
        except InvalidParam as error:  # refused by the process that makes it
            self.sent.append(Failed(request_id=request_id, message=str(error)))
            return
        self.engine.receive(Generate(request_id=request_id, prompt=prompt, params=params, **message))

    def said(self, prompt: list[int], max_new_tokens: int = 8, **options: Any) -> list[int]:
        """The tokens of one request that is alone."""
        before = len(self.tokens("alone"))
        self.ask("alone", prompt, max_new_tokens, **options)
        self.run()
        return self.tokens("alone")[before:]

    def serve(self, prompts: Mapping[str, list[int]], max_new_tokens: int = 8, **options: Any) -> None:
        """Queue a request for each prompt, by its name, and step until all is done."""
        for name, prompt in prompts.items():
            self.ask(name, prompt, max_new_tokens, **options)
        self.run()

    def run(self, *, at_most: int = 5000) -> None:
        """Step until all is done, recounting the laws after each step."""
        for _ in range(at_most):
            if not self.engine.has_work:
                self.engine.settle()
                return
            self.step()
        raise AssertionError(f"still busy after {at_most} steps")

    def step(self, count: int = 1) -> None:
        """So many steps, with a recount of the laws behind each: the cache's, and those of the request table."""
        for _ in range(count):
            self.engine.step()
            self.cache.check()
            self.check_table()

    def check_table(self) -> None:
        """Recount what the table says of the requests that run, and that it says nothing of free slots."""
        scheduler, lengths, limits = self.engine.scheduler, self.cache.lengths, self.cache.limits
        table, running = scheduler.table, {request.memory.slot: request for request in scheduler.running}
        scheduler.check()
        decoding = [each for each in scheduler.running if each.status is Status.DECODING]
        slots = [each.memory.slot for each in decoding if table.num_coming[each.memory.slot] < each.max_tokens]
        slots = [slot for slot in slots if lengths[slot] < table.ends[slot]]
        assert scheduler.decoding.slots.tolist() == slots
        for feature in self.engine.features.having(Feature.check):
            feature.check()
        for kept in (each for feature in self.engine.features.every for each in vars(feature).values()):
            requests = {key for key in kept if isinstance(key, Request)} if isinstance(kept, dict | set | list) else set()
            known = {*scheduler.running, *scheduler.waiting, *scheduler.held}
            assert requests <= known, "no table of a feature has a request that has ended"
        for slot, owner in enumerate(table.requests):
            assert owner is running.get(slot)
            confirmed, known, coming, end = (
                int(each[slot]) for each in (table.num_confirmed, table.num_known, table.num_coming, table.max_tokens)
            )
            assert table.num_inserted[slot] <= confirmed, "only what has been read back is shared"
            if owner is None:
                assert confirmed == known == coming == end == 0
                continue
            length = int(lengths[slot])
            position = length + owner.num_dropped
            assert len(owner.prompt) <= known <= coming <= end == owner.max_tokens
            assert confirmed <= position and length <= limits[slot] <= owner.shape.most_rows <= end
            if owner.shape.samples:
                assert confirmed <= known and coming == (position + 1 if owner.status is Status.DECODING else known)
                assert owner.table is table and owner.num_answered == owner.num_generated
                assert known < end or not owner.ask.params.max_tokens, "a request with all its tokens has ended"

    def outputs(self, request_id: str | None = None) -> list[Output]:
        """What was answered, in order: to one request, or to all."""
        every = (output for message in self.sent if isinstance(message, Outputs) for output in message.outputs)
        return [output for output in every if request_id in (None, output.request_id)]

    def tokens(self, request_id: str) -> list[int]:
        """The tokens of its answer."""
        return [token for output in self.outputs(request_id) for token in output.token_ids]

    def finish_reasons(self, request_id: str) -> list[str | None]:
        """The finish reasons of its outputs, in order."""
        return [output.finish_reason for output in self.outputs(request_id)]

    def logprobs(self, request_id: str) -> list[float]:
        """The log-probabilities that were answered."""
        return [logprob for output in self.outputs(request_id) for logprob in output.logprobs]

    def failures(self) -> dict[str, str]:
        """What failed, by request."""
        return {message.request_id: message.message for message in self.sent if isinstance(message, Failed)}

    def by_transformers(self) -> AbstractContextManager[None]:
        """Within, the model attends by transformers' own function, over quantised K and V if ours are."""
        return attending_by(self.model, "sdpa" if self.kv_kind is None else quantising(self.kv_kind))

    def poison(self, sequence: Sequence, end: int) -> None:
        """V of its first rows is NaN in the first layer."""
        sequence.view(0, "v" if self.kv_kind is None else SCALES)[:end] = float("nan")

    def expected(self, prompt: list[int], max_new_tokens: int = 8) -> list[int]:
        """transformers' own greedy answer, with its DynamicCache and its own attention, as `by_transformers` says."""
        ids = torch.tensor([prompt], device=self.cache.device)
        with self.by_transformers():
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
        return out[0, len(prompt) :].tolist()

    def assert_expected(self, prompts: Mapping[str, list[int]], max_new_tokens: int = 8) -> None:
        """The answer to each prompt, by its name, is transformers' own."""
        for name, prompt in prompts.items():
            assert self.tokens(name) == self.expected(prompt, max_new_tokens), name

    def close(self) -> None:
        """The threads end and everything goes back, or this raises."""
        self.engine.close()
        self.memory.close()
        calls = self.pool.driver.calls
        assert calls["create"] + calls["import_fd"] == calls["release"] and calls["map"] == calls["unmap"]


MakeHarness = Callable[..., Harness]


@pytest.fixture(params=["exact", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fp8", "int8"))])
def harness(request: pytest.FixtureRequest) -> Iterator[MakeHarness]:
    """Makes harnesses, and closes them after the test. All tests hold over quantised K and V as well."""
    yield from making(None if request.param == "exact" else request.param)


def making(kv_kind: Kind | None) -> Iterator[MakeHarness]:
    """What makes harnesses over rows of this kind; then they are closed."""
    made: list[Harness] = []

    def make(model: Any = None, **options: Any) -> Harness:
        made.append(Harness(tiny_model() if model is None else model, **({"kv_kind": kv_kind} | options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
