"""The command line: `python -m bench SUITE... [--quick]`; each suite also runs by itself, as `python -m bench.append`."""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, cast

import torch

from bench import kernels, prefix, serve, table
from bench.prefix.bars import print_tables as print_prefix
from bench.report import Report
from bench.rows import Provenance, RowFile
from bench.serve.bars import print_tables as print_serve
from bench.settings import MODEL_SHAPES, SHAPES, Settings
from bench.timing import warm_clock

SUITES: Final = {
    "driver_calls": "each call of the driver: alone, beside a busy Python thread, beside a kernel",
    "append": "a decode loop that grows: in the foreground, pumped in slack, in a thread, on adopted slots",
    "kernels": "attention over each kind of memory, by our kernels, torch's SDPA and FlashAttention-3; append; copy",
    "prefix": "a shared prefix: by each rung, by the chooser, over blocks and not shared; attention, chat, attaching",
    "serve": "the engine under load: requests of many kinds, decode steps, and where their time goes; bars, and vLLM's figures",
    "quality": "what quantised K and V cost a real model: perplexity, and the error of attention; not part of all",
}
"""By the name of its module, what a suite measures. A suite is loaded when it runs; triton, when a kernel is."""

ALL: Final = tuple(name for name in SUITES if name != "quality")
"""What `all` stands for. Quality needs a model and minutes, and is of no machine: it runs when it is named."""

_TABLES: Final = {"kernels": table.print_tables, "prefix": print_prefix, "serve": print_serve, "quality": table.print_quality}
"""Suites whose rows do not read well one below the other, or that end with what was promised."""

RESULTS: Final = Path(__file__).parent / "out"
"""Not kept in git; `bench/results` has the rows of the machines that the documents speak of."""


_SHAPE_HELP: Final = (
    "default: llama-3.1-8b on a GPU (kernels: and the two smaller models; serve: and qwen3-0.6b), wide (one layer) on a CPU"
)


class Suite(Protocol):
    """What a suite's module has."""

    run: Callable[[Settings, Report], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run suites; 1 if any of them failed. Those behind a failed one still run. `table FILE` prints rows instead."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "table":
        return table.main(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.suites:
        parser.print_help()
        return 0
    # argparse's own `choices` would refuse that there is none.
    if unknown := sorted(set(options.suites) - SUITES.keys() - {"all"}):
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}, and all")
    wanted = [suite for name in options.suites for suite in (ALL if name == "all" else [name])]
    names = [name for name in SUITES if name in wanted] if "all" in options.suites else list(dict.fromkeys(wanted))
    try:
        settings = _settings(options)
        _check_names(settings, names)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    torch.manual_seed(settings.seed)
    provenance = Provenance.collect(settings.device, seed=settings.seed, quick=settings.quick, commit=options.commit)
    report = Report(RowFile(options.out, provenance))
    warm_clock(settings.device)
    failed = [name for name in names if not _succeeds(name, settings, report)]
    for name in names:
        if name in _TABLES:
            _TABLES[name](report)
        else:
            report.print_tables(name)
    report.say(f"{len(report.rows)} rows appended under {options.out}; bench/README.md says what they do and do not show")
    if failed:
        report.say(f"FAILED: {', '.join(failed)}; see the traceback above")
    return 1 if failed else 0


def _check_names(settings: Settings, suites: Sequence[str]) -> None:
    """Refuse parts and cases that there are not, and options of suites that are not wanted, before anything is measured."""
    for option, given in (("--cases", settings.cases), ("--fa3", settings.fa3)):
        if given and "kernels" not in suites:
            raise ValueError(f"{option} is of kernels, which is not wanted here: name that suite, or leave {option} out")
    checks = {"kernels": kernels.check, "prefix": prefix.check, "serve": serve.check}
    with_parts = [suite for suite in checks if suite in suites]
    if len(with_parts) > 1 and settings.parts:
        raise ValueError(f"--parts: {' and '.join(with_parts)} have different ones; name one suite, or no parts")
    for suite in with_parts:
        checks[suite](settings)


def _succeeds(name: str, settings: Settings, report: Report) -> bool:
    suite = cast(Suite, import_module(f"bench.{name}"))
    try:
        suite.run(settings, report)
    except Exception:
        report.say(f"\n{name} failed:\n{traceback.format_exc()}")
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    suites = "\n".join(f"  {name:14}{text}" for name, text in SUITES.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"suites:\n{suites}\n  {'all':14}{', '.join(ALL)}\n\n"
        "quality needs SmolLM2 (`vmmkv fetch smollm2-135m`) and minutes.\n"
        "`table ROWS.jsonl` prints rows of kernels as tables instead.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="which to run; none prints this")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that everything works; the figures are noise")
    parser.add_argument("--device", help="cpu, or cuda:0; default: the GPU if torch sees one")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where SUITE.jsonl is appended to")
    parser.add_argument("--commit", help="for the rows, where there is no git repository to ask")
    parser.add_argument("--seed", type=int, default=0, help="everything random follows from it; default: 0")
    parser.add_argument("--model-shape", choices=SHAPES, help=_SHAPE_HELP)
    group = parser.add_argument_group("append")
    group.add_argument("--work", choices=("attention", "sleep"), default="attention", help="what a step does on the device")
    group.add_argument("--sequences", type=int, help="how many decode at once; default: 256 on a GPU, 8 on a CPU")
    group.add_argument("--steps", type=int, help="steps that are measured in each mode")
    group = parser.add_argument_group("kernels, prefix, serve")
    group.add_argument(
        "--parts",
        nargs="+",
        default=(),
        metavar="PART",
        help="of kernels: decode, prefill, quantised, append, copy; of prefix: requests, attention, chat, attach, tree; "
        "of serve: mixed, single, first, long, shared, step, breakdown",
    )
    group.add_argument(
        "--cases", nargs="+", default=(), metavar="CASE", help="of kernels alone, by the names that rows have, such as 64x8K"
    )
    group.add_argument(
        "--fa3", type=Path, metavar="LIBRARY", help="of kernels alone, FlashAttention-3: vLLM's _vllm_fa3_C.abi3.so"
    )
    group = parser.add_argument_group("serve")
    group.add_argument("--repeat", type=int, default=2, help="timed runs of each workload; default: 2")
    group.add_argument("--max-num-batched-tokens", type=int, help="tokens of one step at most; default: the engine's own")
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    device = torch.device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device.index >= count:
            seen = f"torch sees {count} GPUs here" if count else "torch sees no GPU here"
            raise ValueError(f"--device {options.device}: {seen}; use {f'cuda:{count - 1} or ' if count else ''}cpu")
        torch.cuda.set_device(device)
    return Settings(
        device=device,
        shape=SHAPES[options.model_shape or ("llama-3.1-8b" if device.type == "cuda" else "wide")],
        quick=options.quick,
        seed=options.seed,
        work=options.work,
        sequences=options.sequences,
        steps=options.steps,
        parts=tuple(options.parts),
        cases=tuple(options.cases),
        fa3=options.fa3,
        repeat=options.repeat,
        max_num_batched_tokens=options.max_num_batched_tokens,
        shapes=() if options.model_shape or device.type == "cpu" else MODEL_SHAPES,
    )
