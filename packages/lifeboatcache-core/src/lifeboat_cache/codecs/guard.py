"""The accuracy guard: compares a few of the blocks that are stored with what is kept of them."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lifeboat_cache import kernels
from lifeboat_cache.codecs.blocks import decode_block, encode_block
from lifeboat_cache.codecs.layout import KVLayout, TensorLayout
from lifeboat_cache.codecs.names import FP8, LBQ2, LBQ3, LBQ4, RAW, codec_name, is_exact
from lifeboat_cache.codecs.quality import compare as compare_tensors
from lifeboat_cache.codecs.recipes import CodedLayout, coded_layout
from lifeboat_cache.errors import FormatError
from lifeboat_cache.kernels import codec_layout as columns

__all__ = ["LIMITS", "Compare", "Guard", "Standing"]

_log = logging.getLogger("lifeboat_cache")

#: The most that a codec may do to attention on average, by keys and by values: two to four times
#: what it is for the KV of models that it suits. Where one channel of the keys is much larger
#: than all others, for instance, attention suffers although the relative error is small.
LIMITS: dict[int, tuple[float, float]] = {
    FP8: (0.03, 0.03),
    LBQ4: (0.06, 0.15),
    LBQ3: (0.1, 0.3),
    LBQ2: (0.1, 0.5),
}

#: So many samples are looked at before anything is concluded from them.
_LEAST_SAMPLES = 8

#: What a mean goes back to, in samples.
_MEMORY = 64

#: One part in so many of a core's time.
_SHARE = 100

#: At least so many seconds between two samples.
_PAUSE_S = 0.25

#: Bytes per second at which the store copies a block for the guard, for the account.
_COPY = 2e9

#: Larger errors count as this one.
_WORST = 100.0

_NICE = 10

_EXACT_CODERS = frozenset({columns.CODER_COPY, columns.CODER_LOSSLESS, columns.CODER_DENSE})

#: As :func:`lifeboat_cache.codecs.quality.compare`.
Compare = Callable[
    [TensorLayout, TensorLayout, npt.NDArray[np.uint8], npt.NDArray[np.uint8]],
    tuple[float, float],
]


@dataclass
class Standing:
    """What is known of a codec for blocks of one layout.

    Attributes
    ----------
    samples
        Comparisons so far.
    error
        Mean relative reconstruction error: the norm of the difference by that of the original.
    attention
        Mean part of attention that goes elsewhere for the error of keys.
    output
        Mean relative error of what attention makes of values.
    why
        Why the codec is not used for this layout any more; empty if it is.
    """

    samples: int = 0
    error: float = 0.0
    attention: float = 0.0
    output: float = 0.0
    why: str = ""

    def add(self, error: float, attention: float, output: float) -> None:
        """Take in a comparison."""
        self.samples += 1
        part = 1 / min(self.samples, _MEMORY)
        self.error += (error - self.error) * part
        self.attention += (attention - self.attention) * part
        self.output += (output - self.output) * part


@dataclass
class _Sample:
    layout: KVLayout
    codec: int
    payload: npt.NDArray[np.uint8]


class Guard:
    """Samples blocks, keeps account of errors, and rules codecs out.

    Works on a thread of its own, which is started by the first sample and takes about one
    hundredth of a core.

    Parameters
    ----------
    active
        Whether it takes samples at all.
    compare
        How to compare a tensor.
    """

    def __init__(self, *, active: bool = True, compare: Compare = compare_tensors) -> None:
        self._active = active
        self._compare = compare
        self._next = 0.0
        self._wake = threading.Condition()
        self._sample: _Sample | None = None
        self._busy = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._standings: dict[tuple[int, int], Standing] = {}
        self._ruled_out: Mapping[tuple[int, int], str] = {}
        self._random = random.Random()

    # For the store ----------------------------------------------------------

    def wants(self, codec: int) -> bool:
        """Whether to :meth:`offer` a block that goes through this codec; costs next to nothing."""
        if codec == RAW or not self._active or self._busy or time.monotonic() < self._next:
            return False
        return kernels.ready()  # without them a comparison takes seconds

    def offer(self, layout: KVLayout, codec: int, payload: npt.NDArray[np.uint8]) -> None:
        """Have a block compared, soon; returns at once.

        Parameters
        ----------
        layout, codec
            Its layout, and the codec that it is stored with.
        payload
            uint8 ``(layout.nbytes,)``: a copy of its bytes, which the guard keeps.
        """
        if not self._active or self._process != os.getpid():
            return
        with self._wake:
            if self._busy:
                return
            self._sample, self._busy = _Sample(layout, codec, payload), True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="lifeboat-guard", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError:  # no threads are left: nothing is compared
                    self._thread, self._active = None, False
                    return
            self._wake.notify()

    def ruled_out(self) -> Mapping[tuple[int, int], str]:
        """By layout tag and codec: why it is not used any more. Replaced, never changed."""
        return self._ruled_out

    def facts(self) -> list[dict[str, Any]]:
        """What is published: one entry for each layout and codec that was compared."""
        return [
            {
                "layout": f"{tag:016x}",
                "codec": codec_name(codec),
                "samples": one.samples,
                "error": one.error,
                "attention": one.attention,
                "output": one.output,
                "ruled_out": one.why,
            }
            for (tag, codec), one in list(self._standings.items())
        ]

    def close(self, timeout: float = 1.0) -> None:
        """End the thread. Idempotent."""
        self._active = False
        with self._wake:
            self._sample = None
            self._wake.notify()
        thread = self._thread
        if thread is not None and self._process == os.getpid():
            thread.join(timeout)

    # The thread -------------------------------------------------------------

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)  # of this thread, on Linux
        while True:
            with self._wake:
                while self._sample is None and self._active:
                    self._wake.wait()
                if not self._active:
                    return
                sample, self._sample = self._sample, None
            began = time.thread_time()
            if sample is not None:
                copied = sample.payload.nbytes / _COPY
                try:
                    self._look_at(sample)
                except Exception:  # a fault of ours: the store goes on without a guard
                    _log.exception(
                        "LifeboatCache: comparing a block failed, no more are compared; please "
                        "report this"
                    )
                    self._active = False
                    return
                del sample
                took = time.thread_time() - began + copied
                self._next = time.monotonic() + max(_PAUSE_S, _SHARE * took)
            self._busy = False

    def _look_at(self, sample: _Sample) -> None:
        layout, codec = sample.layout, sample.codec
        part = _part(layout, codec, self._random)
        if part is None:
            return
        restored = np.zeros_like(sample.payload)
        problem = ""
        try:
            decode_block(part, encode_block(part, sample.payload), restored)
        except (FormatError, ValueError) as error:
            problem = f"it does not restore a block ({error})"
        name = (layout.tag, codec)
        standing = self._standings.setdefault(name, Standing())
        if is_exact(codec):
            same = not problem and all(
                np.array_equal(tensor.gather(sample.payload), tensor.gather(restored))
                for tensor in part.layout.tensors
            )
            standing.add(*[float(not same)] * 3)
            if not same:
                self._rule_out(name, problem or "it does not give back what was stored")
            return
        if problem:
            standing.add(1.0, 1.0, 1.0)
            self._rule_out(name, problem)
            return
        errors: dict[str, list[float]] = {"error": [], "attention": [], "output": []}
        for tensor in part.layout.tensors:
            relative, effect = self._compared(tensor, part.layout, sample.payload, restored)
            errors["error"].append(relative)
            errors["output" if tensor.role == "value" else "attention"].append(effect)
        standing.add(**{kind: _mean(found) for kind, found in errors.items()})
        self._judge(name, standing)

    def _judge(self, name: tuple[int, int], standing: Standing) -> None:
        if standing.samples < _LEAST_SAMPLES:
            return
        codec = name[1]
        keys, values = LIMITS.get(codec, (np.inf, np.inf))
        for what, found, limit in (
            ("moves {} of attention", standing.attention, keys),
            ("changes what attention gives by {}", standing.output, values),
        ):
            if found > limit:
                done = what.format(f"{100 * found:.2g} %")
                self._rule_out(
                    name,
                    f"{codec_name(codec)} {done} here ({standing.samples} samples), more than "
                    f"{100 * limit:g} %",
                )
                return

    def _compared(
        self,
        tensor: TensorLayout,
        layout: KVLayout,
        original: npt.NDArray[np.uint8],
        restored: npt.NDArray[np.uint8],
    ) -> tuple[float, float]:
        keys = next((one for one in layout.tensors if one.role == "key"), tensor)
        return self._compare(tensor, keys, original, restored)

    def _rule_out(self, name: tuple[int, int], why: str) -> None:
        standing = self._standings[name]
        if standing.why:
            return
        tag, codec = name
        standing.why = why
        self._ruled_out = {**self._ruled_out, name: why}
        say = _log.error if is_exact(codec) else _log.warning
        say(
            "LifeboatCache: %s is not used any more for blocks of layout %016x: %s%s",
            codec_name(codec),
            tag,
            why,
            "; please report this" if is_exact(codec) else "",
        )


def _mean(errors: list[float]) -> float:
    """A mean that is bounded: what has no bounds would never be forgotten."""
    bounded = [min(error, _WORST) if np.isfinite(error) else _WORST for error in errors]
    return sum(bounded) / max(1, len(bounded))


def _part(layout: KVLayout, codec: int, chance: random.Random) -> CodedLayout | None:
    """One layer of a block, as the codec stores it: the whole would take too long."""
    coded = coded_layout(layout, codec)
    known = [
        (tensor, coder)
        for tensor, coder in zip(layout.tensors, coded.coders, strict=True)
        if (coder[0] in _EXACT_CODERS) == is_exact(codec) and coder[0] != columns.CODER_COPY
    ]
    if not known:
        return None
    layer = chance.choice(sorted({tensor.layer for tensor, _ in known}))
    mine = [(tensor, coder) for tensor, coder in known if tensor.layer == layer]
    return CodedLayout(
        KVLayout(layout.nbytes, tuple(tensor for tensor, _ in mine)),
        codec,
        tuple(coder for _, coder in mine),
    )
