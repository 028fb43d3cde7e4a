"""How far restored KV is from what was stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lifeboat_cache.codecs.layout import DType, TensorLayout
from lifeboat_cache.codecs.quality import (
    attention_shift,
    compare,
    output_error,
    relative_error,
    to_float32,
)

HEADS, TOKENS, DIM = 3, 48, 16


def values(seed: int = 0) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(0, 1, (HEADS, 1, DIM)))
    return (rng.standard_normal((HEADS, TOKENS, DIM)) * scales).astype(np.float32)


def tensor(role: Any, dtype: DType, offset: int = 0) -> TensorLayout:
    width = DIM * (4 if dtype == "float32" else 2)
    # Heads before tokens, as some engines have them.
    return TensorLayout(
        role, dtype, 0, 3, 16, HEADS, DIM, 16 * width, width, TOKENS * width, offset
    )


def packed(array: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[np.uint8]:
    if dtype == "bfloat16":
        return (array.view(np.uint32) >> 16).astype("<u2").reshape(-1).view(np.uint8)
    return array.astype("<f2" if dtype == "float16" else "<f4").reshape(-1).view(np.uint8)


@pytest.mark.parametrize(
    ("dtype", "precision"), [("bfloat16", 2**-7), ("float16", 2**-10), ("float32", 0.0)]
)
def test_elements_as_numbers(dtype: DType, precision: float) -> None:
    array = values()
    found = to_float32(tensor("key", dtype), packed(array, dtype))
    assert found.shape == (HEADS, TOKENS, DIM)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, array, rtol=precision, atol=1e-6 if precision else 0)


def test_what_is_exact_anyway_is_not_compared() -> None:
    one = TensorLayout("key", "float8_e4m3fn", 0, 1, 1, 1, 8, 8, 8, 8, 0)
    with pytest.raises(ValueError, match="stored exactly"):
        to_float32(one, np.zeros(8, dtype=np.uint8))


def test_relative_error() -> None:
    array = values()
    assert relative_error(array, array) == 0
    assert relative_error(array, array * np.float32(1.25)) == pytest.approx(0.25)
    assert relative_error(array, np.zeros_like(array)) == pytest.approx(1)
    zeros = np.zeros_like(array)
    assert relative_error(zeros, zeros) == 0
    assert relative_error(zeros, array) == np.inf
    huge = np.full_like(array, 3e38)
    assert relative_error(huge, -huge) == pytest.approx(2), "squares do not overflow"


def test_infinities_must_come_back_and_disturb_nothing_else() -> None:
    array = values()
    array[0, 0, 0], array[1, 2, 3] = np.inf, np.nan
    near = array * np.float32(1.01)
    assert relative_error(array, near) == pytest.approx(0.01, rel=1e-3)
    near[0, 0, 0] = 3e38
    assert relative_error(array, near) == np.inf
    lost = array.copy()
    lost[1, 2, 3] = 0
    assert relative_error(array, lost) == np.inf
    worse = values()
    worse[0, 0, 0] = np.inf
    assert not relative_error(values(), worse) < 1e9


def test_attention_shifts_with_the_error_and_stays_within_1() -> None:
    keys = values()
    noise = values(1)
    assert attention_shift(keys, keys) == 0
    shifts = [
        attention_shift(keys, keys + np.float32(part) * noise) for part in (0.02, 0.2, 2, 200)
    ]
    assert shifts == sorted(shifts)
    assert 0 < shifts[0] < 0.05
    assert 0.5 < shifts[-1] <= 1


def test_what_is_common_to_all_tokens_moves_no_attention() -> None:
    keys = values()
    offset = np.float32(10) * values(2)[:, :1]
    assert relative_error(keys, keys + offset) > 1
    assert attention_shift(keys, keys + offset) < 1e-3
    assert attention_shift(keys + offset, keys) < 1e-3


def test_a_scale_of_all_keys_does_not_matter() -> None:
    keys, noise = values(), np.float32(0.1) * values(1)
    assert attention_shift(keys * np.float32(100), (keys + noise) * np.float32(100)) == (
        pytest.approx(attention_shift(keys, keys + noise), rel=1e-3)
    )


def test_errors_of_values_average_out_and_a_common_one_does_not() -> None:
    keys = values()
    for size in (0.05, 0.5):
        noise = np.float32(size) * values(1)
        alone = output_error(keys, keys, keys + noise)
        common = output_error(keys, keys, keys + noise[:, :1])
        assert 0 < alone < common
    assert output_error(keys, keys, keys) == 0


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("same", [False, True])
def test_blocks_of_few_or_equal_tokens(tokens: int, same: bool) -> None:
    keys = np.ones((HEADS, tokens, DIM), dtype=np.float32) if same else values()[:, :tokens]
    assert attention_shift(keys, keys) == 0
    assert np.isfinite(attention_shift(keys, keys * np.float32(0.9)))
    assert np.isfinite(output_error(keys, keys, keys * np.float32(0.9)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tensors_of_a_block(dtype: DType) -> None:
    keys = tensor("key", dtype)
    vals = tensor("value", dtype, keys.nbytes)
    payload = np.concatenate((packed(values(), dtype), packed(values(3), dtype)))
    restored = np.concatenate(
        (packed(values() * np.float32(1.02), dtype), packed(values(3) * np.float32(1.3), dtype))
    )
    assert compare(keys, keys, payload, payload) == (0, 0)
    assert compare(vals, keys, payload, payload) == (0, 0)
    error, shift = compare(keys, keys, payload, restored)
    assert error == pytest.approx(0.02, abs=0.004)
    assert 0 < shift < 0.02
    error, output = compare(vals, keys, payload, restored)
    assert error == pytest.approx(0.3, abs=0.01)
    assert output == pytest.approx(0.3, abs=0.03)
    latent = tensor("latent", dtype)
    assert compare(latent, latent, payload, restored)[1] == shift


def test_a_tensor_that_is_not_finite_has_no_attention() -> None:
    array = values()
    array[0, 0, 0] = np.inf
    keys = tensor("key", "float32")
    payload = packed(array, "float32")
    assert compare(keys, keys, payload, payload) == (0, 0)
    lost = array.copy()
    lost[0, 0, 0] = 1
    assert compare(keys, keys, payload, packed(lost, "float32")) == (np.inf, np.inf)
