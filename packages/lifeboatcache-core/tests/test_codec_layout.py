"""Descriptions of blocks: every byte belongs to one tensor, and equal tags mean equal blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifeboat_cache.codecs.layout import KVLayout, TensorLayout
from lifeboat_cache.codecs.names import RAW
from lifeboat_cache.codecs.recipes import coded_layout

_TENSOR = TensorLayout("key", "bfloat16", 0, 2, 3, 2, 8, 200, 64, 32, 10)


def test_gaps_are_opaque() -> None:
    layout = KVLayout.of(500, [_TENSOR])
    assert sum(tensor.nbytes for tensor in layout.tensors) == 500
    assert [tensor.role for tensor in layout.tensors[1:]] == ["opaque"] * (len(layout.tensors) - 1)
    # Before it, between its vectors, and after it.
    first = layout.tensors[1]
    assert (first.offset, first.nbytes) == (0, 10)
    assert KVLayout.of(0).tensors == ()
    assert KVLayout.opaque(7) == KVLayout.of(7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "empty"),
        ({"offset": -1}, "outside"),
        ({"offset": 400}, "outside"),
        ({"head_stride": 8}, "overlap"),
        ({"outer_stride": 64}, "overlap"),
        ({"outer_stride": 0}, "overlap"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVLayout.of(500, [replace(_TENSOR, **change)])  # type: ignore[arg-type]


def test_tensors_must_not_overlap() -> None:
    with pytest.raises(ValueError, match="overlap"):
        KVLayout.of(1000, [_TENSOR, replace(_TENSOR, offset=20)])
    apart = KVLayout.of(1000, [_TENSOR, replace(_TENSOR, offset=500)])
    assert apart.nbytes == 1000


def test_the_tag_covers_everything() -> None:
    tags = {KVLayout.of(500, [_TENSOR]).tag, KVLayout.of(501, [_TENSOR]).tag}
    for change in (
        {"role": "value"},
        {"dtype": "float16"},
        {"layer": 1},
        {"outer": 1},
        {"inner": 2},
        {"heads": 1},
        {"dim": 4},
        {"outer_stride": 208},
        {"inner_stride": 66},
        {"head_stride": 30},
        {"offset": 12},
    ):
        tags.add(KVLayout.of(500, [replace(_TENSOR, **change)]).tag)
    assert len(tags) == 13
    assert KVLayout.of(500, [_TENSOR]).tag == KVLayout.of(500, [_TENSOR]).tag


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.data())
def test_gather_and_scatter_are_inverse(
    outer: int, inner: int, heads: int, dim: int, data: st.DataObject
) -> None:
    width = dim * 2
    pads = [data.draw(st.integers(0, 5)) for _ in range(3)]
    head = width + pads[0]
    step = heads * head + pads[1]
    page = inner * step + pads[2]
    tensor = TensorLayout("key", "float16", 0, outer, inner, heads, dim, page, step, head, 3)
    nbytes = 3 + outer * page
    layout = KVLayout.of(nbytes, [tensor])
    payload = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
    back = np.zeros_like(payload)
    for part in layout.tensors:
        part.scatter(part.gather(payload), back)
    assert np.array_equal(back, payload)
    vectors = tensor.gather(payload)
    assert vectors.shape == (outer * inner, heads, width)
    token, at = inner * outer - 1, 3 + (outer - 1) * page + (inner - 1) * step
    assert np.array_equal(vectors[token, 0], payload[at : at + width])


def test_pieces() -> None:
    layout = KVLayout.of(500, [_TENSOR])
    coded = coded_layout(layout, RAW)
    places = coded.places(np.array([500]))
    assert places is not None
    which, within = places
    assert (which == 0).all()
    assert within.tolist() == [tensor.offset for tensor in layout.tensors]
    assert coded.places(np.array([11, 489])) is None  # inside the first vector
    assert coded.places(np.array([200, 300])) is None  # between two pages of the tensor
    assert coded.places(np.array([4, 496])) is None  # inside the opaque bytes in front
    two = KVLayout.of(1000, [_TENSOR, replace(_TENSOR, offset=510)])
    cut = coded_layout(two, RAW).places(np.array([0, 500, 0, 500]))
    assert cut is None or set(cut[0].tolist()) == {1, 3}
