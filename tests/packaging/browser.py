"""Open every page of the built documentation in headless Chromium: `nox -s docs_browser`.

    python tests/packaging/browser.py HTML_FOLDER [CHROMIUM]

Faults are: an error in the console, a resource that does not load, a broken link within the documentation, a block
wider than its column at 1280 or 390 pixels, and a search without results. The script controls Chromium by the DevTools
protocol, over a pipe.
"""

import functools
import http.server
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

WIDTHS = (1280, 390)  # pixels: desktop, phone
HEIGHT = 900
SEARCHED = "AffinityError"
_LOADED = """new Promise(done => {
  const soon = () => setTimeout(done, 50);
  if (document.readyState === "complete") soon(); else addEventListener("load", soon);
})"""
_LOOK = """(() => {
  const wide = [], column = document.querySelector(".content") || document.body;
  const right = column.getBoundingClientRect().right + 1;
  for (const each of column.querySelectorAll("pre, .highlight, .table-wrapper, svg, img, dt.sig"))
    if (each.getBoundingClientRect().right > right && !each.closest(".table-wrapper table"))
      wide.push(`${each.tagName} ${each.className}: ${each.textContent.replace(/\\s+/g, " ").slice(0, 60)}`);
  if (document.documentElement.scrollWidth > innerWidth + 1)
    wide.push("the page: " + document.documentElement.scrollWidth + " pixels");
  return JSON.stringify({
    wide: wide,
    links: [...document.querySelectorAll("a[href]")].map(each => each.href),
    ids: [...document.querySelectorAll("[id]")].map(each => each.id),
    results: document.querySelectorAll("ul.search li").length,
  });
})()"""
_WAIT_FOR_RESULTS = """new Promise(done => {
  const end = Date.now() + 10000;
  (function look() {
    if (document.querySelector("ul.search li") || Date.now() > end) done(); else setTimeout(look, 50);
  })();
})"""


class Browser:
    """Chromium process with one tab.

    :param program: path or name of Chromium.
    :param profile: empty folder for its user data.
    """

    def __init__(self, program: str, profile: str) -> None:
        here_read, there_write = os.pipe()
        there_read, here_write = os.pipe()

        def place() -> None:  # the protocol's descriptors are 3 and 4
            read, write = os.dup(there_read), os.dup(there_write)
            os.dup2(read, 3)
            os.dup2(write, 4)

        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        command = [program, *flags, "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(command, preexec_fn=place, close_fds=False, stderr=subprocess.DEVNULL)
        os.close(there_read)
        os.close(there_write)
        self._in = os.fdopen(here_read, "rb")
        self._out = os.fdopen(here_write, "wb", buffering=0)
        self._number = 0
        self._session: str | None = None
        self.faults: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and process the events that arrive before its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._event(answer.get("method"), answer.get("params", {}))

    def _next(self) -> dict[str, Any]:
        read = bytearray()
        while not read.endswith(b"\0"):
            byte = self._in.read1(1)
            if not byte:
                raise RuntimeError("the browser ended")
            read += byte
        message: dict[str, Any] = json.loads(read[:-1])
        return message

    def _event(self, method: str | None, what: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.faults.append(f"exception: {what['exceptionDetails'].get('text')}")
            case "Runtime.consoleAPICalled" if what["type"] in ("error", "assert"):
                self.faults.append(f"console: {[each.get('value') for each in what['args']]}")
            case "Log.entryAdded" if what["entry"]["level"] == "error":
                self.faults.append(f"log: {what['entry']['text']} {what['entry'].get('url', '')}")
            case "Network.loadingFailed" if not what.get("canceled"):
                self.faults.append(f"not loaded: {what.get('errorText')}")

    def evaluate(self, script: str) -> Any:
        """Run a script, wait for its promise, and return its value."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        return done["result"].get("value")

    def inspect(self, url: str, width: int, wait: str = _LOADED) -> dict[str, Any]:
        """Open a page, and return its links, IDs, blocks that are too wide, and search results."""
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        self.evaluate(wait)
        found: dict[str, Any] = json.loads(self.evaluate(_LOOK))
        return found


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def check(folder: Path, browser: Browser, address: str) -> Iterator[str]:
    """Yield the faults of the pages in a folder that is served at an address."""
    # The top page only redirects to another one.
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/**/*.html"))
    ids: dict[str, set[str]] = {}
    links: dict[str, set[str]] = {}
    for page, width in itertools.product(pages, WIDTHS):
        browser.faults.clear()
        found = browser.inspect(f"{address}/{page}", width)
        yield from (f"{page} at {width} pixels: {fault}" for fault in browser.faults)
        yield from (f"{page} at {width} pixels: too wide: {wide}" for wide in found["wide"])
        ids[page] = set(found["ids"])
        links[page] = {link.removeprefix(f"{address}/") for link in found["links"] if link.startswith(address)}
    for page, targets in links.items():
        for target in sorted(targets):
            path, fragment = urldefrag(target)
            path = unquote(path.partition("?")[0]) or "index.html"
            if not (folder / path).is_file():
                yield f"{page}: a link to {target}, which does not exist"
            elif fragment and path in ids and unquote(fragment) not in ids[path]:
                yield f"{page}: a link to {target}, whose page has no such ID"
    for searching in (path for path in pages if path.endswith("search.html")):
        found = browser.inspect(f"{address}/{searching}?q={SEARCHED}", WIDTHS[0], _WAIT_FOR_RESULTS)
        if not found["results"]:
            yield f"{searching}: no results for {SEARCHED}"
    print(f"{len(pages)} pages, {sum(map(len, links.values()))} links inside of them")


def main(folder: Path, program: str = "chromium") -> int:
    """Check all pages, and return the exit status."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = Browser(program, profile)
        try:
            faults = list(check(folder, browser, f"http://127.0.0.1:{server.server_port}"))
        finally:
            browser.process.terminate()
            browser.process.wait()
            server.shutdown()
    print(*faults, sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
