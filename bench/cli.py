"""The options of a run, and what they say: settings, suites, where rows go."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import torch

from bench import suites
from bench.arguments import Parser
from bench.rows import make_folder
from bench.settings import MODEL_SHAPES, SHAPES, Settings

OUT: Final = Path(__file__).parent / "out"
"""Not kept in git; `bench/results` has the rows of the machines that the documents speak of."""

_SHAPE_HELP: Final = (
    "default: llama-3.1-8b on a GPU (kernels: and the two smaller models; serve: and qwen3-0.6b), wide (one layer) on a CPU"
)

COMMANDS: Final = {
    "run": "measure",
    "report": "make a page and figures of rows",
    "compare": "two sets of rows: what has changed beyond noise",
    "table": "rows of kernels as Markdown",
}

_ON_A_GPU: Final = """What says something where:
  on a GPU alone   driver_calls, append, elastic, kernels, prefix, serve, hf: on a CPU host memory stands for the GPU's, models
                   are tiny, and Triton's kernels run interpreted or not at all; that shows that a suite works, and no figure
                   of it says anything of a GPU
  anywhere         waste, which counts bytes; quality, but for speed
  more than torch  serve's parts http and grammar need the tokenizer of SmolLM2 (or --tokenizer FILE), its other parts none;
                   quality needs SmolLM2 (`vmmkv fetch smollm2-135m`) and minutes; kernels --fa3 needs FlashAttention-3, which
                   vLLM's wheel for x86_64 has as vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so, built for one version of torch: see
                   bench/README.md; without it all else of kernels is measured
"""

_DEVICE: Final = re.compile(r"cpu|cuda(:(?P<index>\d+))?")

_EXAMPLES: Final = """examples:
  python -m bench run --quick --device cpu        every suite, to see that it works; some three minutes on two cores
  python -m bench run --suite alloc serve         a group, and a suite
  python -m bench run --resume                    what a run that was cut short has not finished
  python -m bench kernels --parts decode          the short form of run --suite kernels
  python -m bench report                          rows to one HTML page and its figures
  python -m bench compare bench/results/prefix.jsonl@0a1d004 bench/results/prefix.jsonl@647c26e
  python -m bench table bench/out/kernels.jsonl   rows of kernels as Markdown, promises kept or not
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A run: `suites` by `settings`, rows to `out`; with `resume`, without what has finished there."""

    suites: tuple[str, ...]
    settings: Settings
    out: Path
    commit: str | None
    resume: bool


def print_help() -> None:
    """The commands, and the suites."""
    width = max(map(len, suites.SUITES)) + 2
    print("usage: python -m bench COMMAND ... | SUITE... [options of run]\n")
    print("commands (each has --help):")
    for name, text in COMMANDS.items():
        print(f"  {name:{width}}{text}")
    print(f"\n{_suite_list()}\n")
    print(_EXAMPLES, end="")


def parse(arguments: Sequence[str], *, short: bool) -> Options:
    """The options of `run`, or of its short form, which names suites first. What is wrong ends the process, in words."""
    parser = _parser(short=short)
    given, left = parser.parse_known_args(arguments)
    try:
        if left:
            _refuse_left(parser, left, short=short)
        names = suites.chosen(given.suites or ["all"])
        settings = _settings(given)
        suites.check(settings, names)
    except (ValueError, RuntimeError) as error:
        parser.refuse(str(error))
    try:
        make_folder(given.out)
    except ValueError as error:
        parser.refuse(f"--out {error}")
    return Options(suites=tuple(names), settings=settings, out=given.out, commit=given.commit, resume=given.resume)


def refuse_command(name: str) -> NoReturn:
    """What is neither a command nor a suite: say which there are, in one line."""
    parser = Parser(prog="python -m bench")
    parser.refuse(
        f"no command or suite {name}; commands: {', '.join(COMMANDS)}; suites: {', '.join([*suites.SUITES, *suites.GROUPS])}"
    )


def _refuse_left(parser: Parser, left: Sequence[str], *, short: bool) -> NoReturn:
    """What no option takes. Names of suites, which `run` has behind an option, are answered by that."""
    names = [word for word in left if not word.startswith("-")]
    if short or names != left:
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    suites.chosen(names)
    parser.refuse(f"suites are named by an option: --suite {' '.join(names)}")


def _suite_list() -> str:
    width = max(map(len, suites.SUITES)) + 2
    lines = [f"  {name:{width}}{text}" for name, text in suites.SUITES.items()]
    lines += [f"  {name:{width}}{', '.join(of_group)}" for name, of_group in suites.GROUPS.items()]
    return "\n".join(["suites:", *lines, "", _ON_A_GPU.rstrip()])


def _parser(*, short: bool) -> Parser:
    parser = Parser(
        prog="python -m bench" if short else "python -m bench run",
        description=f"Measure. {_suite_list()}",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if short:
        parser.add_argument("suites", nargs="+", metavar="SUITE", help="which to run: suites, groups, or all")
    else:
        parser.add_argument(
            "--suite",
            dest="suites",
            nargs="+",
            action="extend",
            default=[],
            metavar="SUITE",
            help="which to run: suites, groups, or all; default: all",
        )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="to see that everything works: all in some three minutes on two cores; the figures are noise",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N, or auto, the default: the GPU if torch sees one")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="where SUITE.jsonl is appended to")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="leave out what has finished in that folder: same commit, device, seed and options",
    )
    parser.add_argument("--commit", help="for the rows, where there is no git repository to ask")
    parser.add_argument("--seed", type=int, default=0, help="everything random follows from it; default: 0")
    parser.add_argument("--model-shape", choices=SHAPES, help=_SHAPE_HELP)
    group = parser.add_argument_group("append")
    group.add_argument("--work", choices=("attention", "sleep"), default="attention", help="what a step does on the device")
    group.add_argument("--sequences", type=int, help="how many decode at once; default: 256 on a GPU, 8 on a CPU")
    group.add_argument("--steps", type=int, help="steps that are measured in each mode")
    group = parser.add_argument_group("suites with parts")
    group.add_argument("--parts", nargs="+", default=(), metavar="PART", help="of one suite; a wrong name is answered by all")
    group.add_argument(
        "--cases",
        nargs="+",
        default=(),
        metavar="CASE",
        help="of kernels, by the names that rows have, such as 64x8K; of serve's parts that compare systems too: chat, or 8",
    )
    group.add_argument(
        "--fa3",
        type=Path,
        metavar="LIBRARY",
        help="of kernels alone, FlashAttention-3: _vllm_fa3_C.abi3.so, out of vLLM's wheel",
    )
    group = parser.add_argument_group("serve")
    group.add_argument("--repeat", type=int, default=2, help="timed runs of each workload; default: 2")
    group.add_argument("--max-num-batched-tokens", type=int, help="tokens of one step at most; default: the engine's own")
    group.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer.json of http and grammar; default: that of SmolLM2"
    )
    return parser


def _settings(given: argparse.Namespace) -> Settings:
    auto = "cuda:0" if torch.cuda.is_available() else "cpu"
    named = _DEVICE.fullmatch(auto if given.device == "auto" else given.device)
    if named is None:
        raise ValueError(f"--device {given.device!r}: no such device; there are cpu, cuda, cuda:N, and auto")
    if named[0] == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(named["index"] or 0))
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device.index >= count:
            seen = f"torch sees {count} GPUs here" if count else "torch sees no GPU here"
            raise ValueError(f"--device {given.device}: {seen}; use {f'cuda:{count - 1} or ' if count else ''}cpu")
        torch.cuda.set_device(device)
    return Settings(
        device=device,
        shape=SHAPES[given.model_shape or ("llama-3.1-8b" if device.type == "cuda" else "wide")],
        quick=given.quick,
        seed=given.seed,
        work=given.work,
        sequences=given.sequences,
        steps=given.steps,
        parts=tuple(given.parts),
        cases=tuple(given.cases),
        fa3=given.fa3,
        repeat=given.repeat,
        max_num_batched_tokens=given.max_num_batched_tokens,
        tokenizer=given.tokenizer,
        shapes=() if given.model_shape or device.type == "cpu" else MODEL_SHAPES,
    )
