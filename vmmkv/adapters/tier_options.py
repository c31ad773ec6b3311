"""Options of the adapters to other engines: which tiers, in the words of `vmmkv serve`, and a name for the weights."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from vmmkv.errors import did_you_mean
from vmmkv.tier import Tier
from vmmkv.tiers import DiskTier, HostTier, open_store
from vmmkv.units import parse_bytes

_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Fields of the JSON in which an engine's user names tiers: of vLLM `kv_connector_extra_config`."""

    kv_host_budget: str | None = None
    """Pinned host memory for records, such as "16GiB"; of an engine over several GPUs each takes a part."""
    kv_disk: str | None = None
    """Directory of a disk tier. Engines of one host may share it."""
    kv_disk_budget: str | None = None
    """Size of the disk tier, such as "200GiB"."""
    kv_store: str | None = None
    """URL of a store that engines on several machines share, such as redis://host:6379/0."""
    fingerprint: str | None = None
    """Name of the weights, which must differ where they do. By default, of a local model samples of its files, and otherwise
    its name and revision."""

    @classmethod
    def of(cls, given: Mapping[str, Any], *, where: str = "kv_connector_extra_config") -> Self:
        """Options out of what an engine was given, `where`.

        Raises: ValueError for unknown ones, or ones that do not fit; TierUnavailable for a store whose client is missing.
        """
        names = cls.__dataclass_fields__
        if unknown := sorted(set(given) - set(names)):
            raise ValueError(
                f"{where} has no {unknown[0]!r}; there are {', '.join(names)}. " + did_you_mean(unknown[0], list(names))
            )
        for name, value in given.items():
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{where}: {name}={value!r} is no text; put it in quotes")
        options = cls(
            **{name: os.path.expanduser(value) if name == "kv_disk" and value else value for name, value in given.items()}
        )
        if options.kv_disk is not None and not os.path.isabs(options.kv_disk):
            raise ValueError(
                f"{where}: kv_disk={options.kv_disk!r} depends on the folder that an engine starts in; give it from / on"
            )
        if (options.kv_disk is None) != (options.kv_disk_budget is None):
            raise ValueError(f"{where}: a disk tier needs both kv_disk, a directory, and kv_disk_budget")
        if not (options.kv_host_budget or options.kv_disk or options.kv_store):
            raise ValueError(f"{where} names no tier; give kv_host_budget, kv_disk with kv_disk_budget, or kv_store")
        for name in ("kv_host_budget", "kv_disk_budget"):
            if (text := getattr(options, name)) is not None:
                _bytes_of(name, text)
        if options.kv_store is not None:
            open_store(options.kv_store).close()  # which neither needs its server nor asks it
        return options

    def tiers(self, record_bytes: int, *, has_host: bool, num_ranks: int = 1) -> list[Tier]:
        """The tiers, the fastest first, not open yet; without the host tier for a process that only looks records up.

        Raises: ValueError, BudgetError, TierUnavailable, as each of them.
        """
        tiers: list[Tier] = []
        try:
            if has_host and self.kv_host_budget is not None:
                size_bytes = _bytes_of(name := "kv_host_budget", self.kv_host_budget) // num_ranks
                part = f"{name}/{num_ranks}" if num_ranks > 1 else name
                tiers.append(HostTier(size_bytes, record_bytes=record_bytes, budget_name=part))
            if self.kv_disk is not None and self.kv_disk_budget is not None:
                size_bytes = _bytes_of(name := "kv_disk_budget", self.kv_disk_budget)
                tiers.append(DiskTier(self.kv_disk, size_bytes, record_bytes=record_bytes, budget_name=name))
            if self.kv_store is not None:
                tiers.append(open_store(self.kv_store, record_bytes=record_bytes))
        except BaseException:
            for tier in tiers:
                tier.close()
            raise
        return tiers


def _bytes_of(name: str, text: str) -> int:
    """The size that an option has. Raises: ValueError naming it."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r}: {error}") from error


def fingerprint_of(model: str, revision: str | None) -> str:
    """A name for the weights of a model or adapter: of a directory its configurations, and names, sizes, samples of weights.

    Raises: OSError. Cost: some reads of 4 KiB for each file.
    """
    directory = Path(model)
    if not directory.is_dir():
        return f"{model}@{revision}"
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.iterdir()):
        if path.name in ("config.json", "adapter_config.json") or path.name.endswith("processor_config.json"):
            state.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".bin", ".pt", ".gguf"):
            size_bytes = path.stat().st_size
            state.update(repr((path.name, size_bytes)).encode())
            with open(path, "rb") as file:
                for sample in range(_SAMPLES):
                    file.seek(sample * max(0, size_bytes - _SAMPLE_BYTES) // (_SAMPLES - 1))
                    state.update(file.read(_SAMPLE_BYTES))
    return state.hexdigest()
