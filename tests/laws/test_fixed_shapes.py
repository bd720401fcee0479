"""Law: an update changes no shape and no dtype of a state, whatever number of tokens it brings."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import vq_functional as vq
from laws.common import Subject, begin, call, keys_and_values, over, shapes, tokens
from vq_functional.core.tree import flatten

LENGTHS = st.lists(st.sampled_from([0, 1, 1, 2, 7, 32, 45]), min_size=1, max_size=4)


@over(without=["share", "anchors"])
@given(pieces=LENGTHS, batch=st.sampled_from([1, 2]), with_queries=st.booleans())
def test_update_keeps_shapes(subject: Subject, pieces: list[int], batch: int, with_queries: bool) -> None:
    spec = vq.KVSpec(batch=batch, kv_heads=2, key_dim=64, value_dim=64, capacity=192)
    run = begin(subject.transform, spec)
    before, structure = shapes(run.state), flatten(run.state)[1]
    for seed, n in enumerate(pieces):
        keys, values = keys_and_values(spec, n, seed)
        queries = tokens(n, 50 + seed, batch=batch, heads=4) if with_queries else None
        run, keys_out, values_out = call(subject.transform, run, keys, values, queries)
        assert shapes(run.state) == before, f"after a call of {n}"
        assert flatten(run.state)[1] == structure, f"after a call of {n}"
        assert keys_out.shape == values_out.shape


@over(without=["share"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=["fp16", "bf16", "fp32"])
def test_a_state_holds_arrays_only(subject: Subject, dtype: mx.Dtype) -> None:
    spec = vq.KVSpec(batch=2, kv_heads=2, key_dim=64, value_dim=64, dtype=dtype, capacity=64)
    run = begin(subject.transform, spec)
    leaves, structure = flatten(run.state)
    hash(structure)
    assert all(isinstance(leaf, mx.array) and leaf.shape[0] == spec.batch for leaf in leaves)
    keys, values = keys_and_values(spec, 5)
    assert shapes(call(subject.transform, run, keys, values)[0].state) == shapes(run.state)
