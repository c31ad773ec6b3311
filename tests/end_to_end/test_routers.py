"""Routers that exist, before two replicas: what they find cached, and what becomes of requests when a replica is killed."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
import yaml

from tests.end_to_end.small import server_process, small_model, small_server, until
from tests.engine.test_kv_events import Router
from tests.server.tiny import token_ids
from tests.stores import free_port
from vmmkv_server.models import resolve
from vmmkv_server.protocol import BLOCK_TOKENS, KVEventSource

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"
NUM_CONVERSATIONS, NUM_TURNS, AT_ONCE = 64, 5, 4
BUDGET = "76MiB"
"""38 pages, of which a conversation and a request that runs take one each: room for more than half of the conversations."""
WORDS = (ROOT / "tests" / "texts" / "opticks.txt").read_text().split()

pytestmark = pytest.mark.nightly


# Conversations.


def texts(seed: int, num_words: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        start = rng.randrange(len(WORDS) - num_words)
        yield " ".join(WORDS[start : start + num_words])


def complete(url: str, prompt: str, max_tokens: int = 4, session: object = None) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {} if session is None else {"X-Session-ID": f"session-{session}"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)


def cached_share(answer: httpx.Response) -> float:
    usage = answer.json()["usage"]
    return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


def hit_rate(urls: Sequence[str], seed: int, *, named: bool = False) -> float:
    """The share of prompt tokens that were cached, over all turns of all conversations. URLs are asked by turns.

    Requests of `named` conversations say which one is theirs.

    In each turn the conversations come in another order, so that turns do not bring them back to where they were.
    """
    conversations = list(itertools.islice(texts(seed, 48), NUM_CONVERSATIONS))
    more, rng, turns, counts = texts(seed + 1, 8), random.Random(seed), itertools.cycle(urls), [0, 0]
    for _ in range(NUM_TURNS):
        order = rng.sample(range(NUM_CONVERSATIONS), NUM_CONVERSATIONS)
        with ThreadPoolExecutor(AT_ONCE) as clients:
            asked = [
                clients.submit(complete, next(turns), conversations[index], session=index if named else None) for index in order
            ]
        for index, each in zip(order, asked, strict=True):
            answer = each.result().json()
            conversations[index] += f"{answer['choices'][0]['text']} {next(more)}"
            counts[0] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            counts[1] += answer["usage"]["prompt_tokens"]
    return counts[0] / counts[1]


# Deployments, each as its page says.


def path_of(program: str, folder: str) -> str:
    """A router's program, of its environment."""
    for path in (*sorted(ROOT.glob(f".venv/{folder}-*/bin")), *os.environ["PATH"].split(":")):
        if found := shutil.which(program, path=str(path)):
            return found
    pytest.skip(f"{program} is not installed; make nightly installs it")


def with_vllm_router() -> str:
    """A PATH with the router, and the command of these tests' own vmmkv."""
    return f"{Path(path_of('vllm-router', 'vllm-router')).parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"


@contextlib.contextmanager
def started(log: Path, command: Sequence[str | Path], url: str, in_log: str = "", **environment: str) -> Iterator[None]:
    """A process that serves a model at the URL, until the end of the block; then all that it started has ended."""

    def serves() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            models = httpx.get(f"{url}/v1/models")
            return models.status_code == 200 and bool(models.json()["data"]) and in_log in log.read_text()
        return False

    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment, cwd=ROOT, start_new_session=True
        )
    try:
        until(serves, within_s=300)
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def behind_vllm_router(folder: Path, model: str | Path, options: str, policy: str) -> Iterator[str]:
    port = free_port()
    command = [ROOT / "deploy" / "vllm-router.sh", model, "cpu cpu", *options.split()]
    url = f"http://127.0.0.1:{port}"
    with started(folder / "log", command, url, PATH=with_vllm_router(), PORT=str(port), POLICY=policy):
        yield url


@contextlib.contextmanager
def behind_ray_serve(folder: Path, model: str | Path, options: str) -> Iterator[str]:
    program, port = Path(path_of("serve", "ray")), free_port()
    config = yaml.safe_load((ROOT / "deploy" / "ray_serve.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"] |= {"model": str(model), "gpus": 0, "options": f"--device cpu {options}"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHONPATH": os.environ["PYTHONPATH"], "RAY_USAGE_STATS_ENABLED": "0"}
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as short,  # it holds sockets
        started(folder / "log", [program, "run", folder / "config.yaml"], url, "successfully", **environment, RAY_TMPDIR=short),
    ):
        yield url


@contextlib.contextmanager
def behind_dynamo(folder: Path, model: str | Path, options: str) -> Iterator[str]:
    installed = sorted(ROOT.glob(".venv/dynamo-*"))
    if not installed:
        pytest.skip("Dynamo is not installed; make nightly installs it")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [ROOT / "deploy" / "dynamo.sh", model, "cpu cpu", *options.split()]
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{installed[-1]}",
    }

    def num_workers() -> int:
        return sum(each["endpoint"] == "generate" for each in httpx.get(f"{url}/health").json()["instances"])

    with started(folder / "log", command, url, PORT=str(port), **environment):
        until(lambda: num_workers() == 2)
        yield url


DEPLOYMENTS = {
    "vllm-router cache_aware": lambda *args: behind_vllm_router(*args, policy="cache_aware"),
    "vllm-router kv_aware": lambda *args: behind_vllm_router(*args, policy="kv_aware"),
    "ray serve": behind_ray_serve,
    "dynamo": behind_dynamo,
}
each_router = pytest.mark.parametrize("router", DEPLOYMENTS)


def servers_of(model: Path) -> list[int]:
    """The processes that were started with a model: of replicas, without their engines."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = each.read_bytes().decode().split("\0")
            if str(model) in line and ("serve" in line or line[1].endswith("dynamo_worker.py")):
                found.append(int(each.parent.name))
    return sorted(found)


# Laws.


@pytest.fixture(scope="module")
def by_turns(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The hit rate of two replicas that take turns."""
    with contextlib.ExitStack() as stack:
        folders = [tmp_path_factory.mktemp("replica") / MODEL for _ in range(2)]
        for folder in folders:
            folder.mkdir()
        servers = [stack.enter_context(small_server(folder, "--kv-budget", BUDGET)) for folder in folders]
        return hit_rate([each.url for each in servers], seed=1)


@pytest.mark.parametrize(
    ("router", "named"),
    [("vllm-router kv_aware", False), ("vllm-router kv_aware", True), ("ray serve", False), ("dynamo", True)],
)
def test_a_router_by_prefixes_finds_twice_as_much_cached_as_turns_do(
    router: str, named: bool, by_turns: float, tmp_path: Path
) -> None:
    """Not cache_aware, which knows what it has sent, not what is cached: 0.26 to 0.74 where turns find 0.18. Nor Dynamo
    without names, which moves conversations to even the load: 0.32."""
    model = small_model(tmp_path / MODEL)
    with DEPLOYMENTS[router](tmp_path, model, f"--load-format dummy --kv-budget {BUDGET}") as url:
        found = hit_rate([url], seed=1, named=named)
    print(f"hit rate: {by_turns:.3f} by turns, {found:.3f} by {router}{', named conversations' if named else ''}")
    assert found >= 2 * by_turns


@each_router
def test_smollm2_answers_behind_a_router_and_knows_the_prompt_again(router: str, tmp_path: Path) -> None:
    resolve(MODEL)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
    with DEPLOYMENTS[router](tmp_path, MODEL, "--kv-budget 256MiB") as url:
        answers = []
        for _ in range(4):
            answers.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120))
            time.sleep(1)  # for events
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": True}, timeout=120) as stream:
            lines = [line for line in stream.iter_lines() if line]
    assert not [each.text for each in answers if each.status_code != 200]
    assert all("Paris" in each.json()["choices"][0]["message"]["content"] for each in answers), [each.text for each in answers]
    assert [cached_share(each) > 0.9 for each in answers] == [False, True, True, True]
    assert len(lines) > 3 and lines[-1] == "data: [DONE]"


@each_router
def test_requests_to_a_killed_replica_fail_over_or_fail_clearly(router: str, tmp_path: Path) -> None:
    model = small_model(tmp_path / MODEL)
    with DEPLOYMENTS[router](tmp_path, model, "--load-format dummy --kv-budget 64MiB") as url:
        first, second = servers_of(model)
        # More than the ten by which Ray lets one replica be ahead of the other.
        with ThreadPoolExecutor(24) as clients:
            asked = [clients.submit(complete, url, f"{number} is a number", 900, number) for number in range(24)]
            time.sleep(1)
            assert not all(each.done() for each in asked)
            os.kill(first, signal.SIGKILL)
            answers = [each.result() for each in asked]
        assert {each.status_code for each in answers} <= {200, 500, 502, 503}, [each.text for each in answers]
        codes = [each.status_code for each in answers]
        print(f"{codes.count(200)} of {len(codes)} in flight were answered behind {router}")
        assert 200 in codes and second in servers_of(model)
        afterwards = [(f"{number} afterwards", number) for number in range(8)]
        until(lambda: all(complete(url, prompt, session=of).status_code == 200 for prompt, of in afterwards), within_s=30)
    until(lambda: not servers_of(model), within_s=30)


@contextlib.contextmanager
def apart(folder: Path, model: str | Path, *options: str) -> Iterator[str]:
    """One server that prefills and one that decodes, behind vllm-router."""
    port = free_port()
    command = [ROOT / "deploy" / "prefill-decode.sh", model, "cpu", "128MiB", "cpu", "128MiB", *options]
    url = f"http://127.0.0.1:{port}"
    with started(folder / "log", command, url, PATH=with_vllm_router(), PORT=str(port)):
        yield url


def test_vllm_router_prefills_and_decodes_apart(tmp_path: Path) -> None:
    resolve(MODEL)
    prompts = list(itertools.islice(texts(1, 150), 3))
    with server_process(tmp_path / "one", MODEL, "--kv-budget", "128MiB") as one:
        expected = [complete(one.url, prompt, 8).json()["choices"][0]["text"] for prompt in prompts]
    with apart(tmp_path, MODEL) as url:
        answers = [complete(url, prompt, 8).json() for prompt in prompts]
        chat = {"model": MODEL, "messages": [{"role": "user", "content": prompts[0]}], "max_tokens": 8, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=chat, timeout=120) as stream:
            lines = [line for line in stream.iter_lines() if line]
        few = {"max_completion_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}, "stream": False}
        chosen = httpx.post(f"{url}/v1/chat/completions", json=chat | few | {"max_tokens": None}, timeout=120).json()
    assert chosen["choices"][0]["message"]["content"] in ("yes", "no")
    assert [each["choices"][0]["text"] for each in answers] == expected
    for each in answers:
        # The router gives what the prefill server had cached, but for the details.
        lent = each["usage"]["prompt_tokens_details"]["cached_tokens_details"]["lender"]
        assert each["usage"]["prompt_tokens"] - 92 <= lent, "all but the last page"
    assert len(lines) > 3 and lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("answer", ["echo curl: 401 >&2; exit 22", "echo '{}'"], ids=["401", "{}"])
def test_replicas_that_do_not_say_where_their_events_are_are_named(answer: str, tmp_path: Path) -> None:
    curl = f'case "$*" in */health) ;; *) {answer} ;; esac'
    for name, script in {"vmmkv": "exec sleep 600", "curl": curl, "vllm-router": "echo started"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [ROOT / "deploy" / "vllm-router.sh", "model", "cpu"]
    ended = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 1 and not ended.stdout
    assert "http://127.0.0.1:8001/kv_event_sources does not say where KV events are" in ended.stderr


def test_a_pair_can_be_ended_before_its_holder_is_ready(tmp_path: Path) -> None:
    slow = tmp_path / "vmmkv"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    command = [ROOT / "deploy" / "prefill-decode.sh", "model", "cpu", "2MiB", "cpu", "2MiB"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    process = subprocess.Popen(command, env=os.environ | {"PATH": path}, start_new_session=True)
    try:
        time.sleep(1)
        process.terminate()
        process.wait(10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_killed_server_of_a_pair_fails_requests_clearly_and_the_other_stays(tmp_path: Path) -> None:
    model = small_model(tmp_path / MODEL)
    with apart(tmp_path, model, "--load-format", "dummy") as url:
        assert complete(url, "A prompt").status_code == 200
        first, second = servers_of(model)
        os.kill(first, signal.SIGKILL)
        codes = {complete(url, f"{number} is a number").status_code for number in range(4)}
        assert codes <= {500, 502, 503} and servers_of(model) == [second]
    until(lambda: not servers_of(model), within_s=30)


def test_bench_measures_one_and_two_replicas_through_the_router(tmp_path: Path) -> None:
    resolve(MODEL)  # its tokenizer
    command = [sys.executable, "-m", "bench", "serve", "--parts", "replicas", "--quick", "--device", "cpu"]
    environment = os.environ | {"PATH": with_vllm_router()}
    ended = subprocess.run(
        [*command, "--out", tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text().splitlines()]
    systems = {f"vmmkv, replicas: {count}" for count in (1, 2)}
    for metric in ("throughput", "total", "first token"):
        assert {row["system"] for row in rows if row["metric"] == metric and row["p50"] > 0} == systems


@pytest.mark.parametrize("medium", ["GPU", "CPU"])
def test_vllm_router_learns_by_replay_what_was_cached_before_it_came(tmp_path: Path, medium: str) -> None:
    events = ("--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay", "tcp://127.0.0.1:*", "--load-format", "dummy")
    events += ("--kv-budget", "256MiB" if medium == "GPU" else "32MiB", "--kv-host-budget", "256MiB")
    model = small_model(tmp_path / MODEL, hidden_size=512, num_key_value_heads=4, num_hidden_layers=16)  # some 16 MiB a prompt
    command, port = [path_of("vllm-router", "vllm-router"), "--policy", "kv_aware"], free_port()
    url = f"http://127.0.0.1:{port}"
    command += ["--port", str(port), "--prometheus-port", str(free_port()), "--worker-startup-check-interval", "1"]
    before, after = (list(itertools.islice(texts(seed, 40), 8)) for seed in (1, 2))
    heard: list[Router] = []
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(server_process(tmp_path / str(index), model, *events)) for index in range(2)]
        for each, prompt in zip(itertools.cycle(replicas), before, strict=False):
            assert complete(each.url, prompt).status_code == 200
            time.sleep(0.5)  # until it is in the tier too
        for each in replicas:
            source = msgspec.convert(httpx.get(f"{each.url}/kv_event_sources").json()["0"], KVEventSource)
            heard.append(stack.enter_context(contextlib.closing(Router(source))))
            command += ["--kv-event-source", f"{each.url}={source.endpoint}"]
            command += ["--kv-event-replay-source", f"{each.url}={source.replay_endpoint}"]
        command += ["--kv-event-model", MODEL, "--worker-urls", *(each.url for each in replicas)]
        stack.enter_context(started(tmp_path / "log", command, url))
        time.sleep(1)  # until it has subscribed
        for each, prompt in zip(replicas, after, strict=False):
            complete(each.url, prompt)  # the number of its events tells the router that it has missed some
        time.sleep(1)
        for each, hears, prompt in zip(itertools.cycle(replicas), itertools.cycle(heard), before, strict=False):
            hears.ask()
            first_block = None, tuple(token_ids(prompt)[:BLOCK_TOKENS])
            assert [name for name in hears.held if first_block in hears.at(name)] == (
                ["GPU", "CPU"] if medium == "GPU" else ["CPU"]
            )
            finished = each.metric(r'requests_total\{outcome="finished"\}')
            share = cached_share(complete(url, prompt))
            assert each.metric(r'requests_total\{outcome="finished"\}') == finished + 1
            assert share > 0.8 or medium == "CPU", "what may be computed faster than loaded"
