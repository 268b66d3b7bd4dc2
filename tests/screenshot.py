"""A page of the dashboard as a person sees it, through headless Chromium (apt-get install chromium), by hand:

python tests/screenshot.py 'http://127.0.0.1:8265/#/jobs/ID' out.png 'Ray Data Overview'

The last words are texts that are clicked first: that section of a job's page is folded. No other host is reached.
"""

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

CLICK = """[...document.querySelectorAll('*')].reverse()
  .find(node => node.textContent.trim().startsWith(TEXT) && node.getClientRects().length)?.click()"""
SIZE = {"width": 1400, "height": 1500, "deviceScaleFactor": 1, "mobile": False}


class Page:
    """Chromium's debugging protocol, as far as it is needed here."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._number = socket, 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json()
            if answer.get("id") == self._number:
                result: dict[str, Any] = answer["result"]
                return result


async def take(url: str, target: Path, clicks: list[str], port: int) -> None:
    async with aiohttp.ClientSession() as session:
        tabs: list[dict[str, Any]] = []
        while not any(tab["type"] == "page" for tab in tabs):
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = json.loads(await answer.text())
            await asyncio.sleep(0.5)
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        async with session.ws_connect(address, max_msg_size=0) as socket:
            page = Page(socket)
            await page.call("Emulation.setDeviceMetricsOverride", **SIZE)
            await page.call("Page.navigate", url=url)
            await asyncio.sleep(12)
            for text in clicks:
                await page.call("Runtime.evaluate", expression=CLICK.replace("TEXT", json.dumps(text)))
                await asyncio.sleep(6)
            shot = await page.call("Page.captureScreenshot", captureBeyondViewport=True)
            target.write_bytes(base64.b64decode(shot["data"]))


def main(url: str, target: Path, clicks: list[str], port: int = 9333) -> None:
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        options += [f"--remote-debugging-port={port}", f"--user-data-dir={profile}", "about:blank"]
        browser = subprocess.Popen(["chromium", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            asyncio.run(asyncio.wait_for(take(url, target, clicks, port), 120))
        finally:
            browser.terminate()
            browser.wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
