"""An image is kept once, by what is seen of it, and opened as it was, or not at all."""

from __future__ import annotations

import multiprocessing
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.buffers.files import Disk
from async_rlhf.buffers.images import store
from async_rlhf.buffers.images.decoding import decoded, digest_of, encoded
from async_rlhf.buffers.images.store import ImageStore
from tests.conftest import REPOSITORY

_ORIENTATION = 0x0112


def noise(width: int = 7, height: int = 5, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def saved(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def turned(image: Image.Image, orientation: int, form: str) -> bytes:
    """A file of the image with this orientation of EXIF."""
    exif = Image.Exif()
    exif[_ORIENTATION] = orientation
    return saved(image, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_an_image_has_one_digest_in_every_lossless_form(width: int, height: int, seed: int) -> None:
    image = noise(width, height, seed=seed)
    files = [saved(image, form, lossless=True) if form == "WEBP" else saved(image, form)
             for form in ("PNG", "BMP", "TIFF", "PPM", "WEBP")]  # fmt: skip
    files += [saved(image, compress_level=0), encoded(image), saved(image.convert("RGBA"))]
    assert {digest_of(decoded(file)) for file in files} == {digest_of(image)}
    assert digest_of(image) != digest_of(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)) or width == 1
    if width != height:
        same_pixels = Image.frombytes("RGB", (height, width), image.tobytes())
        assert digest_of(same_pixels) != digest_of(image), "the size counts"


def test_equal_images_are_stored_once_and_opened_as_they_were(tmp_path: Path) -> None:
    store, image = ImageStore(tmp_path / "images"), noise()
    digest = store.add(saved(image))
    assert store.add(saved(image, "BMP")) == digest and [*store] == [digest]
    assert (store.directory / digest).read_bytes() == saved(image), "the file as it was given first"
    opened = store.open(digest)
    assert opened.mode == "RGB" and opened.tobytes() == image.tobytes() and store.size(digest) == (7, 5)
    opened.putpixel((0, 0), (0, 0, 0))
    assert store.open(digest).tobytes() == image.tobytes(), "what one caller draws no other sees"


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_upright_whatever_way_the_camera_was_held(tmp_path: Path, form: str, orientation: int) -> None:
    """The orientation says how the stored pixels have to be turned; a JPEG is compared with itself, which lost some."""
    from PIL import ImageOps

    file = turned(noise(40, 24), orientation, form)
    store = ImageStore(tmp_path)
    digest = store.add(file)
    with Image.open(BytesIO(file)) as stored:
        wanted = ImageOps.exif_transpose(stored).convert("RGB")
    assert store.open(digest).tobytes() == wanted.tobytes()
    assert store.size(digest) == wanted.size == ((24, 40) if orientation > 4 else (40, 24))
    assert encoded(Image.open(BytesIO(file))) == encoded(wanted), "so is one that a program has opened"


def palette() -> bytes:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    return saved(image, transparency=bytes([255, 0]))


def half_clear() -> Image.Image:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 255, 0))
    return image


@pytest.mark.parametrize(
    ("file", "pixels"),
    [
        (lambda: saved(half_clear()), [(255, 0, 0), (255, 255, 255)]),
        (palette, [(255, 0, 0), (255, 255, 255)]),
        (lambda: saved(Image.frombytes("LA", (2, 1), bytes([9, 255, 9, 0]))), [(9, 9, 9), (255, 255, 255)]),
        (lambda: saved(Image.frombytes("L", (2, 1), bytes([7, 200]))), [(7, 7, 7), (200, 200, 200)]),
        (lambda: saved(Image.new("1", (2, 1), 1)), [(255, 255, 255)] * 2),
        (lambda: saved(Image.new("CMYK", (2, 1), (0, 0, 0, 0)), "TIFF"), [(255, 255, 255)] * 2),
        (lambda: saved(Image.fromarray(np.array([[0, 65535]], np.uint16))), [(0, 0, 0), (255, 255, 255)]),
        (lambda: saved(Image.fromarray(np.array([[300, 32896]], np.uint16))), [(1, 1, 1), (128, 128, 128)]),
    ],
)
def test_every_kind_of_pixel_becomes_red_green_and_blue_on_white(
    file: Callable[[], bytes], pixels: list[tuple[int, int, int]]
) -> None:
    image = decoded(file())
    assert image.mode == "RGB" and [image.getpixel((x, 0)) for x in range(2)] == pixels


def bomb() -> bytes:
    """A small file of 20,000 x 20,000 pixels, by its header."""
    file = bytearray(saved(Image.new("L", (1, 1))))
    file[16:24] = (20_000).to_bytes(4, "big") * 2
    file[29:33] = zlib.crc32(file[12:29]).to_bytes(4, "big")
    return bytes(file)


def frames(form: str) -> bytes:
    return saved(noise(), form, save_all=True, append_images=[noise(seed=1)])


def many_frames() -> bytes:
    """A million frames of one pixel in 15 MB: they are not counted."""
    frame = b"," + bytes(4) + b"\1\0\1\0\0" + b"\2\2D\1\0"
    return b"GIF89a\1\0\1\0\x80\0\0" + bytes(6) + frame * 1_000_000 + b";"


def skipping() -> bytes:
    """Packed pixels of BMP that skip 255 rows of a million pixels in each four bytes."""
    header = struct.pack("<IiiHHIIiiII", 40, 1 << 20, 1, 1, 8, 1, 6, 0, 0, 1, 0)
    return b"BM" + struct.pack("<IHHI", 64, 0, 0, 58) + header + bytes(4) + b"\0\2\0\xff\0\1"


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (bomb, "more pixels than the limit, which is 67,108,864"),
        (lambda: saved(Image.new("1", (9000, 8000))), "9000 x 8000, 72,000,000 pixels; the limit is 67,108,864"),
        (lambda: frames("GIF"), "it has several frames or pages, and one was expected"),
        (lambda: frames("TIFF"), "several frames"),
        (lambda: frames("WEBP"), "several frames"),
        (lambda: frames("PNG"), "several frames"),
        (many_frames, "several frames"),
        (lambda: b"P3\n1 1\n255\n1 2 3\n", "packed as 'ppm_plain', .*; save it as PNG"),
        (lambda: b"P6\n1 1\n9\n123", "packed as 'ppm'"),
        (skipping, "packed as 'bmp_rle'"),
        (lambda: saved(noise(40, 40))[:-300], "cannot be decoded .*is the file whole"),
        (lambda: saved(noise(40, 40), "JPEG")[:-300], "cannot be decoded .*is the file whole"),
        (lambda: b"a text, no image", "no image of a known format"),
        (lambda: b"", "no image of a known format"),
        (lambda: saved(noise(), "PDF"), r"no image of a known format \(PNG, JPEG"),
        (lambda: saved(Image.new("F", (2, 2)), "TIFF"), "of the kind 'F'; save it with 8 bits"),
        (lambda: saved(Image.new("I", (2, 2), 1 << 20), "TIFF"), "from 1048576 to 1048576; save it with"),
        (lambda: b"\x89PNG" + bytes(33 << 20), "34,603,012 bytes, the limit is 33,554,432"),
    ],
)
def test_what_cannot_be_seen_whole_is_refused_with_its_limit(tmp_path: Path, file: Callable[[], bytes], reason: str) -> None:
    store = ImageStore(tmp_path / "images")
    with pytest.raises(ValueError, match=reason):
        store.add(file())
    assert [*store] == []


def test_an_image_of_one_pixel_is_an_image(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    assert store.size(store.add(saved(noise(1, 1)))) == (1, 1)


def test_a_file_that_comes_again_is_not_decoded_again_and_what_is_gone_is_kept_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent sends the images of its conversation with each call."""
    kept, counted = ImageStore(tmp_path / "images"), list[int]()
    honest = store.decoded
    monkeypatch.setattr(store, "decoded", lambda data: (counted.append(len(data)), honest(data))[1])
    files = [saved(noise(seed=seed)) for seed in range(3)]
    digests = [kept.add(file) for _ in range(4) for file in files]
    assert digests[:3] * 4 == digests and len(counted) == 3
    kept.path(digests[0]).unlink()
    assert digests[0] not in kept and kept.add(files[0]) == digests[0] in kept and len(counted) == 4
    monkeypatch.setattr(store, "_ADDED", 2)
    kept.add(saved(noise(seed=9)))
    assert len(kept._added) == 2, "what is remembered is bounded"
    assert "../images" not in kept and 7 not in kept


def test_what_comes_while_a_run_goes_on_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, synced = ImageStore(tmp_path, durable=True), list[tuple[str, bool]]()
    monkeypatch.setattr(Disk, "sync_path", lambda self, path: synced.append((path.name, any(True for _ in kept))))
    digest = kept.add(saved(noise()))
    (file, was_there), last = synced
    assert file.startswith(f".{digest}") and not was_there and last == (tmp_path.name, True)
    ImageStore(tmp_path).add(saved(noise(seed=1)))
    assert len(synced) == 2, "of rows all are, once"


def test_an_image_that_is_missing_or_another_is_never_shown(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    digest, other = store.add(saved(noise())), "0" * 32
    (tmp_path / digest).write_bytes(saved(noise(seed=1)))
    (tmp_path / other).write_bytes(b"cut")
    for name, reason in ((digest, "it was changed"), (other, "no image of a known format"), ("1" * 32, "No such file")):
        with pytest.raises(DamagedError, match=f"{name} is missing or damaged: .*{reason}"):
            store.open(name)
    for name in ("../secret", "", "A" * 32, digest + "\n"):
        with pytest.raises(DamagedError, match="is no digest of an image"):
            store.open(name)


def _add(directory: Path, seeds: list[int]) -> list[str]:
    return [ImageStore(directory).add(saved(noise(64, 64, seed=seed))) for seed in seeds]


def test_several_processes_keep_the_same_images_at_once(tmp_path: Path) -> None:
    seeds = list(range(40))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.starmap(_add, [(tmp_path, seeds), (tmp_path, seeds)])
    store = ImageStore(tmp_path)
    assert first == second and sorted(store) == sorted(first) == sorted(path.name for path in tmp_path.iterdir())
    assert [store.open(digest).tobytes() for digest in first] == [noise(64, 64, seed=seed).tobytes() for seed in seeds]


def test_a_store_takes_from_another_what_it_has_not(tmp_path: Path) -> None:
    source, own = ImageStore(tmp_path / "a"), ImageStore(tmp_path / "b")
    first, second = (source.add(saved(noise(seed=seed))) for seed in range(2))
    own.take([first], source)
    own.take([first, second, second], source)
    (source.directory / first).unlink()
    assert sorted(own) == sorted([first, second]) and own.open(first).tobytes() == noise().tobytes()


_LOADS = """
import os, sys
from async_rlhf.buffers.images.store import scratch
print(scratch().add(sys.stdin.buffer.read()), scratch().directory, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
if os.fork() == 0:
    sys.exit()
os.wait()
print(len([*scratch()]))
"""


def test_what_a_process_has_read_is_gone_with_it_or_with_the_next(tmp_path: Path) -> None:
    def load(end: str) -> tuple[Path, list[str]]:
        command = [sys.executable, "-c", _LOADS, end]
        ran = subprocess.run(
            command, input=saved(noise()), capture_output=True, cwd=REPOSITORY, env={**os.environ, "TMPDIR": str(tmp_path)}
        )
        first, *rest = ran.stdout.decode().splitlines()
        digest, directory = first.split()
        assert digest == digest_of(noise()) and Path(directory).parent == tmp_path, ran.stderr
        return Path(directory), rest

    left, _ = load("killed")
    assert sorted(path.name for path in left.iterdir()) == sorted([".lock", digest_of(noise())])
    directory, rest = load("ended")
    assert rest == ["1"] and directory != left and [*tmp_path.iterdir()] == [], "a child that ends removes nothing"
