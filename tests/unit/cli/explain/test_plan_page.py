"""The page that plays a plan: what it holds, and that a real browser plays it from the keyboard."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

from chromium import opened_chromium
from crossdevice.cli.main import main

PICTURE = Path(__file__).parents[4] / "docs" / "plan_page.png"


def page_of(tmp_path, capsys, *words):
    path = tmp_path / "page.html"
    assert main(["explain", *words, "--html", str(path)]) == 0
    capsys.readouterr()
    return path


def data_of(path):
    return json.loads(re.search(r"const plan = (.*);\n", path.read_text(encoding="utf-8"))[1])


@pytest.fixture
def ring_page(tmp_path, capsys):
    return page_of(tmp_path, capsys, "--ops", "ring", "--topology", "dgx1v", "--bytes", "1MiB")


def test_the_page_needs_no_network(ring_page):
    text = ring_page.read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\"' )]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name, which nobody fetches"
    assert "src=" not in text
    assert "@import" not in text


def test_the_page_prints_times_as_the_text_does(ring_page):
    times = [frame["time"] for frame in data_of(ring_page)["frames"]]
    assert times[0] == "0 us"
    assert all(re.fullmatch(r"[0-9.]{1,5} (us|ms|s)", time) for time in times)


def test_at_first_each_device_holds_its_own_and_at_last_the_result(ring_page):
    frames = data_of(ring_page)["frames"]
    assert frames[0]["held"] == [[f"{1 << device:x}"] * 8 for device in range(8)]
    assert frames[-1]["held"] == [["ff!"] * 8] * 8
    assert frames[1]["text"].startswith("8 copies: 1 to 2 (128 KiB), 2 to 3")


@pytest.mark.parametrize(
    "name", ["one_device", "hierarchical_copy", "halving_doubling", "tree", "direct", "nccl"]
)
def test_every_algorithm_ends_with_the_result_everywhere(tmp_path, capsys, name):
    page = page_of(tmp_path, capsys, "--ops", name, "--topology", "hgx_h100", "--devices", "6")
    last = data_of(page)["frames"][-1]["held"]
    assert {cell for cells in last for cell in cells} == {"3f!"}


@pytest.fixture
def browser(tmp_path):
    with opened_chromium(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--force-color-profile=srgb",
        "--window-size=1000,1250",
        f"--user-data-dir={tmp_path / 'profile'}",
    ) as opened:
        yield opened


def test_a_browser_plays_the_plan_from_the_keyboard_and_says_what_happens(browser, ring_page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    num_frames = len(data_of(ring_page)["frames"])
    browser.get(ring_page.as_uri())
    status = browser.find_element(By.ID, "status")
    body = browser.find_element(By.TAG_NAME, "body")

    def count(kind):
        return len(browser.find_elements(By.CSS_SELECTOR, f"svg .{kind}"))

    assert status.get_attribute("aria-live") == "polite"
    assert status.text.startswith(f"Step 0 of {num_frames - 1}")
    assert (count("part"), count("result"), count("send")) == (64, 0, 0)
    body.send_keys(Keys.ARROW_RIGHT)
    assert "8 copies: 1 to 2" in status.text
    assert count("send") == 8
    assert count("part") == 72
    body.send_keys(Keys.ARROW_LEFT)
    assert "Every device holds its own contribution" in status.text
    body.send_keys(Keys.END)
    assert (count("part"), count("result")) == (0, 512)
    body.send_keys(Keys.HOME, Keys.SPACE)
    play = browser.find_element(By.ID, "play")
    assert play.get_attribute("aria-pressed") == "true"
    WebDriverWait(browser, 5).until(lambda _: "Step 1 of" in status.text)
    body.send_keys(Keys.SPACE)
    assert play.text == "play"
    play.send_keys(Keys.SPACE)
    assert play.text == "pause", "on the button itself the space bar presses it once"
    play.click()
    body.send_keys(Keys.HOME, *[Keys.ARROW_RIGHT] * 9)
    picture = browser.get_screenshot_as_png()
    assert struct.unpack(">II", picture[16:24])[0] >= 900
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    if PICTURE.parent.exists() and not PICTURE.exists():
        PICTURE.write_bytes(picture)
