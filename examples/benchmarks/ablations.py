"""Options changed one at a time: the ablation tables of the method pages, 128 rows unless a row says otherwise.

    python examples/benchmarks/ablations.py --repeats 1 --methods "cam|keyformer"

Takes the options of decode.py and prints its table.
"""

import functools
from collections.abc import Callable
from typing import Any

import attrs
from decode import BUDGET, Entry, codes, main
from mlx_lm.models.cache import KVCache

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_functional.ops.rope import Rope

LAYERS = 30  # of SmolLM2-135M
PAIRED = 2  # of these are packed together, all from the first on

# Options besides the budget, and whether attention hands over the real queries.
CHANGES: dict[str, list[tuple[dict[str, Any], bool]]] = {
    "tova": [({"share_heads": False}, True)],
    "h2o": [({"decay": 1.0}, True), ({"decay": 1.0, "grace": 1}, True), ({"budget": 64}, True)],
    "morphkv": [({"fuse": "sum"}, True), ({"window": 32}, True), ({"window": 32}, False)],
    "pyramidkv": [
        ({"decay": 1.0, "recent": 1}, True),
        ({"rule": "paper", "beta": 20.0}, True),
        ({"rule": "paper", "beta": 20.0, "scorer": "snapkv"}, True),
    ],
    "squeeze": [({"decay": 1.0, "recent": 1}, True)],
    "chunkkv": [({"reuse_layers": 2}, True), ({"pin_chunks": 0}, True), ({"score": "key_norm"}, False)],
    "cam": [
        ({"merge": "drop"}, True),
        ({"merge": "window"}, True),
        ({"recent": 1}, True),
        ({"recent": 1, "merge_gate": False}, True),
        ({"recent": 1, "merge": "drop"}, True),
    ],
    "keyformer": [
        ({"recent_share": 0.0}, True),
        ({"recent": 16}, True),
        ({"recent": 32}, True),
        ({"recent": 32, "tau": 0.5}, True),
        ({"recent": 32, "tau": 0.0}, True),
    ],
    "curdkv": [({"rank_cap": 64}, True), ({"decode": "append"}, True), ({"decode": "cur"}, True)],
    "qfilters": [
        ({"recent": 32}, True),
        ({"recent": 32}, False),
        ({"stand_in": "axis"}, False),
        ({"stand_in": "axis", "recent": 32}, False),
    ],
    "knorm": [({"n_sink": 0}, False), ({"keep": "high"}, False), ({"recent": 32}, False)],
    "turboquant_mse": [
        ({}, True),
        ({"n_outlier_channels": 8, "n_calib_tokens": 32}, True),
        ({"n_outlier_channels": 8}, True),
        ({"bits_outlier": 3, "n_calib_tokens": 32}, True),
        ({"bits": 3}, True),
    ],
    "turboquant_prod": [({}, False), ({"bits": 4}, True), ({"n_outlier_channels": 8, "n_calib_tokens": 32}, True)],
    "polar": [({}, False), ({"polar_values": True}, True)],
    "kitty": [({"value_bits": 4}, True), ({"value_bits": None}, True)],
    "adakv": [({"n_sink": 4}, True), ({"n_sink": 4, "value_bits": 2}, True)],
    "kvquant": [({"rope": False}, True)],
    "cachegen": [({}, False), ({"n_sink": 4}, True)],
    "gear": [({"n_sink": 4}, True)],
    "zipcache": [({}, False), ({"hi_fraction": 0.5}, True)],
    "skvq": [({"fp8": True}, True), ({"order": "range", "clip_grid": (1.0, 0.97, 0.94, 0.9, 0.85)}, True)],
    "nsnquant": [({}, False), ({"bits": 1}, True)],
    "vecinfer": [({}, False), ({"value_sub_dim": 4}, True)],
    "a2ats": [({}, False)],
    "svdq": [
        ({"rope": False}, True),
        ({"n_fit": 32, "bit_schedule": (4, 3, 2, 2, 1, 1, 1, 1)}, True),
        ({"n_fit": 32, "rope": Rope(dims=64, base=1e5)}, True),
    ],
    "palu": [({"n_head_groups": 1}, True), ({"rank": 64}, True), ({"rank": 64, "bits_k": 4, "bits_v": 4}, True)],
    "kvtc": [({"bit_budget": 192, "window": 48, "n_fit": 80}, True), ({"bit_budget": 256}, True)],
    "amc": [
        ({"use_query_saliency": True}, True),
        ({"k_high": 0.0, "k_mid": 0.4, "rank_mid": 64, "rank_low": 64, "residual_length": 32}, True),
        ({"normalize": "none", "fill": "zero", "n_sink": 0}, True),
    ],
    "anchorkv": [
        ({}, False),
        ({"n_sink": 0}, True),
        ({"theta": 0.2, "window": 16, "anchor_frac": 1 / 16}, True),
        ({"theta": 0.305, "window": 8, "anchor_frac": 1 / 32, "residual_bits": 3}, True),
    ],
    "xquant": [
        ({"n_sink": 0}, True),
        ({"base_bits": 3, "residual_bits": 3}, True),
        ({"base_bits": 3, "residual_bits": 3, "group_quant_size": 64, "residual_length": 32}, True),
        ({"residual_bits": 0}, True),
    ],
    "minicache": [({"direction_bits": 8}, True), ({"direction_bits": 8, "center": False}, True)],
    "xkv": [({"n_fit": 128}, True), ({"centred": False}, True)],
}


def ablations() -> list[Entry]:
    """All rows, in order."""
    changed = [_changed(method, options, hook) for method, rows in CHANGES.items() for options, hook in rows]
    exact = [_with_plain_layers(options) for options in ({}, {"recent": 32})]
    rows = Entry("all rows as 3-bit codes", lambda layer: TransformKVCache(codes(4, 2, layer)), True)
    policy = vq.h2o_policy(budget=282)
    fewer = Entry(
        "h2o 282 over 3-bit codes", lambda layer: TransformKVCache(vq.chain(policy, codes(4, 2, layer))), True
    )
    return [*changed, *exact, rows, fewer]


def _changed(method: str, options: dict[str, Any], hook: bool) -> Entry:
    budget = {"budget": BUDGET} if "evicts" in vq.METHODS[method].traits else {}
    if "stacks" in vq.METHODS[method].traits:
        stack = vq.METHODS[method].build(layers=PAIRED, **options)
        return Entry(_named(method, options), stack, hook)
    cache: Callable[[int], Any] = functools.partial(_cache, method, {**budget, **options})
    return Entry(_named(method, options), cache, hook)


def _named(method: str, options: dict[str, Any]) -> str:
    return f"{method} {', '.join(f'{name}={value!r}' for name, value in options.items())}".strip()


def _cache(method: str, options: dict[str, Any], layer: int) -> TransformKVCache:
    known = attrs.fields_dict(vq.METHODS[method].options)
    place = {name: number for name, number in (("layer", layer), ("layers", LAYERS)) if name in known}
    return TransformKVCache(vq.METHODS[method].build(**options, **place))


def _with_plain_layers(options: dict[str, Any]) -> Entry:
    """knorm with the first two layers left as they are."""

    def cache(layer: int) -> Any:
        return KVCache() if layer < 2 else _cache("knorm", {"budget": BUDGET, **options}, layer)

    return Entry(" ".join(["knorm", *(f"{name}={value}" for name, value in options.items()), "2 plain layers"]), cache)


if __name__ == "__main__":
    main(rows=ablations)
