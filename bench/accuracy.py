"""Codecs: what they do to the output of a real model.

    python3 tools/dev.py bench accuracy

A causal language model in float32 reads the first tokens of a text. Its keys and values,
rounded to bfloat16, are stored by a store in blocks of 256 tokens, loaded by another one, and the
model continues the text over them. What it then expects, token by token, is compared with
what it expects over the keys and values themselves. Beside each codec of this project
stand a plain cast, plain groups of 4 bits, and rotation with a codebook as others describe
it, whole and without each of its parts; and ``lbq4`` without each of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from kv_attention import block_errors
from kv_model import KIND_TEXTS, Prompt, TextModel, kv_layout, tensors_of, to_blocks
from kv_recipes import BLOCK_TOKENS, RECIPES

from lifeboat_cache.bench import Report, Row, compare, ready_kernels
from lifeboat_cache.codecs import quality
from lifeboat_cache.codecs.blocks import decode_block, encode_block
from lifeboat_cache.codecs.layout import KVLayout
from lifeboat_cache.codecs.lbq import CENTRED, PRECISE, TURNING
from lifeboat_cache.codecs.names import LBQ2, LBQ3, LBQ4, CodecName, codec_name
from lifeboat_cache.codecs.policy import CodecPolicy
from lifeboat_cache.codecs.recipes import CodedLayout, coded_layout
from lifeboat_cache.interface import (
    BlockBatch,
    BlockBuffers,
    BlockStore,
    Job,
    Namespace,
    Outcome,
    block_keys,
)
from lifeboat_cache.kernels.codec_layout import CODER_LBQ
from lifeboat_cache.targets.filesystem import FilesystemTarget

_BENCH = "accuracy"

_LOSSY: tuple[CodecName, ...] = ("fp8", "lbq4", "lbq3", "lbq2")

#: Parts of ``lbq``, and the bits of what its coder is told that stand for them.
_PARTS = {
    "turning means": TURNING,
    "precise tokens": PRECISE,
    "means": CENTRED | TURNING,
    "all of these": CENTRED | TURNING | PRECISE,
}

_NAMESPACE = Namespace.from_identity({"bench": "accuracy"})
_PATIENCE_S = 300.0

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Line:
    """What one way to store KV does to the continuation of one text.

    Attributes
    ----------
    case, text
        How it is stored, and which kind of text.
    token_bytes
        Bytes of KV of a token, as the model keeps it.
    ratio
        Bytes of KV by bytes stored, of the whole prefix.
    kl, top1, perplexity
        In nats; share of positions where the most likely token stays; of the text.
    relative, attention
        Mean errors that the accuracy guard would find (``codecs/quality.py``).
    """

    case: str
    text: str
    token_bytes: int
    ratio: float
    kl: float
    top1: float
    perplexity: float
    relative: float
    attention: float

    def rows(self) -> Iterator[Row]:
        """What ``--json`` prints."""
        for metric, unit, value in (
            ("stored per token", "bytes", self.token_bytes / self.ratio),
            ("KL", "nats", self.kl),
            ("top-1 agreement", "share", self.top1),
            ("loss", "nats", math.log(self.perplexity)),
            ("relative error", "share", self.relative),
            ("attention error", "share", self.attention),
        ):
            yield compare(_BENCH, f"{self.case}, {self.text}", metric, unit, [value])


@dataclass(frozen=True)
class Sample:
    """One layer's keys or values in one block: the guard's error, and what it stands for.

    Attributes
    ----------
    case, role
        How the block is stored; ``key`` or ``value``.
    relative, guard
        The two errors that the accuracy guard finds.
    real
        The error of attention with the queries of the tokens after the prefix.
    """

    case: str
    role: str
    relative: float
    guard: float
    real: float


class Bench:
    """One text after the other, in all ways.

    Parameters
    ----------
    model
        That continues.
    home
        A directory for stores.

    Attributes
    ----------
    samples
        Of all lines so far.
    """

    def __init__(self, model: TextModel, home: Path) -> None:
        self._model = model
        self._home = home
        self.samples: list[Sample] = []

    def lines(self, kind: str, wanted: str) -> Iterator[Line]:
        """Every case whose name contains ``wanted``."""
        prompt = self._model.read(KIND_TEXTS[kind])
        layers, heads, _, dim = prompt.keys.shape
        layout = kv_layout(layers, heads, dim, BLOCK_TOKENS)
        payloads = to_blocks(prompt.keys, prompt.values, BLOCK_TOKENS)
        yield self._line("as it is", kind, prompt, layout, payloads, payloads, 1.0)
        for name, recipe in RECIPES.items():
            if wanted in name:
                made = recipe(prompt.keys, prompt.values)
                blocks = to_blocks(made.keys, made.values, BLOCK_TOKENS)
                yield self._line(name, kind, prompt, layout, payloads, blocks, 16 / made.bits)
        for codec in _LOSSY:
            if wanted in codec:
                blocks, stored = self._through_store(codec, kind, layout, payloads)
                ratio = payloads.nbytes / stored
                yield self._line(codec, kind, prompt, layout, payloads, blocks, ratio)
        for name, coded in _variants(layout):
            if wanted in name:
                blocks, stored = _through_coders(coded, payloads)
                ratio = payloads.nbytes / stored
                yield self._line(name, kind, prompt, layout, payloads, blocks, ratio)

    def _line(
        self,
        case: str,
        kind: str,
        prompt: Prompt,
        layout: KVLayout,
        payloads: Bytes,
        restored: Bytes,
        ratio: float,
    ) -> Line:
        keys, values = tensors_of(restored, prompt.keys, BLOCK_TOKENS)
        score = self._model.score(prompt, keys, values)
        samples = list(_samples(case, prompt, layout, payloads, restored, keys, values))
        if restored is not payloads:
            self.samples += samples
        return Line(
            case=case,
            text=kind,
            token_bytes=payloads.nbytes // prompt.keys.shape[2],
            ratio=ratio,
            kl=score.kl,
            top1=score.top1,
            perplexity=score.perplexity,
            relative=float(np.mean([sample.relative for sample in samples])),
            attention=float(np.mean([sample.guard for sample in samples])),
        )

    def _through_store(
        self, codec: CodecName, kind: str, layout: KVLayout, payloads: Bytes
    ) -> tuple[Bytes, int]:
        """Payloads stored by one store and loaded by another; bytes on storage."""
        place = self._home / f"{kind}-{codec}"
        keys = block_keys([f"{number}".encode() for number in range(payloads.shape[0])])
        ends = [BLOCK_TOKENS * (number + 1) for number in range(payloads.shape[0])]
        restored = np.zeros_like(payloads)
        for rows, loading in ((payloads, False), (restored, True)):
            store = BlockStore(
                _NAMESPACE, [FilesystemTarget(place)], codecs=CodecPolicy.fixed(codec)
            )
            try:
                tag = store.describe(layout)
                if not store.wait_recovered(_PATIENCE_S):
                    raise RuntimeError(f"the store did not open: {store.reason}")
                batch = BlockBatch(keys, BlockBuffers.from_buffers(list(rows)), tag, ends)
                _run(store, batch, loading=loading)
                if not loading:
                    written = store.counters().bytes_written
            finally:
                store.close()
        return restored, written


def _run(store: BlockStore, batch: BlockBatch, *, loading: bool) -> None:
    done = threading.Event()

    def finished(_: Job) -> None:
        done.set()

    job = (store.load if loading else store.store)(batch, finished)
    if not done.wait(_PATIENCE_S) or any(Outcome(o) is not Outcome.OK for o in job.outcomes):
        raise RuntimeError(f"{'load' if loading else 'store'}: {list(job.outcomes)}")


def _variants(layout: KVLayout) -> Iterator[tuple[str, CodedLayout]]:
    """``lbq`` without each of its parts, and with other widths."""
    for codec in (LBQ4, LBQ3, LBQ2):
        yield f"{codec_name(codec)}, first block too", coded_layout(layout, codec)
    whole = coded_layout(layout, LBQ4)
    for part, bits in _PARTS.items():
        coders = tuple((n, told & ~bits if n == CODER_LBQ else told) for n, told in whole.coders)
        yield f"lbq4 without {part}", dataclasses.replace(whole, coders=coders)
    for codec, keys, values in ((LBQ4, 4, 3), (LBQ2, 2, 2)):
        coded = coded_layout(layout, codec)
        coders = tuple(
            (number, (told & ~15) | (keys if tensor.role == "key" else values))
            for tensor, (number, told) in zip(layout.tensors, coded.coders, strict=True)
        )
        yield (
            f"lbq, keys {keys} and values {values} bits",
            dataclasses.replace(coded, coders=coders),
        )


def _through_coders(coded: CodedLayout, payloads: Bytes) -> tuple[Bytes, int]:
    restored = np.zeros_like(payloads)
    stored = 0
    for payload, out in zip(payloads, restored, strict=True):
        block = encode_block(coded, payload)
        stored += block.shape[0]
        decode_block(coded, block, out)
    return restored, stored


def _samples(
    case: str,
    prompt: Prompt,
    layout: KVLayout,
    payloads: Bytes,
    restored: Bytes,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> Iterator[Sample]:
    """Every fifth layer of every block but the first, at whose first token all others look.

    That one token would decide the correlation, and it is kept apart by `lbq` anyway.
    """
    for block in range(1 % payloads.shape[0], payloads.shape[0]):
        tokens = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        for layer in range(0, prompt.keys.shape[0], 5):
            real = block_errors(
                prompt.queries[layer],
                prompt.keys[layer],
                prompt.values[layer],
                keys[layer],
                values[layer],
                tokens,
            )
            own = layout.tensors[2 * layer : 2 * layer + 2]
            for tensor, error in zip(own, real, strict=True):
                relative, guard = quality.compare(tensor, own[0], payloads[block], restored[block])
                yield Sample(case, tensor.role, relative, guard, error)


def _rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's."""
    ranks = [np.argsort(np.argsort(np.array(side))) for side in (left, right)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _print_table(lines: Sequence[Line], kinds: Sequence[str]) -> None:
    by_case: dict[str, dict[str, Line]] = {}
    for line in lines:
        by_case.setdefault(line.case, {})[line.text] = line
    print(f"| {' / '.join(kinds)} | size | KL | top-1 | perplexity | attention error |")
    print("|---|---|---|---|---|---|")
    for case, texts in by_case.items():
        of = [texts[kind] for kind in kinds]
        print(
            f"| {case} | {of[0].ratio:.2f}× | {' / '.join(f'{one.kl:.4f}' for one in of)} "
            f"| {' / '.join(f'{one.top1:.3f}' for one in of)} "
            f"| {' / '.join(f'{one.perplexity:.2f}' for one in of)} "
            f"| {' / '.join(f'{one.attention:.3f}' for one in of)} |"
        )
    lossy = [line for line in lines if line.case != "as it is"]
    if len(lossy) > 2:
        for name in ("attention", "relative"):
            found = _rank_correlation(
                [getattr(line, name) for line in lossy], [line.kl for line in lossy]
            )
            print(f"\nrank correlation of the {name} error with KL: {found:.2f}")


def _print_correlations(samples: Sequence[Sample]) -> None:
    """How well the guard's errors follow those of attention with real queries."""
    for role in ("key", "value"):
        of = [sample for sample in samples if sample.role == role]
        for name in ("guard", "relative"):
            overall = _rank_correlation(
                [getattr(one, name) for one in of], [one.real for one in of]
            )
            within = [
                _rank_correlation(
                    [getattr(one, name) for one in of if one.case == case],
                    [one.real for one in of if one.case == case],
                )
                for case in dict.fromkeys(one.case for one in of)
            ]
            kind = "attention" if name == "guard" else "relative"
            print(
                f"rank correlation of the {kind} error of {role}s with that of real queries, "
                f"{len(of)} blocks: {overall:.2f}; within a case {np.median(within):.2f} (median)"
            )
        ratio = np.median([one.real / one.guard for one in of if one.guard > 0])
        print(f"real error by the attention error of {role}s: {ratio:.2f} (median)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model",
        default=os.environ.get("LIFEBOAT_TEST_MODEL"),
        help="a causal language model of Hugging Face, a directory or a name",
    )
    parser.add_argument("--prefix", type=int, default=2048, help="tokens read and stored (2048)")
    parser.add_argument("--scored", type=int, default=256, help="tokens looked at (256)")
    parser.add_argument("--texts", nargs="+", choices=sorted(KIND_TEXTS), default=["prose", "code"])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    if not options.model:
        parser.error(
            "which model? Name it with --model, or use python3 tools/dev.py bench accuracy"
        )
    if options.prefix < BLOCK_TOKENS or options.prefix % BLOCK_TOKENS or options.scored < 1:
        parser.error(f"--prefix must be a multiple of {BLOCK_TOKENS}, and --scored at least 1")
    torch.set_num_threads(options.threads)
    ready_kernels(lambda said: print(said, file=sys.stderr), compiling=True)
    model = TextModel(options.model, options.prefix, options.scored)
    report = Report(as_json=options.json)
    lines = []
    with tempfile.TemporaryDirectory(prefix="lifeboat-accuracy-") as home:
        bench = Bench(model, Path(home))
        for kind in options.texts:
            for line in bench.lines(kind, options.only):
                lines.append(line)
                for row in line.rows():
                    report.add(row)
    if not options.json:
        _print_table(lines, options.texts)
        if len(bench.samples) > 2:
            print()
            _print_correlations(bench.samples)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
