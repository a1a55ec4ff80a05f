"""Images in rows: however they are given, a row names the same digests at the same places; what is wrong is said with it."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from async_rlhf.actors.data.config import DataConfig
from async_rlhf.actors.data.kept import written
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.prompts import Row, Template, from_json, to_json
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.images.decoding import digest_of
from async_rlhf.buffers.images.store import scratch


def noise(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (5, 7, 3), np.uint8))


def png(seed: int = 0) -> bytes:
    file = BytesIO()
    noise(seed).save(file, "PNG")
    return file.getvalue()


def url(seed: int = 0) -> str:
    return "data:image/png;base64," + base64.b64encode(png(seed)).decode()


def digest(seed: int = 0) -> str:
    return digest_of(noise(seed))


def image(seed: int = 0) -> dict[str, str]:
    return {"type": "image", "image": digest(seed)}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*content]}]


def load(rows: list[dict[str, Any]], **settings: Any) -> list[Row]:
    return load_rows(DataConfig(source="caller", held_out=0, **settings), rows)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files 0.png to 2.png."""
    made = tmp_path_factory.mktemp("images")
    for seed in range(3):
        (made / f"{seed}.png").write_bytes(png(seed))
    return made


FORMS = {
    "bytes": lambda folder, seed: png(seed),
    "a path": lambda folder, seed: str(folder / f"{seed}.png"),
    "a file's URL": lambda folder, seed: f"file://{folder}/{seed}.png",
    "a data URL": url,
    "what datasets writes": lambda folder, seed: {"bytes": png(seed), "path": "gone.png"},
    "what datasets names": lambda folder, seed: {"bytes": None, "path": str(folder / f"{seed}.png")},
    "an image of Pillow": lambda folder, seed: noise(seed),
    "one with a palette of clear pixels": lambda folder, seed: noise(seed).convert("RGBA"),
}
FORMS["a data URL"] = lambda folder, seed: url(seed)
PARTS = {
    "chat completions": lambda value: {"type": "image_url", "image_url": {"url": value, "detail": "low"}},
    "responses": lambda value: {"type": "input_image", "image_url": value},
    "Qwen": lambda value: {"type": "image", "image": value},
    "what Arrow fills up": lambda value: {"type": "image", "image": value, "text": None, "url": None},
}


@given(
    st.lists(st.tuples(st.sampled_from([*FORMS]), st.integers(0, 2)), min_size=1, max_size=4),
    st.sampled_from(["before", "places", "marks", "parts"]),
    st.sampled_from([*PARTS]),
)
def test_every_form_of_images_is_the_same_row(folder: Path, images: list[tuple[str, int]], where: str, written_as: str) -> None:
    given_images, seeds = [FORMS[form](folder, seed) for form, seed in images], [seed for _, seed in images]
    rows: dict[str, dict[str, Any]] = {
        "before": {"prompt": "What?", "images": given_images},
        "places": {"prompt": user(*[{"type": "image"}] * len(seeds), text("Wh"), text("at?")), "images": given_images},
        "marks": {"prompt": "<image>" * len(seeds) + "What?", "images": given_images},
        "parts": {"prompt": user(*map(PARTS[written_as], given_images), text("What?"))},
    }
    (row,) = load([{**rows[where], "answer": 1}])
    assert row == Row(user(*map(image, seeds), text("What?")), {"answer": 1})
    assert row.images == tuple(map(digest, seeds))
    assert scratch().open(row.images[0]).tobytes() == noise(seeds[0]).tobytes()


def test_images_stand_where_the_messages_have_places_for_them() -> None:
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [text("First"), {"type": "image"}, text("then"), {"type": "image"}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "image"}]},
    ]
    (row,) = load([{"prompt": chat, "images": [png(2), png(0), png(2)]}])
    assert row.images == (digest(2), digest(0), digest(2))
    assert row.prompt == [
        chat[0],
        {"role": "user", "content": [text("First"), image(2), text("then"), image(0)]},
        chat[2],
        {"role": "user", "content": [image(2)]},
    ]
    before = [chat[0], {"role": "user", "content": "What?"}, chat[2], {"role": "user", "content": "And?"}]
    (row,) = load([{"prompt": before, "image": png()}])
    assert row.prompt == [chat[0], *user(image(), text("What?")), *before[2:]], "the first message of the user"


SAID = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1)
TURNS = st.lists(st.tuples(st.booleans(), SAID), max_size=2)


@given(TURNS, st.integers(0, 3), st.booleans())
def test_images_of_a_column_stand_where_trl_puts_them(turns: list[tuple[bool, str]], count: int, places: bool) -> None:
    from trl.data_utils import prepare_multimodal_messages

    first: Any = [*[{"type": "image"}] * count, text("q")] if places else "q"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": first}]
    for with_user, said in turns:
        chat.append({"role": "assistant", "content": said})
        chat += [{"role": "user", "content": said}] * (with_user and not places)  # there TRL wants a place in each
    theirs = prepare_multimodal_messages(chat, list(map(digest, range(count))))
    (row,) = load([{"prompt": chat, "images": list(map(png, range(count)))}])
    (plain,) = load([{"prompt": [{**each, "content": only_text(each["content"])} for each in theirs]}])
    for ours, wanted, its in zip(row.prompt, plain.prompt, theirs, strict=True):
        has_image = any(part["type"] == "image" for part in its["content"])
        assert ours == (its if has_image else wanted)


def only_text(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for part in parts if part["type"] == "text"]


def test_a_row_without_images_stays_as_it_is() -> None:
    rows = [{"prompt": "<image> is a tag", "images": []}, {"prompt": user(text("a"), text("b")), "image": None}]
    assert load(rows) == [Row("<image> is a tag", {}), Row([{"role": "user", "content": "ab"}], {})]
    assert [row.images for row in load(rows)] == [(), ()]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "datasets", "decoded", "caller"])
def test_every_kind_of_source_brings_the_same_images(tmp_path: Path, folder: Path, kind: str) -> None:
    """Paths are seen from the folder of the file, not from that in which the command runs."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "0.png").write_bytes(png())
    path, rows = tmp_path / f"rows.{kind}", [{"prompt": f"q{number}", "picture": "own/0.png"} for number in range(3)]
    config: dict[str, Any] = {"columns": {"image": "picture"}, "held_out": 1}
    held = [{**row, "picture": {"bytes": png(), "path": None}} for row in rows]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        path.write_text("prompt,picture\n" + "".join(f"{row['prompt']},{row['picture']}\n" for row in rows))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(held), path)
    else:
        made = datasets.Dataset.from_list([{**row, "picture": png()} for row in rows])
        made = made.cast_column("picture", datasets.Image()) if kind != "datasets" else made
        made.save_to_disk(str(path))
    given_rows = datasets.load_from_disk(str(path)) if kind == "caller" else None
    source = "caller" if kind == "caller" else str(path)
    training, held_out = load_rows(DataConfig(source=source, **config), given_rows)
    assert training == [Row(user(image(), text(f"q{number}")), {}) for number in range(2)]
    assert held_out == [Row(user(image(), text("q2")), {})]


def test_what_is_kept_of_rows_with_images_are_their_digests(folder: Path) -> None:
    """And nothing of their pixels, in whatever form they came: pictures in JSON have made files of other systems huge."""
    big = Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8))
    rows = load([{"prompt": "q", "images": [big, noise()], "answer": "a"}])
    kept = b"".join(written(rows))
    assert len(kept) < 300 and from_json(kept.splitlines()[0]) == rows[0] == from_json(to_json(rows[0]))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"images": ["https://example.org/a.png"]},
            "image 1: 'https://.*nothing is fetched .*; download it first, and give its",
        ),
        ({"images": ["s3://bucket/a.png"]}, "nothing is fetched"),
        ({"images": [png(), "gone.png"]}, "image 2: 'gone.png': there is no file .*gone.png; a path is seen from the folder"),
        ({"images": [png()[:60]]}, "image 1: 'data:.*cannot be decoded"),
        ({"images": [b"a text"]}, "image 1: 'data:.*no image of a known format"),
        ({"image": "a cat"}, "image 1: 'a cat': there is no file"),
        ({"image": "~nobody-of-that-name/a.png"}, "image 1: '~nobody.*; write the path without ~"),
        ({"image": "data:image/png,abc"}, "a data URL with base64 was expected"),
        ({"image": "data:image/png;base64,@"}, "its base64 is damaged"),
        ({"image": 3}, "image 1: a int is no image; give a path, bytes, a data URL or an image of Pillow"),
        ({"image": {"path": None, "bytes": None}}, "image 1: an object has no image; one of image, .*bytes.*path"),
        ({"image": {"file": "a.png"}}, "an object has the key 'file', which is not read"),
        ({"images": np.zeros((2, 2, 3), np.uint8)}, "image 1: a list is no image"),
        ({"images": [png()], "image": png()}, "it has the columns 'images' and 'image'; give one"),
        ({"images": [png()] * 65}, "it has 65 images, the limit is 64"),
        ({"prompt": user({"type": "image"}, text("a"))}, "1 places for images, and its columns 0 images"),
        ({"prompt": user({"type": "image"}, text("a")), "images": [png()] * 2}, "1 places for images, and its columns 2"),
        ({"prompt": "<image> or <image>?", "images": [png()]}, "2 places for images, and its columns 1 images; give as many"),
        ({"prompt": user({"type": "image", "image": png()}), "images": [png()]}, "0 places for images, and its columns 1"),
        ({"prompt": user({"type": "image", "image": png(), "max_pixels": 9})}, "image 1: the part has the key 'max_pixels'"),
        ({"prompt": user({"type": "image", "source": {"file_id": "f"}})}, "an object has the key 'file_id', which is not read"),
        ({"prompt": [{"role": "system", "content": "a"}], "image": png()}, "no message of the user to put them into"),
        ({"prompt": [{"role": "user", "content": "a", "images": [png()]}]}, "has the key 'images', which is no text"),
        ({"prompt": user({"type": "video", "video": "a.mp4"})}, "part 1 is 'video', and text was expected"),
        ({"prompt": user({"type": "image", "image": png()}, {"type": "audio"})}, "is 'audio', and text was expected"),
    ],
)
def test_an_image_that_cannot_be_had_is_refused_with_its_row(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^data, row 2: (.*: )?.*{reason}") as found:
        load([{"prompt": "fine"}, {"prompt": "q", **row}])
    assert len(str(found.value)) < 500, "no pixels in messages"


def test_an_image_of_pillow_that_is_too_large_is_refused_with_its_row() -> None:
    with pytest.raises(ConfigError, match="data, row 1: an image: it is 9000 x 8000, 72,000,000 pixels; the limit is"):
        load([{"prompt": "q", "image": Image.new("1", (9000, 8000))}])


def test_bytes_elsewhere_are_refused_as_ever() -> None:
    with pytest.raises(ConfigError, match="data, row 1: column 'thumbnail' has no form in JSON"):
        load([{"prompt": "q", "image": png(), "thumbnail": png()}])


def test_a_template_of_text_cannot_be_written_around_an_image() -> None:
    (row,) = load([{"prompt": "q", "image": png()}])
    with pytest.raises(ConfigError, match=r"'Q: \{prompt\}' cannot be applied to a prompt with images, which is a chat; leave"):
        Template("Q: {prompt}").said(row)
    for template in (Template(), Template(chat=True)):
        assert template.said(row) == row.prompt and template.is_chat(row)
