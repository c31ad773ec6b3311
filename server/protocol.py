"""The messages between the HTTP process and the engine process: msgspec structs over one ZeroMQ pair of sockets."""

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vmmkv.memory.memory_map import SlotMap
from vmmkv.server.sampling_params import SamplingParams

# -------- protocol

FinishReason: TypeAlias = Literal["stop", "length"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What every message derives from; on the wire it carries its class name."""


class Generate(Message, frozen=True, kw_only=True):
    """HTTP -> engine: continue `prompt`. One message asks for one answer, or for one beam search."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    """`n`, `stop` and `structured_outputs` are not the engine's; a `seed` of None counts as 0."""
    priority: int = 0
    """Lower ones run first."""
    cache_salt: str | None = None
    """Prefix namespace: requests share cached prefixes only with requests of the same salt."""
    grammar: bytes = b""
    """The compiled grammar that the answer follows; empty for none."""


class Abort(Message, frozen=True, kw_only=True):
    """HTTP -> engine: the client is gone or a stop string was found; no answer is expected."""

    request_id: str


class Shutdown(Message, frozen=True, kw_only=True):
    """HTTP -> engine: finish now."""


class AskMap(Message, frozen=True, kw_only=True):
    """HTTP -> engine: a `MemoryMap` is wanted. Who asks before it has come gets the same one."""


class Forget(Message, frozen=True, kw_only=True):
    """HTTP -> engine: forget every prefix that no running request uses; `Managed` is the answer."""


class Resize(Message, frozen=True, kw_only=True):
    """HTTP -> engine: have another KV budget; `Managed` is the answer."""

    budget_bytes: int


class Loading(Message, frozen=True, kw_only=True):
    """Engine -> HTTP, while it starts: what it is at, and how far."""

    stage: str
    done: int
    total: int


class Ready(Message, frozen=True, kw_only=True):
    """Engine -> HTTP, once: the model is loaded; these are its limits."""

    model: str
    device: str
    dtype: str
    max_tokens: int
    """Prompt and new tokens of one request together: the lesser of the model's and the slot's reach."""
    pool_tokens: int
    """Tokens of one sequence that the whole budget can hold; a request beyond it can never fit."""
    budget_bytes: int
    max_sequences: int
    implementation: str = "transformers"
    """Whose code computes the model: `vmmkv` for the decoder that is driven by configuration, `transformers` for that
    library's own, unmodified."""
    vocabulary_size: int = 0
    """Of its logits."""
    end_tokens: list[int] = []
    """That end an answer."""


class CannotStart(Message, frozen=True, kw_only=True):
    """Engine -> HTTP, in place of `Ready`: what it was asked to load cannot be served, and it ends."""

    reason: str
    """For whoever started the server: it may have paths in it."""


class Output(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """New tokens of one request; its last one has a finish reason. On the wire it is an array, without names.

    There are 256 of these a step: tuples, of which the empty one costs nothing, and no garbage collector that counts them,
    take a tenth of the time that lists take.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """In a request's first output: tokens of its prompt that the prefix cache had. 0 in all others."""
    logprobs: tuple[float, ...] = ()
    """If asked for: of each token chosen, under the model's own distribution (before temperature, penalties, bias and
    truncation). An end token, which is not in `token_ids`, has its own here too."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """If asked for: for each of `logprobs` the likeliest tokens and their log-probabilities, the likeliest first."""
    queued_us: int = 0
    """In a request's first output: how long it waited in the engine before it began, at least 1. 0 in all others."""


class Outputs(Message, frozen=True, kw_only=True):
    """Engine -> HTTP: what one step gave, of all its requests in one message."""

    outputs: list[Output]


class PromptLogprobs(Message, frozen=True, kw_only=True):
    """Engine -> HTTP: how likely the next tokens of a prompt were, under the model's own distribution; in order, before the
    request's first `Output`. The first token of a prompt has none. Arrays as bytes: there can be hundreds of thousands."""

    request_id: str
    logprobs: bytes
    """float32, of each token."""
    top_logprobs: bytes
    """float32, of the likeliest at each place, as many as were asked for, the likeliest first."""
    top_ids: bytes
    """int32, which these are."""


class Beam(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that a beam search found."""

    token_ids: list[int]
    """Without the end token."""
    score: float
    """Log-probability / (number of tokens, the end token among them) ** length_penalty."""
    finish_reason: FinishReason


class Beams(Message, frozen=True, kw_only=True):
    """Engine -> HTTP: the whole answer to a request with a `beam_width`; nothing comes after it."""

    request_id: str
    beams: list[Beam]
    """As many as the search was wide, the best first."""
    cached_tokens: int = 0
    """As in `Output`."""
    queued_us: int = 0
    """As in `Output`."""


class Failed(Message, frozen=True, kw_only=True):
    """Engine -> HTTP: one request ended in an error; the others go on."""

    request_id: str
    message: str


class Managed(Message, frozen=True, kw_only=True):
    """Engine -> HTTP: a `Forget` or `Resize` is done, or is not. They are answered in the order in which they came."""

    error: str | None = None
    freed_bytes: int
    budget_bytes: int
    pool_tokens: int
    """As in `Ready`."""


class Snapshot(Message, frozen=True, kw_only=True):
    """Engine -> HTTP, at least once a second while busy, and once when it becomes idle: what /metrics shows."""

    running: int
    waiting: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    kv_tokens: int
    kv_mapped_bytes: int
    kv_free_bytes: int
    kv_cached_bytes: int = 0
    kv_retiring_bytes: int
    kv_created_bytes: int
    kv_budget_bytes: int
    stalls: int
    stall_us: float
    driver_calls: dict[str, int]
    prefix_hit_tokens: int = 0
    """Tokens of prompts that were not computed, because the prefix cache had them; since the start."""
    prefix_missed_tokens: int = 0
    """Tokens of prompts that the prefix cache was asked for, and had not; since the start."""
    prefix_pages: int = 0
    """That the prefix cache holds now."""
    kv_used_bytes: int = 0
    """Physical memory of running sequences, once however many share it."""
    attached: dict[str, int] = {}
    """How often sequences came to their first tokens by each method, since the start."""
    attach_us: dict[str, float] = {}
    """How long that took in all."""


class MemoryMap(Message, frozen=True, kw_only=True):
    """Engine -> HTTP, when asked: what is mapped where. Each slot is told as it was at one moment, all within a few steps."""

    num_slots: int
    slot_pages: list[int]
    """Pages of addresses that a slot has, by group of layers."""
    slots: list[SlotMap]
    """Those with something mapped, in order."""
    requests: dict[int, str]
    """By slot, the request that runs there; a search has one slot under its name, whatever its beams have."""
    took_us: float
    """Of the engine's time, to look at the slots."""


ToEngine: TypeAlias = Generate | Abort | AskMap | Forget | Resize | Shutdown
FromEngine: TypeAlias = (
    Loading | Ready | CannotStart | Outputs | PromptLogprobs | Beams | Failed | Managed | Snapshot | MemoryMap
)

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: Message) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """The engine's side of the wire. Raises msgspec.ValidationError for anything else."""
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """The HTTP side of the wire. Raises msgspec.ValidationError for anything else."""
    return _from_engine.decode(data)


# -------- prompt logprobs
# The log-probabilities of a prompt as arrays of bytes, and back: there can be hundreds of thousands in a message.
#
# Legend: W tokens of a prompt, T likeliest ones at the place of each.

LOGPROB_BYTES: Final = np.dtype(np.float32).itemsize


def packed(
    request_id: str,
    chosen_W: npt.NDArray[np.float32],
    values_WT: npt.NDArray[np.float32],
    ids_WT: npt.NDArray[np.int32 | np.int64],
) -> PromptLogprobs:
    """As a message."""
    return PromptLogprobs(
        request_id=request_id,
        logprobs=chosen_W.tobytes(),
        top_logprobs=values_WT.tobytes(),
        top_ids=ids_WT.astype(np.int32).tobytes(),
    )


def unpacked(message: PromptLogprobs) -> tuple[list[float], list[Sequence[tuple[int, float]]]]:
    """Of each token its log-probability; and the likeliest at its place, with theirs, the likeliest first."""
    chosen: list[float] = np.frombuffer(message.logprobs, np.float32).tolist()
    values_WT = np.frombuffer(message.top_logprobs, np.float32).reshape(len(chosen), -1)
    ids_WT = np.frombuffer(message.top_ids, np.int32).reshape(values_WT.shape)
    likeliest: list[Sequence[tuple[int, float]]] = [
        tuple(zip(ids, values, strict=True)) for ids, values in zip(ids_WT.tolist(), values_WT.tolist(), strict=True)
    ]
    return chosen, likeliest
