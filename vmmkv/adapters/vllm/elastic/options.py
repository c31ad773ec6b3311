"""ElasticOptions: what `--additional-config '{"vmmkv_elastic": {...}}'` says."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from vmmkv.units import parse_bytes

OPTION: Final = "vmmkv_elastic"
"""Name of the option in vLLM's `additional_config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """Options of elastic memory."""

    budget_bytes: int | None = None
    """Most memory at first; None for all that is reserved."""
    control: Path | None = None
    """Socket of `vmmkv resize`."""
    arbiter: Path | None = None
    """Socket of the holder process by which engines share a budget."""
    floor_bytes: int | None = None
    """Least memory that the arbiter leaves to this engine."""
    holder: Path | None = None
    """Socket of the holder process that owns the memory, so that cached blocks outlive this engine."""
    fingerprint: str | None = None
    """Name for the weights; None for samples of a directory's files, or name and revision."""

    @classmethod
    def of(cls, given: object) -> "ElasticOptions":
        """Read the option. Raises: ValueError, naming what is wrong."""
        if not isinstance(given, Mapping):
            raise ValueError(f'vmmkv_elastic is {given!r}, and is to be an object, such as {{"budget": "24GiB"}}')
        names = {each.name.removesuffix("_bytes"): each.name for each in fields(cls)}
        for name in given:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, n=1)
                raise ValueError(f"vmmkv_elastic has no {name!r}; {f'did you mean {near[0]}?' if near else ', '.join(names)}")
        values: dict[str, Any] = {}
        for name, value in given.items():
            if not isinstance(value, str):
                raise ValueError(f"{name} of vmmkv_elastic is {value!r}, and is to be a text")
            is_path = name in ("control", "arbiter", "holder")
            values[names[name]] = parse_bytes(value) if names[name].endswith("_bytes") else Path(value) if is_path else value
        options = cls(**values)
        for name in ("control", "arbiter", "holder"):
            if (path := getattr(options, name)) is not None and not path.is_absolute():
                raise ValueError(f"{name} of vmmkv_elastic is {str(path)!r}, and is to be an absolute path")
        if (options.arbiter is None) != (options.floor_bytes is None):
            raise ValueError("vmmkv_elastic needs both arbiter, a socket of `vmmkv hold`, and floor, or neither")
        if options.arbiter is not None and options.budget_bytes is not None:
            raise ValueError("vmmkv_elastic has budget and arbiter: the arbiter gives the budget, so leave one out")
        if options.arbiter is not None and options.holder is not None:
            raise ValueError("vmmkv_elastic has arbiter and holder: memory that a holder owns is not shared, so leave one out")
        return options
