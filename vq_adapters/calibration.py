"""Calibration on a real model: what a method needs for each layer, found from texts that the model reads."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from vq_adapters.artifacts import Arrays, ArtifactStore, digest
from vq_adapters.recording import Captured, capture
from vq_functional.codebook.spectral_basis import SpectralBasis, spectral_calibrate
from vq_functional.codebook.vecinfer import VecInferTables, vecinfer_calibrate
from vq_functional.core.describe import describe
from vq_functional.core.errors import QuantizerConfigError, check, check_choice
from vq_functional.core.table import Table, to_table
from vq_functional.crosslayer.xkv_basis import XKVBasis, xkv_calibrate
from vq_functional.hybrid.a2ats import A2ATSTables, a2ats_calibrate
from vq_functional.hybrid.amc import amc_calibrate
from vq_functional.hybrid.amc_options import AMCBasis
from vq_functional.lowrank.kvtc import KVTCBasis, kvtc_calibrate
from vq_functional.lowrank.palu import PALUBasis, palu_calibrate
from vq_functional.lowrank.svdq_basis import SVDqBasis, svdq_calibrate
from vq_functional.methods import METHODS
from vq_functional.quantize.kvquant import KVQuantTables, kvquant_calibrate
from vq_functional.quantize.skvq import SKVQTables, skvq_calibrate

__all__ = ["CALIBRATORS", "Calibrator", "Captured", "calibrate", "capture", "load_calibration"]

PROBE = 16  # numbers of each weight that tell one model from another


@attrs.frozen
class Calibrator:
    """How a method is calibrated.

    `find(*rows, **options)` gives what one layer needs, of class `kind`, whose
    `arrays` are what a store holds and whose `from_arrays` reads them. Layers
    that the method packs together need one in common, found from the heads of
    all of them; `grouped_by` are its options that say which layers these are.
    """

    find: Callable[..., Any]
    kind: Any
    takes: tuple[str, ...]  # fields of Captured, in order
    names: tuple[str, ...] = ()  # fields of Captured that go by name
    grouped_by: tuple[str, ...] = ()


CALIBRATORS: dict[str, Calibrator] = {
    "spectral": Calibrator(spectral_calibrate, SpectralBasis, ("keys", "values")),
    "vecinfer": Calibrator(vecinfer_calibrate, VecInferTables, ("keys", "values")),
    "kvquant": Calibrator(kvquant_calibrate, KVQuantTables, ("keys", "values"), ("positions", "rope")),
    "skvq": Calibrator(skvq_calibrate, SKVQTables, ("keys", "values")),
    "svdq": Calibrator(svdq_calibrate, SVDqBasis, ("keys", "values"), ("positions", "rope")),
    "kvtc": Calibrator(kvtc_calibrate, KVTCBasis, ("keys", "values")),
    "palu": Calibrator(palu_calibrate, PALUBasis, ("keys", "values")),
    "amc": Calibrator(amc_calibrate, AMCBasis, ("keys", "values"), ("queries",)),
    "xkv": Calibrator(xkv_calibrate, XKVBasis, ("keys", "values"), grouped_by=("group_size",)),
    "a2ats": Calibrator(a2ats_calibrate, A2ATSTables, ("keys", "queries"), ("positions", "rope")),
}


def calibrate(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[Any],
    method: str = "spectral",
    *,
    store: ArtifactStore | None = None,
    model_name: str = "model",
    max_tokens: int = 4096,
    **options: Any,
) -> list[Any]:
    """What a method needs for each compressed layer, found from texts that the model reads.

    Layers that are packed together share an entry. `options` are those of the
    method's own calibration, such as `spectral_calibrate`, and those that say
    which layers are packed together; texts and `max_tokens` as for `capture`.
    With a `store`, what it holds for this model name, method and options is
    taken as it is, whatever the texts, and else put there. Raises
    QuantizerConfigError for unknown methods and options, for options that have
    no text to find them by in a store, and where the store holds it for a model
    of that name with other weights.
    """
    row = _row("calibrate", method)
    known = calibration_options(method)
    for option in options:
        check(option in known, "calibrate", "options", f"must be of {known}", option)
    if store is not None:
        found = load_calibration(model, method, store, model_name, **options)
        if found is not None:
            return found
    grouping, own = _grouping(method, options), {name: x for name, x in options.items() if name not in row.grouped_by}
    layers = capture(model, tokenizer, texts, max_tokens)
    sizes = grouping(len(layers))
    artifacts = [_found(row, method, group, own) for group in _groups(layers, sizes)]
    if store is not None:
        arrays = {f"{i}.{name}": x for i, artifact in enumerate(artifacts) for name, x in artifact.arrays().items()}
        metadata = {"model": fingerprint(model), "layers": len(layers), "options": json.loads(_text(options))}
        store.save(method, calibration_name(model_name, options), arrays, metadata)
    return _for_each_layer(artifacts, sizes)


def load_calibration(
    model: nn.Module, method: str, store: ArtifactStore, model_name: str = "model", **options: Any
) -> list[Any] | None:
    """What `calibrate` put into a store, one artifact a layer; None where nothing is there."""
    row = _row("load_calibration", method)
    try:
        arrays, metadata = store.load(method, calibration_name(model_name, options))
    except FileNotFoundError:
        return None
    rule = "must name one model; the store holds tables of another under this name"
    check(metadata.get("model") == fingerprint(model), method, "model_name", rule, model_name)
    try:
        sizes = _grouping(method, options)(metadata["layers"])
        groups: list[Arrays] = [{} for _ in sizes]
        for place, x in arrays.items():
            group, name = place.split(".", 1)
            groups[int(group)][name] = x
        return _for_each_layer([row.kind.from_arrays(group) for group in groups], sizes)
    except QuantizerConfigError:
        raise
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise QuantizerConfigError(f"load_calibration: `store` must hold whole tables; got {error!r}") from error


def calibration_options(method: str) -> tuple[str, ...]:
    """Options of the method's calibration, the method's own among them where it takes these."""
    row = CALIBRATORS[method]
    parameters = list(inspect.signature(row.find).parameters.values())[len(row.takes) :]
    whole = all(one.kind is not one.VAR_KEYWORD for one in parameters)
    named = tuple(one.name for one in parameters if one.kind is not one.VAR_KEYWORD and one.name not in row.names)
    if whole:
        return named + row.grouped_by
    return named + tuple(field.name for field in attrs.fields(METHODS[method].options))


def _row(name: str, method: str) -> Calibrator:
    idle = method in [*METHODS] and method not in CALIBRATORS
    check(not idle, name, "method", f"needs no calibration; those that do are {tuple(CALIBRATORS)}", method)
    check_choice(name, "method", method, tuple(CALIBRATORS))
    return CALIBRATORS[method]


def _grouping(method: str, options: dict[str, Any]) -> Callable[[int], list[int]]:
    """From the number of layers to the sizes of the groups of consecutive ones that have an artifact in common."""
    names = CALIBRATORS[method].grouped_by
    if not names:
        return lambda layers: [1] * layers
    chosen: Any = METHODS[method].options(**{name: options[name] for name in names if name in options})
    return chosen.stacks


def _groups(layers: Sequence[Captured], sizes: Sequence[int]) -> list[Sequence[Captured]]:
    """The layers in groups of these sizes."""
    ends = list(itertools.accumulate(sizes))
    return [layers[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _for_each_layer(artifacts: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """What each group has in common, once for every layer of it."""
    return [artifact for artifact, size in zip(artifacts, sizes, strict=True) for _ in range(size)]


def _found(row: Calibrator, method: str, group: Sequence[Captured], options: dict[str, Any]) -> Any:
    layer = group[0] if len(group) == 1 else _side_by_side(method, group)
    taken = [getattr(layer, field) for field in row.takes]
    check(all(x is not None for x in taken), "calibrate", "model", "must let the attention hook see its queries", None)
    named = {name: getattr(layer, name) for name in row.names}
    return row.find(*taken, **{**named, **options})


def _side_by_side(method: str, layers: Sequence[Captured]) -> Captured:
    """The heads of several layers one behind the other; positions and rotation are the first layer's."""
    unlike = {(layer.keys.shape, layer.values.shape) for layer in layers}
    rule = "must have equal heads and sizes in the layers that are packed together"
    check(len(unlike) == 1, method, "model", rule, sorted(unlike))
    queries = [layer.queries for layer in layers if layer.queries is not None]
    return attrs.evolve(
        layers[0],
        keys=mx.concatenate([layer.keys for layer in layers], axis=1),
        values=mx.concatenate([layer.values for layer in layers], axis=1),
        queries=mx.concatenate(queries, axis=1) if len(queries) == len(layers) else None,
    )


def calibration_name(model_name: str, options: dict[str, Any]) -> str:
    """The name in a store: the model's, and a digest of the options."""
    check(isinstance(model_name, str) and model_name != "", "calibrate", "model_name", "must be a name", model_name)
    return f"{model_name}-{hashlib.sha256(_text(options).encode()).hexdigest()[:12]}"


def _text(options: dict[str, Any]) -> str:
    """Options as JSON, equal where they are equal; arrays by a digest of their numbers."""
    return json.dumps(options, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (mx.array, np.ndarray, Table)):
        table: Any = to_table(value)
        return digest({"": table.array})
    check(attrs.has(type(value)), "calibrate", "options", "must be numbers, text, arrays or lists of them", value)
    return describe(value)


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of the names, shapes and dtypes of all weights and of some numbers of each."""
    found = hashlib.sha256()
    weights: Any = sorted(tree_flatten(model.parameters()))
    parts = [x.reshape(-1)[:: max(x.size // PROBE, 1)][:PROBE].astype(mx.float32) for _, x in weights]
    mx.eval(parts)
    for (name, x), part in zip(weights, parts, strict=True):
        found.update(f"{name} {x.dtype} {x.shape} {part.tolist()}\n".encode())
    return found.hexdigest()
