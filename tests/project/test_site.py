"""The site of `make docs` in a real browser: all pages are there, links hold, the search finds, and no network is asked."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import amprewrite

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))), None)

pytest.importorskip("mkdocs", reason="the site needs the docs extra: mkdocs is not installed")
pytest.importorskip("mkdocstrings", reason="the site needs the docs extra: mkdocstrings is not installed")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site with a gallery of one plan. Building is strict: a link that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "gallery").mkdir()
    (folder / "gallery" / "index.html").write_text("<h1>twelve plans</h1>")
    command = [sys.executable, str(ROOT / "examples" / "site.py"), "--out", str(folder / "out"), "--gallery", str(folder / "gallery")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder / "out"


def test_every_name_and_page_is_there_and_asks_no_network(site: Path) -> None:
    reference = (site / "api.html").read_text()
    assert [name for name in amprewrite.__all__ if not re.search(rf'id="[\w.]*\.{name}"', reference)] == []
    assert (site / "gallery" / "index.html").read_text() == "<h1>twelve plans</h1>"
    for guide in (ROOT / "examples" / "guides").glob("*.md"):
        assert (site / "examples" / "guides" / f"{guide.stem}.html").is_file()
    for page in site.rglob("*.html"):
        assert not re.search(r"<(?:script|link rel=.stylesheet|img)[^>]*(?:src|href)=.http", page.read_text()), page


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The site, served to this machine alone."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Print nothing: requests are no results of a test."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: no Chromium is installed (Debian: apt-get install chromium)")
def test_a_browser_searches_and_follows_links(address: str) -> None:
    sync = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with sync.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/index.html")
        assert "amprewrite" in page.title()
        page.click("text=API reference")
        page.wait_for_selector("h3:has-text('rewrite')")
        page.click("input[name=query]")
        page.locator("input[name=query]").press_sequentially("GradScaler")
        page.wait_for_selector(".md-search-result__item a")
        assert "from_autocast" in page.inner_html(".md-search-result__list")
        page.goto(f"{address}/index.html")
        page.click("article a:has-text('troubleshooting')")
        assert page.url.endswith("troubleshooting.html")
        browser.close()
    assert asked and all(url.startswith((address, "data:", "blob:")) for url in asked)
