"""A page: what it shows, what it refuses to become, and that it asks nothing of the outside."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

from matplotlib.figure import Figure

from async_rlhf.experiments.page import plain, svg, table, to_html

HOSTILE = "<script>alert(1)</script> [go](http://x.org) ![see](http://x.org/a.png) <http://x.org> | `code` **bold** # head"


class Tags(HTMLParser):
    """Every tag with its attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.text = list[tuple[str, dict[str, Any]]](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def loads(page: str) -> list[str]:
    """What a browser would fetch or run."""
    found = []
    for tag, attrs in Tags(page).tags:
        runs = tag in ("script", "iframe", "object", "link", "img") or any(name.startswith("on") for name in attrs)
        fetched = [attrs[name] for name in ("src", "href", "xlink:href", "data") if not attrs.get(name, "#").startswith("#")]
        found += [tag] * runs + fetched
    return found + re.findall(r"@import|url\((?!#)[^)]*\)", page)


def drawn(text: str = "reward") -> str:
    figure = Figure()
    axes = figure.subplots()
    axes.plot([1, 2], [3, 4], "o", label=text)
    axes.legend()
    return svg(figure, "one")


def test_tables_lists_code_and_pictures_come_out_and_the_page_is_titled() -> None:
    page = to_html(
        "# What <is> it?\n\n    async-rlhf sweep s.toml\n\n"
        + table([["a", "b"], ["x | y", "1\n2"]])
        + "\n\n- **FAILS**: one\n- two\n\n![The picture](p.png)\n",
        {"p.png": drawn()},
    )
    found = Tags(page)
    names = [tag for tag, _ in found.tags]
    assert names.count("th") == 2 and names.count("td") == 2 and names.count("li") == 2 and "strong" in names
    assert "x | y" in found.text and "1 2" in found.text and "async-rlhf sweep s.toml" in found.text
    assert "<title>What &lt;is&gt; it?</title>" in page
    (picture,) = [attrs for tag, attrs in found.tags if tag == "svg"]
    assert picture["aria-label"] == "The picture" and picture["role"] == "img"
    assert ">reward</text>" in page, "text of a picture stays text"
    assert loads(page) == []


def test_foreign_text_stays_text_wherever_it_stands() -> None:
    page = to_html(
        f"# {HOSTILE}\n\n{HOSTILE}\n\n- {plain(HOSTILE)}\n\n{table([['a', 'b'], [HOSTILE, '2']])}\n", {"p.png": drawn(HOSTILE)}
    )
    assert loads(page) == []
    assert page.count("<td>") == 2, "a bar begins no column"
    assert "default-src 'none'" in page
    (item,) = re.findall(r"<li>(.*)</li>", page)
    assert "<" not in item and "![see](http://x.org/a.png)" in item, "what is told of is shown as it is"


def test_an_image_that_is_not_given_is_its_words_and_a_picture_is_the_same_text_each_time_and_names_no_address() -> None:
    assert "<p>The picture</p>" in to_html("![The picture](other.png)\n", {})
    one = drawn()
    assert one == drawn()
    assert not re.search(r"https?://(?!www\.w3\.org/)", one)
