"""Law: a row that stays is the row that came, bit for bit, at its true position; in a store of codes, its codes."""

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vq_functional as vq
from laws.common import (
    PAIRS,
    SMALL,
    SPEC,
    Run,
    Subject,
    assert_same,
    begin,
    feed,
    held_positions,
    in_order,
    keys_and_values,
    over,
    read_in_order,
    same_array,
    tokens,
)
from vq_functional.methods import METHODS
from vq_functional.ops.rows import pick


def assert_kept_rows_are_those_that_came(subject: Subject, run: Run, keys: mx.array, values: mx.array) -> None:
    """Against the store alone, which never evicts."""
    transform = subject.transform
    state = in_order(transform, run.state)
    position = transform.positions(state)[..., : run.fill.rows]
    assert (mx.min(position) >= 0).item() and bool((position[..., 1:] > position[..., :-1]).all())
    store = transform.store
    alone = feed(store, begin(store, attrs.evolve(SPEC, capacity=keys.shape[2], dtype=keys.dtype)), keys, values)
    sides = slice(1 if "folds" in subject.traits else 2)  # what is folded changes the values of others
    got = [array for part in sum(transform.parts(state, run.fill)[sides], ()) for array in part.rows]
    want = [array for part in sum(store.parts(alone.state, alone.fill)[sides], ()) for array in part.rows]
    for one, all_rows in zip(got, want, strict=True):
        assert same_array(one, pick(all_rows, position))
    if "packs" not in subject.traits:
        for one, all_rows in zip(read_in_order(transform, run)[sides], (keys, values)[sides], strict=True):
            assert same_array(one, pick(all_rows, position))


@over("evicts", among=PAIRS)
@given(
    pieces=st.lists(st.sampled_from([1, 1, 1, 9, 30]), min_size=3, max_size=9),
    dtype=st.sampled_from([mx.float16, mx.bfloat16, mx.float32]),
    with_queries=st.booleans(),
)
def test_kept_rows(subject: Subject, pieces: list[int], dtype: mx.Dtype, with_queries: bool) -> None:
    spec = attrs.evolve(SPEC, dtype=dtype)
    keys, values = keys_and_values(spec, sum(pieces))
    queries = tokens(sum(pieces), 7, heads=4, dtype=dtype) if with_queries else None
    run = feed(subject.transform, begin(subject.transform, spec), keys, values, pieces, queries)
    assert_kept_rows_are_those_that_came(subject, run, keys, values)


@over("evicts")
def test_survivors_keep_their_rotation(subject: Subject) -> None:
    """One basis vector a token, turned to its position; evictions leave gaps, and nobody closes them."""
    basis = mx.eye(64)[mx.arange(60) % 64]
    turned = mx.fast.rope(basis[None, None], 64, traditional=False, base=500000.0, scale=1.0, offset=0)
    keys = mx.broadcast_to(turned.astype(mx.float16), (2, 2, 60, 64))
    _, values = keys_and_values(SPEC, 60)
    run = feed(subject.transform, begin(subject.transform), keys, values, [20, *[1] * 40])
    assert run.state.offset.tolist() == [60, 60]
    assert_kept_rows_are_those_that_came(subject, run, keys, values)


@over("evicts", where=lambda subject: subject.name in METHODS, without=["pages"])
def test_a_method_is_its_policy_over_plain_rows(subject: Subject) -> None:
    policy = getattr(vq, f"{subject.name}_policy")
    options = {name: SMALL[name] for name in SMALL if name in attrs.fields_dict(METHODS[subject.name].options)}
    composed = vq.chain(policy(**options), vq.rows())
    keys, values = keys_and_values(SPEC, 70)
    one, two = (feed(t, begin(t), keys, values, [40, *[1] * 30]) for t in (subject.transform, composed))
    assert_same(one.state, two.state, "the method and the composition")


@over("evicts", among=PAIRS)
def test_every_subject_really_evicts(subject: Subject) -> None:
    """Or the laws about eviction would say nothing of it."""
    run = feed(subject.transform, begin(subject.transform), *keys_and_values(SPEC, 60))
    policy = subject.transform.policy
    rows = policy.kept(60, 60, policy.limit(60))
    assert run.fill.rows == rows <= policy.limit(60) < 60
    assert np.unique(held_positions(subject.transform, run)[0], axis=0).shape[1] == rows


@over("packs", among=PAIRS, without=["anchors"])
def test_every_subject_really_packs(subject: Subject) -> None:
    transform = subject.transform
    run = feed(transform, begin(transform), *keys_and_values(SPEC, 80))
    key_parts, value_parts = transform.parts(run.state, run.fill)
    assert transform.coded
    assert any(array.dtype in (mx.uint32, mx.uint8) for part in key_parts + value_parts for array in part.rows)


@over(without=["pages", "packs"])
def test_plain_rows_are_no_codes(subject: Subject) -> None:
    assert not subject.transform.coded


def test_stores_that_share_scales_are_no_bed() -> None:
    shared = [name for name, method in METHODS.items() if not getattr(method.build(), "take", True)]
    assert shared
    for name in shared:
        with pytest.raises(vq.QuantizerConfigError, match=name):
            vq.chain(vq.streaming_llm_policy(), METHODS[name].build())
