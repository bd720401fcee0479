"""Classes of layers that are packed together: roles, coordinators, and whose bytes are whose."""

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from configs import CONFIGS, DV, B, D, H, counted, feed, rows, statistics
from models import build, tokens

from vq_adapters import (
    KVCacheBuilder,
    KVCacheConfig,
    MiniCacheCoordinator,
    MiniCacheKVCache,
    MiniCacheOptions,
    QuantizerConfigError,
    XKVCoordinator,
    XKVKVCache,
    XKVOptions,
    XQuantCoordinator,
    XQuantKVCache,
    XQuantOptions,
    load,
    save,
)

WITH_ROLES = (XQuantKVCache, MiniCacheKVCache)
CALLS = (140, 60, 1, 1)  # 202 tokens
kinds = pytest.mark.parametrize("kind", (*WITH_ROLES, XKVKVCache), ids=lambda kind: kind.__name__)
with_roles = pytest.mark.parametrize("kind", WITH_ROLES, ids=lambda kind: kind.__name__)


def stack(kind: Any, readers: int = 1, group_id: int = 0, coordinator: Any = None) -> list[Any]:
    """The caches of one group."""
    coordinator = coordinator or MiniCacheCoordinator()
    if kind is XKVKVCache:
        options = XKVOptions(xkv_rank=16, xkv_group_size=readers + 1)
        config = KVCacheConfig(method="xkv", options=options)
        return [kind(config, member, group_id, coordinator) for member in range(readers + 1)]
    first = kind(CONFIGS[kind], kind.roles[0], group_id, coordinator, readers)
    return [first, *(kind(CONFIGS[kind], kind.roles[1], group_id, coordinator) for _ in range(readers))]


def feed_all(caches: list[Any], calls: tuple[int, ...] = CALLS) -> list[Any]:
    """Every layer gets rows of its own."""
    for i, n in enumerate(calls):
        for layer, cache in enumerate(caches):
            mx.eval(cache.update_and_fetch(*rows(n, seed=10 * i + layer)))
    return caches


def resident(caches: list[Any], side: str) -> int:
    """Bytes of the arrays that hold the packed rows of a stack, without room that is not filled, and of tables."""
    first = caches[0]
    state, at = first._settled_state(), ("keys", "values").index(side)
    units, held = first.transform.reader.sides(state.layout)[at], getattr(state, side)
    return sum(x.nbytes for x in (*units.first(held.rows, first._fills[0].coded), *held.tables))


def summed(caches: list[Any], name: str) -> Any:
    return sum(getattr(cache, name) for cache in caches)


class TestBytes:
    def test_xquant(self):
        """128 of 202 tokens are in groups of 32; a number of a reading layer has 4 bits more."""
        anchor, reuse = feed_all(stack(XQuantKVCache))
        lines, codes, more = 4 * 4, 128 * 2 // 8, 128 * 4 // 8
        assert anchor.compressed_key_bytes == B * H * D * (codes + lines)
        assert reuse.compressed_key_bytes == B * H * D * (lines + more + lines)
        lines, codes, more = 4, DV * 2 // 8, DV * 4 // 8
        assert anchor.compressed_value_bytes == B * H * 128 * (codes + lines)
        assert reuse.compressed_value_bytes == B * H * 128 * (lines + more + lines)
        assert (anchor.reuse_param_bytes, reuse.reuse_param_bytes) == (0, B * H * (D * 4 * 4 + 128 * 4))
        assert [cache.effective_pair_bits for cache in (anchor, reuse)] == [2 + 1, 1 + 4 + 1]
        assert anchor.fp16_key_bytes == reuse.fp16_key_bytes == B * H * 202 * D * 2

    def test_minicache(self):
        """Two blocks of 64 tokens, of which 4 are apart in each layer."""
        primary, merge = feed_all(stack(MiniCacheKVCache))
        for side, dim in (("key", D), ("value", DV)):
            shared, own = 64 * dim * 2 + 4 + 1, 64 * 2 + dim * 2 + 4 * dim * 2
            assert getattr(primary, f"compressed_{side}_bytes") == 2 * B * H * (shared + own)
            assert getattr(merge, f"compressed_{side}_bytes") == 2 * B * H * own
            assert getattr(primary, f"fp16_{side}_bytes") == B * H * 202 * dim * 2

    @pytest.mark.parametrize("layers", [1, 2])
    def test_xkv(self, layers):
        """32 of 202 tokens are latents of 32 components at 4 bits, in one group."""
        caches = feed_all(stack(XKVKVCache, layers - 1))
        latents, bases = B * 32 * (32 * 4 // 8 + 4), 0
        for side, dim in (("key", D), ("value", DV)):
            basis, spread = B * H * dim * (32 + 1) * 2, B * 32 * 4
            shares = [basis + latents + spread, basis][:layers]
            assert [getattr(cache, f"compressed_{side}_bytes") for cache in caches] == shares
            bases += layers * basis + spread
        assert [cache.shared_basis_bytes for cache in caches] == [bases, 0][:layers]
        for member, cache in enumerate(caches):
            assert (cache.member_idx, cache.rank) == (member, 32)
            assert cache.assigned_avg_bits == 32 * 4 / (layers * H * D)
            assert cache.value_fp16_bytes == cache.fp16_value_bytes == B * H * 202 * DV * 2

    @kinds
    @pytest.mark.parametrize("readers", [1, 2])
    def test_the_sum_over_a_group_is_what_is_resident(self, kind, readers):
        caches = feed_all(stack(kind, readers))
        for side in ("keys", "values"):
            assert summed(caches, f"compressed_{side[:-1]}_bytes") == resident(caches, side) > 0

    @kinds
    def test_batches(self, kind):
        """Of rows of different lengths, one of which has no block."""
        lists = [stack(kind) for _ in range(2)]
        for caches, calls in zip(lists, ((40,), CALLS), strict=True):
            feed_all(caches, calls)
        batch = [kind.merge(list(pair)) for pair in zip(*lists, strict=True)]
        for cache, *alone in zip(batch, *lists, strict=True):
            for name in ("compressed_key_bytes", "compressed_value_bytes", "fp16_key_bytes"):
                assert getattr(cache, name) == summed(alone, name)
            assert (cache.transform, cache.group_id) == (alone[0].transform, alone[0].group_id)

    @kinds
    def test_reading_them_in_the_middle_of_a_pass(self, kind):
        caches, others = feed_all(stack(kind), (140,)), feed_all(stack(kind), (140,))
        for layer, (cache, other) in enumerate(zip(caches, others, strict=True)):
            for one in (cache, other):
                mx.eval(one.update_and_fetch(*rows(60, seed=layer)))
            before = [counted(one) for one in caches]
            assert [statistics(one) for one in caches]
            assert [counted(one) for one in caches] == before
        assert [statistics(one) for one in caches] == [statistics(one) for one in others]


class TestTokens:
    """Layers that agree but in some tokens."""

    @staticmethod
    def _caches(unlike: list[int]) -> list[Any]:
        caches = stack(MiniCacheKVCache)
        keys, values = rows(140)
        other = keys * mx.where((mx.arange(140)[:, None] == mx.array(unlike)).any(axis=-1), -1, 1)[:, None]
        for cache, x in zip(caches, (keys, other.astype(mx.float16)), strict=True):
            mx.eval(cache.update_and_fetch(x, values))
        return caches

    @pytest.mark.parametrize("unlike", [[20], [20, 30, 50]], ids=str)
    def test_those_are_retained(self, unlike):
        for cache in self._caches(unlike):
            assert cache.n_retained == B * H * len(unlike)
            assert cache.n_merged == B * H * (64 - len(unlike))
            assert cache.retention_rate == len(unlike) / 64

    def test_a_block_has_room_for_four(self):
        caches = self._caches([20, 21, 30, 40, 50])
        assert [cache.n_retained for cache in caches] == [B * H * 4] * 2

    def test_none_before_the_first_block(self):
        for cache in feed_all(stack(MiniCacheKVCache), (100,)):
            assert (cache.n_retained, cache.n_merged, cache.retention_rate) == (0, 0, 0.0)


@with_roles
class TestRoles:
    def test_groups_of_a_coordinator(self, kind):
        coordinator = XQuantCoordinator()
        caches = [cache for group_id in (0, 1, 4) for cache in stack(kind, 2, group_id, coordinator)]
        first, other = kind.roles
        assert [cache.role for cache in caches] == [first, other, other] * 3
        assert [cache.group_id for cache in caches] == [0] * 3 + [1] * 3 + [4] * 3
        feed_all(caches)
        alone = feed_all(stack(kind, 2))
        assert [cache.compressed_key_bytes for cache in caches] == [one.compressed_key_bytes for one in alone] * 3

    @pytest.mark.parametrize("arguments", [{}, {"coordinator": "given", "n_readers": 0}], ids=["none", "no readers"])
    def test_a_layer_alone(self, kind, arguments):
        arguments = {name: XQuantCoordinator() if x == "given" else x for name, x in arguments.items()}
        cache = kind(CONFIGS[kind], group_id=3, **arguments)
        assert (cache.role, cache.group_id, cache.transform.place) == (kind.roles[0], 3, None)
        plain = feed(kind(CONFIGS[kind]))
        assert feed(cache).compressed_key_bytes == plain.compressed_key_bytes

    def test_a_reading_layer_alone_is_like_any(self, kind):
        cache = feed(kind(CONFIGS[kind], role=kind.roles[1]), (100,))
        assert cache.role == kind.roles[1]
        assert cache.compressed_key_bytes == feed(kind(CONFIGS[kind]), (100,)).compressed_key_bytes

    def test_refusals(self, kind):
        first, other = kind.roles
        coordinator = XQuantCoordinator()
        with pytest.raises(QuantizerConfigError, match=f"{kind.method}: `role`"):
            kind(CONFIGS[kind], "leader")
        for field, value in (("group_id", -1), ("group_id", "0"), ("n_readers", -1), ("n_readers", 1.0)):
            for role in kind.roles:
                with pytest.raises(QuantizerConfigError, match=f"{kind.method}: `{field}`"):
                    kind(CONFIGS[kind], role, coordinator=coordinator, **{field: value})
        with pytest.raises(QuantizerConfigError, match="`group_id` must be of a group whose first layer is there"):
            kind(CONFIGS[kind], other, 0, coordinator)
        caches = stack(kind, 1, 0, coordinator)
        with pytest.raises(QuantizerConfigError, match="`group_id` must be of a group with fewer than 2 layers yet"):
            kind(CONFIGS[kind], other, 0, coordinator)
        with pytest.raises(QuantizerConfigError, match="`group_id` must be of a group without a layer 0 yet"):
            kind(CONFIGS[kind], first, 0, coordinator)
        with pytest.raises(QuantizerConfigError, match="`group_id` must be of a group whose first layer is there"):
            kind(CONFIGS[kind], other, 1, coordinator)
        with pytest.raises(QuantizerConfigError, match="`coordinator` must have groups of 3 layers"):
            kind(CONFIGS[kind], first, 1, coordinator, 2)
        feed_all(caches)

    def test_a_group_that_is_not_whole(self, kind):
        cache = kind(CONFIGS[kind], coordinator=XQuantCoordinator())
        assert cache.compressed_key_bytes == 0
        with pytest.raises(RuntimeError, match="needs the caches of 2 layers in one list"):
            feed(cache)


class TestMembers:
    def test_groups_of_a_coordinator(self):
        coordinator = XKVCoordinator()
        caches = [cache for group_id in (0, 1, 4) for cache in stack(XKVKVCache, 2, group_id, coordinator)]
        assert [cache.member_idx for cache in caches] == [0, 1, 2] * 3
        assert [cache.group_id for cache in caches] == [0] * 3 + [1] * 3 + [4] * 3

    def test_a_layer_alone(self):
        cache = XKVKVCache(CONFIGS[XKVKVCache], group_id=3)
        assert (cache.member_idx, cache.group_id, cache.transform.place) == (0, 3, None)

    @pytest.mark.parametrize("member", [-1, 2, 0.5])
    def test_refuses_a_place_that_the_group_lacks(self, member):
        with pytest.raises(QuantizerConfigError, match="xkv: `member_idx`"):
            XKVKVCache(CONFIGS[XKVKVCache], member, coordinator=XKVCoordinator())

    def test_refuses_a_place_that_is_taken(self):
        coordinator = XKVCoordinator()
        caches = stack(XKVKVCache, 1, 0, coordinator)
        with pytest.raises(QuantizerConfigError, match="xkv: `group_id` must be of a group without a layer 1 yet"):
            XKVKVCache(CONFIGS[XKVKVCache], 1, 0, coordinator)
        with pytest.raises(QuantizerConfigError, match="xkv: `group_id`"):
            XKVKVCache(CONFIGS[XKVKVCache], 1, -1, coordinator)
        assert [cache.member_idx for cache in caches] == [0, 1]


OPTIONS: dict[Any, Any] = {
    XQuantKVCache: XQuantOptions(),
    MiniCacheKVCache: MiniCacheOptions(),
    XKVKVCache: XKVOptions(xkv_rank=16),
}
# Of five layers the places in their groups, and the groups.
MADE: dict[Any, tuple[list[int], list[int]]] = {
    XQuantKVCache: ([0, 1, 0, 1, 0], [0, 0, 1, 1, 4]),
    MiniCacheKVCache: ([0, 0, 0, 1, 0], [0, 1, 1, 1, 4]),
    XKVKVCache: ([0, 1, 0, 1, 0], [0, 0, 1, 1, 4]),
}


def served(kind: Any) -> list[Any]:
    """The caches of a model of five layers after a prompt of 200 tokens and one more."""
    model = build("llama", num_hidden_layers=5)
    caches = KVCacheBuilder.for_model(model, KVCacheConfig(method=kind.method, options=OPTIONS[kind]))
    for call in (tokens(200), [1]):
        mx.eval(model(mx.array([call]), cache=caches))
    return caches


def told(caches: list[Any]) -> list[dict[str, Any]]:
    return [statistics(cache) for cache in caches]


@kinds
class TestLists:
    def test_for_model(self, kind):
        caches, (places, groups) = served(kind), MADE[kind]
        assert all(type(cache) is kind for cache in caches)
        assert [cache.transform.place or 0 for cache in caches] == places
        assert [cache.group_id for cache in caches] == groups
        assert caches[2]._partners() == caches[3]._partners() == caches[2:4]
        stacks = [caches[2:4]] + [caches[:2]] * (kind is not MiniCacheKVCache)
        for one in stacks:
            assert summed(one, "compressed_key_bytes") == resident(one, "keys") > 0

    def test_copies(self, kind):
        caches = served(kind)
        before = told(caches)
        copies = copy.deepcopy(caches)
        assert told(copies) == before
        del caches
        assert told(copies) == before

    def test_files(self, kind, tmp_path: Path):
        caches = served(kind)
        save(tmp_path / "caches", caches)
        loaded = load(tmp_path / "caches")
        assert [type(cache) for cache in loaded] == [kind] * 5
        alone = [cache.transform.place is None for cache in caches]
        for cache, was, single in zip(loaded, caches, alone, strict=True):
            there, here = statistics(cache), statistics(was)
            if single:  # where it stood is not told
                here["group_id"] = there["group_id"]
            assert there == here
