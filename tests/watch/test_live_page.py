"""The page in a real browser: on a desktop and a phone, in light and dark, of long, empty and broken runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import DESKTOP, PHONE, Browser, found, opened
from made_runs import HOSTILE, broken_run, episode, made_run, records, write_lines
from serving import Site, serving

from async_rlhf.watch.runs import Runs

pytestmark = pytest.mark.skipif(found() is None, reason="chromium and chromedriver are not installed")

SECTIONS = ["tiles", "ages", "idle", "ledger", "actors", "timeline", "completions", "events"]


@pytest.fixture(scope="module")
def screen() -> Iterator[Browser]:
    with opened() as screen:
        yield screen


@pytest.fixture
def browser(screen: Browser) -> Iterator[Browser]:
    yield screen
    screen.leave()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    made_run(directory / "long", 20_000)
    made_run(directory / "short", 60, seed=1)
    made_run(directory / "empty", 0)
    broken_run(directory / "broken")
    return directory


@pytest.fixture(scope="module")
def site(made: Path) -> Iterator[Site]:
    with serving(Runs(made)) as site:
        yield site


def pixels(browser: Browser) -> int:
    """Canvases on which something is drawn."""
    drawn = "[...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].some((v) => v)"
    return int(browser.ask(f"[...document.querySelectorAll('canvas')].filter((c) => c.width && c.height && {drawn}).length"))


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_section_is_drawn_and_fits_the_screen(browser: Browser, site: Site, size: tuple[int, int], colours: str) -> None:
    browser.open(f"{site.url}#long", size, colours)
    for section in SECTIONS:
        assert browser.ask(f"document.getElementById('{section}').getBoundingClientRect().height > 20"), section
    assert pixels(browser) > 11 and browser.ask("document.querySelectorAll('#ages rect').length") > 100
    assert "Started again: actor 3, scorer 1." in browser.text("#actors")
    assert browser.ask("[...document.querySelectorAll('#ledger .bar i')].filter((filled) => filled.clientWidth).length") == 7
    assert "Spool: 80,000 rows have come, 2 lines were set aside." in browser.text("#idle")
    assert browser.ask("document.documentElement.scrollWidth") <= size[0]
    light = browser.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every((v) => v > 128)")
    assert light == (colours == "light")
    assert browser.complaints() == []


def parts_of(browser: Browser, place: int) -> list[list[str]]:
    """Of the text of a completion: title and text of each part, and its background."""
    shown = f"[...document.querySelectorAll('.rollout')[{place}].querySelector('.text').children]"
    return browser.ask(f"{shown}.map((s) => [s.title, s.textContent, getComputedStyle(s).backgroundColor])")  # type: ignore[no-any-return]


def test_tokens_are_coloured_by_the_version_that_sampled_them_and_those_of_an_environment_are_not(
    browser: Browser, site: Site, tmp_path: Path
) -> None:
    browser.run("document.body.dataset.ready = ''")
    browser.open(f"{site.url}#short")
    # There is no checkpoint, so the tokenizer is that of the model it began with.
    (*one, first), (*other, second) = parts_of(browser, 1)
    assert [one, other] == [["version 58", "lee"], ["version 59", "ts"]] and first != second
    with serving(Runs(made_run(tmp_path / "tools", 60, sampled=episode))) as tools:
        browser.open(tools.url)
        parts = parts_of(browser, 0)
        given = ["read", "408\n", "rgba(0, 0, 0, 0)"]
        assert [part[:2] for part in parts] == [["version 58", "<34 * 12>"], given[:2], ["version 59", "408"]]
        assert parts[1] == given and len({background for *_, background in parts}) == 3
        assert "calculator 1" in browser.text(".rollout .pale") and "v58: 10, read: 4, v59: 4" in browser.text(".rollout .pale")
        assert browser.complaints() == []
    with serving(Runs(made_run(tmp_path / "agents", 60, sampled=two_rows))) as agents:
        browser.open(agents.url)
        assert [text for _, text, _ in parts_of(browser, 0)] == ["row 1", "<34 * 12>", "row 2", "408\n", "408"]
        assert browser.complaints() == []


def two_rows(step: int) -> dict[str, Any]:
    sample = episode(step)
    return {**sample, "rollouts": [{**rollout, "restarts": [1]} for rollout in sample["rollouts"]]}


def test_an_empty_and_a_broken_run_say_so_and_their_texts_stay_texts(browser: Browser, site: Site) -> None:
    browser.open(f"{site.url}#empty")
    assert "No step yet: stopped." in browser.text("#tiles") and "none yet" in browser.text("#completions")
    browser.open(f"{site.url}#broken")
    assert "metrics.jsonl: damaged lines that are left out: 1" in browser.text("#problems")
    assert "no ledger.json" in browser.text("#ledger")
    assert browser.ask("view.state.changed") == [] and "upright" not in browser.text("#events")
    assert HOSTILE in browser.text("#completions") and HOSTILE in browser.text("#events")
    assert browser.ask("document.title") == "broken · async-rlhf"
    assert browser.ask("document.querySelectorAll('img').length") == 0 and browser.complaints() == []
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
    browser.wait("document.querySelector('img').complete")
    assert browser.ask("document.title") == "broken · async-rlhf", "even markup that came in would not run"
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())


def test_a_new_step_is_shown_without_asking_for_the_page_again(browser: Browser, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 10)
    with serving(Runs(run)) as site:
        browser.open(site.url)
        assert browser.text("#tiles b") == "10"
        browser.run("window.same = true")
        write_lines(run / "metrics.jsonl", records(11, begin=11))
        browser.wait("document.querySelector('#tiles b').textContent === '11' && window.same")


def test_runs_are_compared_one_is_opened_and_any_metric_of_it_is_drawn(browser: Browser, site: Site) -> None:
    browser.open(site.url)
    names = "[...document.querySelectorAll('#runs a')].map((a) => a.textContent).sort()"
    assert browser.ask(names) == ["broken", "empty", "long", "short"] and pixels(browser) > 10
    browser.open(site.url, (500, 900))
    assert browser.ask("[...document.querySelectorAll('#runs .scroll')].every((e) => e.scrollWidth <= e.clientWidth)")
    before = browser.ask("document.querySelectorAll('#compared .legend')[1].children.length")
    browser.run("document.querySelector('[aria-label=\"compare short\"]').click()")
    browser.wait(f"document.querySelectorAll('#compared .legend')[1].children.length === {before - 1}")
    browser.run("[...document.querySelectorAll('#runs a')].find((a) => a.textContent === 'short').click()")
    browser.wait("document.getElementById('title').textContent === 'short' && document.getElementById('tiles')")
    browser.wait("document.getElementById('events').textContent.includes('dotted upright line')")
    assert browser.ask("view.state.changed") == [30]
    assert browser.ask("document.querySelector('#other .plot canvas')") is None
    browser.run("const s = document.querySelector('#other select'); s.value = 'learning_rate'; s.onchange()")
    browser.wait("document.querySelector('#other .plot canvas') !== null")
    assert browser.text("#other .legend") == "learning_rate 2.0e-4" and browser.complaints() == []


def test_a_browser_gives_the_token_as_a_password(browser: Browser, made: Path) -> None:
    token = "0123456789abcdef-secret"
    with serving(Runs(made / "short"), token) as site:
        browser.open(f"http://me:{token}@127.0.0.1:{site.port}/")
        assert browser.text("#tiles b") == "60"
    browser.complaints()
