"""Arrays that nobody has written to."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from lifeboat_cache.mlx import blank
from lifeboat_cache.mlx.arrays import DTYPES, memory_of
from lifeboat_cache.mlx.blank import blank_arrays


@pytest.fixture(params=["from a file", "zeros"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "zeros":

        def refuse(*args: object, **options: object) -> None:
            raise RuntimeError("another MLX")

        monkeypatch.setattr(mx, "load", refuse)


@pytest.mark.usefixtures("_way")
def test_arrays_have_memory_of_their_own_that_can_be_filled() -> None:
    wanted = [((1, 2, 640, 64), name) for name in DTYPES] * 2 + [((1, 2, 640, 0), "float32")]
    arrays = blank_arrays(wanted)
    assert [(array.shape, array.dtype) for array in arrays] == [
        (shape, DTYPES[name]) for shape, name in wanted
    ]
    filled = []
    for number, array in enumerate(arrays[:-1]):
        memory, _ = memory_of(array, row=4)
        memory.view(np.uint8)[:] = number % 2  # a bool is 0 or 1
        filled.append(memory)
    for number, array in enumerate(arrays[:-1]):
        again, _ = memory_of(array, row=4)
        assert again.ctypes.data == filled[number].ctypes.data
        assert (again.view(np.uint8) == number % 2).all()


def test_no_byte_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it worth while: the memory is not touched, so the system has not given it yet."""

    def resident() -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

    def none(*args: object) -> None:
        raise AssertionError("made of zeros after all")

    monkeypatch.setattr(blank, "_zeros", none)
    before = resident()
    arrays = blank_arrays([((1, 8, 16384, 128), "bfloat16")] * 4)
    assert resident() - before < 64 << 10  # KiB; 128 MiB were wanted
    mx.eval(arrays)
