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
    "turboquant_prod": [({}, False), ({"bits": 4}, True)],
    "polar": [({}, False), ({"polar_values": True}, True)],
    "kitty": [({"value_bits": 4}, True), ({"value_bits": None}, True)],
    "adakv": [({"n_sink": 4}, True), ({"n_sink": 4, "value_bits": 2}, True)],
    "kvquant": [({"rope": Rope(dims=64, base=1e5)}, True)],
    "cachegen": [({}, False), ({"n_sink": 4}, True)],
    "gear": [({"n_sink": 4}, True)],
    "zipcache": [({}, False), ({"hi_fraction": 0.5}, True)],
    "skvq": [({"fp8": True}, True), ({"order": "range", "clip_grid": (1.0, 0.97, 0.94, 0.9, 0.85)}, True)],
    "nsnquant": [({}, False), ({"bits": 1}, True)],
    "vecinfer": [({}, False), ({"value_sub_dim": 4}, True)],
    "a2ats": [({}, False)],
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
    cache: Callable[[int], Any] = functools.partial(_cache, method, {**budget, **options})
    return Entry(f"{method} {', '.join(f'{name}={value!r}' for name, value in options.items())}".strip(), cache, hook)


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
