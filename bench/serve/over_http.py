"""The same requests by `vmmkv serve` over HTTP, all of them streams, and by the engine in this process: what HTTP costs.

The engine in this process makes texts too, since it has a tokenizer here: both do all that a user gets.
"""

from collections.abc import Sequence
from typing import Final

from bench.serve import SERVED, SYSTEM
from bench.serve.checks import Alone, share_of_same
from bench.serve.context import Context
from bench.serve.engine import Answers, ServedEngine
from bench.serve.padding import tokenizer_file
from bench.serve.requests import Requests, Workload
from bench.serve.server import Clients, Server
from bench.streams import Streamed
from bench.timing import WrongNumbers
from vmmkv.server.detokenize import Detokenizer
from vmmkv.server.tokenizer import Tokenizer

_CLIENTS: Final = {"cpu": 1, "cuda": 8}
"""Processes of clients: one cannot read as many events a second as a GPU's engine makes tokens."""


def http(context: Context) -> None:
    """Many requests of many lengths, over HTTP and without."""
    name = context.name("http", "many requests of many lengths")
    with context.guarded(name):
        model = context.model.with_tokenizer(tokenizer_file(context.settings.tokenizer))
        requests = Requests(model, context.sizes, context.settings.seed)
        workload = requests.mixed()
        name = context.name("http", workload.text)
        context.close()  # each engine takes all memory
        with model.directory() as directory:
            offline = _offline(context, ServedEngine(model, context.settings, context.sizes), requests, workload)
            context.close()
            tokenizer = Tokenizer.load(directory)
            options = _options(context)
            context.progress("http: vmmkv serve starts")
            with Clients(_CLIENTS[context.settings.device.type]) as clients, Server(directory, *options) as server:
                context.progress(f"http: vmmkv serve is there, at {server.url}")
                served = _served(context, server, clients, workload)
        share = _checked(context, workload, tokenizer, offline, served)
        _add_rows(context, name, workload, offline, served, share)


def _options(context: Context) -> list[str]:
    """Of `vmmkv serve`: those of the engine in this process."""
    settings = context.settings
    options = ["--device", str(settings.device), "--seed", str(settings.seed)]
    options += ["--max-num-seqs", str(context.sizes.max_num_seqs)]
    if settings.max_num_batched_tokens is not None:
        options += ["--max-num-batched-tokens", str(settings.max_num_batched_tokens)]
    return options


def _offline(context: Context, engine: ServedEngine, requests: Requests, workload: Workload) -> list[Answers]:
    """Of the engine in this process: a run that is not timed, and those that are."""
    with engine:
        alone = Alone.of(engine, workload, requests, context.sizes.sampled)
        runs = []
        for number in range(1 + context.settings.repeat):
            context.progress(f"http, without it: run {number} of {context.settings.repeat}")
            engine.forget()
            runs.append(engine.ask(workload.prompts, workload.outs, scored=() if number else alone.sampled))
        alone.check(runs[0])
    share_of_same(runs, strict=not context.settings.on_gpu)
    return runs


def _served(context: Context, server: Server, clients: Clients, workload: Workload) -> list[list[Streamed]]:
    """Over HTTP: a run that is not timed, and those that are."""
    bodies = [
        {
            "model": server.name,
            "prompt": prompt,
            "max_tokens": num_out,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for prompt, num_out in zip(workload.prompts, workload.outs, strict=True)
    ]
    runs = []
    for number in range(1 + context.settings.repeat):
        context.progress(f"http: run {number} of {context.settings.repeat}")
        server.forget()
        runs.append(clients.ask(f"{server.url}/v1/completions", bodies))
    return runs


def _checked(
    context: Context, workload: Workload, tokenizer: Tokenizer, offline: list[Answers], served: list[list[Streamed]]
) -> float:
    """How many of the texts are those of the tokens of the engine in this process, as a share; on a CPU all must be.

    Raises: WrongNumbers if a request has failed, or has not exactly its tokens.
    """
    wanted = [_text(tokenizer, prompt, tokens) for prompt, tokens in zip(workload.prompts, offline[0].tokens, strict=True)]
    same = 0
    for run in served:
        for index, (stream, prompt, num_out) in enumerate(zip(run, workload.prompts, workload.outs, strict=True)):
            if stream["error"] is not None:
                raise WrongNumbers(f"request {index} failed: {stream['error']}")
            counts = (stream["prompt_tokens"], stream["completion_tokens"], stream["finish_reason"])
            if counts != (len(prompt), num_out, "length"):
                raise WrongNumbers(f"request {index} of {len(prompt)} tokens in, {num_out} out, has {counts} over HTTP")
            same += stream["text"] == wanted[index]
    share = same / (len(served) * len(wanted))
    if share < 1 and not context.settings.on_gpu:
        raise WrongNumbers(f"{100 * (1 - share):.3g} % of the texts over HTTP are not those of the engine's own tokens")
    context.report.say(
        f"checked: {context.model.name} http: {len(wanted)} answered with exactly {workload.num_out:,} tokens in each run; "
        f"{100 * share:.4g} % of the texts are those of the tokens of the engine without HTTP"
    )
    return share


def _text(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """What a stream says of tokens behind a prompt."""
    detokenizer: Detokenizer = tokenizer.detokenizer((), prompt)
    return detokenizer.feed(tokens[:-1]) + detokenizer.finish(tokens[-1:])


def _add_rows(
    context: Context, name: str, workload: Workload, offline: list[Answers], served: list[list[Streamed]], share: float
) -> None:
    """Of the timed runs, side by side."""
    seconds = {
        SYSTEM: [answers.seconds for answers in offline[1:]],
        SERVED: [max(each["ended_s"] for each in run) - min(each["begun_s"] for each in run) for run in served[1:]],
    }
    firsts_s = {
        SYSTEM: [first_s for answers in offline[1:] for first_s in answers.first_s],
        SERVED: [each["first_s"] - each["begun_s"] for run in served[1:] for each in run],
    }
    for system, of_system in seconds.items():
        rates = [workload.num_out / each for each in of_system]
        context.add(name, "throughput", "tok/s", rates, workload.num_out / workload.bound_s, system=system)
        context.add(name, "total", "s", of_system, workload.bound_s, system=system)
        context.add(name, "first token", "ms", [1e3 * each for each in firsts_s[system]], system=system)
    chunks = sum(each["chunks"] for run in served[1:] for each in run)
    count = len(workload.prompts)
    per_chunk = workload.num_out * len(served[1:]) / chunks
    context.add_figure(name, "tokens a chunk", "tokens", per_chunk, count, system=SERVED)
    context.add_figure(name, f"same answers as {SYSTEM}", "%", 100 * share, count, system=SERVED)
