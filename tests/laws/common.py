"""What the laws run over, how tokens are fed, and what it means that two states hold the same."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

import vq_functional as vq
from vq_adapters import TransformKVCache
from vq_functional.core.transform import Fill, Transform
from vq_functional.core.tree import flatten, map_leaves
from vq_functional.methods import TABLE, Method, find

# Small enough that a hundred tokens evict rows and fill groups; by option, so that most new methods are covered too.
SMALL = {
    "budget": 24,
    "grace": 4,
    "obs_window": 8,
    "window_size": 20,
    "residual_length": 32,
    "group_size": 32,
    "chunk_size": 4,
    "val_d_eff": 16,
}
# By method, where those options do not do: a policy, say, may protect at most 18 of the 24 rows, since laws add 5 more.
OWN: dict[str, dict[str, Any]] = {
    "skvq": {"window": 32},
    "kvquant": {"n_fit": 32},
    "zipcache": {"window": 64},
    "age_tiered": {"recent_boundary": 16, "mid_boundary": 32},
    "svdq": {"n_fit": 32},
    "palu": {"n_fit": 64},
    "anchorkv": {"window": 6, "theta": 0.3, "anchor_frac": 0.05},
    "xkv": {"n_fit": 64},
    "minicache": {"block": 32, "direction_bits": 8},
    "kvtc": {"window": 32, "n_fit": 48},
    "amc": {"threshold_window": 32, "rank_mid": 48, "rank_low": 48, "use_query_saliency": True},
    "a2ats": {"window": 6, "n_sink": 4, "retrieval_fraction": 0.3},
}
# Options that make a method another kind of transform.
VARIANTS: dict[str, dict[str, Any]] = {"turboquant_mse": {"n_outlier_channels": 8, "n_calib_tokens": 40}}
BATCH, HEADS, DIM = 2, 2, 64
SPEC = vq.KVSpec(batch=BATCH, kv_heads=HEADS, key_dim=DIM, value_dim=DIM, capacity=192)


@attrs.frozen
class Subject:
    """A transform that the laws hold for; `traits` as in the table of methods."""

    name: str
    transform: Transform
    traits: frozenset[str]


def small_options(method: Method) -> dict[str, Any]:
    """The options of a method that make it work after few tokens."""
    fields = {field.name for field in attrs.fields(method.options)}
    layers = {"layers": 2} if "stacks" in method.traits else {}
    return {name: value for name, value in SMALL.items() if name in fields} | OWN.get(method.name, {}) | layers


def stores() -> dict[str, vq.Store]:
    """One store for each per-token codec."""
    three_bits, two_stages, eight_bits = vq.turboquant_mse_codec(bits=3), vq.turboquant_rvq_codec(), vq.int8_codec()
    return {
        "plain": vq.rows(),
        "turboquant_mse": vq.rows(key=three_bits, value=three_bits),
        "turboquant_rvq": vq.rows(key=two_stages, value=two_stages),
        "qjl": vq.rows(key=vq.qjl_codec(), value=eight_bits),
        "int8": vq.rows(key=eight_bits, value=eight_bits),
    }


def _methods() -> Iterator[Subject]:
    for method in TABLE:
        yield Subject(method.name, method.build(**small_options(method)), method.traits)
    for name, options in VARIANTS.items():
        method = find(name)
        yield Subject(f"{name}-split", method.build(**options), method.traits)


def _compositions() -> Iterator[Subject]:
    for method in TABLE:
        if "evicts" not in method.traits:
            continue
        for name, store in stores().items():
            more = {"packs", "attends_codes"} if store.coded else set()
            if "pages" not in method.traits:
                policy = getattr(vq, f"{method.name}_policy")(**small_options(method))
                yield Subject(f"{method.name}-over-{name}", vq.chain(policy, store), method.traits | more)
            elif not store.key.keys_only:  # pages are made of vectors
                transform = method.build(store=store, **small_options(method))
                yield Subject(f"{method.name}-over-{name}", transform, method.traits | more)


METHODS = tuple(_methods())
PAIRS = METHODS + tuple(_compositions())


def _each_over_one_store() -> Iterator[Subject]:
    """For laws that take long: each policy over one store of codes, and each of these under several policies."""
    coded = [name for name, store in stores().items() if store.coded]
    turn = 0
    for method in TABLE:
        pairs = {s.name: s for s in PAIRS if s.name.startswith(f"{method.name}-over-") and "packs" in s.traits}
        while pairs and f"{method.name}-over-{coded[turn % len(coded)]}" not in pairs:
            turn += 1
        if pairs:
            yield pairs[f"{method.name}-over-{coded[turn % len(coded)]}"]
            turn += 1


SUBJECTS = METHODS + tuple(_each_over_one_store())


def over(
    *traits: str, without: Sequence[str] = (), where: Callable[[Subject], bool] = lambda subject: True, among=SUBJECTS
) -> pytest.MarkDecorator:
    """Run a test over all subjects with `traits`; an empty choice is an error and no skip."""
    chosen = [s for s in among if s.traits.issuperset(traits) and s.traits.isdisjoint(without) and where(s)]
    assert chosen, f"no subject has {traits} without {without}"
    return pytest.mark.parametrize("subject", chosen, ids=[subject.name for subject in chosen])


# Tokens


def tokens(
    n: int, seed: int = 0, *, batch: int = BATCH, heads: int = HEADS, dim: int = DIM, dtype: mx.Dtype = mx.float16
) -> mx.array:
    """Standard normal rows [batch, heads, n, dim]."""
    return mx.random.normal((batch, heads, n, dim), key=mx.random.key(seed)).astype(dtype)


def keys_and_values(spec: vq.KVSpec, n: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Independent keys and values of `n` tokens."""
    size = {"batch": spec.batch, "heads": spec.kv_heads, "dtype": spec.dtype}
    return tokens(n, 2 * seed, dim=spec.key_dim, **size), tokens(n, 2 * seed + 1, dim=spec.value_dim, **size)


def spans(pieces: Sequence[int], start: int = 0) -> Iterator[slice]:
    """One slice of the token axis for each call."""
    for n in pieces:
        yield slice(start, start + n)
        start += n


# Feeding


@attrs.frozen
class Run:
    """A state and how full it is."""

    state: Any
    fill: Fill = Fill()


def begin(transform: Any, spec: vq.KVSpec = SPEC) -> Run:
    """An empty state."""
    return Run(transform.init_state(spec))


def call(
    transform: Transform,
    run: Run,
    keys: mx.array,
    values: mx.array,
    queries: mx.array | None = None,
    update: Callable[..., Any] | None = None,
) -> tuple[Run, mx.array, mx.array]:
    """One update, by `update` where it is another than the transform's own."""
    n = keys.shape[2]
    state, keys_out, values_out = (update or transform.update)(run.state, keys, values, queries)
    fill = transform.settled(transform.written(run.fill, n), n) if n else run.fill
    return Run(state, fill), keys_out, values_out


def feed(
    transform: Transform,
    run: Run,
    keys: mx.array,
    values: mx.array,
    pieces: Sequence[int] | None = None,
    queries: mx.array | None = None,
    update: Callable[..., Any] | None = None,
) -> Run:
    """Updates with consecutive pieces of the tokens; one piece unless told otherwise."""
    for span in spans([keys.shape[2]] if pieces is None else pieces):
        asking = None if queries is None else queries[:, :, span]
        run, *_ = call(transform, run, keys[:, :, span], values[:, :, span], asking, update)
        mx.eval(flatten(run.state)[0])
    return run


def run_of(cache: TransformKVCache) -> Run:
    """State and fill of a cache of one length."""
    return Run(cache._settled_state(), cache._fills[0])


# Comparing


def raw(x: mx.array) -> np.ndarray:
    """The bytes of an array."""
    return np.array(mx.contiguous(x).reshape(-1).view(mx.uint8)) if x.size else np.zeros(0, np.uint8)


def same_array(got: mx.array, want: mx.array) -> bool:
    """Equal in shape, dtype and every bit."""
    return got.shape == want.shape and got.dtype == want.dtype and np.array_equal(raw(got), raw(want))


def assert_same(got: Any, want: Any, what: str) -> None:
    """Two trees of arrays are equal in structure and every bit."""
    (got_leaves, got_structure), (want_leaves, want_structure) = flatten(got), flatten(want)
    assert got_structure == want_structure, f"{what}: structure differs"
    for index, (a, b) in enumerate(zip(got_leaves, want_leaves)):
        assert a.shape == b.shape and a.dtype == b.dtype, (
            f"{what}: leaf {index} is {a.dtype} {a.shape} {b.dtype} {b.shape}"
        )
        assert same_array(a, b), f"{what}: leaf {index} differs in {int((a != b).sum())} of {a.size} numbers"


def shapes(tree: Any) -> list[tuple[Any, ...]]:
    """Shape and dtype of every leaf."""
    return [(leaf.shape, leaf.dtype) for leaf in flatten(tree)[0]]


def batch_row(tree: Any, index: int) -> Any:
    """One batch row of a state."""
    return map_leaves(lambda leaf: leaf[index : index + 1], tree)


def in_order(transform: Transform, state: Any) -> Any:
    """The state with its rows in token order."""
    return transform.ordered(state) if transform.evicts else state


def live(transform: Transform, run: Run) -> tuple[mx.array, ...]:
    """Offset, positions and every array of the rows that are held, in token order, without unused room."""
    state = in_order(transform, run.state)
    key_parts, value_parts = transform.parts(state, run.fill)
    arrays = [array for part in key_parts + value_parts for array in part.rows]
    if transform.evicts:
        arrays.append(transform.positions(state)[..., : run.fill.rows])
    return (state.offset, *arrays)


def held_positions(transform: Transform, run: Run) -> np.ndarray:
    """Token positions [B, H, rows] of the rows that are held, rising."""
    state = in_order(transform, run.state)
    rows = np.array(transform.positions(state))
    rows = np.broadcast_to(rows, (rows.shape[0], run.state.layout.kv_heads, rows.shape[2]))
    offset = np.array(state.offset)[:, None, None]
    picked = np.where((rows >= 0) & (rows < offset), rows, np.iinfo(np.int32).max)
    return np.sort(picked, axis=-1)[..., : run.fill.rows]


def read_in_order(transform: Transform, run: Run) -> tuple[mx.array, mx.array]:
    """Keys and values of the rows that are held, in token order."""
    return transform.read(in_order(transform, run.state), run.fill)


def numbers(x: mx.array) -> np.ndarray:
    """The array in float64."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def tokens_of(rows: mx.array, originals: mx.array) -> np.ndarray:
    """Which token [B, H, C] each row shows: the one whose vector points most nearly the same way; -1 for a zero row."""
    rows, originals = numbers(rows), numbers(originals)
    norms = np.linalg.norm(rows, axis=-1)
    unit = originals / np.linalg.norm(originals, axis=-1, keepdims=True)
    nearest = (rows @ unit.swapaxes(-1, -2)).argmax(axis=-1)
    return np.where(norms > 0, nearest, -1)
