"""How small real KV becomes without loss.

    python3 tools/dev.py bench exact_kv

The small model reads documentation (prose) and source text of this repository (code); its
keys and values, computed in float32 and rounded to each dtype, are stored in blocks of 256
tokens by the exact codecs. The limit is the KV as it is, the peer the known way: bytes of one
kind together, compressed with zlib.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lifeboat_cache.bench import LEAST_PAIRS, Report, compare, ready_kernels
from lifeboat_cache.codecs.blocks import decode_block, encode_block
from lifeboat_cache.codecs.layout import ITEM_BYTES, DType, KVLayout, TensorLayout
from lifeboat_cache.codecs.names import DENSE, LOSSLESS, codec_name
from lifeboat_cache.codecs.recipes import coded_layout

_BENCH = "exact_kv"
_ROOT = Path(__file__).resolve().parent.parent
_TEXTS = {"prose": "docs/*.md", "code": "packages/*/src/**/*.py"}
_DTYPES: dict[DType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_BLOCK_TOKENS = 256
_ZLIB_LEVEL = 6

Bytes = npt.NDArray[np.uint8]


def kv_of(model: str, tokens: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """For each kind of text, keys and values of all layers, ``(tokens, heads, dim)``."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for kind, pattern in _TEXTS.items():
        text = "\n".join(path.read_text() for path in sorted(_ROOT.glob(pattern))[:40])
        asked = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
        with torch.inference_mode():
            cache: Any = network(asked, use_cache=True).past_key_values
        yield (
            kind,
            [
                tensor[0].transpose(0, 1).contiguous()
                for layer in cache.layers
                for tensor in (layer.keys, layer.values)
            ],
        )


def layout_of(dtype: DType, tensors: Sequence[torch.Tensor]) -> KVLayout:
    """Blocks of such tensors, one after the other."""
    _, heads, dim = tensors[0].shape
    head = dim * ITEM_BYTES[dtype]
    size = head * heads * _BLOCK_TOKENS
    return KVLayout.of(
        size * len(tensors),
        [
            TensorLayout(
                "value" if number % 2 else "key",
                dtype,
                number // 2,
                1,
                _BLOCK_TOKENS,
                heads,
                dim,
                size,
                head * heads,
                head,
                size * number,
            )
            for number in range(len(tensors))
        ],
    )


def known_way(block: Bytes, item: int) -> int:
    """Bytes of a tensor by zlib, bytes of one kind together."""
    planes = np.ascontiguousarray(block.reshape(-1, item).T)

    return sum(len(zlib.compress(plane.tobytes(), _ZLIB_LEVEL)) for plane in planes)


def bench_dtype(report: Report, kind: str, dtype: DType, tensors: list[torch.Tensor]) -> None:
    """Rows of one kind of text and one dtype."""
    item = ITEM_BYTES[dtype]
    layout = layout_of(dtype, tensors)
    cast = [tensor.to(_DTYPES[dtype]).view(torch.uint8).numpy() for tensor in tensors]
    blocks = [
        np.concatenate([tensor[first : first + _BLOCK_TOKENS].reshape(-1) for tensor in cast])
        for first in range(0, cast[0].shape[0] - _BLOCK_TOKENS + 1, _BLOCK_TOKENS)
    ]
    values = len(blocks) * layout.nbytes / item
    size = layout.nbytes // len(tensors)
    peer = sum(
        known_way(block[first : first + size], item)
        for block in blocks
        for first in range(0, layout.nbytes, size)
    )
    for codec in (LOSSLESS, DENSE):
        coded = coded_layout(layout, codec)
        total = 0
        for block in blocks:
            stored = encode_block(coded, block)
            back = np.empty_like(block)
            decode_block(coded, stored, back)
            if not (back == block).all():
                raise RuntimeError(f"{codec_name(codec)} restores something else")
            total += stored.shape[0]
        report.add(
            compare(
                _BENCH,
                f"{codec_name(codec)}, {dtype}, {kind}",
                "stored, per value",
                "bytes",
                [total / values] * LEAST_PAIRS,
                limit=("raw", [float(item)] * LEAST_PAIRS),
                peer=(f"planes, zlib {_ZLIB_LEVEL}", [peer / values] * LEAST_PAIRS),
            )
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dev.py bench exact_kv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--model", default=os.environ.get("LIFEBOAT_TEST_MODEL"))
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args(argv)
    report = Report(arguments.json)
    ready_kernels(partial(print, flush=True, file=sys.stderr), compiling=True)
    for kind, tensors in kv_of(arguments.model, arguments.tokens):
        for dtype in _DTYPES:
            bench_dtype(report, kind, dtype, tensors)
    report.close()


if __name__ == "__main__":
    main()
