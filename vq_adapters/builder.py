"""From a configuration to caches: one cache, a fluent builder, the cache list of a model."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs
import mlx.core as mx
import mlx.nn as nn

from vq_adapters.architecture import (
    attention_of,
    check_eviction,
    check_model,
    check_reading,
    dtype_of,
    language_model,
    layers_of,
    own_caches,
    query_heads,
    replaceable,
    shard_of,
    spec_of,
    stage_of,
)
from vq_adapters.cache import TransformKVCache
from vq_adapters.classes import CLASSES
from vq_adapters.config import KVCacheConfig, Layer
from vq_adapters.entries import changed, is_plain
from vq_adapters.group import LayerGroup, unlike
from vq_adapters.reports import report
from vq_adapters.rotation import rope_of
from vq_adapters.rules import check_field
from vq_adapters.vectors import VECTOR_CLASSES, KVCache, SlidingWindowKVCache
from vq_functional.core.errors import check
from vq_functional.core.policy import Policy
from vq_functional.core.shard import sharded
from vq_functional.core.spec import KVSpec
from vq_functional.core.stage import Stage
from vq_functional.core.store import rows
from vq_functional.core.transform import Transform
from vq_functional.crosslayer.stack import Stack
from vq_functional.evict.engine import Evicting

# Methods that also have the per-vector API.
STANDALONE_METHODS = frozenset(VECTOR_CLASSES)


Config: TypeAlias = KVCacheConfig | Transform


class KVCacheFactory:
    """One cache from a configuration."""

    @staticmethod
    def create(config: KVCacheConfig) -> KVCache | TransformKVCache:
        """The documented class of the method; for the methods with a per-vector API, that one.

        Raises QuantizerConfigError for a list of bit widths, and for a store:
        what it holds is found by `for_model`.
        """
        check(isinstance(config, KVCacheConfig), "KVCacheFactory", "config", "must be a KVCacheConfig", config)
        if config.method not in STANDALONE_METHODS:
            return _one_layer(config)
        kind = VECTOR_CLASSES[config.method]
        if config.sliding_window is None:
            return kind(config)
        whole = copy.copy(config)
        whole.sliding_window = None
        return SlidingWindowKVCache(kind(whole), config.sliding_window)


class KVCacheBuilder:
    """A configuration, value by value; every method returns the builder and checks what it is given."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def _with(self, **values: Any) -> KVCacheBuilder:
        for field, value in values.items():
            check_field("KVCacheBuilder", field, value)
        self._values |= values
        return self

    def with_method(self, method: str) -> KVCacheBuilder:
        """One of the documented method names."""
        return self._with(method=method)

    def with_head_dim(self, d: int) -> KVCacheBuilder:
        """Head size, here a power of two; KVCacheConfig and `for_model` take others."""
        check_field("KVCacheBuilder", "head_dim", d)
        check(d & (d - 1) == 0, "KVCacheBuilder", "head_dim", "must be a power of two", d)
        return self._with(head_dim=d)

    def with_bit_width(self, inlier: int | Sequence[int], outlier: int | None = None) -> KVCacheBuilder:
        """Bits a number; a list, one entry an attention layer, is for `for_model` and not for `build`.

        `outlier`: for outlier channels, which are held apart then, a quarter where their number isn't given. Without it
        such channels have 8 bits, not those of the others.
        """
        return self._with(bit_width_inlier=inlier, bit_width_outlier=outlier)

    def with_jl_dim(self, m: int) -> KVCacheBuilder:
        """Size of the sketch, here at most `head_dim`; KVCacheConfig takes larger ones."""
        return self._with(jl_dim=m)

    def with_n_outlier_channels(self, n: int) -> KVCacheBuilder:
        """Outlier channels held apart, fewer than `head_dim`; of keys, by turboquant_mse and turboquant_prod."""
        return self._with(n_outlier_channels=n)

    def with_n_calib_tokens(self, n: int) -> KVCacheBuilder:
        """First tokens, whose keys tell which channels are held apart and are exact until then."""
        return self._with(n_calib_tokens=n)

    def with_vectorized_attend(self, enabled: bool = True) -> KVCacheBuilder:
        """A way of computing; results are the same."""
        return self._with(enable_vectorized_attend=enabled)

    def with_outlier_two_stream(self, enabled: bool = True) -> KVCacheBuilder:
        """Outlier channels in a stream of their own; a quarter of them where nothing tells how many."""
        return self._with(enable_outlier_two_stream=enabled)

    def with_fused_query_dot(self, enabled: bool = True) -> KVCacheBuilder:
        """A way of computing; results are the same."""
        return self._with(enable_fused_query_dot=enabled)

    def with_seed(self, seed: int) -> KVCacheBuilder:
        """Seed of rotations and sketches."""
        return self._with(seed=seed)

    def with_precision(self, dtype: mx.Dtype) -> KVCacheBuilder:
        """Dtype of what is stored uncompressed."""
        return self._with(dtype=dtype)

    def with_capacity(self, max_tokens: int) -> KVCacheBuilder:
        """Most tokens: per-vector caches then drop the oldest, the others refuse more."""
        return self._with(capacity=max_tokens)

    def with_artifact_store(self, store: Any) -> KVCacheBuilder:
        """Where precomputed tables are kept."""
        return self._with(store=store)

    def with_observer(self, observer: Any) -> KVCacheBuilder:
        """One more observer of quantization events."""
        return self._with(observers=[*self._values.get("observers", []), observer])

    def with_sliding_window(self, window_size: int) -> KVCacheBuilder:
        """Hold the newest `window_size` tokens only."""
        return self._with(sliding_window=window_size)

    def config(self) -> KVCacheConfig:
        """The configuration so far; raises QuantizerConfigError where its values don't go together."""
        config = KVCacheConfig(**self._values)
        sketch, outliers, rule = config.jl_dim, config.n_outlier_channels, f"`head_dim` = {config.head_dim}"
        fits = sketch is None or sketch <= config.head_dim
        check(fits, "KVCacheBuilder", "jl_dim", f"must be at most {rule}", sketch)
        fits = outliers is None or outliers < config.head_dim
        check(fits, "KVCacheBuilder", "n_outlier_channels", f"must be below {rule}", outliers)
        return config

    def build(self) -> KVCache | TransformKVCache:
        """One cache; raises QuantizerConfigError where the values don't go together."""
        return KVCacheFactory.create(self.config())

    @staticmethod
    def for_model(model: nn.Module, config: Config | Sequence[Config | None]) -> list[Any]:
        """The model's own cache list with every plain KV cache replaced.

        What the model made of another class stays as it is (`report` tells which
        and why), and so do latent keys and values. A transform serves all layers
        alike; a list has one configuration or transform a layer that is replaced,
        or None for one whose rows stay exact. Raises QuantizerConfigError for what
        is no model, where nothing can be replaced, where a list has not one entry a
        layer, where bytes are too few, and where the model can't do with fewer rows
        than tokens.
        """
        check_model("for_model", model)
        configs = _configs(config)
        found = {id(one): _calibration(model, one) for one in configs}
        specs: list[KVSpec | None] = []
        made: list[TransformKVCache] = []
        model = language_model(model)
        caches = own_caches(model)
        layers = layers_of(model, len(caches))
        places = _places(model, caches, layers)
        first, stage = stage_of(model, len(places))
        before, count = stage.before, stage.count
        configs = configs if isinstance(config, (list, tuple)) else configs * count
        rule = f"must have one entry for each of the {count} layers that are replaced"
        check(len(configs) == count, "for_model", "config", rule, config)
        own, stacks = configs[before : before + len(places)], _stacked(configs, before, len(places))
        for index, (place, one, stacked) in enumerate(zip(places, own, stacks, strict=True)):
            attention, tables = attention_of(layers[place]), found[id(one)]
            spec, its = spec_of(attention, dtype_of(layers[place])), None if tables is None else tables[before + index]
            specs.append(spec)
            _check_stack(one, specs[index - stacked[1] :])
            layer = Layer(index, count, first + place, spec, its, rope_of(attention), *stacked, before)
            made.append(_layer_cache(one, layer, attention, stage))
            caches[place] = _with(caches[place], made[-1])
        _join(made)
        for cache in made:
            check_eviction(model, cache.transform)
        return caches


def _configs(config: Config | Sequence[Config | None]) -> list[Any]:
    """What is given as a list, a store of exact rows for None; raises QuantizerConfigError for anything else."""
    many = isinstance(config, (list, tuple))
    given: list[Any] = list(config) if isinstance(config, (list, tuple)) else [config]
    configs = [rows() if many and one is None else one for one in given]
    for one in configs:
        known = isinstance(one, (KVCacheConfig, Transform))
        check(known, "for_model", "config", f"must be a KVCacheConfig or a Transform{_instead(one)}", one)
    return configs


def _instead(config: Any) -> str:
    """What to write in place of what is no configuration, where that can be told."""
    if isinstance(config, str):
        return f", such as KVCacheConfig(method={config!r})"
    return ", such as chain(policy, rows())" if isinstance(config, Policy) else ""


def _places(model: nn.Module, caches: Sequence[Any], layers: Sequence[nn.Module]) -> list[int]:
    """Which entries of the model's own list are replaced; raises QuantizerConfigError where none can be."""
    check_reading(model)
    places = [i for i, entry in enumerate(caches) if replaceable(entry, layers[i])]
    left = sorted({f"{row.used} ({row.reason})" for row in report(caches)})
    check(len(places) > 0, "for_model", "model", "must have a plain KVCache to replace", left)
    return places


def _with(entry: Any, ours: TransformKVCache) -> Any:
    """An entry of the model's list with our cache in the plain one's place."""
    return changed(entry, lambda cache: ours if is_plain(cache) else cache)


def _join(caches: Sequence[TransformKVCache]) -> None:
    """Make those a group that have something to tell each other, or hold different numbers of rows."""
    group, differ = LayerGroup(), unlike(cache.transform for cache in caches)
    for index, cache in enumerate(caches):
        if differ or cache.transform.in_group:
            cache.join(group, index)


def _one_layer(config: KVCacheConfig) -> TransformKVCache:
    kind = CLASSES.get(config.method)
    cache = kind(config) if kind else TransformKVCache(config.transform(), max_tokens=config.max_tokens)
    cache.observers = tuple(config.observers)
    return cache


def _calibration(model: nn.Module, config: KVCacheConfig | Transform) -> list[Any] | None:
    """What the configuration's store holds for each layer of this model: by the options it has, else by defaults."""
    if not isinstance(config, KVCacheConfig) or config.store is None:
        return None
    from vq_adapters.calibration import calibration_options, load_calibration  # which captures through `for_model`

    name, known = getattr(config, f"{config.method}_model_name", "model"), calibration_options(config.method)
    own = {option: value for option, value in config.changed_options().items() if option in known}
    found = load_calibration(model, config.method, config.store, name, **own)
    if found is None:
        found = load_calibration(model, config.method, config.store, name)
    check(found is not None, config.method, "store", "must hold what `calibrate` found for this model", name)
    return found


def _stacked(configs: Sequence[Config], before: int = 0, count: int | None = None) -> list[tuple[int, int]]:
    """For `count` layers from `before` on the size of the stack that each is packed with, and its place there.

    None for all layers. A stack that begins or ends in another process is cut there.
    """
    sizes = [_stack_sizes(one, len(configs)) for one in configs]
    same = all(one is configs[0] for one in configs) or all(set(one) == {1} for one in sizes)
    check(same, "for_model", "config", "must be one for all layers, where some are packed together", configs)
    ends = list(itertools.accumulate(sizes[0]))
    last = len(configs) if count is None else before + count
    spans = [(max(end - size, before), min(end, last)) for end, size in zip(ends, sizes[0])]
    whole = all(stop - start == size or stop <= start for (start, stop), size in zip(spans, sizes[0]))
    rule = "must have whole stacks in every process"
    check(whole or isinstance(configs[0], KVCacheConfig), "for_model", "config", rule, sizes[0])
    return [(stop - start, member) for start, stop in spans for member in range(stop - start)]


def _stack_sizes(config: Config, layers: int) -> list[int]:
    if isinstance(config, KVCacheConfig):
        return config.stacks(layers)
    if not isinstance(config, Stack):
        return [1] * layers
    rule = f"must be a multiple of the {config.layers} layers of a stack"
    check(layers % config.layers == 0, config.name, "layers", rule, layers)
    return [config.layers] * (layers // config.layers)


def _check_stack(config: Config, specs: Sequence[KVSpec | None]) -> None:
    """Refuse to pack the rows of layers together that are known to have other shapes than the first of them."""
    name, unlike = config.name if isinstance(config, Transform) else config.method, {*specs} - {None}
    rule = "must have equal heads and sizes in the layers that are packed together"
    check(len(unlike) < 2, name, "model", rule, [(spec.kv_heads, spec.key_dim) for spec in specs if spec is not None])


def _layer_cache(
    config: KVCacheConfig | Transform, layer: Layer, attention: nn.Module | None, stage: Stage
) -> TransformKVCache:
    if isinstance(config, Stack) and layer.stack > 1:
        config = config.member(layer.member)
    cache = TransformKVCache(config) if isinstance(config, Transform) else _one_layer(config.for_layer(layer))
    cache.query_heads = query_heads(attention)
    shard = shard_of(attention)
    if shard.size > 1:
        cache.transform = sharded(cache.transform, shard)
    if stage.size > 1 and isinstance(cache.transform, Evicting) and cache.transform.agrees:
        stage.check_processes(cache.transform.name)
        cache.transform = attrs.evolve(cache.transform, stage=stage)
    if layer.spec is not None:
        # Refuses a head size at once, and makes the tables in this thread.
        cache.transform.init_state(layer.spec)
    return cache
