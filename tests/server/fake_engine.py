"""An engine without a model: speaks the protocol, and answers with whatever it is told to, by default the prompt itself.

In a test's own process it is a thread, so that the test sees what it received. Run as a program, with the arguments of the
real engine, it is a process, for the tests of starting and stopping one.
"""

import argparse
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zmq

from vmmkv_server.protocol import (
    Abort,
    AskMap,
    Beam,
    Beams,
    Compacted,
    Failed,
    FinishReason,
    Forget,
    Generate,
    LoadFailed,
    Loading,
    Managed,
    MemoryMap,
    Message,
    Output,
    Outputs,
    PromptLogprobs,
    Ready,
    Resize,
    Shutdown,
    Sleep,
    Snapshot,
    ToEngine,
    WakeUp,
    decode_to_engine,
    encode,
)
from vmmkv_server.sampling_params import Limits
from vmmkv_server.statistics import (
    AnswerStatistics,
    MemoryStatistics,
    PrefixStatistics,
    SchedulerStatistics,
    TierStatistics,
    Value,
)

FAIL_SEED, SILENT_SEED = 1001, 1002
"""A request with one of these fails, or gets no answer."""
SILENT_SEEDS = range(2000, 3000)
"""Nor do these, of which a request has several."""

READY = Ready(
    model="tiny",
    device="fake",
    dtype="float32",
    kv_cache_dtype="int8",
    num_ranks=2,
    implementation="vmmkv",
    limits=Limits(model_tokens=256, pool_tokens=1024, budget_bytes=1 << 26, max_sequences=4, vocabulary_size=258),
)


def ready_with(**limits: Any) -> Ready:
    """READY with other limits."""
    return msgspec.structs.replace(READY, limits=dataclasses.replace(READY.limits, **limits))


def with_features(ready: Ready) -> Ready:
    """The same engine with the metrics of the real engine's features, whose modules import torch."""
    from vmmkv_server.engine.engine import FEATURES
    from vmmkv_server.engine.feature import metrics_of

    return msgspec.structs.replace(ready, feature_metrics=metrics_of(FEATURES))


def echo(request: Generate) -> list[int]:
    return request.prompt


def echoes(request: Generate) -> list[Beam]:
    """The prompt from its first token on, from its second on, and so forth."""
    answers = [request.prompt[start:][: request.params.max_tokens] for start in range(request.params.beam_width)]
    return [Beam(token_ids=answer, score=-float(rank), finish_reason="stop") for rank, answer in enumerate(answers)]


class FakeEngine:
    """Answers each request with `answer(request)` and an end token, a token each `step_s`, up to max_tokens."""

    def __init__(self, address: str, *, ready: Ready = READY) -> None:
        self.running: dict[str, tuple[Generate, list[int]]] = {}
        self._ready = ready
        self._address = address
        self._num_tokens = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.run, name="fake-engine", daemon=True)
        self.reset()

    def reset(self) -> None:
        """Answer as at first, forget what came, and end what runs."""
        self.answer: Callable[[Generate], list[int]] = echo
        self.search: Callable[[Generate], list[Beam]] = echoes
        self.logprob: Callable[[Generate, int], float] = lambda request, place: -1.0
        """Of the token at a place of the answer, the end token's behind the last."""
        self.likeliest: Callable[[Generate, int], list[tuple[int, float]]] = lambda request, place: [
            (token_id, -2.0 - token_id) for token_id in range(request.params.logprobs or 0)
        ]
        """What is said to have been the likeliest at a place."""
        self.cached: Callable[[Generate], int | tuple[tuple[str, int], ...]] = lambda request: 0
        """Tokens of the prompt that are said to be cached, on the device or by source."""
        self.memory_map: MemoryMap | None = MemoryMap(num_slots=4, slot_pages=[64], slots=[], requests={}, took_us=1.0)
        """What it says is mapped; None: it does not say."""
        self.endless = False
        """Repeat the answer up to max_tokens."""
        self.deaf = False
        """Go on when told to finish."""
        self.fails_to_sleep = False
        """And to wake up."""
        self.step_s = 0.0
        self.received: list[ToEngine] = []
        self.most_running = 0
        """Requests at once, at the worst."""
        self.is_asleep = False
        self.holder_is_gone: bool | None = None
        self.running.clear()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def aborted(self) -> set[str]:
        return {message.request_id for message in self.received if isinstance(message, Abort)}

    def run(self, *, loading_s: float = 0.0, cannot_start: str | None = None) -> None:
        with zmq.Context() as context, context.socket(zmq.PAIR) as self._socket:
            self._socket.set(zmq.LINGER, 1000)
            self._socket.connect(self._address)
            for done in range(3):
                self.send(Loading(stage="weights", done=done, total=2))
                time.sleep(loading_s / 3)
            if cannot_start is not None:
                self.send(LoadFailed(reason=cannot_start))
                sys.exit(1)
            self.send(self._ready)
            self.send(self.snapshot())
            while not self._stop.is_set():
                if self._socket.poll(0 if self.running else 20):
                    self._take(decode_to_engine(self._socket.recv()))
                elif self.running:
                    self._step()
                    time.sleep(self.step_s)

    def _take(self, message: ToEngine) -> None:
        self.received.append(message)
        match message:
            case Generate(request_id=request_id, params=params):
                seed = params.seed
                if seed == FAIL_SEED:
                    self.send(Failed(request_id=request_id, message="the fake engine was told to fail"))
                elif seed != SILENT_SEED and seed not in SILENT_SEEDS:
                    self.running[request_id] = (message, [])
                    self.most_running = max(self.most_running, len(self.running))
            case Abort(request_id=request_id):
                self.running.pop(request_id, None)
            case AskMap():
                if self.memory_map is not None:
                    self.send(self.memory_map)
            case Forget():
                self.send(
                    Managed(
                        freed_bytes=7, budget_bytes=self._ready.limits.budget_bytes, pool_tokens=self._ready.limits.pool_tokens
                    )
                )
            case Resize(budget_bytes=budget_bytes):
                error = "that is too little" if budget_bytes < 1 << 21 else None
                self.send(Managed(error=error, freed_bytes=0, budget_bytes=budget_bytes, pool_tokens=64))
            case Sleep() | WakeUp():
                self.is_asleep = isinstance(message, Sleep)
                error, limits = "told to fail" if self.fails_to_sleep else None, self._ready.limits
                self.send(Managed(error=error, freed_bytes=9, budget_bytes=limits.budget_bytes, pool_tokens=limits.pool_tokens))
                self.send(self.snapshot())
            case Shutdown():
                if not self.deaf:
                    self._stop.set()

    def _say_prompt(self, request: Generate) -> None:
        """In two messages, as if in two chunks: token t had -t / 8, and the likeliest as in answers."""
        count = request.params.prompt_logprobs
        assert count is not None
        for tokens in (request.prompt[1:3], request.prompt[3:]):
            if tokens:
                chosen = -np.array(tokens, np.float32) / 8
                ids = np.tile(np.arange(count, dtype=np.int32), (len(tokens), 1))
                self.send(PromptLogprobs.packed(request.request_id, chosen, -2 - ids.astype(np.float32), ids))

    def _step(self) -> None:
        outputs: list[Output] = []
        for request, generated in list(self.running.values()):
            if request.params.kv_policy is not None:
                rows = len(request.prompt) + len(generated)
                self.send(Compacted(request_id=request.request_id, kept_rows=2, dropped_rows=rows - 2))
            if request.params.prompt_logprobs is not None and not generated:
                self._say_prompt(request)
            if request.params.beam_width:
                del self.running[request.request_id]
                self.send(Beams(request_id=request.request_id, beams=self.search(request), cached=self._sources(request)))
            else:
                outputs.append(self._output(request, generated))
        self.send(Outputs(outputs=outputs))
        self.send(self.snapshot())

    def _output(self, request: Generate, generated: list[int]) -> Output:
        """The next token, or the end."""
        params, place, answer = request.params, len(generated), self.answer(request)
        reason: FinishReason | None = "stop" if params.max_tokens else "length"
        if params.max_tokens and (self.endless or place < len(answer)):
            generated.append(answer[place % len(answer)])
            self._num_tokens += 1
            reason = "length" if len(generated) == params.max_tokens else None
        if reason is not None:
            del self.running[request.request_id]
        return Output(
            request_id=request.request_id,
            token_ids=tuple(generated[place:]),
            finish_reason=reason,
            logprobs=(self.logprob(request, place),) if params.logprobs is not None else (),
            top_logprobs=(tuple(self.likeliest(request, place)),) if params.logprobs else (),
            cached=self._sources(request) if place == 0 else (),
        )

    def _sources(self, request: Generate) -> tuple[tuple[str, int], ...]:
        cached = self.cached(request)
        return cached if isinstance(cached, tuple) else (("device", cached),) if cached else ()

    def snapshot(self) -> Snapshot:
        unused: dict[str, Value] = {name: {} if metric.label else 0 for name, metric in self._ready.feature_metrics.items()}
        return Snapshot(
            scheduler=SchedulerStatistics(
                requests_running=len(self.running),
                hit_tokens={"device": 1, "host": 4},
                resumed_tokens={"recomputed": 3},
            ),
            answers=AnswerStatistics(generation_tokens=self._num_tokens),
            memory=MemoryStatistics(
                kv_tokens=sum(len(generated) for _, generated in self.running.values()),
                kv_mapped_bytes=len(self.running) << 21,
                kv_created_bytes=len(self.running) << 21,
                kv_budget_bytes=0 if self.is_asleep else self._ready.limits.budget_bytes,
                stalls=2,
                stall_seconds=0.0015,
                driver_calls={"create": 3, "map": 4},
                holder_up=None if self.holder_is_gone is None else not self.holder_is_gone,
            ),
            prefix=PrefixStatistics(prefix_hit_tokens=5, prefix_pages=6),
            tiers={
                "host": TierStatistics(
                    **(dict.fromkeys(TierStatistics.metrics(), 7) | {"budget_bytes": 1 << 30, "held_bytes": 1 << 21})
                )
            },
            features=unused | {"fetches": {"done": 2}, "fetch_wait_seconds": 0.003},
        )

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--loading-s", type=float, default=0.0)
    parser.add_argument("--exit-at-start", type=int)
    parser.add_argument("--cannot-start", metavar="REASON")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--endless", action="store_true")
    arguments = parser.parse_args()
    assert os.path.isdir(json.load(sys.stdin)["model"])
    if arguments.exit_at_start is not None:
        sys.exit(arguments.exit_at_start)
    engine = FakeEngine(arguments.socket)
    engine.deaf, engine.endless = arguments.deaf, arguments.endless
    engine.run(loading_s=arguments.loading_s, cannot_start=arguments.cannot_start)


if __name__ == "__main__":
    main()
