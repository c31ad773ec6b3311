"""The messages between the HTTP process and the engine process: msgspec structs over one ZeroMQ pair of sockets."""

from typing import Literal, TypeAlias

import msgspec

FinishReason: TypeAlias = Literal["stop", "length"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What every message derives from; on the wire it carries its class name."""


class Generate(Message, frozen=True, kw_only=True):
    """HTTP -> engine: continue `prompt` by up to `max_new_tokens`."""

    request_id: str
    prompt: list[int]
    max_new_tokens: int
    stop_token_ids: list[int] = []
    """Ends the sequence when sampled, in addition to the model's own end tokens; neither is sent back."""
    ignore_eos: bool = False
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    seed: int = 0
    """The random stream depends on this and on the position only."""
    want_logprobs: bool = False
    """Have `Tokens` carry log-probabilities."""
    cache_salt: str | None = None
    """Part of the prefix namespace: prompts share what is known of them only with prompts of the same salt."""
    beam_width: int = 0
    """Above 0, search for the best answers with so many beams, instead of sampling; `Beams` is the answer then."""
    length_penalty: float = 1.0
    """Of a beam search: answers compare by log-probability / (number of tokens) ** length_penalty."""


class Abort(Message, frozen=True, kw_only=True):
    """HTTP -> engine: the client is gone or a stop string was found; no answer is expected."""

    request_id: str


class Shutdown(Message, frozen=True, kw_only=True):
    """HTTP -> engine: finish now."""


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


class Tokens(Message, frozen=True, kw_only=True):
    """Engine -> HTTP: new tokens of one request; the last such message has a finish reason."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[float] = []
    """If asked for: of each token chosen, under the model's own distribution (before temperature and top-p). An end token,
    which is not in `token_ids`, has its own here too."""
    cached_tokens: int = 0
    """In a request's first message: tokens of its prompt that the prefix cache had. 0 in all others."""


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
    """As in `Tokens`."""


class Failed(Message, frozen=True, kw_only=True):
    """Engine -> HTTP: one request ended in an error; the others go on."""

    request_id: str
    message: str


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
    prefix_pages: int = 0
    """That the prefix cache holds now."""


ToEngine: TypeAlias = Generate | Abort | Shutdown
FromEngine: TypeAlias = Loading | Ready | Tokens | Beams | Failed | Snapshot

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
