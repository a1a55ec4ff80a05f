"""The images of a run, by the digest of their bytes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import xxhash

from async_rlhf.buffers.errors import DamagedError
from async_rlhf.buffers.files import write_whole


class ImageStore:
    """Files of a directory, each named by the digest of its bytes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def add(self, data: bytes) -> str:
        """The digest, 32 hexadecimal digits."""
        digest = xxhash.xxh3_128_hexdigest(data)
        self._directory.mkdir(parents=True, exist_ok=True)
        write_whole(self._directory / digest, data)
        return digest

    def open(self, digest: str) -> Any:
        """The image, RGB and loaded. Raises DamagedError where it is not there."""
        from PIL import Image

        try:
            return Image.open(io.BytesIO((self._directory / digest).read_bytes())).convert("RGB")
        except OSError as error:
            raise DamagedError(f"image {digest} of {str(self._directory)!r} cannot be read: {error}") from error

    def size(self, digest: str) -> tuple[int, int]:
        """Width and height in pixels."""
        width, height = self.open(digest).size
        return width, height
