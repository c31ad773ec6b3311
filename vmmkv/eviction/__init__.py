"""Policies that choose which rows of a sequence to keep when it may hold no more: `Sequence.compact` drops the others.

    policy = SnapKV(budget=2048)
    first = sequence.length - policy.num_queries(sequence.length)      # score the queries from here on
    sequence.compact(policy.keep(sequence.length, scores_T))

A sequence keeps one set of rows for all layers and heads, so scores are sums over both. The scores of a row are how much some
of the last queries attend to it: `vmmkv_kernels.attention.column_sums` on a GPU, `vmmkv_kernels.reference.column_sums` in plain
torch. Any class with the members of `KVPolicy` is a policy; for a request's `kv_policy` it is a frozen dataclass of whole
numbers.

| policy | keeps | scored queries |
|---|---|---|
| `StreamingLLM` | the first rows and the last ones (Xiao et al., 2024) | none |
| `H2O` | the last rows, and those that all queries attend to most (Zhang et al., 2023) | all |
| `SnapKV` | the last rows, and those that these attend to most, with their neighbours (Li et al., 2024) | the last 32 |
| `TOVA` | the rows that the last query attends to most (Oren et al., 2024) | the last one |
"""

from vmmkv.eviction.policies import H2O, TOVA, SnapKV, StreamingLLM
from vmmkv.kv_policy import KVPolicy

__all__ = ["H2O", "TOVA", "KVPolicy", "SnapKV", "StreamingLLM"]
