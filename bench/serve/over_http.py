"""The same requests by `vmmkv serve` over HTTP, all of them streams, and by the engine in this process: what HTTP costs.

The engine in this process makes texts too, since it has a tokenizer here: both do all that a user gets. It runs first, and its
rows are written before the server starts.
"""

from collections.abc import Sequence
from typing import Final

from bench.serve import SERVED, SYSTEM
from bench.serve.checks import Alone, share_of_same
from bench.serve.context import Context
from bench.serve.engine import Answers, ServedEngine
from bench.serve.padding import digest_of, tokenizer_file
from bench.serve.requests import Requests, Workload, begins_alike
from bench.serve.server import Clients, Server
from bench.streams import Streamed
from bench.timing import WrongNumbers
from vmmkv.server.tokenizer import Detokenizer, Tokenizer

_CLIENTS: Final = {"cpu": 1, "cuda": 8}
"""Processes of clients: one cannot read as many events a second as a GPU's engine makes tokens."""

_LATEST: Final = 10
_LEAST_LIMIT_S: Final = 120.0
"""Streams that take longer than so many of the runs without HTTP, and than so long, will not end."""

_BEGINNING: Final = 4
"""Tokens of an answer that are looked for at the beginning of its text. Over HTTP requests come one after the other, and so in
other batches, whose rounding on a GPU may part a long answer from the one without HTTP somewhere: both are right (see checks).
"""

_LEAST_ALIKE: Final = 0.5
"""Of the share of answers that are the same in all runs without HTTP, what has to begin alike over HTTP."""


def http(context: Context) -> None:
    """Many requests of many lengths, over HTTP and without."""
    file = tokenizer_file(context.settings.tokenizer)
    name = context.name("http", f"{context.requests.mixed().text}, tokenizer {digest_of(file)}")
    with context.guarded(name):
        model = context.model.with_tokenizer(file)
        requests = Requests(model, context.sizes, context.settings.seed)
        workload = requests.mixed()
        context.close()  # each engine takes all memory
        with model.directory() as directory:
            engine = ServedEngine(model, context.settings, context.sizes)
            offline, same = _offline(context, engine, requests, workload)
            _add_offline_rows(context, name, workload, offline, same)
            context.close()
            tokenizer = Tokenizer.load(directory)
            options = _options(context)
            limit_s = max(_LEAST_LIMIT_S, _LATEST * max(answers.seconds for answers in offline))
            context.progress("http: vmmkv serve starts")
            with Clients(_CLIENTS[context.settings.device.type]) as clients, Server(directory, *options) as server:
                context.progress(f"http: vmmkv serve is there, at {server.url}")
                served = _served(context, server, clients, workload, limit_s)
                context.progress("http: vmmkv serve stops")
        context.progress("http: texts are compared")
        share = _checked(context, workload, tokenizer, offline[0], same, served)
        _add_served_rows(context, name, workload, served, share)


def _options(context: Context) -> list[str]:
    """Of `vmmkv serve`: those of the engine in this process."""
    settings = context.settings
    options = ["--device", str(settings.device), "--seed", str(settings.seed)]
    options += ["--max-num-seqs", str(context.sizes.max_num_seqs)]
    if settings.max_num_batched_tokens is not None:
        options += ["--max-num-batched-tokens", str(settings.max_num_batched_tokens)]
    return options


def _offline(context: Context, engine: ServedEngine, requests: Requests, workload: Workload) -> tuple[list[Answers], float]:
    """Of the engine in this process: a run that is not timed, and those that are; and how many answers are the same in all.

    Raises: WrongNumbers if they are wrong.
    """
    with engine:
        alone = Alone.of(engine, workload, requests, context.sizes.sampled)
        runs = []
        for number in range(1 + context.settings.repeat):
            context.progress(f"http, without it: run {number} of {context.settings.repeat}")
            engine.forget()
            runs.append(engine.ask(workload.prompts, workload.outs, scored=() if number else alone.sampled))
            _check_cached(workload, runs[-1].cached_tokens)
        alone.check(runs[0])
    return runs, share_of_same(runs, strict=not context.settings.on_gpu)


def _served(context: Context, server: Server, clients: Clients, workload: Workload, limit_s: float) -> list[list[Streamed]]:
    """Over HTTP: a run that is not timed, and those that are. Raises: WrongNumbers, after the run in which one has failed."""
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
        runs.append(clients.ask(f"{server.url}/v1/completions", bodies, limit_s))
        _check_streams(workload, runs[-1])
    return runs


def _check_streams(workload: Workload, run: Sequence[Streamed]) -> None:
    """Raises: WrongNumbers if a request has failed, or has not exactly its tokens; or if something was known of the prompts."""
    for index, (stream, prompt, num_out) in enumerate(zip(run, workload.prompts, workload.outs, strict=True)):
        if stream["error"] is not None:
            raise WrongNumbers(f"request {index} failed: {stream['error']}")
        counts = (stream["prompt_tokens"], stream["completion_tokens"], stream["finish_reason"])
        if counts != (len(prompt), num_out, "length"):
            raise WrongNumbers(f"request {index} of {len(prompt)} tokens in, {num_out} out, has {counts} over HTTP")
    _check_cached(workload, sum(stream["cached_tokens"] for stream in run))


def _check_cached(workload: Workload, cached_tokens: int) -> None:
    """A run begins with an empty prefix cache, which knows no more than prompts have in common by chance."""
    if cached_tokens > (most := begins_alike(workload.prompts)):
        raise WrongNumbers(
            f"{cached_tokens:,} tokens of prompts were in the prefix cache, which has been emptied; they have {most} in common"
        )


def _checked(
    context: Context,
    workload: Workload,
    tokenizer: Tokenizer,
    offline: Answers,
    same_offline: float,
    served: Sequence[Sequence[Streamed]],
) -> float:
    """How many of the texts are those of the tokens of the engine in this process, as a share; on a CPU all must be.

    Raises: WrongNumbers if fewer are, or on a GPU if too few begin as they do.
    """
    pairs = list(zip(workload.prompts, offline.tokens, strict=True))
    wanted = [_text(tokenizer, prompt, tokens) for prompt, tokens in pairs]
    beginnings = [tokenizer.detokenizer((), prompt).feed(tokens[:_BEGINNING]) for prompt, tokens in pairs]
    texts = [[stream["text"] for stream in run] for run in served]
    share = _share([text == whole for run in texts for text, whole in zip(run, wanted, strict=True)])
    alike = _share([text.startswith(begins) for run in texts for text, begins in zip(run, beginnings, strict=True)])
    if share < 1 and not context.settings.on_gpu:
        raise WrongNumbers(f"{100 * (1 - share):.3g} % of the texts over HTTP are not those of the engine's own tokens")
    if alike < _LEAST_ALIKE * same_offline:
        raise WrongNumbers(
            f"only {100 * alike:.3g} % of the texts over HTTP begin as those of the engine's own tokens, of which "
            f"{100 * same_offline:.3g} % are the same in all runs without HTTP"
        )
    context.report.say(
        f"checked: {context.model.name} http: {len(wanted)} answered with exactly {workload.num_out:,} tokens in each run; "
        f"{100 * same_offline:.4g} % of the answers the same in all runs without HTTP; of the texts over it "
        f"{100 * share:.4g} % are those of the same tokens, and {100 * alike:.4g} % begin so"
    )
    return share


def _share(held: Sequence[bool]) -> float:
    return sum(held) / len(held)


def _text(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """What a stream says of tokens behind a prompt."""
    detokenizer: Detokenizer = tokenizer.detokenizer((), prompt)
    return detokenizer.feed(tokens[:-1]) + detokenizer.finish(tokens[-1:])


def _add_offline_rows(context: Context, name: str, workload: Workload, offline: list[Answers], same: float) -> None:
    """Of the timed runs without HTTP."""
    seconds = [answers.seconds for answers in offline[1:]]
    firsts_s = [first_s for answers in offline[1:] for first_s in answers.first_s]
    _add_times(context, name, workload, SYSTEM, seconds, firsts_s)
    context.add_figure(name, "same answers in all runs", "%", 100 * same, len(workload.prompts))


def _add_served_rows(context: Context, name: str, workload: Workload, served: list[list[Streamed]], share: float) -> None:
    """Of those over it."""
    seconds = [max(each["ended_s"] for each in run) - min(each["begun_s"] for each in run) for run in served[1:]]
    firsts_s = [each["first_s"] - each["begun_s"] for run in served[1:] for each in run]
    _add_times(context, name, workload, SERVED, seconds, firsts_s)
    chunks = sum(each["chunks"] for run in served[1:] for each in run)
    count = len(workload.prompts)
    context.add_figure(name, "tokens a chunk", "tokens", workload.num_out * len(seconds) / chunks, count, system=SERVED)
    context.add_figure(name, f"same answers as {SYSTEM}", "%", 100 * share, count, system=SERVED)


def _add_times(
    context: Context, name: str, workload: Workload, system: str, seconds: Sequence[float], firsts_s: Sequence[float]
) -> None:
    rates = [workload.num_out / each for each in seconds]
    context.add(name, "throughput", "tok/s", rates, workload.num_out / workload.bound_s, system=system)
    context.add(name, "total", "s", seconds, workload.bound_s, system=system)
    context.add(name, "first token", "ms", [1e3 * each for each in firsts_s], system=system)
