"""An inference engine in 100 lines: continuous batching over a KVCache.

    python examples/minimal_engine.py

Each step computes the prompts that were admitted and one more token of each running request, in one batch. When the pool has
no page left, the newest request is preempted and computed again later. Answers do not depend on the batch, up to near ties.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from tiny import TinyModel

from vmmkv import MIB, KVCache, OutOfPages, Pool, Sequence


@dataclass(eq=False)
class Request:
    """A prompt, the number of tokens to generate, and the sequence while the request runs."""

    prompt: list[int]
    max_tokens: int
    answer: list[int] = field(default_factory=list)
    sequence: Sequence | None = None

    @property
    def missing(self) -> list[int]:
        """Tokens that the cache does not have yet: all of them at first, then the newest."""
        return (self.prompt + self.answer)[self.sequence.length if self.sequence else 0 :]


class Engine:
    """Continuous batching with greedy sampling."""

    def __init__(self, model: TinyModel, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = self.steps = 0

    def step(self) -> None:
        """Admit requests, map memory, compute one batch, and end what is finished."""
        while self.waiting and len(self.running) < self.cache.num_slots:
            self.running.append(self.waiting.popleft())
            self.running[-1].sequence = self.cache.open()
        for request in list(self.running):
            self.make_room(request)
        slots = [request.sequence.slot for request in self.running]
        tokens_B = self.model.forward(self.cache, slots, [request.missing for request in self.running]).argmax(dim=1)
        self.cache.map_ahead(500, lookahead_tokens=16)  # while the GPU works
        for request, token in zip(list(self.running), tokens_B.tolist(), strict=True):
            request.answer.append(token)
            if len(request.answer) == request.max_tokens:
                self.end(request)
        self.steps += 1

    def make_room(self, request: Request) -> None:
        """Map memory for the missing tokens; preempt the newest requests until it fits, at last this one."""
        while request in self.running:
            try:
                return request.sequence.grow(request.sequence.length + len(request.missing))
            except OutOfPages:
                if len(self.running) == 1:
                    raise
                self.preemptions += self.running[-1].sequence.length > 0
                self.waiting.appendleft(self.running[-1])
                self.end(self.running[-1])

    def end(self, request: Request) -> None:
        """Close the sequence; its pages are free when all work on them is done."""
        self.running.remove(request)
        request.sequence.close()
        request.sequence = None


def main() -> None:
    """Answer requests in a pool that is too small for all at once; compare some with the model run alone."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model, ids = TinyModel(device), torch.randint(256, (12, 1110), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [Request(ids[number][90 * number :], max_tokens=12 + 3 * number) for number in range(12)]
    with Pool(device, 8 * MIB) as pool, KVCache(model.layout, pool, slots=6, max_tokens=4096) as cache:
        engine = Engine(model, cache)
        engine.waiting.extend(requests)
        while engine.waiting or engine.running:
            engine.step()
        cache.check()
        for request in requests[2::4]:
            with cache.open() as alone:
                for new, token in zip([request.prompt, *([token] for token in request.answer)], request.answer, strict=False):
                    alone.grow(alone.length + len(new))
                    (logits,) = model.forward(cache, [alone.slot], [new])
                    assert logits.max() - logits[token] < 1e-3, "its answer depends on the batch"  # near ties apart
    num_tokens = sum(len(request.answer) for request in requests)
    print(f"{num_tokens} tokens for {len(requests)} requests in {engine.steps} steps, {engine.preemptions} preemptions")
    assert engine.preemptions > 0


if __name__ == "__main__":
    main()
