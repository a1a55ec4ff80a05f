"""A weight set as a file that vLLM's workers read: safetensors, written without a copy of the tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from async_rlhf.buffers.tensors import RawTensor

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_weights(path: Path, tensors: Mapping[str, RawTensor]) -> None:
    """Write the tensors in the safetensors format: length of the header (8 bytes, little-endian), header (JSON), bytes.

    The header is padded with spaces so that tensors begin at a multiple of 8 bytes.
    """
    header, start = {}, 0
    for name, tensor in tensors.items():
        stop = start + len(tensor.data)
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.data)
