"""A request that cannot be served is refused before it reaches the engine, with the parameter's name and what would work."""

import math
import tracemalloc
from typing import Any

import msgspec
import openai
import pytest

from tests.server.fake_engine import READY, ready_with
from tests.server.support import CHAT, COMPLETIONS, HELLO, Running, running_server
from vmmkv.errors import did_you_mean
from vmmkv_server.http import generation
from vmmkv_server.http.schemas import MAX_VARIABLE_CHARS

OF_BOTH: dict[str, list[Any]] = {
    "n": [0, 129, 1.5],
    "max_tokens": [-1, 1.5, True],
    "min_tokens": [-1, 1.5, False],
    "temperature": [-0.1, 2.1, "hot", math.nan],
    "top_p": [0, 1.5],
    "top_k": [-2, 1.5, True],
    "min_p": [1.5, -0.1],
    "presence_penalty": [2.5],
    "frequency_penalty": [-2.5],
    "repetition_penalty": [0, 101],
    "logit_bias": [
        {"five": 1},
        {"-5": 1},
        {"05": 1},
        {"5": 100.5},
        {"5": "1"},
        {"258": 1},
        [5],
        {str(each): 1 for each in range(1025)},
    ],
    "seed": [1 << 63, 1e19],
    "stop": ["a" * 4097, ["a" * 4096, "b"], ["a", ""], "", 3, [3], "\ud800"],
    "stop_token_ids": [[10**30], [-1], [258], [1] * 65],
    "use_beam_search": [1],
    "beam_width": [2],
    "length_penalty": [0.5],
    "logprobs": [-1, 21],
    "top_logprobs": [2],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "response_format": [{"type": "xml"}],
    "kv_policy": [7, {}, "h2o", {"type": "tova", "budget": 0}, {"type": ["tova"]}],
    "cache_salt": ["", 5, "\ud800", "a" * 1025],
    "priority": [0.5, 1 << 31],
    "timeout": [0, 1e9, "soon"],
    "user": [7, "a" * 1025],
    "best_of": [2],
    "store": [True],
    "skip_special_tokens": [False],
    "made_up": [1],
}
OF_COMPLETIONS: dict[str, list[Any]] = {
    "logprobs": [1.5],
    "echo": ["yes"],
    "suffix": ["end"],
    "max_tokens": [0],
    "min_tokens": [17],  # max_tokens is 16 unless given
    "prompt": [
        *("", [], [[]], ["ok", ""], [1, "two"], [1.5], [True], [[1], None], [-1], [258], None),
        *(["a"] * 129, [[1]] * 129, "\ud800", "a" * 5000 + "\udfff"),
    ],
}
OF_CHATS: dict[str, list[Any]] = {
    "logprobs": [2],
    "max_completion_tokens": [0],
    "tools": [[{}], [{"type": "function"}], {"type": "function", "function": {"name": "f"}}],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": ["x", {str(number): 1 for number in range(17)}, {"a b": 1}, {"a" * 65: 1}],
    "chat_template_kwargs.a": [{"a": value} for value in ([], {}, math.nan, "x" * (MAX_VARIABLE_CHARS + 1))],
    "messages": [[], [{"role": "user", "content": "\ud800"}]],
    "messages.0.role": [[{"role": "function", "content": "x"}]],
    "messages.0.content": [
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
}


@pytest.mark.parametrize(
    ("path", "param", "value"),
    [
        (path, param, value)
        for path, own in ((COMPLETIONS, OF_COMPLETIONS), (CHAT, OF_CHATS))
        for params in (OF_BOTH, own)
        for param, values in params.items()
        for value in values
    ],
)
def test_the_parameter_is_named(server: Running, path: str, param: str, value: Any) -> None:
    name, _, rest = param.partition(".")
    error = server.refuses(path, **{name: value})
    assert error["param"] is not None and name in error["message"]
    assert error["param"] == param if rest else error["param"].split(".")[0] == name


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (COMPLETIONS, {"logit_bias": {"five": 1}}, "must be token ids, as in {\"50256\": -100}, and 'five' is none."),
        (COMPLETIONS, {"logit_bias": 5}, "Invalid logit_bias: it must be a JSON object."),
        (COMPLETIONS, {"stop": 5}, "Invalid stop: it must be a string, or a list of strings."),
        (COMPLETIONS, {"stop": ["a" * 4096, "b"]}, "Invalid stop: it has 4097 characters together, and may have 4096."),
        (COMPLETIONS, {"stop_token_ids": [1, 300]}, "300 is not a token id of this model: they go from 0 to 257."),
        (COMPLETIONS, {"temperature": -1}, "Invalid temperature: Input should be greater than or equal to 0."),
        (COMPLETIONS, {"response_format": "json_object"}, ', "json_object" or "json_schema", as in {"type": "json_object"}.'),
        (COMPLETIONS, {"prompt": [1] * 256}, "shorten the prompt to 255 tokens."),
        (COMPLETIONS, {"prompt": [1] * 200, "max_tokens": 100}, "lower max_tokens to 56 or shorten the prompt to 156 tokens."),
        (COMPLETIONS, {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "only for include_usage=true."),
        (COMPLETIONS, {"prompt": "a", "n": 129}, "lower n to 128 and send further requests for the others."),
        (COMPLETIONS, {"prompt": ["a"] * 3, "n": 43}, "lower n to 42 and send further requests for the others."),
        (COMPLETIONS, {"prompt": ["a"] * 3, "use_beam_search": True, "beam_width": 43},
         "lower beam_width to 42 and send further requests for the others."),
        (CHAT, {"messages": []}, "Invalid messages: it must have 1 item at least, and has 0."),
        (CHAT, {"messages": "hello"}, "Invalid messages: it must be a list."),
        (CHAT, {"messages": ["hello"]}, "Invalid messages.0: it must be a JSON object."),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, '{"type": "text", "text": "..."} are served.'),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "send valid Unicode."),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "mean the same: send one."),
        (CHAT, {"top_logprobs": 2}, "only for logprobs=true."),
        (CHAT, {"max_token": 5}, "Unknown parameter: 'max_token'; did you mean max_tokens?"),
        (CHAT, {"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "or send false."),
        (CHAT, {"messages": [{"role": "user", "contents": "a"}]}, "Unknown parameter: 'contents'; did you mean content?"),
        (CHAT, {"made_up\ud800": 5}, "Unknown parameter: 'made_up\\ud800'."),
        (CHAT, {"functions": [{}]}, 'send "tools": [{"type": "function", "function": {...}}].'),
    ],
)  # fmt: skip
def test_it_says_what_would_work(server: Running, path: str, body: dict[str, Any], said: str) -> None:
    assert server.refuses(path, **body)["message"].endswith(said)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"temperature": 0.5}, "temperature", "send 0"),
        ({"stream": True}, "stream", "leave stream out"),
        ({"top_p": 0.5}, "top_p", "leave top_p out"),
        ({"top_k": 5}, "top_k", "leave top_k out"),
        ({"min_p": 0.5}, "min_p", "leave min_p out"),
        ({"presence_penalty": 1}, "presence_penalty", "leave presence_penalty out"),
        ({"frequency_penalty": 1}, "frequency_penalty", "leave frequency_penalty out"),
        ({"repetition_penalty": 2}, "repetition_penalty", "leave repetition_penalty out"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "leave logit_bias out"),
        ({"logprobs": 1}, "logprobs", "leave logprobs out"),
        ({"n": 4, "beam_width": 2}, "n", "raise beam_width to 4 or lower n to 2"),
        ({"beam_width": 0}, "beam_width", "greater than or equal to 1"),
        ({"beam_width": READY.limits.max_sequences + 1}, "beam_width", f"lower beam_width to {READY.limits.max_sequences}"),
        ({"length_penalty": 1e308}, "length_penalty", "10"),
        ({"min_tokens": 2}, "min_tokens", "or the beam search"),
        ({"use_beam_search": False, "beam_width": 2}, "beam_width", "use_beam_search=true"),
        ({"use_beam_search": False, "length_penalty": 0}, "length_penalty", "use_beam_search=true"),
    ],
)
def test_what_no_beam_search_can_do_is_refused(server: Running, path: str, body: dict[str, Any], param: str, said: str) -> None:
    if path == CHAT and "logprobs" in body:
        body = {"logprobs": True}
    error = server.refuses(path, **{"use_beam_search": True, **body})
    assert error["param"] == param and said in error["message"]


def test_what_can_never_fit_is_refused_with_the_numbers_and_no_path() -> None:
    with running_server(ready=msgspec.structs.replace(READY, model="/home/me/tiny")) as server:
        error = server.refuses(COMPLETIONS, prompt=[1] * 256)
        assert error["param"] == "prompt" and "the most that tiny takes here" in error["message"]
        assert "/home" not in error["message"]
        error = server.refuses(COMPLETIONS, prompt=[1] * 200, max_tokens=100)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
        assert all(number in error["message"] for number in ("300", "200", "100", "256", "56", "156"))
    with running_server(ready=ready_with(pool_tokens=64)) as server:
        error = server.refuses(COMPLETIONS, prompt=[1] * 60, max_tokens=5)
        assert "64.0 MiB" in error["message"] and "lower max_tokens to 4" in error["message"]
        assert server.complete(prompt=[1] * 60, max_tokens=4).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_text_that_can_never_fit_is_not_tokenised(server: Running, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of this model stands for more than 12 characters, and a request can have 256."""
    sizes, rust = list[int](), server.tokenizer.rust

    class Watched:
        def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
            sizes.extend(map(len, texts))
            return rust.encode_batch_fast(texts, **options)

    monkeypatch.setattr(server.tokenizer, "rust", Watched())
    most = 12 * 256
    for num_chars in (most + 1, 100 * most):
        text = "a" * num_chars
        asked: Any = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        error = server.refuses(path, **asked)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages" if path == CHAT else "prompt")
        assert "tokens or more" in error["message"] and error["message"].endswith("shorten the prompt to 255 tokens.")
        for wanted, remedy in ((3, "shorten the prompt to 253 tokens."), (256, "lower max_tokens to 256 together at most.")):
            assert server.refuses(path, **asked, max_tokens=wanted)["message"].endswith(remedy)
    assert not sizes
    assert server.refuses(COMPLETIONS, prompt="a" * most)["code"] == "context_length_exceeded" and sizes == [most]


@pytest.mark.parametrize(("before", "behind"), [(256, 64), (64, 256)])
def test_a_budget_that_changes_while_a_prompt_is_tokenised_counts(
    before: int, behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(ready=ready_with(pool_tokens=before)) as server:
        rust = server.tokenizer.rust

        class Resizing:
            def __getattr__(self, name: str) -> Any:
                return getattr(rust, name)

            def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
                server.client.phase = ready_with(pool_tokens=behind)
                return rust.encode_batch_fast(texts, **options)

        monkeypatch.setattr(server.tokenizer, "rust", Resizing())
        response = server.complete(prompt="abc", max_tokens=100)
        assert response.status_code == (200 if behind > 100 else 400), response.text
        assert len(server.generates) == (behind > 100)


def test_a_text_that_is_only_counted_needs_no_room_unless_it_is_very_long(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a" * 4000
    for param, asked in (("prompt", {"prompt": text}), ("messages", {"messages": [{"role": "user", "content": text}]})):
        monkeypatch.setattr(generation, "COUNTED_BYTES", 5000)
        assert server.post("/tokenize", asked).json()["count"] >= 4000 > READY.limits.max_tokens
        monkeypatch.setattr(generation, "COUNTED_BYTES", 3000)
        refused = server.post("/tokenize", asked)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert error["message"].endswith("send the text in parts, in bodies of 2.9 KiB or less.")


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (17, 'Invalid kv_policy: it must be a string, or an object such as {"type": "streaming_llm", "window": 2048}.'),
        (
            {"type": "snapkv", "budget": 16},
            "Invalid kv_policy: it is of type snapkv: window=32 (the default) is more than budget=16: give a budget of 32 or "
            "more, or a smaller window.",
        ),
        (
            {"type": "tova", "budgets": 16},
            "Invalid kv_policy: it is of type tova, which has no option budgets; did you mean budget?",
        ),
    ],
)
def test_a_policy_of_another_form_is_refused(server: Running, policy: Any, reason: str) -> None:
    assert server.refuses(COMPLETIONS, prompt="a", kv_policy=policy)["message"] == reason


def test_a_policy_that_cannot_work_here_is_refused() -> None:
    policy = {"type": "tova", "budget": 20, "every": 5}
    with running_server(ready=ready_with(kv_policy_refusal="is not for this model", pool_tokens=64)) as server:
        assert server.refuses(CHAT, messages=HELLO, kv_policy=policy)["message"].endswith(
            "it is not for this model: leave it out."
        )
    with running_server(ready=ready_with(kv_policy="tova:budget=20,every=5", pool_tokens=64)) as server:
        error = server.refuses(COMPLETIONS, prompt="a", use_beam_search=True)
        assert error["param"] == "kv_policy" and 'send "none"' in error["message"]
        assert server.complete(prompt="a", use_beam_search=True, kv_policy="none").status_code == 200
        assert server.complete(prompt="a", max_tokens=4 * 256 - 1).status_code == 200, "past the model's positions"
        error = server.refuses(COMPLETIONS, prompt="a", max_tokens=4 * 256)
        wanted = f"one request can have {4 * 256} (the most with its kv_policy): lower max_tokens to {4 * 256 - 1}."
        assert error["param"] == "max_tokens" and error["message"].endswith(wanted)
        assert server.refuses(COMPLETIONS, prompt="a", max_tokens=200, kv_policy="none")["param"] == "max_tokens"
        original = policy | {"positions": "original"}
        assert server.complete(prompt="a", max_tokens=256 - 1, kv_policy=original).status_code == 200
        error = server.refuses(COMPLETIONS, prompt="a", max_tokens=256, kv_policy=original)
        assert error["param"] == "max_tokens" and 'Or have "positions": "rerotated"' in error["message"]
        error = server.refuses(COMPLETIONS, prompt="a", max_tokens=4 * 256, kv_policy=original)
        assert "rerotated" not in error["message"], "it would go too far as well"


def test_another_model_is_not_found(server: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny'") as caught:
        server.openai.completions.create(model="gpt-5", prompt="a")
    assert caught.value.code == "model_not_found"
    for path, body in ((CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert server.post(path, {"model": "\ud800", **body}).status_code == 404


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_model_left_out_is_the_served_one(server: Running, path: str) -> None:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "a"}
    for body in (asked, asked | {"model": None}, asked | {"model": "tiny"}):
        assert server.post(path, body).json()["model"] == "tiny"
        rendered = server.post(f"{path}/render", body).json()
        assert (rendered if path == CHAT else rendered[0])["model"] == "tiny"


def test_every_error_has_openais_form(server: Running) -> None:
    http, json = server.http, {"Content-Type": "application/json"}
    for response, status, said in (
        (http.get("/nothing-here"), 404, "GET /nothing-here: Not Found; the routes of this server are in /openapi.json"),
        (http.get(COMPLETIONS), 405, "Method Not Allowed; send POST"),
        (http.get("/v1/models/other"), 404, "'tiny'"),
        (http.post(COMPLETIONS, content="{", headers=json), 400, "not valid JSON"),
        (
            http.post(COMPLETIONS, content="[" * 100_000, headers=json),
            400,
            "not valid JSON: it is nested too deeply; send a flatter",
        ),
        (
            http.post(COMPLETIONS, content=b'{"prompt": "\xe9"}', headers=json),
            400,
            "byte 12 is 0xe9, which is not utf-8; send it in UTF",
        ),
        (http.post(COMPLETIONS, content="1" * 5000, headers=json), 400, "it has an integer of too many digits; send a smaller"),
        (http.post(COMPLETIONS, headers=json), 400, "must be a JSON object"),
        (http.post(COMPLETIONS, content='{"model": "tiny"}', headers={"Content-Type": "text/plain"}), 400, "Content-Type"),
        (http.post(COMPLETIONS, json=[1]), 400, "must be a JSON object"),
        (http.post(COMPLETIONS, json={"model": "tiny"}), 400, "Missing required parameter: 'prompt'"),
    ):
        assert response.status_code == status and said in response.json()["error"]["message"], response.text
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/responses", "did you mean /v1/responses?"),
        ("POST", "/v1/messages", "this server has /v1/chat/completions instead"),
        ("POST", "/generate", "this server has /v1/completions instead"),
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/completions", "did you mean /v1/completions?"),
        ("POST", "/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/tokenize", "did you mean /tokenize?"),
        ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("GET", "/models/", "did you mean /v1/models?"),
        ("POST", "/v1/embeddings", "the routes of this server are in /openapi.json"),
    ],
)
def test_an_unknown_path_names_what_there_is(server: Running, method: str, path: str, said: str) -> None:
    response = server.http.request(method, path)
    wanted = f"{method} {path.rstrip('/')}: Not Found; {said}"
    assert (response.status_code, response.json()["error"]["message"]) == (404, wanted)


def test_a_path_with_a_slash_at_its_end_is_the_same_without_a_redirect(server: Running) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method in methods:
            if path not in ("/events", "/kv", "/metrics", "/health", "/") and "{" not in path:
                plain, slash = (server.http.request(method, each) for each in (path, f"{path}/"))
                assert slash.status_code == plain.status_code, path
    answer = server.post(f"{CHAT}/", {"messages": HELLO})
    assert answer.status_code == 200 and len(server.generates) == 1


def test_a_parameter_with_a_name_of_megabytes_is_compared_by_its_beginning() -> None:
    name = "x" * (1 << 20)
    tracemalloc.start()
    try:
        assert did_you_mean(name, ["max_tokens", "temperature"]) == ""
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
