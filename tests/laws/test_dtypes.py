"""Law: what comes out has the dtype of what came in, for keys and for values; state and scores take no detour."""

import attrs
import mlx.core as mx
import pytest

import vq_functional as vq
from laws.common import SPEC, Subject, begin, call, keys_and_values, over, tokens
from vq_adapters import QuantizerConfigError, TransformKVCache
from vq_functional.core.tree import flatten

DTYPES = pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=["fp16", "bf16", "fp32"])


@over()
@DTYPES
def test_dtype_in_is_dtype_out(subject: Subject, dtype: mx.Dtype) -> None:
    transform, spec = subject.transform, attrs.evolve(SPEC, dtype=dtype)
    keys, values = keys_and_values(spec, 50)
    run = begin(transform, spec)
    for new in (slice(0, 40), slice(40, 41), slice(41, 50)):
        run, keys_out, values_out = call(transform, run, keys[:, :, new], values[:, :, new])
        assert (keys_out.dtype, values_out.dtype) == (dtype, dtype)
    read_keys, read_values = transform.read(run.state, run.fill)
    assert (read_keys.dtype, read_values.dtype) == (dtype, dtype)
    if dtype != mx.float32:
        allowed = {dtype, mx.bfloat16, mx.uint32, mx.uint16, mx.uint8, mx.int32}
        rest = flatten((getattr(run.state, "memory", ()), getattr(run.state, "carry", ())))[0]
        others = [leaf for leaf in flatten(run.state)[0] if all(leaf is not one for one in rest)]
        assert {leaf.dtype for leaf in others if leaf.ndim > 3} <= allowed, "rows, or numbers of every row"


@over()
@DTYPES
@pytest.mark.parametrize("n", [1, 5])
def test_attention_has_the_queries_dtype(subject: Subject, dtype: mx.Dtype, n: int) -> None:
    transform, spec = subject.transform, attrs.evolve(SPEC, dtype=dtype)
    keys, values = keys_and_values(spec, 40 + n)
    run, *_ = call(transform, begin(transform, spec), keys[:, :, :40], values[:, :, :40])
    held = transform.write(run.state, keys[:, :, 40:], values[:, :, 40:])
    out = transform.attend(held, tokens(n, 7, heads=4, dtype=dtype), 0.125)
    assert (out.dtype, out.shape) == (dtype, (2, 4, n, 64))
    assert mx.isfinite(out).all()


@over()
@DTYPES
def test_adapter_keeps_the_dtype(subject: Subject, dtype: mx.Dtype) -> None:
    cache = TransformKVCache(subject.transform)
    keys, values = keys_and_values(attrs.evolve(SPEC, dtype=dtype), 42)
    for new in (slice(0, 40), slice(40, 41), slice(41, 42)):
        held = cache.update_and_fetch(keys[:, :, new], values[:, :, new])
        assert [x.dtype for x in held] == [dtype, dtype]


@over()
def test_other_dtypes_are_refused_at_the_door(subject: Subject) -> None:
    transform = subject.transform
    keys, values = keys_and_values(SPEC, 5)
    state = begin(transform).state
    with pytest.raises(QuantizerConfigError, match="dtype"):
        transform.update(state, keys.astype(mx.float32), values.astype(mx.float32))
    with pytest.raises(QuantizerConfigError, match="float"):
        TransformKVCache(transform).update_and_fetch(keys.astype(mx.int32), values.astype(mx.int32))
    with pytest.raises(QuantizerConfigError, match="float"):
        vq.KVSpec(kv_heads=2, key_dim=64, value_dim=64, dtype=mx.int32)
