"""The picture of the live page: `python docs/tools/page.py` asks a server on the CPU, and writes docs/figures/page.png."""

import contextlib
import shutil
import sys
import tempfile
import threading
import time
from io import BytesIO
from pathlib import Path
from typing import Final

import httpx
from PIL import Image
from playwright.sync_api import expect, sync_playwright

ROOT: Final = Path(__file__).parents[2]
SYSTEM: Final = "You are a careful assistant, and answer in short sentences. " * 30
"""Some pages that most requests share."""
OPTIONS: Final = ("--kv-budget", "512MiB", "--kv-host-budget", "256MiB", "--max-num-seqs", "16")


def ask(url: str, number: int) -> None:
    """A long answer, behind the shared prompt or a shorter one."""
    prompt = SYSTEM if number < 6 else "Answer briefly. " * (10 * number)
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": f"Tell story {number}. " * (1 + 6 * number)}]
    body = {"messages": messages, "max_tokens": 250 + 60 * number, "temperature": 0, "ignore_eos": True}
    with contextlib.suppress(httpx.HTTPError):  # the server ends first
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)


def main() -> None:
    """Nine requests and a chat, some seconds after they began."""
    from tests.end_to_end.small import server_process

    with (
        tempfile.TemporaryDirectory() as folder,
        server_process(Path(folder) / "log", "smollm2-135m", *OPTIONS) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 733}, color_scheme="light", reduced_motion="reduce")
        page.goto(server.url)
        expect(page.locator("#status")).to_have_text("serving", timeout=15_000)
        for number in range(9):
            threading.Thread(target=ask, args=(server.url, number), daemon=True).start()
            time.sleep(0.3 if number else 1.5)  # the first computes what the others share
        page.locator("#options > summary").click()
        page.fill("#system", SYSTEM)
        page.fill("#temperature", "0")
        page.locator("#options > summary").click()
        page.fill("#question", "What is the capital of France?")
        page.press("#question", "Enter")
        expect(page.get_by_text("prompt tokens known")).to_be_visible(timeout=60_000)
        picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
        browser.close()
    picture.quantize(128, dither=Image.Dither.NONE).save(ROOT / "docs" / "figures" / "page.png", optimize=True)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / source) for source in (".", "kernels", "server")]
    main()
