"""A notebook opens in JupyterLab, runs there from top to bottom, and shows."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from common import ranks

sync_api = pytest.importorskip("playwright.sync_api")
pytest.importorskip("jupyterlab")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "ch06_single_gpu_perf" / "ch06_single_gpu_perf.ipynb"
LONGEST_S = 400  # for all cells; a free machine takes less than a minute
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = [  # no sandbox: root in a container has none; the rest: no network
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
TOKEN = "of-this-test"
# how wide ten letters are in an element
WIDTHS = """element => ["i", "M"].map(letter => {
    const span = document.createElement("span");
    span.textContent = letter.repeat(10);
    element.append(span);
    const width = span.getBoundingClientRect().width;
    span.remove();
    return width;
})"""


@pytest.fixture(scope="module")
def chromium():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("needs Chromium")
    return found


@pytest.fixture
def lab(tmp_path):
    """A JupyterLab on loopback, in a folder with a copy of the notebook."""
    folder = tmp_path / "book"
    folder.mkdir()
    shutil.copyfile(NOTEBOOK, folder / NOTEBOOK.name)
    # nothing of the user's, and nothing left with the user
    own = {
        f"JUPYTER_{kind}_DIR": str(tmp_path / kind.lower())
        for kind in ("CONFIG", "DATA", "RUNTIME")
    }
    own |= {
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "BENCH_SMOKE": "1",
    }
    port = ranks.free_port()
    log = tmp_path / "log.txt"
    words = [sys.executable, "-m", "jupyterlab", "--no-browser"]
    words += ["--allow-root", f"--ServerApp.root_dir={folder}"]
    words += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    words += ["--ServerApp.port_retries=0"]
    words += [f"--IdentityProvider.token={TOKEN}"]
    words += [f"--LabApp.app_settings_dir={ROOT / 'chapters' / 'lab'}"]
    with open(log, "wb") as file:
        server = subprocess.Popen(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | own,
            start_new_session=os.name != "nt",
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/api/status?token={TOKEN}", server, log)
        yield url, folder / NOTEBOOK.name
    finally:
        if os.name == "nt":
            server.kill()
        else:  # the kernels, too
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def wait_for(url, server, log):
    for _ in range(600):
        assert server.poll() is None, log.read_text(errors="replace")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise AssertionError(log.read_text(errors="replace"))


@pytest.fixture
def page(chromium):
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=QUIET
        )
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(60_000)
        yield page
        browser.close()


def code_cells(path):
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except ValueError:  # half written
        return []
    return [c for c in cells if c["cell_type"] == "code" and c["source"]]


def emptied(path):
    """Take the outputs out, so that what is there later is new."""
    book = json.loads(path.read_text(encoding="utf-8"))
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    path.write_text(json.dumps(book), encoding="utf-8")


def test_all_cells_run_in_a_browser(page, lab):
    url, path = lab
    emptied(path)
    page.goto(f"{url}/lab/tree/{path.name}?token={TOKEN}")
    # the status bar's word for the kernel; before it is there, a dialog
    # would ask for one
    idle = page.get_by_text(re.compile(r"\| Idle$"))
    busy = page.get_by_text(re.compile(r"\| Busy$"))
    idle.wait_for()
    for _ in range(5):  # a menu that is still being built loses the click
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        try:
            busy.wait_for(timeout=5000)
            break
        except sync_api.TimeoutError:
            page.keyboard.press("Escape")
    # cells off the screen may be absent from the page: read the saved file
    cells = []
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until:
        idle.wait_for(timeout=1000 * max(1, until - time.monotonic()))
        page.keyboard.press("Control+s")
        page.wait_for_timeout(2000)
        cells = code_cells(path) or cells
        if cells and all(cell["execution_count"] for cell in cells):
            break
    assert [cell["execution_count"] for cell in cells] == [
        *range(1, len(cells) + 1)
    ]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error"]
    text = "".join("".join(o.get("text", "")) for o in outputs)
    assert "steady state, per sample" in text and "smoke run" in text
    data = [o["data"] for o in outputs if "data" in o]
    shown = "".join("".join(d.get("text/markdown", "")) for d in data)
    assert "def waiting_share(batches, step, mark, seconds," in shown
    assert any("image/png" in d for d in data)
    # and what a reader sees: the heading, and the source in a fixed width
    page.locator(".jp-WindowedPanel-outer").evaluate("e => e.scrollTop = 0")
    page.get_by_role("heading", name="6.1.1 Parallel prep").wait_for()
    source = page.locator(".jp-OutputArea pre", has_text="def waiting_share(")
    narrow, wide = source.first.evaluate(WIDTHS)
    assert 0 < narrow == wide


def test_another_token_is_turned_away(lab):
    url, _ = lab
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{url}/api/contents?token=wrong", timeout=10)
    assert error.value.code == 403
