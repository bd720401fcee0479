"""What a model tells: the caches that it makes, which of them can be replaced, and the shapes of its layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_cache

from vq_adapters.entries import is_plain, members
from vq_functional.core.errors import check
from vq_functional.core.shard import WHOLE, Shard
from vq_functional.core.spec import FLOATS, KVSpec
from vq_functional.core.stage import Stage
from vq_functional.core.transform import Transform

_ATTENTION = ("self_attn", "attn", "attention")
_QUERY_HEADS = ("n_heads", "num_heads", "num_attention_heads", "n_head")
_KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")

# Models that take what a plain cache holds out of it by themselves.
_OWN_READING = {
    "mlx_vlm.models.afm7": "its last layers read another layer's `state`",
    "mlx_vlm.models.diffusion_gemma": "its decoder reads the `state` of every layer",
    "mlx_vlm.models.gemma3n": "its last layers read another layer's `state`",
    "mlx_vlm.models.nemotron_labs_diffusion": "its layers read `keys` and `values` by row number",
}

# Models whose attention takes the number of rows for the number of tokens.
_NO_EVICTION = {
    "mlx_lm.models.afm7": "its last layers take query positions from the number of rows",
    "mlx_lm.models.gemma3n": "its last layers read an earlier layer's rows after that layer has settled",
    "mlx_lm.models.phi3small": "its block-sparse layers take positions from the order of rows",
    "mlx_vlm.models.inkling": "its layers take positions from the number of rows",
    "mlx_vlm.models.phi3small": "its block-sparse layers take positions from the order of rows",
    "mlx_vlm.models.zaya1_vl": "it takes padding from the number of rows",
}


def attentions(model: nn.Module) -> list[nn.Module | None]:
    """The attention modules of the layers that `for_model` replaces; None for one that isn't found."""
    model = language_model(model)
    caches = own_caches(model)
    layers = layers_of(model, len(caches))
    return [attention_of(layer) for entry, layer in zip(caches, layers, strict=True) if replaceable(entry, layer)]


def check_model(name: str, model: Any) -> None:
    """Refuse what is no model."""
    check(isinstance(model, nn.Module), name, "model", "must be a model of mlx", model)


def language_model(model: nn.Module) -> nn.Module:
    """The part of a model that makes caches: of a vision-language model, its language model."""
    inner = getattr(model, "language_model", None)
    if hasattr(model, "make_cache") or inner is None:
        return model
    found = language_model(inner)
    return found if hasattr(found, "make_cache") or hasattr(found, "layers") else model


def own_caches(model: nn.Module) -> list[Any]:
    """The caches that the model's class makes, whatever `make_cache` was set on this model: it may call for_model."""
    make = getattr(type(model), "make_cache", None)
    return list(make(model)) if make is not None else [mlx_cache.KVCache() for _ in model.layers]


def layers_of(model: nn.Module, count: int) -> list[nn.Module]:
    """The layer of each cache; the whole model where caches and layers don't match one to one."""
    layers = list(getattr(model, "layers", ()))
    if len(layers) != count:  # some may have no attention, and no cache
        layers = [layer for layer in layers if attention_of(layer) is not None]
    return layers if len(layers) == count else [model] * count


def stage_of(model: nn.Module, own: int) -> tuple[int, Stage]:
    """The number of the first layer here, and the place of the `own` layers here among all that are replaced.

    In a pipeline a process holds a part of the layers; the rest is known from a blank model of the same kind, whose
    weights are never computed.
    """
    stage = next((module for module in model.modules() if getattr(module, "pipeline_size", 1) > 1), None)
    if stage is None:
        return 0, Stage(0, own, own)
    drawn: Any = mx.random.state
    high, low = drawn[0].tolist()
    kind: Any = type(model)
    whole = kind(model.args)
    mx.random.seed(high << 32 | low)  # as if it had drawn no numbers
    caches = own_caches(whole)
    replaced = [replaceable(entry, layer) for entry, layer in zip(caches, layers_of(whole, len(caches)), strict=True)]
    before = sum(replaced[: stage.start_idx])
    return stage.start_idx, Stage(before, own, sum(replaced), stage.pipeline_size)


def replaceable(entry: Any, layer: nn.Module) -> bool:
    """Whether our cache can stand in the place of a plain one in a layer's own `entry`."""
    return any(map(is_plain, members(entry))) and not any(_holds_latents(module) for module in layer.modules())


def _holds_latents(module: nn.Module) -> bool:
    """Whether an attention module caches latent vectors; those that expand them first cache ordinary heads."""
    return hasattr(module, "kv_lora_rank") and not hasattr(module, "kv_b_proj")


def attention_of(layer: nn.Module) -> nn.Module | None:
    """The attention module of a layer, if it has one of a known name."""
    found = (getattr(layer, name, None) for name in _ATTENTION)
    return next((module for module in found if isinstance(module, nn.Module)), None)


def check_eviction(model: nn.Module, transform: Transform) -> None:
    """Refuse a method that evicts to a model that can't do with fewer rows than tokens."""
    reason = _reason(_NO_EVICTION, model)
    check(reason is None or not transform.evicts, transform.name, "model", f"must keep all rows: {reason}", type(model))


def _reason(reasons: dict[str, str], model: nn.Module) -> str | None:
    """What is told of a model's architecture: a module of mlx_lm, a package of mlx_vlm."""
    module = type(model).__module__
    return reasons.get(module, reasons.get(module.rpartition(".")[0]))


def check_reading(model: nn.Module) -> None:
    """Refuse a model that takes rows out of its caches by itself."""
    reason = _reason(_OWN_READING, model)
    check(reason is None, "for_model", "model", f"must leave its caches to themselves: {reason}", type(model))


def query_heads(attention: nn.Module | None) -> int | None:
    """Query heads of an attention module, or None where it doesn't tell."""
    return _number(attention, _QUERY_HEADS)


def spec_of(attention: nn.Module | None, dtype: mx.Dtype) -> KVSpec | None:
    """Shapes of a layer's keys and values; None where its attention module doesn't tell."""
    size = head_dim(attention)
    if size is None:
        return None
    heads = _number(attention, (*_KV_HEADS, *_QUERY_HEADS)) or 1
    values = _number(attention, ("v_head_dim",)) or size
    return KVSpec(kv_heads=heads, key_dim=size, value_dim=values, dtype=dtype, capacity=1)


def shard_of(attention: nn.Module | None) -> Shard:
    """The part of the heads that `model.shard` has left to an attention module."""
    parts = (ShardedToAllLinear, QuantizedShardedToAllLinear)
    modules: Any = attention.modules() if attention is not None else ()
    return next((Shard.of(module.group) for module in modules if isinstance(module, parts)), WHOLE)


def dtype_of(layer: nn.Module) -> mx.Dtype:
    """The dtype of a layer's own numbers, which its keys and values have too."""
    leaves: Any = tree_flatten(layer.parameters())
    kinds = {x.dtype for _, x in leaves} & set(FLOATS)
    return next((kind for kind in (mx.float32, mx.bfloat16) if kind in kinds), mx.float16)


def head_dim(attention: nn.Module | None) -> int | None:
    """Head size of an attention module, or None where it doesn't tell."""
    size, heads = _number(attention, ("head_dim",)), _number(attention, _KV_HEADS)
    weight = getattr(getattr(attention, "k_proj", None), "weight", None)
    return size if size is not None or weight is None or heads is None else weight.shape[0] // heads


def _number(module: nn.Module | None, names: Iterable[str]) -> int | None:
    found = (getattr(module, name, None) for name in names)
    return next((number for number in found if isinstance(number, int)), None)
