"""Stores of tables: bit-exact round trips, whole files or none, several processes, and refusals by name."""

import json
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vq_adapters.artifacts import ArtifactStore, FileArtifactStore, digest, file_name, table_name
from vq_functional.core.errors import QuantizerConfigError


def draw(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def same(one: mx.array, two: mx.array) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and bool(mx.array_equal(one, two))


@pytest.fixture
def store(tmp_path: Path) -> FileArtifactStore:
    return FileArtifactStore(tmp_path / "new" / "folder")


def files(store: FileArtifactStore) -> list[str]:
    return sorted(os.listdir(store.folder)) if store.folder.exists() else []


# Round trips


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_tables_come_back_bit_for_bit(store: FileArtifactStore, dtype: mx.Dtype) -> None:
    rotation, levels, projection = (draw(*shape).astype(dtype) for shape in ((8, 8), (16,), (12, 8)))
    store.save_rotation_matrix(rotation, 8, 42)
    store.save_codebook(levels, "gaussian", 4, 8)
    store.save_jl_matrix(projection, 8, 12, 42)
    other = FileArtifactStore(str(store.folder))
    assert same(other.load_rotation_matrix(8, 42), rotation)
    assert same(other.load_codebook("gaussian", 4, 8), levels)
    assert same(other.load_jl_matrix(8, 12, 42), projection)


def test_what_is_not_there(store: FileArtifactStore) -> None:
    named: list[tuple[str, dict[str, Any]]] = [
        ("rotation", {"d": 8, "seed": 0}),
        ("codebook", {"distribution": "gaussian", "b": 2, "d": 8}),
        ("jl", {"d": 8, "m": 4, "seed": 0}),
        ("spectral", {"name": "model"}),
    ]
    assert not any(store.exists(kind, **fields) for kind, fields in named)
    for load in (
        lambda: store.load_rotation_matrix(8, 0),
        lambda: store.load_codebook("gaussian", 2, 8),
        lambda: store.load_jl_matrix(8, 4, 0),
        lambda: store.load("spectral", "model"),
    ):
        with pytest.raises(FileNotFoundError, match=r"no (rotation|codebook|jl|spectral)"):
            load()
    store.save_rotation_matrix(draw(8, 8), 8, 0)
    store.save_codebook(draw(4), "gaussian", 2, 8)
    store.save_jl_matrix(draw(4, 8), 8, 4, 0)
    store.save("spectral", "model", {"axes": draw(2, 2)}, {})
    assert all(store.exists(kind, **fields) for kind, fields in named)
    assert not store.exists("rotation", d=8, seed=1) and not store.exists("jl", d=4, m=8, seed=0)


def test_any_arrays_and_metadata(store: FileArtifactStore) -> None:
    arrays = {
        "a": draw(2, 3, 4),
        "bits": mx.array([[1, 2], [3, 4]], mx.uint32),
        "flags": mx.array([True, False]),
        "one": mx.array(7),
        "none": mx.zeros((0, 3)),
        "half": draw(5).astype(mx.bfloat16),
    }
    metadata = {"layers": 3, "options": {"rule": "x", "sizes": [1, 2.5, None, True]}, "text": "é\n"}
    store.save("kind", "name", arrays, metadata)
    back, told = store.load("kind", "name")
    assert told == metadata and back.keys() == arrays.keys()
    assert all(same(back[name], x) for name, x in arrays.items())


def test_arrays_of_numpy_are_taken(store: FileArtifactStore) -> None:
    store.save_codebook(np.linspace(-1, 1, 4), "uniform", 2, 64)  # type: ignore[arg-type]
    np.testing.assert_allclose(np.array(store.load_codebook("uniform", 2, 64)), np.linspace(-1, 1, 4), rtol=1e-6)


def test_the_last_one_saved_is_there(store: FileArtifactStore) -> None:
    for seed in range(3):
        store.save_rotation_matrix(draw(4, 4, seed=seed), 4, 1)
        assert same(store.load_rotation_matrix(4, 1), draw(4, 4, seed=seed))
    assert len(files(store)) == 1


@given(d=st.integers(1, 9), b=st.integers(1, 4), seed=st.integers(0, 10**9), text=st.text(min_size=1, max_size=30))
def test_any_names(tmp_path_factory: pytest.TempPathFactory, d: int, b: int, seed: int, text: str) -> None:
    store = FileArtifactStore(tmp_path_factory.mktemp("store"))
    store.save_codebook(draw(2**b, seed=seed), text, b, d)
    store.save(text, text, {"x": draw(d, seed=seed)}, {"text": text})
    assert same(store.load_codebook(text, b, d), draw(2**b, seed=seed))
    arrays, told = store.load(text, text)
    assert same(arrays["x"], draw(d, seed=seed)) and told == {"text": text}
    assert len(files(store)) == 2


# Names


@pytest.mark.parametrize("name", ["../../out", "/etc/passwd", "..", ".", "a\\b", "a b", "nul\0", "é", "x" * 400, "-rf"])
def test_names_stay_within_the_folder(store: FileArtifactStore, name: str) -> None:
    store.save("kind", name, {"x": draw(2)}, {})
    (found,) = files(store)
    assert set(found) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") and len(found) < 255
    assert store.path("kind", name).parent == store.folder and os.listdir(store.folder.parent) == [store.folder.name]
    assert store.exists("kind", name=name)


def test_names_that_look_alike_are_two_files(store: FileArtifactStore) -> None:
    names = ["a/b", "a_b", "a\\b", "x" * 150, "x" * 151]
    for i, name in enumerate(names):
        store.save("kind", name, {"x": mx.array(i)}, {})
    assert [store.load("kind", name)[0]["x"].item() for name in names] == list(range(5))
    assert file_name("Qwen2.5-7B_v1") == "Qwen2.5-7B_v1" and file_name("a/b") != file_name("a_b")


def test_the_name_of_a_table_says_all() -> None:
    assert table_name("rotation", {"seed": 1, "d": 8}) == "d8-seed1"
    assert table_name("codebook", {"distribution": "g", "b": 2, "d": 8}) == "distributiong-b2-d8"


# Refusals


@pytest.mark.parametrize(
    "save, field",
    [
        (lambda store: store.save_rotation_matrix(draw(8, 7), 8, 0), "Pi"),
        (lambda store: store.save_codebook(draw(5), "gaussian", 2, 8), "cb"),
        (lambda store: store.save_jl_matrix(draw(8, 4), 8, 4, 0), "S"),
        (lambda store: store.save_rotation_matrix(draw(8, 8), 8, -1), "seed"),
        (lambda store: store.save_rotation_matrix(draw(8, 8), "8", 0), "d"),
        (lambda store: store.save_codebook(draw(4), "", 2, 8), "distribution"),
        (lambda store: store.save("kind", "", {"x": draw(2)}, {}), "name"),
        (lambda store: store.save("kind", "name", {}, {}), "arrays"),
        (lambda store: store.exists("rotation", d=8), "kwargs"),
        (lambda store: store.exists("spectral", d=8), "name"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(store: FileArtifactStore, save: Any, field: str) -> None:
    with pytest.raises(QuantizerConfigError, match=f"`{field}`"):
        save(store)
    assert files(store) == []


def test_metadata_that_json_can_not_hold_leaves_the_old_file(store: FileArtifactStore) -> None:
    store.save("kind", "name", {"x": draw(2)}, {"old": 1})
    with pytest.raises(TypeError):
        store.save("kind", "name", {"x": draw(2)}, {"new": object()})
    assert store.load("kind", "name")[1] == {"old": 1} and len(files(store)) == 1


def test_every_cut_and_every_flipped_byte_is_noticed(store: FileArtifactStore) -> None:
    store.save_rotation_matrix(draw(4, 4), 4, 1)
    path = store.path("rotation", "d4-seed1")
    whole = path.read_bytes()
    broken = [whole[:end] for end in range(0, len(whole), 9)]
    for place in range(0, len(whole), 5):
        broken.append(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    for data in broken:
        path.write_bytes(data)
        try:
            table = store.load_rotation_matrix(4, 1)
        except QuantizerConfigError as error:
            assert path.name in str(error)
            assert not store.exists("rotation", d=4, seed=1)
        else:  # a byte of a key that nobody reads
            assert same(table, draw(4, 4))
        assert path.read_bytes() == data


def foreign(path: Path) -> dict[str, Any]:
    """Ways to put something else in an artifact's place."""
    return {
        "nothing": lambda: path.write_bytes(b""),
        "text": lambda: path.write_text("{}" * 50),
        "pickle": lambda: path.write_bytes(pickle.dumps({"table": [1.0]})),
        "numpy": lambda: np.save(path.open("wb"), np.eye(4)),
        "plain safetensors": lambda: mx.save_safetensors(str(path), {"table": mx.eye(4)}),
        "other format": lambda: mx.save_safetensors(
            str(path), {"table": mx.eye(4)}, {"format": "x", "metadata": "{}", "digest": digest({"table": mx.eye(4)})}
        ),
    }


@pytest.mark.parametrize("kind", foreign(Path()).keys())
def test_files_of_others_are_refused_by_name(store: FileArtifactStore, kind: str) -> None:
    store.save_rotation_matrix(mx.eye(4), 4, 1)
    path = store.path("rotation", "d4-seed1")
    foreign(path)[kind]()
    before = path.read_bytes()
    with pytest.raises(QuantizerConfigError, match=path.name):
        store.load_rotation_matrix(4, 1)
    assert path.read_bytes() == before and len(files(store)) == 1


def test_an_artifact_under_another_name_is_refused(store: FileArtifactStore) -> None:
    store.save_rotation_matrix(mx.eye(4), 4, 1)
    os.rename(store.path("rotation", "d4-seed1"), store.path("rotation", "d4-seed2"))
    with pytest.raises(QuantizerConfigError, match="d4-seed2"):
        store.load_rotation_matrix(4, 2)
    store.save("rotation", "d4-seed3", {"table": mx.eye(5)}, {})
    with pytest.raises(QuantizerConfigError, match=r"\(4, 4\).*\(5, 5\)"):
        store.load_rotation_matrix(4, 3)
    store.save("jl", "d4-m2-seed3", {"matrix": mx.eye(5)}, {})
    with pytest.raises(QuantizerConfigError, match="table"):
        store.load_jl_matrix(4, 2, 3)


# Whole files or none


@pytest.mark.parametrize("failing", ["save_safetensors", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(
    store: FileArtifactStore, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save_rotation_matrix(mx.eye(4), 4, 1)

    def fail(*args: Any) -> None:
        if failing == "save_safetensors":
            Path(args[0]).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(mx if failing == "save_safetensors" else os, failing, fail)
    with pytest.raises(OSError, match="no space"):
        store.save_rotation_matrix(2 * mx.eye(4), 4, 1)
    monkeypatch.undo()
    assert same(store.load_rotation_matrix(4, 1), mx.eye(4)) and len(files(store)) == 1


def test_files_can_be_read_by_others(store: FileArtifactStore) -> None:
    old = os.umask(0o022)
    try:
        store.save_rotation_matrix(mx.eye(4), 4, 1)
    finally:
        os.umask(old)
    assert stat.S_IMODE(store.path("rotation", "d4-seed1").stat().st_mode) == 0o644


def test_what_was_loaded_outlives_the_file(store: FileArtifactStore) -> None:
    store.save_rotation_matrix(draw(64, 64), 64, 1)
    table = store.load_rotation_matrix(64, 1)
    store.save_rotation_matrix(draw(64, 64, seed=1), 64, 1)
    os.unlink(store.path("rotation", "d64-seed1"))
    assert same(table, draw(64, 64))


WORKER = """
import sys
import mlx.core as mx
from vq_adapters.artifacts import FileArtifactStore
store, me, tables = FileArtifactStore(sys.argv[1]), int(sys.argv[2]), [mx.full((64, 64), i) for i in range(4)]
for turn in range(25):
    store.save_rotation_matrix(tables[me], 64, 1)
    table = store.load_rotation_matrix(64, 1)
    assert any(bool(mx.array_equal(table, other)) for other in tables)
print("done")
"""


def test_several_processes_at_once(store: FileArtifactStore) -> None:
    """Every load is one of the tables that were saved, whole."""
    command = [sys.executable, "-c", WORKER, str(store.folder)]
    running = [subprocess.Popen([*command, str(i)], stdout=-1, stderr=-1, text=True) for i in range(4)]
    for process in running:
        out, error = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "done\n"), error
    assert len(files(store)) == 1


# The interface


def test_the_interface_is_abstract() -> None:
    documented = {
        *("load_rotation_matrix", "save_rotation_matrix", "load_codebook", "save_codebook"),
        *("load_jl_matrix", "save_jl_matrix", "exists"),
    }
    assert ArtifactStore.__abstractmethods__ == documented
    with pytest.raises(TypeError):
        ArtifactStore()  # type: ignore[abstract]


def test_a_store_with_the_documented_methods_alone_says_what_it_lacks() -> None:
    methods = dict.fromkeys(ArtifactStore.__abstractmethods__, lambda self: None)
    small = type("Small", (ArtifactStore,), methods)()
    with pytest.raises(TypeError, match="Small"):
        small.load("kind", "name")
    with pytest.raises(TypeError, match="Small"):
        small.save("kind", "name", {}, {})


def test_the_digest_sees_names_shapes_dtypes_and_numbers() -> None:
    x = draw(2, 3)
    same_bits = x.view(mx.int32)
    found = {digest(arrays) for arrays in ({"x": x}, {"y": x}, {"x": x.T}, {"x": x.flatten()}, {"x": same_bits}, {})}
    assert len(found) == 6 and digest({"x": x, "y": x}) == digest({"y": x, "x": mx.array(x)})
    assert json.dumps(digest({"x": x.T})) == json.dumps(digest({"x": mx.contiguous(x.T)}))
