"""Layers that pack their rows together: layer by layer is the same as all at once, and their caches hold together."""

import copy
from collections.abc import Sequence

import attrs
import mlx.core as mx
import pytest

import vq_functional as vq
from laws.common import SPEC, Subject, assert_same, keys_and_values, over, same_array, small_options, spans
from vq_adapters import TransformKVCache
from vq_adapters.group import LayerGroup
from vq_functional.crosslayer.stack import Stack
from vq_functional.methods import METHODS

PIECES = (70, 1, 60, *[1] * 40)
LAYERS = (1, 2, 3)
stacks = over("stacks")


def stack_of(subject: Subject, layers: int) -> Stack:
    """The subject's method over so many layers."""
    return METHODS[subject.name].build(**{**small_options(METHODS[subject.name]), "layers": layers})


def rows_of(layers: int, n: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    """Keys and values of a stack, of layers that are alike."""
    whole = attrs.evolve(SPEC, kv_heads=layers * SPEC.kv_heads)
    common, noise = keys_and_values(SPEC, n, seed + 50), keys_and_values(whole, n, seed)
    keys, values = (mx.tile(x, (1, layers, 1, 1)) + 0.3 * y for x, y in zip(common, noise))
    return keys, values


def heads(x: mx.array, layer: int) -> mx.array:
    return x[:, layer * SPEC.kv_heads : (layer + 1) * SPEC.kv_heads]


def caches_of(stack: Stack) -> list[TransformKVCache]:
    """A cache list of one stack."""
    group, caches = LayerGroup(), [TransformKVCache(stack.member(layer)) for layer in range(stack.layers)]
    for layer, cache in enumerate(caches):
        cache.join(group, layer)
    return caches


def feed(caches: Sequence[TransformKVCache], keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    """One call of all layers; what they return, stacked."""
    held = [cache.update_and_fetch(heads(keys, i), heads(values, i)) for i, cache in enumerate(caches)]
    keys_out, values_out = (mx.concatenate(side, axis=1) for side in zip(*held))
    mx.eval(keys_out, values_out)
    return keys_out, values_out


def assert_equal(got: tuple[mx.array, mx.array], want: tuple[mx.array, mx.array]) -> None:
    assert all(same_array(a, b) for a, b in zip(got, want))


@stacks
@pytest.mark.parametrize("layers", LAYERS)
def test_layer_by_layer_is_all_at_once(subject: Subject, layers: int) -> None:
    """In the functional form, and in caches."""
    stack = stack_of(subject, layers)
    keys, values = rows_of(layers, sum(PIECES))
    state = stack.init_state(attrs.evolve(SPEC, kv_heads=layers * SPEC.kv_heads))
    group, caches, whole = stack.init_group(SPEC), caches_of(stack), TransformKVCache(stack)
    for span in spans(PIECES):
        k, v = keys[:, :, span], values[:, :, span]
        state, *want = stack.update(state, k, v)
        held = []
        for layer in range(layers):
            member = stack.member(layer)
            own, group, *out = member.update_in(None, group, heads(k, layer), heads(v, layer))
            assert_same(own, group[layer], "the layer's own state is the one in the group")
            held.append(out)
        assert_equal(tuple(mx.concatenate(side, axis=1) for side in zip(*held)), want)
        assert_equal(feed(caches, k, v), whole.update_and_fetch(k, v))
    assert_same(stack.join(group), state, "functional")
    assert_same(stack.join(tuple(cache._settled_state() for cache in caches)), whole._settled_state(), "caches")


@stacks
@pytest.mark.parametrize("n", [1, 5])
def test_a_call_goes_through_all_layers_in_order(subject: Subject, n: int) -> None:
    """In the functional form too, also where an array's shape can't tell that a layer was left out."""
    stack, (keys, values) = stack_of(subject, 3), rows_of(3, n)
    own = [(heads(keys, layer), heads(values, layer)) for layer in range(3)]
    group = stack.init_group(SPEC)
    for turn in (0, 1, 2, 0):
        for layer in {0, 1, 2} - {turn}:
            with pytest.raises(vq.QuantizerConfigError, match=f"`group` must go to layer {turn} next.*'layer {layer}'"):
                stack.member(layer).update_in(None, group, *own[layer])
        if turn:
            with pytest.raises(vq.QuantizerConfigError, match="`group` must have come to the end of its call"):
                stack.join(group)
            with pytest.raises(vq.QuantizerConfigError, match=f"`keys` must hold {n} tokens"):
                stack.member(turn).update_in(None, group, *(mx.tile(x, (1, 1, 2, 1)) for x in own[turn]))
        _, group, *_ = stack.member(turn).update_in(None, group, *own[turn])


@stacks
def test_a_member_reads_and_trims_what_it_has_borrowed(subject: Subject) -> None:
    """Alone it is refused: what the first member holds is that of all layers."""
    stack, (keys, values) = stack_of(subject, 2), rows_of(2, 150)
    group = stack.split(stack.update(stack.init_state(attrs.evolve(SPEC, kv_heads=2 * SPEC.kv_heads)), keys, values)[0])
    read = stack.read(stack.join(group))
    for layer in range(2):
        member = stack.member(layer)
        borrowed = member.borrowed(group[layer], group[0])
        assert_equal(member.read(borrowed), tuple(heads(x, layer) for x in read))
        assert_equal(member.read(member.trim(borrowed, 0)), member.read(borrowed))
        if layer or stack.sinks:
            for call in (member.read, lambda held, of=member: of.trim(held, 3)):
                with pytest.raises(vq.QuantizerConfigError, match=f"{subject.name}: `state` must have borrowed"):
                    call(group[layer])


@stacks
def test_shared_arrays_are_there_once(subject: Subject) -> None:
    """The bytes of a cache list are those of the whole, but for counters."""
    stack = stack_of(subject, 2)
    caches, whole = caches_of(stack), TransformKVCache(stack)
    rows = rows_of(2, 150)
    feed(caches, *rows)
    whole.update_and_fetch(*rows)
    assert abs(sum(cache.nbytes for cache in caches) - whole.nbytes) <= 16 * SPEC.batch


@stacks
def test_a_list_survives_what_is_done_to_it(subject: Subject) -> None:
    """Copies, saved and loaded lists and batch rows read as the list did, and go on without each other."""
    stack = stack_of(subject, 2)
    caches, (keys, values) = caches_of(stack), rows_of(2, 160)
    feed(caches, keys[:, :, :150], values[:, :, :150])
    copied = copy.deepcopy(caches)
    loaded = [TransformKVCache.from_state(cache.state) for cache in caches]
    singles = [[cache.extract(row) for cache in caches] for row in range(SPEC.batch)]
    merged = [TransformKVCache.merge(list(layer)) for layer in zip(*singles)]
    came = keys[:, :, 150:], values[:, :, 150:]
    want = feed(caches, *came)
    for others in (copied, loaded, merged):
        assert_equal(feed(others, *came), want)
    for row, single in enumerate(singles):
        got = feed(single, *(x[row : row + 1] for x in came))
        assert_equal(got, tuple(x[row : row + 1] for x in want))
    for cache in copied:
        cache.filter([1])
    again = feed(copied, *(x[1:] for x in came))
    assert_equal(again, tuple(x[1:] for x in feed(caches, *came)))


@stacks
def test_all_layers_trim(subject: Subject) -> None:
    stack = stack_of(subject, 2)
    caches, whole = caches_of(stack), TransformKVCache(stack)
    keys, values = rows_of(2, 150)
    for n, dropped in ((150, 7), (3, 60), (1, 1), (20, 20)):
        feed(caches, keys[:, :, :n], values[:, :, :n])
        whole.update_and_fetch(keys[:, :, :n], values[:, :, :n])
        whole._settle()
        assert [cache.trim(dropped) for cache in caches] == [dropped] * 2
        whole.trim(dropped)
        assert_equal(
            feed(caches, keys[:, :, :1], values[:, :, :1]), whole.update_and_fetch(keys[:, :, :1], values[:, :, :1])
        )


@stacks
def test_what_tears_a_stack_apart_is_refused(subject: Subject) -> None:
    """By name, with nothing changed."""
    stack = stack_of(subject, 2)
    caches, (keys, values) = caches_of(stack), rows_of(2, 8)
    first, second = ((heads(keys, layer), heads(values, layer)) for layer in range(2))
    with pytest.raises(RuntimeError, match=f"{subject.name}: layer 1 must come after layer 0"):
        caches[1].update_and_fetch(*second)
    caches[0].update_and_fetch(*first)
    with pytest.raises(RuntimeError, match=f"{subject.name}: layer 1 took no part in the last call"):
        caches[0].update_and_fetch(*first)
    with pytest.raises(RuntimeError, match=f"{subject.name}: some layers of the group"):
        _ = caches[0].state
    with pytest.raises(vq.QuantizerConfigError, match=f"{subject.name}: `keys` must have heads, sizes and dtype"):
        caches[1].update_and_fetch(second[0][:, :1], second[1][:, :1])
    with pytest.raises(RuntimeError, match=f"{subject.name}: layer 1 must come after layer 0"):
        caches[1].update_and_fetch(second[0][:, :, :5], second[1][:, :, :5])
    caches[1].update_and_fetch(*second)
    fresh = caches_of(stack)
    assert_equal(feed(caches, keys, values)[0][:, :, 8:], feed(fresh, keys, values)[0])
    with pytest.raises(RuntimeError, match=f"{subject.name}: `group` needs the caches of 2 layers"):
        TransformKVCache(stack.member(0)).update_and_fetch(*first)
    with pytest.raises(RuntimeError, match=f"{subject.name}: `group` must come from the layer"):
        stack.member(0).update(None, *first)
    member = stack.member(1)
    alone = member.init_state(SPEC)
    with pytest.raises(vq.QuantizerConfigError, match=f"{subject.name}: `group` must have the states of all 2 layers"):
        member.update_in(None, stack_of(subject, 1).init_group(SPEC), *second)
    with pytest.raises(vq.QuantizerConfigError, match=f"{subject.name}: `group` must come from `init_group`"):
        member.update_in(None, (alone,), *second)
    with pytest.raises(vq.QuantizerConfigError, match=f"{subject.name}: `state` must have borrowed"):
        member.make_mask(alone, 1)
    caches[0].trim(3)
    with pytest.raises(RuntimeError, match=f"{subject.name}: layer 1 must come after layer 0"):
        caches[0].update_and_fetch(*first)
        caches[1].update_and_fetch(*second)
