"""Law: no query is told of the tokens that follow it."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.common import SPEC, Subject, begin, feed, keys_and_values, over, same_array, tokens

PROMPT, SCALE = 20, 0.125


@over()
@pytest.mark.parametrize("stored", [0, 40], ids=["first-call", "later-call"])
@given(changed=st.integers(1, PROMPT - 1), size=st.sampled_from([1.0, 100.0]), masked=st.booleans())
def test_a_changed_row_changes_no_earlier_output(
    subject: Subject, stored: int, changed: int, size: float, masked: bool
) -> None:
    transform = subject.transform
    keys, values = keys_and_values(SPEC, stored + PROMPT)
    other_keys, other_values = keys_and_values(SPEC, stored + PROMPT, seed=9)
    here = (mx.arange(stored + PROMPT) == stored + changed)[:, None]
    queries = tokens(PROMPT, 7, heads=2 * SPEC.kv_heads)
    run = begin(transform)
    if stored:
        run = feed(transform, run, keys[:, :, :stored], values[:, :, :stored])
    fill = transform.written(run.fill, PROMPT)
    mask = transform.make_mask(run.state, PROMPT)

    def outputs(k: mx.array, v: mx.array) -> list[mx.array]:
        held = transform.write(run.state, k[:, :, stored:], v[:, :, stored:])
        if masked:
            return [transform.attend(held, queries, SCALE, mask)]
        return [transform.attend(held, queries, SCALE), transform.attend(held, queries, SCALE, "causal", fill)]

    before = outputs(keys, values)
    after = outputs(mx.where(here, other_keys * size, keys), mx.where(here, other_values * size, values))
    for was, now in zip(before, after, strict=True):
        assert same_array(now[:, :, :changed], was[:, :, :changed])
        assert not same_array(now[:, :, changed:], was[:, :, changed:]), "the changed row has no effect at all"
