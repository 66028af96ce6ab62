"""Chromium and a TensorBoard with two runs: a calm one, and one with a spike."""

import contextlib
import http.client
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch import free_port
from tests.tools.written_runs import write_run

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    # Chromium asks its makers for updates and models otherwise; as root it has no sandbox.
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
START_SECONDS = 60
SPIKE = 60


def find_chromium() -> str:
    """The path of the program; Debian's package is installed where there is none."""
    if (path := next(filter(None, map(shutil.which, PROGRAMS)), None)) is None:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        path = shutil.which("chromium")
    assert path is not None
    return path


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pages") / "runs"
    return [write_run(folder / "calm"), write_run(folder / "spiky", spike=SPIKE, lr=4e-3)]


@pytest.fixture(scope="session")
def tensorboard(written: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of TensorBoard as a user starts it."""
    port, log = free_port(), tmp_path_factory.mktemp("tensorboard") / "log"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(written[0].parent), "--port", str(port)]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(port):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def answers(port: int) -> bool:
    """Whether the runs are loaded already."""
    with contextlib.suppress(OSError):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/data/runs")
        return b"spiky" in connection.getresponse().read()
    return False


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    # Debian's Chromium never says that fonts are ready when a screenshot is taken.
    os.environ["PW_TEST_SCREENSHOT_NO_FONTS_READY"] = "1"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=find_chromium(), args=QUIET)
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty page; a request to anywhere but this machine fails the test."""
    opened = browser.new_page(viewport={"width": 1500, "height": 1300})
    opened.set_default_timeout(60_000)
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    yield opened
    opened.close()
    assert [url for url in asked if not url.startswith(("http://127.0.0.1", "file:", "data:", "blob:"))] == []
