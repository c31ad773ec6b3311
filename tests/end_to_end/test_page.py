"""The page of a real server, as Chromium shows it: a chat, shared memory on the map, no complaint of the console or of axe.

Maps and calls of tools that a small model would not make are those of a fake engine.
"""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.end_to_end.small import ADMIN, ONE, TWO, ServerProcess, server_process, small_server, until
from tests.server.fake_engine import ready_with
from tests.server.support import CHAT, Running, running_server
from tests.server.test_routes import a_map, live, run
from tests.server.test_tools import HERMES, IN_TAGS
from tests.server.tiny import byte_tokenizer, token_ids
from vmmkv.memory.states import RunState, SlotMap
from vmmkv_server.models import resolve
from vmmkv_server.protocol import Generate

SYSTEM = "You are a careful assistant, and answer in short sentences. " * 30
"""Some 330 tokens: three full pages of 91 and more."""
PHONE = 390

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    resolve("smollm2-135m")
    with server_process(tmp_path_factory.mktemp("page") / "log", "smollm2-135m", "--kv-host-budget", "1GiB") as one:
        yield one


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("there is no chromium here: tests/get-package.sh installs it, as root on Debian")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str, *, width: int = 1280, scheme: str = "light") -> Iterator[Page]:
    """The page in a window of its own, without a word on its console."""
    said: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = context.new_page()
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(url)
    expect(page.locator("#status")).to_have_text("serving", timeout=15_000)
    yield page
    context.close()
    assert said == []


def ask(page: Page, question: str, max_tokens: int) -> None:
    page.locator("#options > summary").click()
    page.fill("#system", SYSTEM)
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#temperature", "0")
    page.locator("#options > summary").click()
    page.fill("#question", question)
    page.press("#question", "Enter")
    expect(page.locator(".said.assistant")).to_have_text(re.compile(r"\w"), timeout=20_000)


def test_two_chats_that_share_a_prefix_show_it_on_the_map(served: ServerProcess, browser: Browser) -> None:
    with opened(browser, served.url) as first, opened(browser, served.url) as second:
        ask(first, "Tell a very long story of the sea.", 3000)
        ask(second, "Tell a very long story of the mountains.", 3000)
        running: list[dict[str, Any]] = []

        def both_run() -> bool:
            slots = httpx.get(f"{served.url}/kv").json()["slots"]
            running[:] = [slot for slot in slots if slot["state"] == "live"]
            return len(running) == 2

        until(both_run, within_s=5)
        for slot in running:
            group, page, num_pages, state, sharers, prefix = slot["runs"][0]
            assert (group, page, state, sharers) == (0, 0, "live", 2) and num_pages >= 3 and prefix is not None
        # The page says the same, reached by the keyboard alone.
        first.locator("#map").focus()
        first.keyboard.press("Home")
        first.keyboard.press("PageDown")
        expect(first.locator("#slot")).to_contain_text("pages of prefix 1, in 2 slots")
        assert "in 2 slots" in str(first.locator("#map").get_attribute("aria-valuetext"))
        first.locator("#slots-box > summary").click()
        expect(first.locator("#slots tr")).to_have_count(2)
        expect(first.locator("#flights td.id")).to_have_count(2)
        until(lambda: has_colour(first, "--p0"))  # a cell has the prefix's colour
        for page in (first, second):
            page.click("#send")  # Stop
            expect(page.locator("#send")).to_have_text("Send")
            expect(page.locator("#chat .meta")).to_contain_text("stopped")
        # A chat that comes to its end tells what was known of its prompt.
        second.click("#new")
        ask(second, "And a short one.", 6)
        meta = second.locator("#chat .meta")
        expect(meta).to_have_text(re.compile(r"^\d+ tokens? · first after"), timeout=20_000)
        known = re.search(r"(\d+) of (\d+) prompt tokens known", meta.inner_text())
        assert known is not None and int(known[1]) >= 3 * 91


def test_each_tier_has_a_bar_beside_what_it_holds_and_gave(served: ServerProcess, browser: Browser) -> None:
    with opened(browser, served.url) as page:
        ask(page, "What is kept on the host?", 4)
        tier = page.locator("#tiers li")
        expect(tier).to_have_text(re.compile(r"^host[1-9].* MiB of 1 GiB.* loaded, .* hit$"), timeout=20_000)
        # Found and measured at once: each update of the page makes new bars.
        bar = "document.querySelector('#tiers .bar')"
        widths = page.evaluate(f"[{bar}.firstChild.getBoundingClientRect().width, {bar}.clientWidth]")
        held = httpx.get(f"{served.url}/kv").json()["memory"]["tiers"]["host"]["held"]
        assert widths[0] / widths[1] == pytest.approx(held / (1 << 30), abs=0.01) and held >= 3 << 21


@pytest.mark.parametrize("width", [PHONE, 700, 1280])
def test_slots_are_numbered_at_equal_distances(served: ServerProcess, browser: Browser, width: int) -> None:
    with opened(browser, served.url, width=width + 1) as page:
        page.evaluate(
            """() => {
                const pen = CanvasRenderingContext2D.prototype, write = pen.fillText;
                window.written = [];
                pen.fillText = function (text, x, y) { window.written.push([text, x, y]); write.call(this, text, x, y); };
            }"""
        )
        page.set_viewport_size({"width": width, "height": 900})  # it draws again
        while not page.evaluate("window.written.length"):  # to wait for a function, the page's policy forbids
            page.wait_for_timeout(50)
        numbers: dict[float, dict[int, float]] = {}
        for text, x, y in page.evaluate("window.written"):
            if text.isdigit():
                numbers.setdefault(y, {})[int(text)] = x
        for band in numbers.values():
            (every,) = set(np.diff(list(band)))
            assert every in (1, 2, 4, 8, 16, 32, 64)
            (distance,) = set(np.diff(list(band.values())))
            assert distance >= 34
        assert min(map(min, numbers.values())) == 1


WATCHED = """() => {
    const pen = CanvasRenderingContext2D.prototype, write = pen.fillText, fill = pen.fillRect;
    window.written = []; window.filled = [];
    pen.fillText = function (text, x, y) {
        const part = { left: 0, center: 0.5, right: 1 }[this.textAlign], wide = this.measureText(text).width;
        window.written.push([text, x - part * wide, x + (1 - part) * wide]);
        write.call(this, text, x, y);
    };
    pen.fillRect = function (x, y, wide, high) {
        window.filled.push([this.fillStyle, high]);
        fill.call(this, x, y, wide, high);
    };
}"""


@pytest.mark.parametrize("width", [PHONE, 1280])
def test_no_label_is_cut_and_one_tall_slot_leaves_the_others_their_height(browser: Browser, width: int) -> None:
    few = [live(slot, run(0, 4, 1, slot)) for slot in range(1, 9)]
    tall = live(9, run(0, 2000, 1, 9, RunState.PARKED))
    with running_server(sockets=True) as server, opened(browser, server.url, width=width) as page:
        page.evaluate(WATCHED)

        def draw(wanted: set[str], *slots: SlotMap) -> list[list[Any]]:
            """The rectangles of a map, drawn until it has one of these labels; none of all is cut."""
            page.evaluate("window.written = [], window.filled = []")
            server.engine.memory_map = msgspec.structs.replace(a_map(*slots), num_slots=1024)
            until(lambda: bool(wanted & {text for text, _, _ in page.evaluate("window.written")} or page.wait_for_timeout(50)))
            right = page.evaluate("document.querySelector('#map canvas').clientWidth")
            cut = [each for each in page.evaluate("window.written") if each[1] < 0 or each[2] > right]
            assert not cut
            filled: list[list[Any]] = page.evaluate("window.filled")
            return filled

        draw({"1000 MiB"}, tall)  # a quarter of it
        own = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--own').trim()")
        heights = [high for colour, high in draw({"32 MiB"}, *few, tall) if colour == own]
        assert len(heights) >= len(few) and min(heights) > 40, "of 220"
        draw(set(map(str, range(1000, 1025))), *few, live(1024, run(0, 4, 1, 10)))


def has_colour(page: Page, name: str) -> bool:
    """Is a pixel of the map exactly of a colour of the style sheet?"""
    found: bool = page.evaluate(
        """name => {
            const canvas = document.querySelector('#map canvas'), pen = canvas.getContext('2d');
            const wanted = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
            const [r, g, b] = [1, 3, 5].map(at => parseInt(wanted.slice(at, at + 2), 16));
            const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
            for (let at = 0; at < data.length; at += 4)
                if (data[at] === r && data[at + 1] === g && data[at + 2] === b) return true;
            return false;
        }""",
        name,
    )
    return found


def assert_accessible(page: Page, width: int) -> None:
    """Axe finds nothing serious, and nothing is wider than the window."""
    results = Axe().run(page).response
    assert len(results["passes"]) > 20
    serious = [each for each in results["violations"] if each["impact"] in ("serious", "critical")]
    assert not serious, [(each["id"], [node["html"] for node in each["nodes"]]) for each in serious]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "something is wider than the window"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (PHONE, "light"), (PHONE, "dark")])
def test_it_is_legible_and_axe_finds_nothing_serious(
    served: ServerProcess, browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    with opened(browser, served.url, width=width, scheme=scheme) as page:
        for box in ("#slots-box", "#options", "#key-box"):
            page.locator(f"{box} > summary").click()
        assert_accessible(page, width)
        page.screenshot(path=tmp_path / "page.png")
        picture = np.asarray(Image.open(tmp_path / "page.png").convert("L"))
        assert (np.median(picture) > 200) if scheme == "light" else (np.median(picture) < 60)


def test_every_control_can_be_reached_by_the_keyboard_and_shows_it(served: ServerProcess, browser: Browser) -> None:
    with opened(browser, served.url) as page:
        reached = []
        for _ in range(14):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.closest('[id]')?.id"))
            if reached[-1] in ("map", "send"):
                outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outline != "none", reached[-1]
        for name in ("key-box", "map", "slots-box", "new", "log", "options", "tools-box", "question", "send"):
            assert name in reached, reached


@pytest.fixture
def calling(tmp_path: Path) -> Iterator[Running]:
    """A server of a fake engine whose model writes calls in Hermes's form."""
    byte_tokenizer().save_pretrained(tmp_path)
    ready = ready_with(model_tokens=4096, pool_tokens=4096)
    ready = msgspec.structs.replace(ready, model=str(tmp_path), end_tokens=[int(byte_tokenizer().eos_token_id)])
    with running_server(ready=ready, sockets=True) as server:
        server.shows(HERMES)
        yield server


@contextmanager
def answered_up_to(server: Running, text: str, end: str = "") -> Iterator[None]:
    """The engine answers with this text, and waits behind its part `end` until the block's end."""
    ids, num_before = token_ids(text), len(token_ids(text[: text.find(end) + len(end)]))
    go_on, num_asked = threading.Event(), 0

    def answer(_: Generate) -> list[int]:
        nonlocal num_asked
        num_asked += 1
        assert num_asked <= num_before or go_on.wait(90)
        return ids

    server.engine.answer = answer
    try:
        yield
    finally:
        go_on.set()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (PHONE, "dark")])
def test_a_call_is_shown_as_it_comes_and_a_person_plays_its_function(
    calling: Running, browser: Browser, width: int, scheme: str
) -> None:
    with opened(browser, calling.url, width=width, scheme=scheme) as page:
        asked: list[Any] = []
        page.on("request", lambda request: asked.append(request.post_data_json) if request.url.endswith(CHAT) else None)
        calls, said = page.locator(".call"), page.locator(".said.assistant")
        results = page.get_by_label("Result of get_weather")
        page.locator("#tools-box > summary").click()
        page.click("#tools-example")
        with answered_up_to(calling, f"Let me see.\n{IN_TAGS}\n{IN_TAGS.replace('Brest', 'Lyon')}", '"Br'):
            page.fill("#question", "How is the weather?")
            page.press("#question", "Enter")
            expect(calls.locator("pre")).to_contain_text('"city": "B', timeout=60_000)  # a grammar's compiler starts first
            assert calls.locator("pre").inner_text() in ('{\n  "city": "B', '{\n  "city": "Br')
            expect(results).to_be_disabled()
        expect(calls.locator("pre")).to_have_text(['{ "city": "Brest" }', '{ "city": "Lyon" }'])
        expect(calls.locator("h3")).to_have_text(["get_weather"] * 2)
        expect(said).to_have_text("Let me see.")
        assert_accessible(page, width)
        # An answer that is stopped before its begin leaves the results as they are.
        results.nth(0).fill("Rain")
        results.nth(1).fill('{"sky": "blue"}')
        with answered_up_to(calling, "It rains."):
            page.get_by_text("Send results").click()
            expect(results.nth(1)).to_be_disabled()
            page.click("#send")
            expect(results.nth(1)).to_be_enabled()
        calling.answers(f"It rains.\n{IN_TAGS}")
        page.get_by_text("Send results").click()
        expect(said).to_have_text(["Let me see.", "", "It rains."])
        expect(results.nth(1)).to_be_disabled()
        # A question sends the results before itself.
        expect(results.nth(2)).to_be_enabled()
        calling.answers("So be it.")
        page.fill("#question", "And then?")
        page.press("#question", "Enter")
        expect(said.last).to_have_text("So be it.")
        first, stopped, second, third = asked
        (tool,) = first["tools"]
        assert tool["function"]["name"] == "get_weather" and all(each["tools"] == [tool] for each in asked)
        question, turn, *played = second["messages"]
        assert stopped["messages"] == second["messages"] and first["messages"] == [question]
        assert [json.loads(call["function"]["arguments"])["city"] for call in turn["tool_calls"]] == ["Brest", "Lyon"]
        assert played == [
            {"role": "tool", "tool_call_id": call["id"], "content": content}
            for call, content in zip(turn["tool_calls"], ("Rain", '{"sky": "blue"}'), strict=True)
        ]
        *before, turn, result, question = third["messages"]
        assert before == second["messages"] and question == {"role": "user", "content": "And then?"}
        assert result == {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": ""}


def test_tools_that_are_no_list_are_refused_beside_their_field(calling: Running, browser: Browser) -> None:
    with opened(browser, calling.url) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if request.url.endswith(CHAT) else None)
        page.fill("#question", "How is the weather?")
        for broken, said in (("[{", "JSON"), ("{}", "A list of tools is wanted")):
            page.locator("#tools-box > summary").click()
            page.fill("#tools", broken)
            page.locator("#tools-box > summary").click()  # it opens again
            page.click("#send")
            expect(page.locator("#tools-wrong")).to_contain_text(said)
            expect(page.locator("#tools")).to_be_focused()
            assert page.input_value("#question") == "How is the weather?"
            page.locator("#tools-box > summary").click()
        page.locator("#tools-box > summary").click()
        page.fill("#tools", "")
        page.click("#send")
        expect(page.locator("#chat .meta")).to_be_visible()
        assert page.locator("#tools-wrong").inner_text() == "" and len(asked) == 1


def test_a_key_goes_with_each_question_and_is_kept_nowhere(served: ServerProcess, browser: Browser) -> None:
    with opened(browser, served.url) as page:
        page.locator("#key-box > summary").click()
        keys: list[str | None] = []
        page.on("request", lambda request: keys.append(request.headers.get("authorization")))
        page.fill("#key", "sk-of-mine")
        page.press("#key", "Tab")
        page.fill("#question", "Hi")
        page.locator("#options > summary").click()
        page.fill("#max-tokens", "4")
        page.click("#send")
        expect(page.locator("#chat .meta")).to_be_visible(timeout=20_000)
        assert keys and set(keys) == {"Bearer sk-of-mine"}
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.href]") == [
            0,
            0,
            "",
            f"{served.url}/",
        ]


def test_the_page_asks_for_the_key_itself_and_one_of_several_may_chat(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    with small_server(tmp_path / "small", "--api-key", ONE, "--api-key", TWO, "--admin-key", ADMIN) as server:
        # What a person types where a browser asks for a password: before the page that would be a window, again and again.
        context = browser.new_context(http_credentials={"username": "me", "password": ONE})
        page = context.new_page()
        answer = page.goto(f"{server.url}/v1/models")
        assert answer is not None and answer.status == 200
        page.goto(server.url)
        expect(page.locator("#status")).to_have_text("this server wants an API key", timeout=15_000)
        page.fill("#key", TWO)
        page.press("#key", "Tab")
        expect(page.locator("#status")).to_contain_text("chat alone", timeout=15_000)
        page.fill("#question", "Hi")
        page.locator("#options > summary").click()
        page.fill("#max-tokens", "4")
        page.click("#send")
        expect(page.locator("#chat .meta")).to_be_visible(timeout=20_000)
        page.fill("#key", ADMIN)
        page.press("#key", "Tab")
        expect(page.locator("#status")).to_have_text("serving", timeout=15_000)
        context.close()
