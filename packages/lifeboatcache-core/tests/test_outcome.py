"""Answers as numpy sees them."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from lifeboat_cache.outcome import Lookup, Outcome


@pytest.mark.parametrize("answer", [Lookup.HIT, Outcome.OK])
def test_comparing_many_with_one_runs_nothing_that_a_signal_could_interrupt(
    answer: Lookup | Outcome,
) -> None:
    # numpy would drop what the handler raises, and the process would not end when it is told to.
    answers = np.array([0, 1, 2], dtype=np.uint8)
    called = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        equal = answers == answer
        differing = np.not_equal(answer, answers)
        equal[:] |= np.less(answers, answer)
    finally:
        sys.setprofile(None)
    assert called == []
    assert equal.tolist() == [True, True, False]
    assert differing.tolist() == [True, False, True]
