"""Messages between the HTTP process and the engine process: msgspec structs over a pair of ZeroMQ sockets."""

from collections.abc import Callable, Sequence
from typing import Final, Literal, Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from vmmkv.memory.states import SlotMap
from vmmkv.units import MIB
from vmmkv_server.sampling_params import Limits, SamplingParams
from vmmkv_server.statistics import (
    AnswerStatistics,
    MemoryStatistics,
    Metric,
    PrefixStatistics,
    SchedulerStatistics,
    TierStatistics,
    Value,
)

FinishReason: TypeAlias = Literal["stop", "length"]

BLOCK_TOKENS: Final = 16
"""Tokens of a block, as routers count them. The cache itself has none."""
KV_EVENTS_PENDING: Final = 1 << 16
"""Changes of the prefix tree that may wait to be published."""
KV_EVENTS_REPLAYED: Final = 10_000
"""The last batches of events, which are sent again on request."""
KV_EVENTS_REPLAYED_BYTES: Final = 64 * MIB
"""Bytes of these batches: fewer are kept where they are longer. One has 100 KB at most."""
KV_EVENTS_HWM: Final = 10_000
"""Batches that wait for a slow subscriber, before it loses some."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; on the wire each carries its class name."""


# HTTP -> engine


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """Places of an answer at which its grammar begins; text elsewhere is free.

    Raises: ValueError if it never has a grammar begin, or has options of triggers without any.
    """

    behind: str = ""
    """Text that comes first, such as `</think>`; empty to look from the start."""
    triggers: tuple[str, ...] = ()
    """Texts with which the grammar begins, their own text included; without any it begins behind `behind`."""
    is_first: bool = False
    """Do triggers count only as the first text, white space aside, from where they are looked for?"""
    repeats: bool = False
    """Is text free again when the grammar has ended, and are triggers looked for? Else the answer ends there."""
    in_code: bool = True
    """Do triggers count in code blocks of the free text too?"""

    def __post_init__(self) -> None:
        if not (self.behind or self.triggers) or "" in self.triggers:
            raise ValueError(f"a gate has a text to look for, and no empty one: {self}")
        if (self.is_first or self.repeats) and not self.triggers:
            raise ValueError(f"a gate that is_first or repeats has triggers: {self}")


class Generate(Message, frozen=True, kw_only=True):
    """Continue `prompt`: one answer, or one beam search."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    """The engine ignores `n`, `stop` and `structured_outputs`; a `seed` of None counts as 0."""
    priority: int = 0
    """Priority: requests with lower ones run first."""
    cache_salt: str | None = None
    """Prefix namespace: requests share cached prefixes only with requests of the same salt."""
    grammar: bytes = b""
    """The grammar that the answer follows, as `Compilation.compile` gives it; empty for none."""
    gate: Gate | None = None
    """Places at which the grammar begins; None for the start of the answer."""

    def __post_init__(self) -> None:
        assert self.gate is None or self.grammar, "a gate is for a grammar"


class Abort(Message, frozen=True, kw_only=True):
    """End a request without an answer: its client is gone, or a stop string was found."""

    request_id: str


class Shutdown(Message, frozen=True, kw_only=True):
    """Finish now."""


class AskMap(Message, frozen=True, kw_only=True):
    """Send a `MemoryMap`; one answers all that were asked before it."""


class Forget(Message, frozen=True, kw_only=True):
    """Evict every prefix that no running request uses; `Managed` is the answer."""


class Resize(Message, frozen=True, kw_only=True):
    """Change the KV budget; `Managed` is the answer."""

    budget_bytes: int


class Sleep(Message, frozen=True, kw_only=True):
    """Store what tiers lack of cached prefixes, and give all KV memory back; no request is there. `Managed` is the answer."""


class WakeUp(Message, frozen=True, kw_only=True):
    """Take KV memory again, as requests need it; `Managed` is the answer."""


Manage: TypeAlias = Forget | Resize | Sleep | WakeUp
"""Request of an administrator, done between two steps."""


# Engine -> HTTP


class Loading(Message, frozen=True, kw_only=True):
    """Progress of the engine's start."""

    stage: str
    done: int
    total: int


class KVEventSource(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses at which KV events are published."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


class Ready(Message, frozen=True, kw_only=True):
    """Sent once, when the model is loaded."""

    model: str
    """Directory of the model."""
    device: str
    dtype: str
    """dtype of the weights."""
    kv_cache_dtype: str
    """`dtype`, or the type that K and V are quantised to."""
    num_ranks: int = 1
    """Devices that share the model."""
    implementation: str
    """`vmmkv` for the decoder driven by configuration, `transformers` for that library's code."""
    limits: Limits
    end_tokens: list[int] = []
    """Tokens that end an answer."""
    kv_events: KVEventSource | None = None
    """Addresses of KV events; None if they are off."""
    feature_metrics: dict[str, Metric] = {}
    """Metrics of the engine's features by name: the numbers are in each `Snapshot`."""

    @property
    def num_blocks(self) -> int:
        """The pool in blocks, for routers."""
        return self.limits.pool_tokens // BLOCK_TOKENS


class LoadFailed(Message, frozen=True, kw_only=True):
    """Sent in place of `Ready`: the model cannot be served, and the engine ends."""

    reason: str
    """Reason for the operator: it may hold paths."""


LOST: Final = 3
"""Exit code of an engine that has lost its device's context, or another rank."""


DEVICE: Final = "device"
"""Source of cached tokens that came from no tier."""

RECOMPUTED: Final = "recomputed"
"""Source of the rows of a preempted request that were nowhere, and are computed again."""


class Output(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """New tokens of one request; the last one has a finish reason. On the wire an array without names.

    There are 256 of these a step: tuples, of which the empty one costs nothing, and no garbage collection take a tenth of the
    time of lists.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached: tuple[tuple[str, int], ...] = ()
    """Prompt tokens found in the prefix cache, by source: DEVICE or a tier's name. Only in a request's first output."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each chosen token under the model's own distribution, before any sampling parameter; empty unless
    asked for. An end token, which is not in `token_ids`, has one too."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Likeliest tokens at each place and their log-probabilities, the likeliest first; empty unless asked for."""
    queued_us: int = 0
    """Wait in the engine before the request began, in microseconds, at least 1. Only in its first output, else 0."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, wherever they were."""
        return sum(count for _, count in self.cached)


class Outputs(Message, frozen=True, kw_only=True):
    """The outputs of one step."""

    outputs: list[Output]


LOGPROB_BYTES: Final = np.dtype(np.float32).itemsize


class PromptLogprobs(Message, frozen=True, kw_only=True):
    """Log-probabilities of the next prompt tokens under the model's own distribution. Made by `packed`, read by `unpacked`.

    They come in order, before the request's first `Output`. The first token of a prompt has none.
    Raw bytes, since a message can hold hundreds of thousands of numbers.

    Legend: W tokens of a prompt, T likeliest tokens at each place.
    """

    request_id: str
    logprobs: bytes
    """float32, of each token."""
    top_logprobs: bytes
    """float32, of as many of the likeliest at each place as were asked for, the likeliest first."""
    top_ids: bytes
    """int32, their token ids."""

    @classmethod
    def packed(
        cls,
        request_id: str,
        chosen_W: npt.NDArray[np.float32],
        values_WT: npt.NDArray[np.float32],
        ids_WT: npt.NDArray[np.int32 | np.int64],
    ) -> Self:
        """The message of these arrays."""
        ids = ids_WT.astype(np.int32).tobytes()
        return cls(request_id=request_id, logprobs=chosen_W.tobytes(), top_logprobs=values_WT.tobytes(), top_ids=ids)

    def unpacked(self) -> tuple[list[float], list[Sequence[tuple[int, float]]]]:
        """The log-probability of each token; and at each place the likeliest tokens with theirs, the likeliest first."""
        chosen: list[float] = np.frombuffer(self.logprobs, np.float32).tolist()
        values_WT = np.frombuffer(self.top_logprobs, np.float32).reshape(len(chosen), -1)
        ids_WT = np.frombuffer(self.top_ids, np.int32).reshape(values_WT.shape)
        return chosen, [tuple(zip(*row, strict=True)) for row in zip(ids_WT.tolist(), values_WT.tolist(), strict=True)]


class Beam(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of a beam search."""

    token_ids: list[int]
    """Tokens of the answer, without the end token."""
    score: float
    """Log-probability / (number of tokens, with the end token) ** length_penalty."""
    finish_reason: FinishReason


class Beams(Message, frozen=True, kw_only=True):
    """The whole answer to a request with a `beam_width`."""

    request_id: str
    beams: list[Beam]
    """`beam_width` answers, the best first."""
    cached: tuple[tuple[str, int], ...] = ()
    """Prompt tokens found in the prefix cache, by source, as `Output.cached`."""
    queued_us: int = 0
    """Wait in the engine before the search began, in microseconds, at least 1."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, from any source."""
        return sum(count for _, count in self.cached)


class Failed(Message, frozen=True, kw_only=True):
    """One request ended in an error; the others go on."""

    request_id: str
    message: str


class Compacted(Message, frozen=True, kw_only=True):
    """The `kv_policy` of a request has dropped rows."""

    request_id: str
    kept_rows: int
    """Rows that are left."""
    dropped_rows: int
    """Rows dropped since the request began, or began again."""


class Managed(Message, frozen=True, kw_only=True):
    """The outcome of a `Manage`, in the order in which they came."""

    error: str | None = None
    freed_bytes: int
    budget_bytes: int
    """Budget now; of a sleeping engine the one that it has again when it wakes up."""
    pool_tokens: int
    """Tokens of one sequence that the whole KV budget holds, as `Limits.pool_tokens`."""


class Snapshot(Message, frozen=True, kw_only=True):
    """The statistics of the engine's parts, sent at least once a second while it is busy, and when it becomes idle."""

    scheduler: SchedulerStatistics
    answers: AnswerStatistics
    memory: MemoryStatistics
    prefix: PrefixStatistics
    tiers: dict[str, TierStatistics] = {}
    """Statistics of each tier, by its name."""
    features: dict[str, Value] = {}
    """Numbers of all features, by the name of the metric, which `Ready` has."""


class MemoryMap(Message, frozen=True, kw_only=True):
    """The mapped pages. Each slot is shown as of one moment, all within a few steps."""

    num_slots: int
    slot_pages: list[int]
    """Pages of addresses of a slot, by group of layers."""
    slots: list[SlotMap]
    """Slots with mapped pages, in order."""
    requests: dict[int, str]
    """The request that runs in a slot; a beam search has one slot under its name."""
    took_us: float
    """Time of the engine's loop that the map took, in microseconds."""


ToEngine: TypeAlias = Generate | Abort | AskMap | Manage | Shutdown
FromEngine: TypeAlias = (
    Loading | Ready | LoadFailed | Outputs | PromptLogprobs | Beams | Compacted | Failed | Managed | Snapshot | MemoryMap
)

encode: Final[Callable[[Message], bytes]] = msgspec.msgpack.Encoder().encode
"""A message as bytes."""
decode_to_engine: Final[Callable[[bytes], ToEngine]] = msgspec.msgpack.Decoder(ToEngine).decode
"""A message to the engine. Raises: msgspec.ValidationError for anything else."""
decode_from_engine: Final[Callable[[bytes], FromEngine]] = msgspec.msgpack.Decoder(FromEngine).decode
"""A message from the engine. Raises: msgspec.ValidationError for anything else."""
