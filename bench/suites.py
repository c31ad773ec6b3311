"""The suites by name: what each measures, the groups, and what a suite's module has. They are loaded when asked for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Final, Protocol, cast

from bench.report import Report
from bench.settings import Settings

SUITES: Final = {
    "driver_calls": "each call of the driver: alone, beside a busy Python thread, beside a kernel",
    "append": "a decode loop that grows: in the foreground, pumped in slack, on adopted slots",
    "elastic": "what it costs to give memory back, and to take it again, while sequences decode on",
    "waste": "memory that is held and holds no token, and how many sequences fit, by each way to lay out a cache",
    "kernels": "attention over each kind of memory, by our kernels, torch's SDPA and FlashAttention-3; append; copy",
    "prefix": "a shared prefix: by each method, by the chooser, over blocks and not shared; attention, chat, attaching",
    "serve": "the engine under load: requests of many kinds, decode steps, and where their time goes; bars, and vLLM's figures",
    "hf": "a VmmCache in transformers, against DynamicCache and StaticCache: time, memory, the longest context, mixed lengths",
    "quality": "what quantised K and V cost a real model: perplexity, and the error of attention; not part of all",
}
"""By the name of its module, what a suite measures. Triton is loaded when a kernel is."""

ALL: Final = tuple(name for name in SUITES if name != "quality")
"""What `all` stands for. Quality needs a model and minutes, and is of no machine: it runs when it is named."""

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {"alloc": ("driver_calls", "append", "elastic"), "all": ALL}

_TABLES: Final = {
    "waste": ("bench.waste.bars", "print_tables"),
    "kernels": ("bench.table", "print_tables"),
    "prefix": ("bench.prefix.bars", "print_tables"),
    "serve": ("bench.serve.bars", "print_tables"),
    "hf": ("bench.hf.bars", "print_tables"),
    "quality": ("bench.table", "print_quality"),
}
"""Module and function, of suites whose rows do not read well one below the other, or that end with what was promised."""

_BY_PARTS: Final = ("kernels", "prefix")
"""Suites whose parts share nothing that takes long to make: they run one by one, so that a run can go on between them."""


class Suite(Protocol):
    """What a suite's module has.

    It may also have `PARTS`, names that `--parts` can choose from; `check(settings)`, which raises ValueError for settings that
    cannot be run; and `pieces(settings)` and `absent(settings)`, see the functions of these names.
    """

    run: Callable[[Settings, Report], None]


def load(name: str) -> Suite:
    """The suite's module."""
    return cast(Suite, import_module(f"bench.{name}"))


def chosen(names: Sequence[str]) -> list[str]:
    """The suites that these names stand for, each once. Beside `all` they are in the order of SUITES.

    Raises: ValueError for a name that there is not, naming those that there are.
    """
    # argparse's own `choices` would refuse that there is none.
    if unknown := sorted(set(names) - SUITES.keys() - GROUPS.keys()):
        groups = ", ".join(f"{group} ({' '.join(of_group)})" for group, of_group in GROUPS.items() if group != "all")
        raise ValueError(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}; {groups}; and all")
    wanted = dict.fromkeys(suite for name in names for suite in GROUPS.get(name, (name,)))
    return [name for name in SUITES if name in wanted] if "all" in names else list(wanted)


def part_names(name: str) -> list[str]:
    """The parts that `--parts` can choose from; of most suites none."""
    return list(getattr(load(name), "PARTS", ()))


def check(settings: Settings, names: Sequence[str]) -> None:
    """Refuse parts and cases that there are not, and options of suites that are not wanted, before anything is measured.

    Raises: ValueError.
    """
    if settings.cases and "kernels" not in names and not ("serve" in names and settings.parts):
        raise ValueError(
            "--cases is of kernels, which is not wanted here, and of serve where --parts names what has some: name that suite, "
            "or such parts, or leave --cases out"
        )
    if settings.fa3 and "kernels" not in names:
        raise ValueError("--fa3 is of kernels, which is not wanted here: name that suite, or leave --fa3 out")
    with_parts = [name for name in names if part_names(name)]
    if settings.parts and not with_parts:
        raise ValueError(f"--parts: {' and '.join(names)} have none; leave --parts out")
    if settings.parts and len(with_parts) > 1:
        raise ValueError(f"--parts: {' and '.join(with_parts)} have different ones; name one suite, or no parts")
    for name in names:
        if checks := getattr(load(name), "check", None):
            checks(settings)


def pieces(name: str, settings: Settings) -> Mapping[str, Settings]:
    """By name, what a run of the suite falls into: pieces that run by themselves, one after the other, and can be resumed at.

    A module says so by a function `pieces` of its own; most are one piece, which has the suite's name.
    """
    module = load(name)
    if own := getattr(module, "pieces", None):
        return {f"{name} {piece}": of_piece for piece, of_piece in own(settings).items()}
    # Cases are checked against all parts that are wanted together: a part alone may have none of them.
    if name not in _BY_PARTS or settings.cases:
        return {name: settings}
    parts = [part for part in part_names(name) if part in settings.parts or not settings.parts]
    return {f"{name} {part}": replace(settings, parts=(part,)) for part in parts}


def absent(name: str, settings: Settings) -> Mapping[str, str]:
    """By name, what of the suite is left out because something that it needs is not here, and why: said before it runs."""
    own = getattr(load(name), "absent", None)
    return own(settings) if own else {}


def print_tables(name: str, report: Report) -> None:
    """What a run of the suite ends with."""
    if name in _TABLES:
        module, function = _TABLES[name]
        getattr(import_module(module), function)(report)
    else:
        report.print_tables(name)
