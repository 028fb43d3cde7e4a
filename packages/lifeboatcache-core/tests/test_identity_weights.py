"""The fingerprint of a checkpoint's weights."""

import itertools
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from hypothesis import given
from hypothesis import strategies as st
from safetensors_file import Tensor, bfloat16, write_file, write_sharded

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity import FingerprintStoppedError, weights_identity
from lifeboat_cache.identity.sampling import WHOLE_BYTES, WINDOW_BYTES, sample_windows, windows_for

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def digest(path: Path, **options: Any) -> str:
    return weights_identity(path, **options).digest


def big_tensor(seed: int = 0, rows: int = 512, columns: int = 1024) -> Tensor:
    return bfloat16(np.random.default_rng(seed).normal(0, 0.02, (rows, columns)))


def flipped(tensor: Tensor, at: int) -> Tensor:
    data = bytearray(tensor.data)
    data[at] ^= 1
    return Tensor(tensor.dtype, tensor.shape, bytes(data))


def test_the_same_files_elsewhere_are_the_same_weights(tmp_path: Path) -> None:
    one = tiny_llama.write(tmp_path / "a")
    other = tiny_llama.write(tmp_path / "b" / "c")
    os.utime(other / "model.safetensors", (1, 1))
    assert weights_identity(one).to_identity() == weights_identity(other).to_identity()


def test_another_checkpoint_at_the_same_path_with_one_changed_tensor_differs(
    tmp_path: Path,
) -> None:
    weights = tiny_llama.tensors()
    before = digest(tiny_llama.write(tmp_path, weights=weights))
    weights[K_PROJ] = tiny_llama.tensors(seed=1)[K_PROJ]
    assert digest(tiny_llama.write(tmp_path, weights=weights)) != before


def test_a_slight_fine_tune_of_one_tensor_differs(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(0, 0.02, (2048, 1024)).astype(np.float32)
    step = np.random.default_rng(1).normal(0, 1e-4, values.shape).astype(np.float32)
    tensors = {"layer.weight": bfloat16(values), "other": big_tensor()}
    write_file(tmp_path / "model.safetensors", tensors)
    before = digest(tmp_path)
    tuned = bfloat16(values + step)
    same = np.frombuffer(tuned.data, np.uint16) == np.frombuffer(
        tensors["layer.weight"].data, "<u2"
    )
    assert 0.3 < same.mean() < 1, "most bf16 values do not move at so small a step"
    write_file(tmp_path / "model.safetensors", tensors | {"layer.weight": tuned})
    assert digest(tmp_path) != before


def test_a_change_of_one_value_in_a_thousand_of_every_tensor_differs(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    tensors = {f"layer.{number}.weight": big_tensor(number) for number in range(8)}
    write_file(tmp_path / "model.safetensors", tensors)
    before = digest(tmp_path)
    changed = {}
    for name, tensor in tensors.items():
        bits = np.frombuffer(tensor.data, "<u2").copy()
        bits[random.random(bits.size) < 1e-3] ^= 1
        changed[name] = Tensor(tensor.dtype, tensor.shape, bits.tobytes())
    write_file(tmp_path / "model.safetensors", changed)
    assert digest(tmp_path) != before


@pytest.mark.parametrize("at", [0, WINDOW_BYTES - 1, -1, -WINDOW_BYTES])
def test_the_first_and_last_window_of_a_large_tensor_are_always_read(
    tmp_path: Path, at: int
) -> None:
    tensor = big_tensor()
    write_file(tmp_path / "model.safetensors", {"w": tensor})
    before = digest(tmp_path)
    write_file(tmp_path / "model.safetensors", {"w": flipped(tensor, at)})
    assert digest(tmp_path) != before


@pytest.mark.parametrize("at", [0, WHOLE_BYTES // 2 + 7, WHOLE_BYTES - 1])
def test_a_small_tensor_is_read_whole(tmp_path: Path, at: int) -> None:
    tensor = Tensor("U8", (WHOLE_BYTES,), np.random.default_rng(0).bytes(WHOLE_BYTES))
    write_file(tmp_path / "model.safetensors", {"w": tensor, "big": big_tensor()})
    before = digest(tmp_path)
    write_file(tmp_path / "model.safetensors", {"w": flipped(tensor, at), "big": big_tensor()})
    assert digest(tmp_path) != before


def test_resharding_reordering_and_metadata_do_not_count(tmp_path: Path) -> None:
    weights = tiny_llama.tensors() | {"big": big_tensor()}
    single = tmp_path / "single"
    single.mkdir()
    write_file(single / "model.safetensors", weights, {"format": "pt"})
    expected = digest(single)

    renamed = tmp_path / "renamed"
    renamed.mkdir()
    backwards = dict(reversed(weights.items()))
    write_file(renamed / "weights-7.safetensors", backwards, {"by": "somebody"}, padding=4321)
    assert digest(renamed) == expected

    names = list(weights)
    for count in (2, 5):
        directory = tmp_path / f"sharded-{count}"
        directory.mkdir()
        write_sharded(
            directory, [{name: weights[name] for name in names[i::count]} for i in range(count)]
        )
        assert weights_identity(directory).tensors == len(weights)
        assert digest(directory) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda t: Tensor("F16", t.shape, t.data),
        lambda t: Tensor(t.dtype, t.shape[::-1], t.data),
        lambda t: Tensor(t.dtype, (t.shape[0] * t.shape[1],), t.data),
    ],
    ids=["dtype", "transposed", "flattened"],
)
def test_dtype_and_shape_count(tmp_path: Path, change: Callable[[Tensor], Tensor]) -> None:
    tensor = bfloat16(np.random.default_rng(0).normal(size=(16, 32)))
    write_file(tmp_path / "model.safetensors", {"w": tensor})
    before = digest(tmp_path)
    write_file(tmp_path / "model.safetensors", {"w": change(tensor)})
    assert digest(tmp_path) != before


def test_names_count_and_cannot_run_into_each_other(tmp_path: Path) -> None:
    tensor = bfloat16(np.zeros((2, 2)))
    found = set()
    for names in (("a", "bc"), ("ab", "c"), ("a", "b"), ("b", "a1")):
        write_file(tmp_path / "model.safetensors", dict.fromkeys(names, tensor))
        found.add(digest(tmp_path))
    assert len(found) == 4


def test_swapping_the_content_of_two_tensors_differs(tmp_path: Path) -> None:
    one, other = big_tensor(1), big_tensor(2)
    write_file(tmp_path / "model.safetensors", {"a": one, "b": other})
    before = digest(tmp_path)
    write_file(tmp_path / "model.safetensors", {"a": other, "b": one})
    assert digest(tmp_path) != before


def test_of_a_name_in_two_files_both_count_in_loading_order(tmp_path: Path) -> None:
    one, other = bfloat16(np.zeros((2, 2))), bfloat16(np.ones((2, 2)))
    write_file(tmp_path / "x-2.safetensors", {"w": one})
    write_file(tmp_path / "x-10.safetensors", {"w": other})
    before = digest(tmp_path)
    write_file(tmp_path / "x-2.safetensors", {"w": other})
    write_file(tmp_path / "x-10.safetensors", {"w": one})
    assert digest(tmp_path) != before, "the later file wins, so the order is part of the model"
    found = weights_identity(tmp_path)
    assert found.tensors == 2
    assert found.files == ("x-2.safetensors", "x-10.safetensors"), "as loaders order shards"


def test_files_that_the_index_does_not_name_are_left_out(tmp_path: Path) -> None:
    weights = tiny_llama.tensors()
    directory = tiny_llama.write(tmp_path, weights=weights, shards=2)
    before = weights_identity(directory)
    write_file(directory / "consolidate.safetensors", {"w": big_tensor()})
    after = weights_identity(directory)
    assert after.files == before.files
    assert after.digest == before.digest


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = tiny_llama.write(tmp_path, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(IdentityError, match=r"model-00002-of-00003.*complete the download"):
        weights_identity(directory)


def test_another_process_finds_the_same(tmp_path: Path) -> None:
    directory = tiny_llama.write(tmp_path, shards=2)
    code = (
        "import sys; from lifeboat_cache.identity import weights_identity; "
        "print(weights_identity(sys.argv[1]).digest)"
    )
    found = set()
    for seed in ("0", "1"):
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        found.add(
            subprocess.run(
                [sys.executable, "-c", code, str(directory)],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
        )
    assert found == {digest(directory)}


def test_the_digest_of_a_fixed_checkpoint_stays(tmp_path: Path) -> None:
    # A changed digest makes everybody's stored KV unreachable: then _FORMAT must change too.
    data = (np.arange(200_000, dtype=np.uint32) * 2654435761 >> 24).astype(np.uint8)
    write_file(tmp_path / "model.safetensors", {"w": Tensor.of(data), "v": Tensor.of(data[:99])})
    assert digest(tmp_path) == "582b37269e1bd5593d96ae6671bb0d1cb9bff993e51427ff1e13e466c1a05248"


def test_dummy_weights_are_a_kind_of_their_own(tmp_path: Path) -> None:
    directory = tiny_llama.write(tmp_path)
    dummy = weights_identity(directory, load_format="dummy")
    assert dummy.kind == "dummy"
    assert dummy.digest == digest(Path("nowhere"), load_format="dummy")
    assert dummy.digest != digest(directory)


@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache", "modelexpress", "npcache"])
def test_formats_whose_weights_are_elsewhere_are_refused(tmp_path: Path, load_format: str) -> None:
    with pytest.raises(IdentityError, match=rf"{load_format}.*local directory"):
        weights_identity(tiny_llama.write(tmp_path), load_format=load_format)


def test_an_unknown_load_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="my_loader"):
        weights_identity(tiny_llama.write(tmp_path), load_format="my_loader")


@pytest.mark.parametrize("path", ["s3://bucket/model", "gs://bucket/model", "az://x/y"])
def test_remote_weights_are_refused(path: str) -> None:
    with pytest.raises(IdentityError, match="local directory"):
        weights_identity(path)
    with pytest.raises(IdentityError, match="local directory"):
        weights_identity(Path(path))


def test_the_load_format_chooses_the_files(tmp_path: Path) -> None:
    directory = tiny_llama.write(tmp_path)
    hf = weights_identity(directory)
    write_file(directory / "consolidated.safetensors", {"w": big_tensor()})
    assert weights_identity(directory).files == ("consolidated.safetensors",)
    assert weights_identity(directory, load_format="mistral").files == ("consolidated.safetensors",)
    (directory / "pytorch_model.bin").write_bytes(b"x" * 100)
    (directory / "training_args.bin").write_bytes(b"y" * 100)
    (directory / "consolidated.safetensors").unlink()
    assert weights_identity(directory).digest == hf.digest
    (directory / "model.safetensors").unlink()
    assert weights_identity(directory).files == ("pytorch_model.bin",)
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(IdentityError, match="no weights"):
        weights_identity(directory)


def test_an_empty_or_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no weights"):
        weights_identity(tmp_path)
    with pytest.raises(IdentityError, match="no such directory"):
        weights_identity(tmp_path / "missing")


def test_it_stops_when_asked(tmp_path: Path) -> None:
    with pytest.raises(FingerprintStoppedError, match="stopped"):
        weights_identity(tiny_llama.write(tmp_path), should_stop=lambda: True)


def test_weights_that_changed_after_the_engine_loaded_them_are_refused(tmp_path: Path) -> None:
    directory = tiny_llama.write(tmp_path)
    changed = (directory / "model.safetensors").stat().st_ctime
    assert digest(directory, not_after=changed + 1) == digest(directory)
    os.utime(directory / "model.safetensors", (1, 1))
    with pytest.raises(IdentityError, match="restart the engine"):
        weights_identity(directory, not_after=changed - 60)


def test_weights_that_change_meanwhile_are_refused(tmp_path: Path) -> None:
    directory = tiny_llama.write(tmp_path)

    def replace() -> bool:
        tiny_llama.write(directory, seed=1)
        os.utime(directory / "model.safetensors", (1, 1))  # the clock ticks every 4 ms only
        return False

    with pytest.raises(IdentityError, match="changed while"):
        weights_identity(directory, should_stop=replace)


def torch_archive(
    path: Path,
    storages: dict[str, bytes],
    name: str = "archive",
    extra: Sequence[tuple[str, bytes]] = (),
) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{name}/data.pkl", json.dumps(sorted(storages)))
        for key, data in storages.items():
            archive.writestr(f"{name}/data/{key}", data)
        for member, data in extra:
            archive.writestr(f"{name}/{member}", data)


def test_a_torch_archive_is_sampled_by_member_and_never_unpickled(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    storages = {str(number): random.bytes(300_000) for number in range(4)}
    torch_archive(tmp_path / "pytorch_model.bin", storages)
    found = weights_identity(tmp_path)
    assert (found.kind, found.tensors) == ("torch", 5)
    torch_archive(
        tmp_path / "pytorch_model.bin",
        storages,
        name="other",
        extra=[(".data/serialization_id", b"123")],
    )
    assert digest(tmp_path) == found.digest, "the archive's own name and save id do not count"
    middle = bytearray(storages["2"])
    middle[150_001] ^= 1
    torch_archive(tmp_path / "pytorch_model.bin", storages | {"2": bytes(middle)})
    assert digest(tmp_path) != found.digest, "its CRC tells"


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch_archive(path, {"0": bytes(300_000)})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"PK\x03\x04", b"PK\x03\x05", 1))
    with pytest.raises(IdentityError, match=r"pytorch_model\.bin.*download or copy"):
        weights_identity(tmp_path)


@pytest.mark.parametrize(("name", "kind"), [("m.gguf", "gguf"), ("m.pt", "torch")])
@pytest.mark.parametrize("at", [0, 5_000_000, -1])
def test_other_files_are_sampled_in_strides(tmp_path: Path, name: str, kind: str, at: int) -> None:
    data = bytearray(np.random.default_rng(0).bytes(9_000_000))
    (tmp_path / name).write_bytes(data)
    before = weights_identity(tmp_path)
    assert before.kind == kind
    assert before.tensors == 257
    # A stride of 31 KiB cannot miss a change as long as that.
    for offset in range(at, min(at + 36_000, len(data)) if at >= 0 else 0):
        data[offset] ^= 1
    (tmp_path / name).write_bytes(data)
    assert digest(tmp_path) != before.digest
    (tmp_path / name).write_bytes(data[:-10])
    assert digest(tmp_path) != before.digest


@given(
    name=st.text(max_size=40),
    length=st.integers(0, 1 << 34),
    regions=st.integers(0, 200_000),
)
def test_windows_are_disjoint_ascending_and_inside(name: str, length: int, regions: int) -> None:
    windows = windows_for(regions)
    pieces = sample_windows(name, length, windows)
    behind = 0
    for offset, size in pieces:
        assert offset >= behind
        assert size > 0
        behind = offset + size
    assert behind <= length
    if length <= WHOLE_BYTES:
        assert sum(size for _, size in pieces) == length
    else:
        assert len(pieces) == windows
        assert pieces[0] == (0, WINDOW_BYTES)
        assert pieces[-1] == (length - WINDOW_BYTES, WINDOW_BYTES)
        # Strata: no gap is longer than two of them.
        gaps = [b[0] - a[0] for a, b in itertools.pairwise(pieces)]
        assert max(gaps) <= 2 * (length // (windows - 2)) + 2 * WINDOW_BYTES


def test_the_number_of_windows_shrinks_with_the_number_of_tensors() -> None:
    assert [windows_for(count) for count in (0, 1, 1024, 2048, 4096, 1 << 20)] == [
        16,
        16,
        16,
        8,
        4,
        4,
    ]
