"""The command line: `python -m bench SUITE...`, and `python -m bench report|compare`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from bench.harness import MODEL_SHAPES, SHAPES, Recorder, Settings, gpu_watched, warm_clock
from bench.rows import FAILED, Provenance, RowFile, make_folder
from bench.suites import SUITES, load

OUT: Final = Path(__file__).parent / "out"
"""Not kept in git; `bench/results` has the rows of the machines that the documents speak of."""

_COMMANDS: Final = ("report", "compare")

_LIST: Final = "\n".join(
    f"  {name:19}{suite.text}{'' if suite.in_all else '; not part of all'}" for name, suite in SUITES.items()
)
_SUITE_LIST: Final = f"""suites:
{_LIST}
  all                all but those that are not part of it

other commands (each has --help; bench/README.md says what is needed, and what says something on a CPU):
  python -m bench report     rows to one HTML page, and figures
  python -m bench compare    two sets of rows by median and spread"""


class Parser(argparse.ArgumentParser):
    """argparse's, with refusals in one line on stderr: a usage of dozens of options would hide what was wrong."""

    def error(self, message: str) -> NoReturn:
        """What argparse itself refuses."""
        self.refuse(f"{message}; --help says what there is")

    def refuse(self, message: str) -> NoReturn:
        """End the process with what was wrong and what would work."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a suite failed, 2 for a wrong command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _COMMANDS:
        try:
            command_main: Callable[[Sequence[str]], int] = import_module(f"bench.{arguments[0]}").main
        except ModuleNotFoundError as error:
            why = f"no package {error.name}; `pip install -e '.[server,hf,bench]'` brings it"
            print(f"python -m bench {arguments[0]}: {why}", file=sys.stderr)
            return 1
        return command_main(arguments[1:])
    parser = _parser()
    given = parser.parse_args(arguments or ["--help"])
    try:
        names, settings = _chosen(given.suites), _settings(given)
        _check(settings, names)
    except (ValueError, RuntimeError) as error:
        parser.refuse(str(error))
    try:
        make_folder(given.out)
    except ValueError as error:
        parser.refuse(f"--out {error}")
    return _run(names, settings, given.out, given.commit)


def _run(suites: Sequence[str], settings: Settings, out: Path, commit: str | None) -> int:
    """Suites one after the other; those behind a failed one still run. Interrupted, what was measured is printed."""
    torch.manual_seed(settings.seed)
    file = RowFile(out, Provenance.collect(settings.device, seed=settings.seed, quick=settings.quick, commit=commit))
    recorders = [Recorder(name, settings, file) for name in suites]
    try:
        warm_clock(settings.device)
        for recorder in recorders:
            suite = load(recorder.suite)
            for what, why in suite.absent(settings).items() if hasattr(suite, "absent") else ():
                recorder.say(f"absent: {recorder.suite} {what}: {why}")
            with recorder.guarded(recorder.suite), gpu_watched(recorder, recorder.suite):
                suite.run(recorder)
    finally:
        for recorder in recorders:
            if recorder.rows:
                recorder.print_tables()
        num_rows = sum(len(recorder.rows) for recorder in recorders)
        print(f"{num_rows} rows appended under {out}; bench/README.md says what they do and do not show")
    if failed := [workload for recorder in recorders for workload in recorder.failed]:
        print(f"FAILED: {'; '.join(failed)}; see the tracebacks above, and the rows `{FAILED}`")
    return 1 if failed else 0


def _chosen(names: Sequence[str]) -> list[str]:
    """The suites that these names stand for, each once. Raises: ValueError, naming what there is."""
    if unknown := sorted(set(names) - SUITES.keys() - {"all"}):
        there_are = f"suites: {', '.join([*SUITES, 'all'])}; commands: {', '.join(_COMMANDS)}"
        raise ValueError(f"no suite or command {', '.join(unknown)}; {there_are}")
    in_all = [name for name, suite in SUITES.items() if suite.in_all]
    return list(dict.fromkeys(suite for name in names for suite in (in_all if name == "all" else (name,))))


def _check(settings: Settings, names: Sequence[str]) -> None:
    """Raises: ValueError for parts, cases and options of suites that are not wanted, before anything is measured."""
    modules = {name: load(name) for name in names}
    if settings.parts:
        with_parts = [name for name, module in modules.items() if hasattr(module, "PARTS")]
        if len(with_parts) != 1:
            which = f"{' and '.join(with_parts)} have different ones" if with_parts else f"{' and '.join(names)} have none"
            raise ValueError(f"--parts: {which}; name one suite, or no parts")
        (name,) = with_parts
        if unknown := [part for part in settings.parts if part not in modules[name].PARTS]:
            raise ValueError(f"no part {', '.join(unknown)}; {name} has {', '.join(modules[name].PARTS)}")
    if settings.cases:
        found = [module.cases_of(settings) for module in modules.values() if hasattr(module, "cases_of")]
        cases = {part: list(of_part) for of_suite in found for part, of_part in of_suite.items()}
        if unknown := [case for case in settings.cases if not any(case in of_part for of_part in cases.values())]:
            there_are = "; ".join(f"{part} has {', '.join(of_part) or 'none'}" for part, of_part in cases.items())
            raise ValueError(f"no case {', '.join(unknown)}: {there_are or 'there are none'}")
    for module in modules.values():
        if hasattr(module, "check"):
            module.check(settings)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m bench", description=f"Measure. {_SUITE_LIST}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("suites", nargs="+", metavar="SUITE", help="suites, groups, or all")
    add("--quick", action="store_true", help="to see that everything works, in minutes on two cores; the figures are noise")
    add("--device", default="auto", help="cpu, cuda, cuda:N, or auto, the default: the GPU if torch sees one")
    add("--out", type=Path, default=OUT, metavar="DIR", help="where SUITE.jsonl is appended to")
    add("--commit", help="for the rows, where there is no git repository to ask")
    add("--seed", type=int, default=0, help="everything random follows from it; default: 0")
    shapes = "llama-3.1-8b on a GPU (kernels: and the two smaller models; serve, tiers: and qwen3-0.6b), wide on a CPU"
    add("--model-shape", choices=SHAPES, help=f"default: {shapes}")
    add("--sequences", type=_count, help="at once; default: 256 on a GPU, 8 on a CPU, and of serve's policies 32 and 4")
    add("--steps", type=_count, help="of append and transformers, steps that are measured")
    add("--parts", nargs="+", default=(), metavar="PART", help="of one suite; a wrong name is answered by all")
    cases = "of kernels, by the names that rows have, such as 64x8K; of serve's parts that compare systems: chat, 8, mixed; of "
    cases += "tiers: none, host, disk, redis"
    add("--cases", nargs="+", default=(), metavar="CASE", help=cases)
    library = "of kernels, prefix and serve, FlashAttention-3: _vllm_fa3_C.abi3.so, out of vLLM's wheel"
    add("--fa3", type=Path, metavar="LIBRARY", help=library)
    add("--repeat", type=_count, default=2, help="of serve and tiers, timed runs of each workload; default: 2")
    ranks = (
        "of serve's parts mixed to full: an engine over so many GPUs, for each number, such as 1 2; of collectives, these alone"
    )
    add("--tensor-parallel-size", type=_count, nargs="+", default=(), metavar="N", help=ranks)
    tokenizer = "of serve's parts http and grammar, a tokenizer.json; default: that of SmolLM2"
    add("--tokenizer", type=Path, metavar="FILE", help=tokenizer)
    add("--dir", type=Path, metavar="DIR", help="of tiers, where a disk tier's files go; default: a temporary directory")
    return parser


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{count} is less than 1")
    return count


def _settings(given: argparse.Namespace) -> Settings:
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if given.device == "auto" else given.device)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {given.device!r}: no such device; there are cpu, cuda, cuda:N, and auto")
    if device.type == "cuda":
        device, count = torch.device("cuda", device.index or 0), torch.cuda.device_count()
        if device.index >= count:
            raise ValueError(f"--device {given.device}: torch sees {count} GPUs here; name another, or cpu")
        torch.cuda.set_device(device)
    same = ("quick", "seed", "sequences", "steps", "fa3", "repeat", "tokenizer", "dir")
    options: dict[str, Any] = {name: getattr(given, name) for name in same}
    return Settings(
        device=device,
        shape=SHAPES[given.model_shape or ("llama-3.1-8b" if device.type == "cuda" else "wide")],
        shapes=() if given.model_shape or device.type == "cpu" else MODEL_SHAPES,
        tensor_parallel_sizes=tuple(given.tensor_parallel_size),
        parts=tuple(given.parts),
        cases=tuple(given.cases),
        **options,
    )
