"""What was shown to go wrong with SGLang's own file backend, done right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_llama
from sglang_rig import Case, Restored, Rig

from lifeboat_cache.integrations import sglang_identity

Attach = Callable[..., Rig]

NOTHING = Restored(0, 0, same=True, state=False)


def everything(case: Case) -> Restored:
    return Restored(case.pages, case.pages, same=True, state=case.mamba)


def stored(attach: Attach, case: Case) -> None:
    with attach(case) as writer:
        assert writer.store() == case.pages


def segments(home: Path) -> list[Path]:
    return sorted((home / "kv").rglob("*.segment"))


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_head"])
def test_pages_of_another_layout_are_never_served_scrambled(attach: Attach, layout: str) -> None:
    """HiCacheFile: pages of page_first_direct "hit" under layer_first, in another order."""
    case = Case()
    stored(attach, case)
    found = attach(case.but(layout=layout)).restore()
    assert found.same
    assert found in (NOTHING, everything(case))


def test_pages_of_another_dtype_are_never_served(attach: Attach) -> None:
    """HiCacheFile: a bf16 page is served to an fp16 run, for it has as many bytes."""
    case = Case(dtype="bfloat16")
    stored(attach, case)
    assert attach(case.but(dtype="float16")).restore() == NOTHING
    assert attach(case).restore() == everything(case)


def test_model_names_that_look_alike_share_nothing_but_the_same_model(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiCacheFile: models a/b-c and a-b/c share keys. Ours go by what a model is."""
    case = Case(model_name="a/b-c")
    stored(attach, case)
    # The same model under another name is the same model.
    assert attach(case.but(model_name="a-b/c")).restore() == everything(case)
    # Another model under the same name is not.
    original = sglang_identity._model

    def other(*args: object, **kwargs: object) -> object:
        section, weights = original(*args, **kwargs)  # type: ignore[arg-type]
        return {**section, "weights": {"kind": "safetensors", "digest": "0" * 64}}, weights

    monkeypatch.setattr(sglang_identity, "_model", other)
    assert attach(case).restore() == NOTHING


def test_weights_that_changed_at_the_same_path_share_nothing(
    attach: Attach, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case()
    stored(attach, case)
    kept = {path: path.read_bytes() for path in model.glob("*.safetensors")}
    try:
        tiny_llama.write(model, seed=1)
        assert attach(case).restore() == NOTHING
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


def test_another_rope_shares_nothing(attach: Attach, model: Path) -> None:
    from sglang.srt.utils.hf_transformers_utils import get_config

    case = Case()
    stored(attach, case)
    config = model / "config.json"
    kept = config.read_text()
    try:
        config.write_text(json.dumps({**json.loads(kept), "rope_theta": 500000.0}))
        get_config.cache_clear()
        assert attach(case).restore() == NOTHING
    finally:
        config.write_text(kept)
        get_config.cache_clear()


def test_a_flipped_bit_is_a_miss_and_is_stored_again(attach: Attach, home: Path) -> None:
    """HiCacheFile: serves it."""
    case = Case(pages=12)
    stored(attach, case)
    (segment,) = segments(home)
    content = bytearray(segment.read_bytes())
    # In the middle of the sixth page.
    content[4096 + 5 * 131072 + 4097] ^= 1
    segment.write_bytes(content)
    with attach(case) as rig:
        assert rig.restore() == Restored(12, 5, same=True, state=False)
        # SGLang computes the rest and gives it to us again.
        assert rig.store() == 12
        assert rig.restore() == everything(case)
    assert attach(case).restore() == everything(case)


def test_a_truncated_file_does_not_poison_its_keys(attach: Attach, home: Path) -> None:
    """HiCacheFile: a short file fails every read, and is never written again."""
    case = Case(pages=12)
    stored(attach, case)
    (segment,) = segments(home)
    with segment.open("r+b") as file:
        file.truncate(4096 + 7 * 131072 + 100)
    with attach(case) as rig:
        found = rig.restore()
        assert (found.loaded_pages, found.same) == (7, True)
        assert rig.store() == 12
        assert rig.restore() == everything(case)
    assert attach(case).restore() == everything(case)


def test_a_segment_that_vanished_is_a_miss_and_is_stored_again(attach: Attach, home: Path) -> None:
    case = Case(pages=12)
    with attach(case) as rig:
        assert rig.store() == 12
    for segment in segments(home):
        segment.unlink()
    with attach(case) as rig:
        found = rig.restore()
        assert (found.loaded_pages, found.same) == (0, True)
        assert rig.store() == 12
        assert rig.restore() == everything(case)


def test_thousands_of_pages_are_a_handful_of_files(attach: Attach, home: Path) -> None:
    """HiCacheFile: a file a page, 7.5 million in one directory."""
    case = Case(tokens=1, pages=3000)
    stored(attach, case)
    assert len([path for path in (home / "kv").rglob("*") if path.is_file()]) < 12


def test_a_batch_that_fails_is_tried_again_inside(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang gives the rest of a node up for one page that was not kept."""
    import numpy as np

    from lifeboat_cache.interface import Outcome
    from lifeboat_cache.store.storing import Storing

    rig = attach(Case(pages=6))
    rig.ready()
    original = Storing.finish
    failed: list[bool] = []

    def fail_once(self: Storing, tasks: list[object]) -> None:
        original(self, tasks)  # type: ignore[arg-type]
        if not failed:
            failed.append(True)
            for task in tasks:
                np.asarray(task.outcomes)[:] = Outcome.FAILED  # type: ignore[attr-defined]

    monkeypatch.setattr(Storing, "finish", fail_once)
    assert rig.store() == 6
    assert failed
    assert rig.restore() == everything(rig.case)
