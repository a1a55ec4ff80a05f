"""An image file to what is seen of it: 8-bit RGB, upright, on white. Its header is looked at before anything is decoded.

Of a format, size or kind that is not listed here it is refused, never changed beyond that: no pixel is scaled away or left out.
"""

from __future__ import annotations

from io import BytesIO
from typing import BinaryIO

import numpy as np
import xxhash
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
MAX_BYTES = 32 << 20
"""Of a file."""
MAX_PIXELS = 64 << 20
"""Of an image: 192 MiB when it is decoded."""

_ORIENTATION = 0x0112
_Turn = Image.Transpose
# What undoes an orientation of EXIF.
_TURNS = {
    2: _Turn.FLIP_LEFT_RIGHT, 3: _Turn.ROTATE_180, 4: _Turn.FLIP_TOP_BOTTOM, 5: _Turn.TRANSPOSE, 6: _Turn.ROTATE_270,
    7: _Turn.TRANSVERSE, 8: _Turn.ROTATE_90,
}  # fmt: skip
_SIDEWAYS = (_Turn.TRANSPOSE, _Turn.ROTATE_270, _Turn.TRANSVERSE, _Turn.ROTATE_90)
_THUMBNAIL = 96
_SIXTEEN_BITS = (1 << 16) - 1


def decoded(data: bytes) -> Image.Image:
    """The image in a file, mode RGB, loaded. Raises ValueError for what is none, or one that is refused."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, the limit is {MAX_BYTES:,}; make it smaller")
    return _seen(_opened(BytesIO(data)))


def size_of(file: BinaryIO) -> tuple[int, int]:
    """(width, height) of what `decoded` gives, by the header alone. Raises ValueError."""
    image = _opened(file)
    width, height = image.size
    return (height, width) if _turn(image) in _SIDEWAYS else (width, height)


def digest_of(image: Image.Image) -> str:
    """xxh3_128 of size and pixels, 32 hexadecimal digits: of equal images, whatever files they came from, it is equal."""
    found = xxhash.xxh3_128(b"%d x %d " % image.size)
    found.update(image.tobytes())
    return found.hexdigest()


def encoded(image: Image.Image) -> bytes:
    """A file of an image that a program has. Raises ValueError as `decoded` does."""
    _check_size(image)
    file = BytesIO()
    _seen(image).save(file, "PNG", compress_level=1)
    return file.getvalue()


def thumbnail(image: Image.Image) -> bytes:
    """A JPEG of it, 96 pixels wide or high."""
    small, file = image.copy(), BytesIO()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    small.save(file, "JPEG", quality=70)
    return file.getvalue()


def _seen(image: Image.Image) -> Image.Image:
    try:
        turn = _turn(image)
        image.load()
    except Exception as error:  # decoders raise what they like, SyntaxError and struct.error among it
        raise ValueError(f"it cannot be decoded ({error}): is the file whole?") from error
    found = _rgb(image if turn is None else image.transpose(turn))
    found.info = {}  # who saves it would write the orientation that was undone
    return found


def _opened(file: BinaryIO) -> Image.Image:
    try:
        image = Image.open(file, formats=FORMATS)
        # Beside a photo lie its previews. How many frames there are is not asked: a small file has a million to be walked.
        has_more = image.format != "MPO" and getattr(image, "is_animated", False)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"it has more pixels than the limit, which is {MAX_PIXELS:,}; make it smaller") from error
    except Exception as error:  # as above
        raise ValueError(f"it is no image of a known format ({', '.join(FORMATS)}), or not whole") from error
    _check_size(image)
    if has_more:
        raise ValueError("it has several frames or pages, and one was expected; give each as an image of its own")
    if slow := next((tile[0] for tile in image.tile if tile[0] in Image.DECODERS), None):
        raise ValueError(
            f"its pixels are packed as {slow!r}, which a few bytes can make slow and large to unpack; save it as PNG"
        )
    return image


def _check_size(image: Image.Image) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"it is {width} x {height}, {width * height:,} pixels; the limit is {MAX_PIXELS:,}; make it smaller")
    if not width * height:
        raise ValueError(f"it is {width} x {height}: it has no pixel")


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What sets it upright. TIFF is read upright by the library. Of PNG a header counts: what follows the pixels would be
    known only after they were decoded."""
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return None
    return _TURNS.get(image.getexif().get(_ORIENTATION, 1))


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _of_integers(image)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        if image.mode in ("La", "RGBa"):
            image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
        above = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", above.size, "white"), above).convert("RGB")
    if image.mode in ("F", "LAB", "HSV"):
        raise ValueError(f"its pixels are of the kind {image.mode!r}; save it with 8 bits a channel, as RGB")
    return image.convert("RGB")


def _of_integers(image: Image.Image) -> Image.Image:
    """Of 16 bits a pixel: the library would clip them to 8."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > _SIXTEEN_BITS:
        raise ValueError(f"its pixels go from {values.min()} to {values.max()}; save it with 8 or 16 bits a channel")
    return Image.fromarray(((values * 255 + _SIXTEEN_BITS // 2) // _SIXTEEN_BITS).astype(np.uint8)).convert("RGB")
