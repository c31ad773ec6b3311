"""A search over a tree of continuations: each node is a fork that shares full pages with its parent.

    python examples/tree_of_thoughts.py

At each level the best nodes are forked into several children, and each child samples a thought. The best children go on; the
rest are closed. A fork maps the full pages of its parent at its own addresses and copies the last one. So a node costs a page
or two whatever its length, and any attention kernel can read it. The search is that of Yao et al., "Tree of Thoughts" (2023),
with the model's own likelihood as the score.
"""

from dataclasses import dataclass

import torch
from tiny import TinyModel

from vmmkv import MIB, PAGE_BYTES, KVCache, Pool, Sequence

BRANCHES, BEST, DEPTH, THOUGHT_TOKENS = 3, 4, 3, 10


@dataclass(eq=False)
class Node:
    """A path through the tree: its sequence, the next token, and its log-probability."""

    sequence: Sequence
    next_token: int
    log_probability: float
    tokens: list[int]


def expand(cache: KVCache, nodes: list[Node]) -> list[Node]:
    """The children of all nodes; the first child takes the node's own sequence."""
    children = []
    for node in nodes:
        for sequence in (node.sequence, *cache.fork(node.sequence, BRANCHES - 1)):
            children.append(Node(sequence, node.next_token, node.log_probability, list(node.tokens)))
    return children


def think(model: TinyModel, cache: KVCache, nodes: list[Node], generator: torch.Generator) -> None:
    """Sample a thought in each node, all in one batch."""
    for _ in range(THOUGHT_TOKENS):
        for node in nodes:
            node.sequence.grow(node.sequence.length + 1)
            node.tokens.append(node.next_token)
        slots = [node.sequence.slot for node in nodes]
        log_probabilities = model.forward(cache, slots, [[node.next_token] for node in nodes]).log_softmax(dim=1).cpu()
        chosen = torch.multinomial(log_probabilities.exp(), 1, generator=generator).flatten().tolist()
        for row, (node, token) in enumerate(zip(nodes, chosen, strict=True)):
            node.next_token = token
            node.log_probability += float(log_probabilities[row, token])


def main() -> None:
    """Search, then check the best node's keys against the model run on its tokens alone."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    model, generator = TinyModel(device), torch.Generator().manual_seed(0)
    prompt = torch.randint(256, (3000,), generator=generator).tolist()
    slots = BEST * BRANCHES
    with Pool(device, 128 * MIB) as pool, KVCache(model.layout, pool, slots=slots, max_tokens=4096) as cache:
        root = cache.open()
        root.grow(len(prompt))
        first = model.forward(cache, [root.slot], [prompt]).argmax(dim=1)
        nodes = [Node(root, int(first), 0.0, [])]
        most_bytes = most_alone_bytes = 0
        for depth in range(DEPTH):
            nodes = expand(cache, nodes)
            think(model, cache, nodes, generator)
            held, alone = pool.held_bytes, sum(_alone_bytes(node.sequence, model) for node in nodes)
            most_bytes, most_alone_bytes = max(most_bytes, held), max(most_alone_bytes, alone)
            print(f"depth {depth + 1}: {len(nodes)} nodes in {held / MIB:.0f} MiB; without sharing {alone / MIB:.0f} MiB")
            nodes.sort(key=lambda node: node.log_probability, reverse=True)
            for node in nodes[BEST:]:
                node.sequence.close()
            nodes = nodes[:BEST]
            cache.drain()
        cache.check()
        assert most_bytes < most_alone_bytes / 2

        best = nodes[0]
        again = cache.open()
        again.grow(best.sequence.length)
        model.forward(cache, [again.slot], [prompt + best.tokens])
        for layer in range(4):
            torch.testing.assert_close(
                best.sequence.k(layer)[: again.length], again.k(layer)[: again.length], rtol=1e-3, atol=1e-3
            )
        print(f"the best of {BRANCHES * BEST} leaves has log-probability {best.log_probability:.1f}")


def _alone_bytes(sequence: Sequence, model: TinyModel) -> int:
    """Bytes that the sequence would take without sharing."""
    return model.layout.pages_for(sequence.length) * PAGE_BYTES


if __name__ == "__main__":
    main()
