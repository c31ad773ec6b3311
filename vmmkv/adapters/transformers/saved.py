"""A batch in a file: written and read back, with a header before its sequences.

The file may come from anywhere: each field is checked against what a batch of this model can be.

Legend: B rows of the batch; S sequences; K kv heads; D head dim.
"""

import hashlib
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import torch

from vmmkv import model_config
from vmmkv.adapters.transformers.batch import BatchRows, Lineage, SavedBatch, SavedWindow, WindowRows
from vmmkv.saved import fill_batches, read_batches_header, save_batches

_DTYPES: Final = {
    str(dtype): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
}
"""Types of keys and values, by their names in a file."""

_MOST_ROWS: Final = 65_536
"""Most rows of a batch in a file."""


def save(batch: BatchRows, config: Any, path: Path, fingerprint: str) -> None:
    """Write the batch of a model with that configuration to a file. See VmmCache.save."""
    save_batches([rows.live_slots for rows in batch.groups], path, fingerprint, header(config, batch))


def restore(batch: BatchRows, config: Any, path: Path, fingerprint: str) -> None:
    """Give a batch without tokens the rows in a file. On failure the caller ends it. See VmmCache.restore."""
    with open(path, "rb") as file:
        found = read(read_batches_header(file, path), path, config, batch.groups)
        batch.fill(found, lambda slots: fill_batches(file, path, slots, fingerprint))


def layers_digest(config: Any) -> str:
    """A digest of what a model's layers keep; models with other rows have another."""
    return hashlib.sha256(repr(model_config.read(config).layers).encode()).hexdigest()


def header(config: Any, batch: BatchRows) -> dict[str, Any]:
    """The header of a file with a batch of a model with that configuration."""
    assert batch.lineage is not None, "there are tokens"
    windows: list[dict[str, Any]] = []
    for rows in batch.groups:
        planes = {
            name: [plane.heads, plane.dim, str(plane.dtype)]
            for name in ("k", "v")
            for plane in [rows.cache.layout.groups[0].plane(name)]
        }
        windows.append({"layers": rows.layers, "window": rows.window, "num_dropped": rows.num_dropped, **planes})
    return {
        "model": layers_digest(config),
        "num_tokens": batch.num_tokens,
        "compacted_tokens": batch.compacted_tokens,
        "parents": batch.lineage.parents,
        "common": batch.lineage.common.tolist(),
        "windows": windows,
    }


def read(fields: Any, path: Path, config: Any, groups: Seq[WindowRows]) -> SavedBatch:
    """Read a batch from the header of a file, for the groups of a cache of that model. Raises: ValueError."""

    def refuse(what: str) -> NoReturn:
        raise ValueError(f"{path} is damaged: {what}")

    def whole(name: str, value: Any, end: int, first: int = 0) -> int:
        if type(value) is not int or not first <= value < end:
            refuse(f"{name}={value!r:.40} is not that of a batch")
        return value

    names = {"model", "num_tokens", "compacted_tokens", "parents", "common", "windows"}
    if not isinstance(fields, dict) or not names <= fields.keys() or not isinstance(fields["windows"], list):
        refuse("it has no header of a batch")
    if fields["model"] != layers_digest(config):
        raise ValueError(f"{path} was saved from a cache of another model, whose layers keep other rows")
    num_tokens = whole("num_tokens", fields["num_tokens"], 2**31, 1)
    compacted_tokens = whole("compacted_tokens", fields["compacted_tokens"], num_tokens + 1)
    parents, common, windows = fields["parents"], fields["common"], fields["windows"]
    if not isinstance(parents, list) or not 1 <= len(parents) <= _MOST_ROWS or not isinstance(common, list):
        refuse("it does not say which sequences its rows go on from")
    for parent in parents:
        whole("parents", parent, len(common))
    if any(not isinstance(row, list) or len(row) != len(common) for row in common):
        refuse("it does not say how many tokens any two sequences have in common")
    common_SS = np.array([[whole("common", each, num_tokens + 1) for each in row] for row in common], np.int64)
    if (common_SS != common_SS.T).any():
        refuse("it says two numbers of tokens that the same two sequences have in common")
    wanted = [(list(rows.layers), rows.window) for rows in groups]
    if [(each.get("layers"), each.get("window")) if isinstance(each, dict) else None for each in windows] != wanted:
        refuse("its layers have other windows than those of its model")
    windows_of_file: list[SavedWindow] = []
    for each in windows:
        states: list[torch.Tensor] = []
        for name in ("k", "v"):
            kind = each.get(name)
            if not isinstance(kind, list) or len(kind) != 3 or not isinstance(kind[2], str) or kind[2] not in _DTYPES:
                refuse(f"{name}={kind!r:.80} says no heads, head dim and type")
            heads, dim = whole("heads", kind[0], 2**20, 1), whole("dim", kind[1], 2**20, 1)
            states.append(torch.empty(len(parents), heads, 0, dim, dtype=_DTYPES[kind[2]], device="meta"))
        windows_of_file.append(SavedWindow(whole("num_dropped", each.get("num_dropped"), num_tokens), (states[0], states[1])))
    return SavedBatch(num_tokens, compacted_tokens, Lineage(tuple(parents), common_SS), windows_of_file)
