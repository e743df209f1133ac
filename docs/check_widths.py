"""Measure the site's pages in a browser: `python docs/check_widths.py build/site`.

Each page is laid out as wide as a phone and as a laptop. It, its tables and its code must fit.
It needs Chromium, or Chrome, and says so where there is none.
"""

import functools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (390, 1280)
SLACK = 1  # pixels, of rounding
SECONDS = 1200  # of measuring, at most; tests may run beside it
FRAMES = 4  # pages that are laid out at once
# lays out every page in a frame, at each width, and posts what is too wide; without the pages'
# scripts, which take most of the time, and change no width
SCRIPT = """
const found = [], left = [...PAGES];
const wide = (e) => e.scrollWidth - e.clientWidth;
const measure = (frame, url) => {
  const root = frame.contentDocument;
  root.querySelector("header").remove();  // whose title scripts cut
  root.querySelectorAll("details").forEach((e) => { e.open = true; });
  const parts = [["page", root.documentElement]];
  root.querySelectorAll(".md-typeset pre > code").forEach((e) => parts.push(["code", e]));
  root.querySelectorAll(".md-typeset table:not([class])").forEach((e) => parts.push(["table", e]));
  for (const width of WIDTHS) {
    frame.style.width = `${width}px`;
    for (const [kind, e] of parts)
      if (wide(e) > SLACK) found.push([url, width, kind, wide(e), e.textContent.slice(0, 60)]);
  }
};
const work = async () => {
  const frame = document.createElement("iframe");
  frame.sandbox = "allow-same-origin";
  frame.style = "height: 900px; border: 0";
  document.body.append(frame);
  for (let url; (url = left.shift()); ) {
    await new Promise((done) => { frame.onload = done; frame.src = url; });
    measure(frame, url);
  }
};
Promise.all(Array.from({length: FRAMES}, work)).then(
  () => fetch("/found", {method: "POST", body: JSON.stringify(found.sort())}));
"""


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, the measuring page, and takes what that page found."""

    def __init__(self, *args: Any, page: str, found: Queue[str], **options: Any) -> None:
        self.page, self.found = page, found
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        if self.path != "/":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.page.encode())
        return None

    def do_POST(self) -> None:
        self.found.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing of requests."""


def too_wide(site: Path, browser: str) -> list[tuple[str, int, str, int, str]]:
    """Return pages, widths, kinds of parts, pixels that don't fit, and how the part begins."""
    pages = [f"/{file.relative_to(site)}" for file in sorted(site.rglob("index.html"))]
    known = {"WIDTHS": WIDTHS, "PAGES": pages, "SLACK": SLACK, "FRAMES": FRAMES}
    lets = "".join(f"const {name} = {json.dumps(value)};" for name, value in known.items())
    page, found = f"<body><script>{lets}{SCRIPT}</script></body>", Queue[str]()
    handler = functools.partial(Handler, page=page, found=found, directory=site)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu"]
        command += [f"--user-data-dir={profile}", "--remote-debugging-port=0", address]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return [tuple(each) for each in json.loads(found.get(timeout=SECONDS))]
        except Empty:
            raise TimeoutError(f"{browser} measured nothing in {SECONDS} s") from None
        finally:
            run.kill()
            run.wait()
            server.shutdown()


def main(site: Path) -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"widths of pages are not measured: none of {', '.join(BROWSERS)} is installed")
        return 0
    found = too_wide(site, browser)
    for page, width, kind, pixels, words in found:
        print(f"{page} at {width} px: a {kind} is {pixels} px too wide: {words!r}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
