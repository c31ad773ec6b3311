"""An inference engine in some 80 lines of code: requests come and go in one running batch, and memory follows them.

    python examples/minimal_engine.py

Each step computes the prompts that were admitted and one token more of all that run, in one batch. When the pool has no page
left the newest gives way: it is closed, and computed again later. Each gives what it gives alone, up to near ties of tokens.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from tiny import TinyModel

from vmmkv import MIB, PAGE_BYTES, KVCache, OutOfPages, Pool, Sequence

MAX_RUNNING = 6


@dataclass(eq=False)
class Request:
    """A prompt, and how many tokens are wanted behind it."""

    prompt: list[int]
    max_tokens: int
    answer: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    """Its memory, while it runs."""

    @property
    def missing(self) -> list[int]:
        """Tokens that are known and not in the cache yet: all of them at first, then the newest."""
        known = self.prompt + self.answer
        return known[self.sequence.length if self.sequence else 0 :]


class Engine:
    """Continuous batching, greedily sampled."""

    def __init__(self, model: TinyModel, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = self.steps = 0

    def run(self, requests: list[Request]) -> None:
        """Until all are answered."""
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Admit, make room, compute, give up what is done."""
        free_bytes = self.cache.pool.budget_bytes - self.cache.pool.held_bytes
        while self.waiting and len(self.running) < MAX_RUNNING:
            free_bytes -= self.cache.layout.pages_for(len(self.waiting[0].missing)) * PAGE_BYTES
            if free_bytes < 0 and self.running:
                break
            self.running.append(self.waiting.popleft())
        for request in list(self.running):
            self.make_room(request)
        slots = [request.sequence.slot for request in self.running if request.sequence]
        logits = self.model.forward(self.cache, slots, [request.missing for request in self.running])
        tokens_B = logits.argmax(dim=1)
        # Map ahead, unmap what was left: before `tolist` waits for the GPU. But tiny.py's attention waits by itself.
        self.cache.pump(500, lead_tokens=16)
        for request, token in zip(self.running, tokens_B.tolist(), strict=True):
            request.answer.append(token)
        for request in [request for request in self.running if len(request.answer) == request.max_tokens]:
            self.give_up(request)
        self.steps += 1

    def make_room(self, request: Request) -> None:
        """Memory for what is missing; whoever came last gives way until there is enough."""
        while request in self.running:
            try:
                request.sequence = request.sequence or self.cache.open()
                request.sequence.grow(request.sequence.length + len(request.missing))
                return
            except OutOfPages:
                if len(self.running) == 1:
                    raise
                newest = self.running[-1]
                self.give_up(newest)
                self.waiting.appendleft(newest)
                self.preemptions += 1

    def give_up(self, request: Request) -> None:
        """Its pages retire, and are free when all work on them is done."""
        self.running.remove(request)
        if request.sequence is not None:
            request.sequence.close()
            request.sequence = None


def main() -> None:
    """Answer requests in a pool that is too small for all at once, and compare some with what they give alone."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model, generator = TinyModel(device), torch.Generator().manual_seed(0)
    prompts = [torch.randint(256, (1110 - 90 * number,), generator=generator).tolist() for number in range(12)]
    requests = [Request(prompt, max_tokens=12 + 3 * number) for number, prompt in enumerate(prompts)]
    with Pool(device, 8 * MIB) as pool, KVCache(model.layout, pool, slots=MAX_RUNNING, max_tokens=4096) as cache:
        engine = Engine(model, cache)
        engine.run(requests)
        cache.check()
        for request in requests[2::4]:
            sequence = cache.open()
            for new, token in zip([request.prompt, *([token] for token in request.answer)], request.answer, strict=False):
                sequence.grow(sequence.length + len(new))
                (logits,) = model.forward(cache, [sequence.slot], [new])
                assert logits.max() - logits[token] < 1e-3, "a request's answer depends on who else ran"  # near ties apart
            sequence.close()
    num_tokens = sum(len(request.answer) for request in requests)
    print(f"{num_tokens} tokens for {len(requests)} requests in {engine.steps} steps, {engine.preemptions} preemptions")
    assert engine.preemptions > 0


if __name__ == "__main__":
    main()
