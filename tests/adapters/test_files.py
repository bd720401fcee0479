"""Cache lists in files: what comes back, and what is refused."""

import json
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from models import build

import vq_functional as vq
from vq_adapters import (
    H2OKVCache,
    H2OOptions,
    KVCacheBuilder,
    KVCacheConfig,
    QuantizerConfigError,
    TransformKVCache,
    load,
    save,
)
from vq_adapters.artifacts import digest
from vq_adapters.files import FORMAT, OWN_CLASSES, register
from vq_functional.methods import METHODS

H2O = KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget=16, h2o_n_sink=2, h2o_grace=4))


def run(model: Any, caches: list[Any], first: int = 0, n: int = 40) -> mx.array:
    out = [model(mx.arange(first, first + n)[None], cache=caches)]
    out += [model(mx.array([[token]]), cache=caches) for token in (7, 8, 9)]
    return mx.concatenate(out, axis=1)


def filled(architecture: str = "llama", config: Any = H2O) -> tuple[Any, list[Any]]:
    model = build(architecture)
    caches = KVCacheBuilder.for_model(model, config)
    mx.eval(run(model, caches))
    return model, caches


def written(path: Path, header: Any, kind: str = FORMAT) -> Path:
    return forged(path, {"0": mx.zeros((3,))}, json.dumps(header), kind)


def forged(path: Path, arrays: dict[str, mx.array], header: str, kind: str = FORMAT) -> Path:
    """A file with the right digest."""
    mx.save_safetensors(str(path), arrays, {"format": kind, "header": header, "digest": digest(arrays, header)})
    return path


class TestRoundTrip:
    @pytest.mark.parametrize("method", METHODS)
    def test_every_method_goes_on_as_before(self, method, tmp_path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = KVCacheConfig(
                method=method, residual_length=8, h2o_budget=24, snap_budget=40, spectral_val_d_eff=16
            )
        model, caches = filled(config=config)
        save(tmp_path / "caches", caches)
        back = load(tmp_path / "caches")
        assert [type(cache) for cache in back] == [type(cache) for cache in caches]
        assert [cache.transform for cache in back] == [cache.transform for cache in caches]
        assert mx.array_equal(run(model, back, 40, 5), run(model, caches, 40, 5))

    @pytest.mark.parametrize("architecture", ["gemma3_text", "lfm2", "gemma4_text", "falcon_h1"])
    def test_beside_caches_of_mlx_lm(self, architecture, tmp_path):
        model, caches = filled(architecture)
        assert any(not isinstance(cache, TransformKVCache) for cache in caches)
        save(tmp_path / "caches.safetensors", caches)
        back = load(str(tmp_path / "caches.safetensors"))
        assert [type(cache) for cache in back] == [type(cache) for cache in caches]
        assert mx.array_equal(run(model, back, 40, 5), run(model, caches, 40, 5))

    @pytest.mark.parametrize(
        "cache",
        [
            mlx_cache.KVCache(),
            mlx_cache.RotatingKVCache(max_size=8, keep=2),
            mlx_cache.ArraysCache(2),
            mlx_cache.ChunkedKVCache(8),
            mlx_cache.CacheList(mlx_cache.KVCache(), mlx_cache.RotatingKVCache(max_size=8)),
            H2OKVCache(H2O),
        ],
        ids=lambda cache: type(cache).__name__,
    )
    def test_empty(self, cache, tmp_path):
        try:
            cache.state  # noqa: B018
        except AttributeError:  # an older mlx_lm
            with pytest.raises(QuantizerConfigError, match="save: `caches` must have a state; got an empty"):
                save(tmp_path / "caches", [cache])
            return
        save(tmp_path / "caches", [cache])
        (back,) = load(tmp_path / "caches")
        assert type(back) is type(cache)
        assert back.empty()
        assert getattr(back, "max_size", None) == getattr(cache, "max_size", None)

    def test_ours_in_a_cache_list(self, tmp_path):
        cache = H2OKVCache(H2O)
        x = mx.random.normal((1, 2, 20, 32))
        cache.update_and_fetch(x, x)
        plain = mlx_cache.KVCache()
        plain.update_and_fetch(x, x)
        save(tmp_path / "caches", [mlx_cache.CacheList(cache, plain)])
        (back,) = load(tmp_path / "caches")
        assert [type(inner) for inner in back.caches] == [H2OKVCache, mlx_cache.KVCache]
        assert back[0].tokens_kept == 16

    def test_batches(self, tmp_path):
        x = mx.random.normal((1, 2, 20, 32))
        single = TransformKVCache(vq.kivi(residual_length=8))
        single.update_and_fetch(x, x)
        batch = TransformKVCache.merge([single, TransformKVCache(vq.kivi(residual_length=8))])
        save(tmp_path / "caches", [batch])
        (back,) = load(tmp_path / "caches")
        assert mx.array_equal(back.offset, mx.array([20, 0]))
        assert mx.array_equal(back.extract(0).keys, single.keys)

    def test_metadata(self, tmp_path):
        _, caches = filled()
        save(tmp_path / "caches", caches, {"model": "a", "prompt": "ünï"})
        back, metadata = load(tmp_path / "caches", return_metadata=True)
        assert metadata == {"model": "a", "prompt": "ünï"}
        assert len(back) == 2
        save(tmp_path / "caches", caches)
        assert load(tmp_path / "caches", return_metadata=True)[1] == {}

    def test_the_list_goes_on_after_saving(self, tmp_path):
        model, caches = filled()
        other, twins = filled()
        save(tmp_path / "caches", caches)
        assert mx.array_equal(run(model, caches, 40, 5), run(other, twins, 40, 5))

    def test_no_layers(self, tmp_path):
        save(tmp_path / "caches", [])
        assert load(tmp_path / "caches") == []

    def test_file_is_as_large_as_its_arrays(self, tmp_path):
        _, caches = filled(config=KVCacheConfig(method="turboquant_mse"))
        save(tmp_path / "caches", caches)
        held = sum(cache.nbytes for cache in caches)
        assert held < (tmp_path / "caches").stat().st_size < held + 8192


class TestWriting:
    def test_exactly_one_file_under_its_own_name(self, tmp_path):
        _, caches = filled()
        save(tmp_path / "caches.kv", caches)
        save(tmp_path / "caches.kv", caches)
        assert [path.name for path in tmp_path.iterdir()] == ["caches.kv"]

    @pytest.mark.parametrize("failing", ["save_safetensors", "fsync", "replace"])
    def test_a_failure_leaves_the_older_file(self, failing, tmp_path, monkeypatch):
        _, caches = filled()
        save(tmp_path / "caches", caches)
        before = (tmp_path / "caches").read_bytes()

        def fail(path, *_):
            if failing == "save_safetensors":
                Path(path).write_bytes(b"half")
            raise RuntimeError("disk full")

        monkeypatch.setattr(mx if failing == "save_safetensors" else os, failing, fail)
        with pytest.raises(RuntimeError, match="disk full"):
            save(tmp_path / "caches", caches)
        assert (tmp_path / "caches").read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == ["caches"]

    def test_threads_that_write_one_file(self, tmp_path, monkeypatch):
        """Both have written before either puts its file in place."""
        both, replace = threading.Barrier(2), os.replace
        monkeypatch.setattr(os, "replace", lambda *paths: both.wait(60) >= 0 and replace(*paths))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda text: save(tmp_path / "caches", [], {"text": text}), ["a", "b"]))
        assert load(tmp_path / "caches", return_metadata=True)[1]["text"] in ("a", "b")
        assert [path.name for path in tmp_path.iterdir()] == ["caches"]

    def test_classes_that_load_could_not_find(self, tmp_path):
        class H2OKVCache(TransformKVCache):
            pass

        for cache in (H2OKVCache(vq.h2o()), object()):
            with pytest.raises(QuantizerConfigError, match="save: `caches` must be of a class of this package"):
                save(tmp_path / "caches", [cache])
        assert not list(tmp_path.iterdir())

    def test_states_that_are_no_arrays(self, tmp_path):
        cache = mlx_cache.ArraysCache(1)
        cache[0] = {"a": 1}
        with pytest.raises(QuantizerConfigError, match="save: `caches` must have states"):
            save(tmp_path / "caches", [cache])


class TestDamage:
    @pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
    def test_truncated(self, share, tmp_path):
        _, caches = filled()
        save(tmp_path / "caches", caches)
        data = (tmp_path / "caches").read_bytes()
        (tmp_path / "caches").write_bytes(data[: int(len(data) * share)])
        with pytest.raises(QuantizerConfigError, match="load: `path` must be a whole file"):
            load(tmp_path / "caches")

    def test_no_safetensors(self, tmp_path):
        (tmp_path / "caches").write_bytes(b"something else, and long enough for a header" * 9)
        with pytest.raises(QuantizerConfigError, match="load: `path`"):
            load(tmp_path / "caches")

    @pytest.mark.parametrize("kind", ["npz", "npy"])
    def test_other_kinds_of_arrays(self, kind, tmp_path):
        (mx.savez if kind == "npz" else mx.save)(str(tmp_path / f"a.{kind}"), mx.zeros((2,)))
        with pytest.raises(QuantizerConfigError, match="load: `path` must be a whole file"):
            load(tmp_path / f"a.{kind}")

    @pytest.mark.parametrize("offset", range(0, 1512, 36))
    def test_a_flipped_bit_of_the_header(self, offset, tmp_path):
        """In one line, whatever the bit stood for."""
        _, caches = filled()
        save(tmp_path / "caches", caches)
        data = bytearray((tmp_path / "caches").read_bytes())
        assert offset < 8 + int.from_bytes(data[:8], "little")
        data[offset] ^= 1 << offset % 7
        (tmp_path / "caches").write_bytes(data)
        with pytest.raises(QuantizerConfigError) as refused:
            load(tmp_path / "caches")
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 1.0])
    def test_a_flipped_bit_of_the_data(self, share, tmp_path):
        _, caches = filled()
        save(tmp_path / "caches", caches)
        data = bytearray((tmp_path / "caches").read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start + int(share * (len(data) - start - 1))] ^= 1
        (tmp_path / "caches").write_bytes(data)
        with pytest.raises(QuantizerConfigError, match="load: `path` must be as `save` wrote it"):
            load(tmp_path / "caches")

    def test_a_missing_array(self, tmp_path):
        _, caches = filled()
        save(tmp_path / "caches.safetensors", caches)
        arrays, metadata = mx.load(str(tmp_path / "caches.safetensors"), return_metadata=True)
        for name in arrays:
            rest = {other: array for other, array in arrays.items() if other != name}
            forged(tmp_path / "other.safetensors", rest, metadata["header"])
            with pytest.raises(QuantizerConfigError, match=f"load: `path` must be a whole file.*'{name}'"):
                load(tmp_path / "other.safetensors")

    def test_a_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            load(tmp_path)

    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="nothing"):
            load(tmp_path / "nothing")

    def test_files_of_others(self, tmp_path):
        mx.save_safetensors(str(tmp_path / "a.safetensors"), {"x": mx.zeros((2,))})
        cache = mlx_cache.KVCache()
        cache.update_and_fetch(mx.zeros((1, 2, 3, 32)), mx.zeros((1, 2, 3, 32)))
        mlx_cache.save_prompt_cache(str(tmp_path / "b.safetensors"), [cache])
        for path in tmp_path.iterdir():
            with pytest.raises(QuantizerConfigError, match=f"must be a file of format {FORMAT}"):
                load(path)

    @pytest.mark.parametrize(
        "header",
        [
            {"version": 2, "layers": [], "metadata": {}},
            {"version": 1, "metadata": {}},
            {"version": 1, "layers": [{"class": "H2OKVCache"}], "metadata": {}},
            {"version": 1, "layers": [{"class": "H2OKVCache", "state": []}], "metadata": {}},
            {"version": 1, "layers": [{"class": "H2OKVCache", "state": [{"array": 0}]}], "metadata": {}},
            {"version": 1, "layers": [{"class": "H2OKVCache", "state": [{"array": 7}]}], "metadata": {}},
            {"version": 1, "layers": [{"class": "KVCache", "state": [None]}], "metadata": {}},
            {"version": 1, "layers": [{"class": "Nothing", "state": []}], "metadata": {}},
            {"version": 1, "layers": [{"class": "make_prompt_cache", "state": []}], "metadata": {}},
            {"version": 1, "layers": [{"class": "LRUPromptCache", "state": []}], "metadata": {}},
            {"version": 1, "layers": [], "metadata": 3},
            [],
            None,
        ],
        ids=str,
    )
    def test_headers_that_no_save_writes(self, header, tmp_path):
        with pytest.raises(QuantizerConfigError):
            load(written(tmp_path / "caches.safetensors", header))

    def test_state_of_another_method(self, tmp_path):
        _, caches = filled(config=KVCacheConfig(method="kivi"))
        save(tmp_path / "caches.safetensors", caches)
        arrays, metadata = mx.load(str(tmp_path / "caches.safetensors"), return_metadata=True)
        header = metadata["header"].replace("KIVIKVCache", "H2OKVCache")
        forged(tmp_path / "other.safetensors", arrays, header)
        with pytest.raises(QuantizerConfigError, match="H2OKVCache: `transform` must be of h2o"):
            load(tmp_path / "other.safetensors")

    def test_arrays_of_another_shape(self, tmp_path):
        _, caches = filled()
        save(tmp_path / "caches.safetensors", caches)
        arrays, metadata = mx.load(str(tmp_path / "caches.safetensors"), return_metadata=True)
        arrays = {name: x[..., :8] if x.ndim == 4 else x for name, x in arrays.items()}
        forged(tmp_path / "other.safetensors", arrays, metadata["header"])
        with pytest.raises(QuantizerConfigError, match="`state` must hold"):
            load(tmp_path / "other.safetensors")


class TestRegistration:
    def test_names_that_were_free_are_ours(self):
        for name, kind in OWN_CLASSES.items():
            assert getattr(mlx_cache, name) is kind

    def test_names_of_others_stay(self, monkeypatch):
        other = type("H2OKVCache", (), {})
        monkeypatch.setattr(mlx_cache, "H2OKVCache", other)
        register()
        assert mlx_cache.H2OKVCache is other
        assert mlx_cache.KVCache.__module__ == mlx_cache.__name__

    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    def test_prompt_cache_files_of_mlx_lm(self, architecture, tmp_path):
        model, caches = filled(architecture)
        mlx_cache.save_prompt_cache(str(tmp_path / "p.safetensors"), caches, {"a": "b"})
        back, metadata = mlx_cache.load_prompt_cache(str(tmp_path / "p.safetensors"), return_metadata=True)
        assert metadata == {"a": "b"}
        assert [type(cache) for cache in back] == [type(cache) for cache in caches]
        assert mx.array_equal(run(model, back, 40, 5), run(model, caches, 40, 5))
