"""Batches: padding, joining and leaving must not change what a request gets."""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, PromptProcessingBatch
from models import (
    BY_CALLS,
    CHUNK,
    TRANSFORMS,
    build,
    cache_list,
    feed,
    greedy,
    log_probabilities,
    shared,
    tokens,
    tolerance,
)

import vq_functional as vq
from vq_adapters import TransformKVCache, attention_hook
from vq_functional.core.transform import Transform

PLAIN_ROWS = "rows"
CODED_WINDOW = "sliding_window over turboquant_mse"
ALL = {
    **TRANSFORMS,
    CODED_WINDOW: vq.sliding_window(window_size=16, key=vq.turboquant_mse_codec(bits=3)),
    PLAIN_ROWS: vq.rows(),
}
# Equal tokens have keys of equal norms in a first layer, but for rounding, and models repeat themselves: a method that
# goes by norms gets a model whose first layer keeps its own cache.
BY_NORMS = ("knorm",)
HEADS, DIM = 2, 64
FIELDS = ("queries", "keys", "values")


class Answers:
    """What a BatchGenerator said to each request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[mx.array]] = defaultdict(list)
        self.finished: dict[int, Any] = {}

    def take(self, generator: BatchGenerator, steps: int = 10_000) -> None:
        for _ in range(steps):
            prompts, responses = generator.next()
            for response in responses:
                self.tokens[response.uid].append(response.token)
                self.logprobs[response.uid].append(response.logprobs)
                if response.finish_reason is not None:
                    self.finished[response.uid] = response
            if not prompts and not responses:
                return

    def check(self, uid: int, expected: tuple[list[int], mx.array], transform: Transform) -> None:
        chosen, logits = expected
        assert self.tokens[uid] == chosen
        got = mx.stack(self.logprobs[uid])
        assert mx.allclose(got, log_probabilities(logits), atol=tolerance(transform, logits))


def architecture_for(name: str) -> str:
    """Of a model that leaves the method no ties."""
    return "gpt_oss" if name in BY_NORMS else "llama"


def generator_for(model: Any, **sizes: int) -> BatchGenerator:
    sizes = {"prefill_batch_size": 2, "completion_batch_size": 4, **sizes}
    return BatchGenerator(model, prefill_step_size=CHUNK, **sizes)


def one_by_one(model: Any, transform: Transform, prompt: list[int], count: int) -> tuple[list[int], mx.array]:
    return greedy(model, cache_list(model, transform), prompt, count)


@pytest.mark.parametrize("hooked", [False, True], ids=["arrays", "hooked"])
@pytest.mark.parametrize("name", ALL)
def test_a_batch_generator_answers_as_one_by_one(name: str, hooked: bool) -> None:
    model = build(architecture_for(name))
    prompts = [tokens(length, seed) for seed, length in enumerate((5, 33, 17, 40, 1, 50))]
    counts = [12, 6, 15, 3, 9, 4]
    with attention_hook(model) if hooked else contextlib.nullcontext():
        expected = [one_by_one(model, ALL[name], *pair) for pair in zip(prompts, counts, strict=True)]
        generator, answers = generator_for(model), Answers()
        caches = [cache_list(model, ALL[name]) for _ in prompts]
        uids = generator.insert(prompts, max_tokens=counts, caches=caches)
        answers.take(generator)
    for uid, answer in zip(uids, expected, strict=True):
        answers.check(uid, answer, ALL[name])


@pytest.mark.parametrize("name", [name for name in ALL if name not in BY_CALLS])
def test_requests_join_and_leave_a_running_batch(name: str) -> None:
    model = shared(architecture_for(name))
    prompts = [tokens(length, seed) for seed, length in enumerate((20, 3, 37, 18))]
    expected = [one_by_one(model, ALL[name], prompt, 14) for prompt in prompts]
    generator, answers = generator_for(model), Answers()
    first = generator.insert(prompts[:2], max_tokens=[14, 14], caches=[cache_list(model, ALL[name]) for _ in range(2)])
    answers.take(generator, steps=5)
    second = generator.insert(prompts[2:], max_tokens=[14, 14], caches=[cache_list(model, ALL[name]) for _ in range(2)])
    answers.take(generator, steps=4)
    generator.remove([first[0]])
    answers.take(generator)
    for uid, answer in zip((first[1], *second), expected[1:], strict=True):
        answers.check(uid, answer, ALL[name])
    cut = answers.tokens[first[0]]
    assert 0 < len(cut) < 14
    assert cut == expected[0][0][: len(cut)]


@pytest.mark.parametrize("name", ALL)
def test_a_finished_request_goes_on_beside_a_fresh_one(name: str) -> None:
    model, history, more, fresh = shared(architecture_for(name)), tokens(35, 1), tokens(19, 2), tokens(24, 3)
    single = cache_list(model, ALL[name])
    chosen, _ = greedy(model, single, history, 6)
    feed(model, single, chosen[-1:])
    expected = [greedy(model, single, more, 8), one_by_one(model, ALL[name], fresh, 8)]

    generator, answers = generator_for(model), Answers()
    (uid,) = generator.insert([history], max_tokens=[6], caches=[cache_list(model, ALL[name])])
    answers.take(generator)
    end = answers.finished[uid]
    assert (end.all_tokens, answers.tokens[uid]) == (history + chosen, chosen)
    assert [cache.offset for cache in end.prompt_cache] == [35 + 6] * 2
    uids = generator.insert(
        [more, fresh],
        max_tokens=[8, 8],
        caches=[end.prompt_cache, cache_list(model, ALL[name])],
        all_tokens=[end.all_tokens, []],
    )
    answers.take(generator)
    for uid, answer in zip(uids, expected, strict=True):
        answers.check(uid, answer, ALL[name])


@pytest.mark.parametrize("name", ["h2o", "kivi"])
@pytest.mark.parametrize(
    "architecture", ["qwen3", "phi3", "gpt_oss", "gemma3_text", "deepseek_v3", "lfm2", "falcon_h1"]
)
def test_other_architectures_in_batches(architecture: str, name: str) -> None:
    model = shared(architecture)
    prompts = [tokens(length, seed) for seed, length in enumerate((5, 39, 20))]
    expected = [one_by_one(model, ALL[name], prompt, 6) for prompt in prompts]
    generator, answers = generator_for(model, prefill_batch_size=3), Answers()
    uids = generator.insert(prompts, max_tokens=[6] * 3, caches=[cache_list(model, ALL[name]) for _ in prompts])
    answers.take(generator)
    for uid, answer in zip(uids, expected, strict=True):
        answers.check(uid, answer, ALL[name])


def generate(batch: Any, steps: int) -> list[list[int]]:
    """Tokens of each row of a GenerationBatch."""
    rows: list[list[int]] = [[] for _ in batch.uids]
    for _ in range(steps):
        for row, response in zip(rows, batch.next(), strict=True):
            row.append(response.token)
    return rows


@pytest.mark.parametrize("name", ALL)
def test_prompt_batches_pad_split_and_extend(name: str) -> None:
    model = shared(architecture_for(name))
    prompts = [tokens(length, seed) for seed, length in enumerate((3, 42, 21, 30))]
    expected = [one_by_one(model, ALL[name], prompt, 8)[0] for prompt in prompts]

    def batch(rows: Sequence[int]) -> PromptProcessingBatch:
        made = PromptProcessingBatch(
            model,
            list(rows),
            [cache_list(model, ALL[name]) for _ in rows],
            prefill_step_size=CHUNK,
            samplers=[None] * len(rows),
            logits_processors=[()] * len(rows),
        )
        made.prompt([prompts[row][:-1] for row in rows])
        return made

    left = batch([0, 1])
    left.extend(batch([2, 3]))
    assert [cache.offset.tolist() for cache in left.prompt_cache] == [[2, 41, 20, 29]] * 2
    right = left.split([0, 2])
    kept = left.generate([prompts[row][-1:] for row in left.uids])
    apart = right.generate([prompts[row][-1:] for row in right.uids])
    assert (kept.uids, apart.uids) == ([1, 3], [0, 2])
    first, second = generate(kept, 4), generate(apart, 4)
    kept.extend(apart)
    for row, start, end in zip(kept.uids, first + second, generate(kept, 4), strict=True):
        assert start + end == expected[row]


# Without a model: random keys, values and queries of a request, by position.


class Request:
    """Keys, values and queries of one request."""

    def __init__(self, seed: int, size: int = 128, scale: float = 1.0) -> None:
        keys = mx.random.split(mx.random.key(seed), 3)
        self.keys, self.values = (mx.random.normal((1, HEADS, size, DIM), key=key) * scale for key in keys[:2])
        self.queries = mx.random.normal((1, HEADS, size, DIM), key=keys[2])


def attend(cache: TransformKVCache, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Attention as a model computes it."""
    mask = cache.make_mask(keys.shape[2], return_array=True)
    keys, values = cache.update_and_fetch(keys, values)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=DIM**-0.5, mask=mask)


class Single:
    """A request on its own cache."""

    def __init__(self, transform: Transform, request: Request) -> None:
        self.cache, self.request = TransformKVCache(transform), request

    def step(self, n: int) -> mx.array:
        start = self.cache.offset
        part = slice(start, start + n)
        return attend(
            self.cache, *(x[:, :, part] for x in (self.request.queries, self.request.keys, self.request.values))
        )


def step(batch: TransformKVCache, requests: Sequence[Request], n: int, valid: Sequence[int] | None = None) -> mx.array:
    """One call for all rows; beyond a row's `valid` tokens come pads of its last token, times 100."""
    columns = []
    for request, start, count in zip(requests, batch.offset.tolist(), valid or [n] * len(requests), strict=True):
        for i, x in enumerate((request.queries, request.keys, request.values)):
            part = x[:, :, start : start + count]
            pads = mx.full((1, HEADS, n - count, DIM), 100.0 + i)
            columns.append(mx.concatenate([part, pads], axis=2))
    queries, keys, values = (mx.concatenate(columns[i::3]) for i in range(3))
    return attend(batch, queries, keys, values)


def fed(transform: Transform, request: Request, *calls: int) -> Single:
    single = Single(transform, request)
    for n in calls:
        single.step(n)
    return single


def merged(singles: Sequence[Single]) -> TransformKVCache:
    return TransformKVCache.merge([copy.deepcopy(single.cache) for single in singles])


def same_steps(batch: TransformKVCache, singles: Sequence[Single], steps: int) -> None:
    """The batch goes on as the singles do."""
    for _ in range(steps):
        together = step(batch, [single.request for single in singles], 1)
        for row, single in enumerate(singles):
            assert mx.allclose(together[row], single.step(1)[0], atol=1e-4)
    assert batch.offset.tolist() == [single.cache.offset for single in singles]


@pytest.mark.parametrize("name", ALL)
def test_merge_takes_fresh_and_fed_caches_of_any_length(name: str) -> None:
    singles = [fed(ALL[name], Request(seed), *calls) for seed, calls in enumerate([(), (40, 1), (5,), (16, 16, 9)])]
    batch = merged(singles)
    assert batch.offset.tolist() == [0, 41, 5, 41]
    assert batch.offset.dtype == mx.int32
    same_steps(batch, singles, 12)
    assert batch.size() == max(single.cache.size() for single in singles)


@pytest.mark.parametrize("name", ALL)
def test_merge_of_fresh_caches_takes_a_first_prompt(name: str) -> None:
    singles = [Single(ALL[name], Request(seed)) for seed in range(2)]
    batch = merged(singles)
    assert batch.empty() and batch.nbytes == 0 and batch.offset.tolist() == [0, 0]
    batch.filter([1, 0])
    together = step(batch, [single.request for single in singles], 20)
    for row, single in enumerate(singles):
        assert mx.allclose(together[row], single.step(20)[0], atol=1e-4)
    same_steps(batch, singles, 4)


@pytest.mark.parametrize("name", ALL)
def test_extend_with_an_empty_side(name: str) -> None:
    for calls in ([(), (20,)], [(20,), ()], [(), ()]):
        singles = [fed(ALL[name], Request(seed), *call) for seed, call in enumerate(calls)]
        batch = merged(singles[:1])
        batch.extend(merged(singles[1:]))
        same_steps(batch, singles, 10)


@pytest.mark.parametrize("name", [name for name in ALL if name not in BY_CALLS])
def test_right_padding_over_several_chunks_leaves_no_trace(name: str) -> None:
    lengths = [2, 40, 17, 33]
    singles = [Single(ALL[name], Request(seed)) for seed in range(4)]
    requests = [single.request for single in singles]
    batch = merged(singles)
    batch.prepare(lengths=lengths, right_padding=[40 - length for length in lengths])
    for start in range(0, 40, 16):
        n = min(16, 40 - start)
        valid = [max(0, min(n, length - start)) for length in lengths]
        together = step(batch, requests, n, valid)
        mx.eval(batch.state)
        for row, count in enumerate(valid):
            if count:
                assert mx.allclose(together[row, :, :count], singles[row].step(count)[0], atol=1e-4)
    batch.finalize()
    assert batch.offset.tolist() == lengths
    same_steps(batch, singles, 12)


# Options so small that a prompt of five tokens loses rows.
TINY: dict[str, Transform] = {
    "snapkv": vq.snapkv(budget=4, n_sink=1, obs_window=2),
    "nestedkv": vq.nestedkv(budget=4, n_sink=1, window=2),
    "h2o": vq.h2o(budget=4, n_sink=1, grace=1),
}


def rows_of(cache: TransformKVCache) -> list[mx.array]:
    """Keys, values and positions of the rows that are held, in token order."""
    position = cache.transform.ordered(cache._settled_state()).position[..., : cache.size()]
    return [*cache.keys_and_values(), position]


@pytest.mark.parametrize("attended", [False, True], ids=["arrays", "hooked"])
@pytest.mark.parametrize("name", TINY)
def test_a_last_chunk_of_one_token(name: str, attended: bool) -> None:
    """Prompts of 8 and 5 tokens in calls of 7 and 1: the last one brings one prompt a token and the other padding."""
    lengths, requests = [8, 5], [Request(seed) for seed in range(2)]
    batch = TransformKVCache.merge([TransformKVCache(TINY[name]) for _ in lengths])
    singles = [TransformKVCache(TINY[name]) for _ in lengths]
    batch.prepare(lengths=lengths, right_padding=[0, 3])

    def call(cache: TransformKVCache, among: Sequence[Request], start: int, n: int) -> None:
        columns = ([getattr(one, field)[:, :, start : start + n] for one in among] for field in FIELDS)
        queries, keys, values = (mx.concatenate(x) for x in columns)
        mask = cache.make_mask(n)
        returned = cache.update_and_fetch(keys, values)
        if attended:
            mx.eval(cache.attend(queries, *returned, DIM**-0.5, mask))

    for start, n in ((0, 7), (7, 1)):
        call(batch, requests, start, n)
    batch.finalize()
    for start, n in ((0, 7), (7, 1)):
        call(singles[0], requests[:1], start, n)
    call(singles[1], requests[1:], 0, 5)
    assert batch.offset.tolist() == lengths
    for row, single in enumerate(singles):
        assert single.size() < lengths[row]
        for got, want in zip(rows_of(batch.extract(row)), rows_of(single), strict=True):
            assert mx.array_equal(got, want)


@pytest.mark.parametrize("name", ALL)
def test_right_padding_up_to_a_single_token(name: str) -> None:
    """As above for every method, and what follows."""
    lengths = [39, 33, 20]
    singles = [Single(ALL[name], Request(seed)) for seed in range(3)]
    requests = [single.request for single in singles]
    batch = merged(singles)
    batch.prepare(lengths=lengths, right_padding=[39 - length for length in lengths])
    for start, n in ((0, 22), (22, 16), (38, 1)):
        valid = [max(0, min(n, length - start)) for length in lengths]
        together = step(batch, requests, n, valid)
        for row, count in enumerate(valid):
            if count:
                assert mx.allclose(together[row, :, :count], singles[row].step(count)[0], atol=1e-4)
    batch.finalize()
    assert batch.offset.tolist() == lengths
    same_steps(batch, singles, 8)


@pytest.mark.parametrize("chunks", [(16,), (5, 5, 6), (1,) * 16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_left_padding_leaves_no_trace(name: str, chunks: tuple[int, ...]) -> None:
    padding = [0, 3, 14]
    singles = [Single(ALL[name], Request(seed)) for seed in range(3)]
    batch = TransformKVCache(ALL[name]).to_batch(padding)
    assert batch.offset.tolist() == [0, -3, -14]
    done = 0
    for n in chunks:
        rows = []
        for request, pad in zip((single.request for single in singles), padding, strict=True):
            pads = mx.full((1, HEADS, pad, DIM), 100.0)
            padded = (mx.concatenate([pads, x], axis=2) for x in (request.queries, request.keys, request.values))
            rows.append([x[:, :, done : done + n] for x in padded])
        together = attend(batch, *(mx.concatenate(x) for x in zip(*rows, strict=True)))
        assert mx.isfinite(together).all()
        for row, pad in enumerate(padding):
            count = min(n, done + n - pad)
            if count > 0:
                assert mx.allclose(together[row, :, n - count :], singles[row].step(count)[0], atol=1e-4)
        done += n
    same_steps(batch, singles, 20)


def test_a_single_column_of_padding_takes_no_row() -> None:
    """Of a batch one sequence is full and has no token in the last call, which has one for the other."""
    transform = vq.snapkv(budget=64, n_sink=0, obs_window=4)
    fed, rows = TransformKVCache(transform), mx.random.normal((1, 2, 64, 16), key=mx.random.key(0))
    fed.update_and_fetch(rows[:, :, :60], rows[:, :, :60])
    batch = TransformKVCache.merge([TransformKVCache(transform), fed])
    batch.prepare(lengths=[5, 4], right_padding=[0, 1])
    for n in (4, 1):
        both = mx.concatenate([rows[:, :, :n], rows[:, :, 60 : 60 + n]], axis=0)
        batch.update_and_fetch(both, both)
    batch.finalize()
    single = batch.extract(1)
    assert single.size() == 64
    assert mx.array_equal(single.keys_and_values()[0], rows)


def test_a_window_takes_nothing_from_a_call_of_padding() -> None:
    cache = TransformKVCache(vq.sliding_window(window_size=16)).to_batch([14])
    cache.update_and_fetch(*[mx.full((1, HEADS, 5, DIM), 100.0)] * 2)
    (keys,), (values,) = cache._settled_state().rows.keys, cache._settled_state().rows.values
    assert mx.array_equal(keys, mx.zeros((1, HEADS, 16, DIM)))
    assert mx.array_equal(values, mx.zeros((1, HEADS, 16, DIM)))


@pytest.mark.parametrize("name", ALL)
def test_the_longest_request_leaves(name: str) -> None:
    singles = [fed(ALL[name], Request(seed), length) for seed, length in enumerate((20, 17, 14))]
    batch = merged(singles)
    same_steps(batch, singles, 2)
    batch.filter([1, 2])
    same_steps(batch, singles[1:], 8)
    assert batch.size() == max(single.cache.size() for single in singles[1:])


@pytest.mark.parametrize("keep", [[2], [2, 0], [1, 0, 2], mx.array([0, 2], mx.int32)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_filter_keeps_rows_in_the_order_asked_for(name: str, keep: list[int] | mx.array) -> None:
    singles = [fed(ALL[name], Request(seed), length) for seed, length in enumerate((4, 33, 20))]
    batch = merged(singles)
    batch.filter(keep)
    rows = keep.tolist() if isinstance(keep, mx.array) else keep
    same_steps(batch, [singles[row] for row in rows], 10)


@pytest.mark.parametrize("name", ALL)
def test_filter_in_the_middle_of_a_padded_prompt(name: str) -> None:
    lengths = [30, 5, 22]
    singles = [Single(ALL[name], Request(seed)) for seed in range(3)]
    batch = merged(singles)
    batch.prepare(lengths=lengths, right_padding=[30 - length for length in lengths])
    step(batch, [single.request for single in singles], 16, [16, 5, 16])
    batch.filter([1, 2])
    step(batch, [single.request for single in singles[1:]], 6, [0, 6])
    batch.finalize()
    singles[1].step(5)
    for n in (16, 6):
        singles[2].step(n)
    same_steps(batch, singles[1:], 10)


@pytest.mark.parametrize("name", ALL)
def test_extract_gives_single_caches_that_go_on_alone(name: str) -> None:
    singles = [fed(ALL[name], Request(seed), *calls) for seed, calls in enumerate([(20, 1), (), (40,)])]
    batch = merged(singles)
    for row, single in enumerate(singles):
        taken = batch.extract(row)
        assert taken.offset == single.cache.offset and isinstance(taken.offset, int)
        assert (taken.size(), taken.empty()) == (single.cache.size(), single.cache.empty())
        going_on = Single(ALL[name], single.request)
        going_on.cache = taken
        alone = Single(ALL[name], single.request)
        alone.cache = copy.deepcopy(single.cache)
        for n in (1, 1, 7, 1):
            assert mx.allclose(going_on.step(n), alone.step(n), atol=1e-4)
    same_steps(batch, singles, 3)


@pytest.mark.parametrize("name", ALL)
def test_copies_of_a_batch_do_not_touch_each_other(name: str) -> None:
    singles = [fed(ALL[name], Request(seed), length) for seed, length in enumerate((33, 7, 20))]
    batch = merged(singles)
    other = copy.deepcopy(batch)
    batch.filter([0])
    other.filter([1, 2])
    same_steps(batch, singles[:1], 6)
    same_steps(other, singles[1:], 6)
    batch.extend(other)
    same_steps(batch, singles, 6)


def test_rings_of_different_age_merge_by_time() -> None:
    ring = vq.streaming_llm(n_sink=0, window_size=16)
    singles = [fed(ring, Request(seed), *[1] * length) for seed, length in enumerate((20, 7))]
    batch = merged(singles)
    assert batch.offset.tolist() == [20, 7]
    mask = batch.make_mask(1)
    keys, _ = batch.update_and_fetch(*[mx.zeros((2, HEADS, 1, DIM))] * 2)
    assert mask.shape == (2, 1, 1, keys.shape[2])
    assert mask.sum(axis=-1)[:, 0, 0].tolist() == [17, 8]
    same_steps(merged(singles), singles, 20)


@pytest.mark.parametrize("name", ALL)
def test_one_request_does_not_move_the_numbers_of_another(name: str) -> None:
    quiet = Request(0)
    single, loud = Single(ALL[name], quiet), Single(ALL[name], Request(1, scale=1000.0))
    batch = merged([single, loud])
    for n in (20, 20, *[1] * 12):
        together = step(batch, [quiet, loud.request], n)
        assert mx.allclose(together[0], single.step(n)[0], atol=1e-4)
    taken = batch.extract(0).state[1:]
    assert all(mx.array_equal(got, want) for got, want in zip(taken, single.cache.state[1:], strict=True))


@pytest.mark.parametrize("name", ALL)
def test_ragged_batches_through_the_hooked_attention(name: str) -> None:
    """Codes under an array mask; queries stand in for what a model would ask."""
    singles = [fed(ALL[name], Request(seed), length) for seed, length in enumerate((40, 9, 21))]
    batch = merged(singles)
    for n in (1, 3, 12, 1):
        parts = [single.cache.offset for single in singles]
        columns = [
            mx.concatenate([x[:, :, at : at + n] for x, at in zip(xs, parts, strict=True)])
            for xs in zip(*((s.request.queries, s.request.keys, s.request.values) for s in singles), strict=True)
        ]
        mask = batch.make_mask(n)
        keys, values = batch.update_and_fetch(*columns[1:])
        together = batch.attend(columns[0], keys, values, DIM**-0.5, mask)
        for row, single in enumerate(singles):
            mask = single.cache.make_mask(n)
            keys, values = single.cache.update_and_fetch(columns[1][row : row + 1], columns[2][row : row + 1])
            alone = single.cache.attend(columns[0][row : row + 1], keys, values, DIM**-0.5, mask)
            assert mx.allclose(together[row], alone[0], atol=1e-4)


def test_merge_refuses_what_does_not_belong_together() -> None:
    h2o, kivi = fed(TRANSFORMS["h2o"], Request(0), 8), fed(TRANSFORMS["kivi"], Request(0), 8)
    other = fed(vq.h2o(budget=20, n_sink=2, grace=4), Request(0), 8)
    narrow = TransformKVCache(TRANSFORMS["h2o"])
    narrow.update_and_fetch(*[mx.zeros((1, HEADS, 3, DIM // 2))] * 2)
    for wrong in (kivi.cache, other.cache, narrow):
        with pytest.raises(vq.QuantizerConfigError, match="merge"):
            TransformKVCache.merge([h2o.cache, wrong])
    assert h2o.cache.offset == 8
    same_steps(merged([h2o]), [h2o], 2)


def test_a_batch_refuses_a_call_of_another_size() -> None:
    batch = merged([fed(TRANSFORMS["h2o"], Request(seed), 8) for seed in range(2)])
    with pytest.raises(vq.QuantizerConfigError, match="batch rows"):
        batch.update_and_fetch(*[mx.zeros((3, HEADS, 1, DIM))] * 2)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["h2o", "kivi"])
def test_rows_that_are_not_there_are_refused(name: str, rows: int) -> None:
    """By padded prompts and by `filter`, which change nothing then."""
    singles = [fed(TRANSFORMS[name], Request(seed), 8 + seed) for seed in range(rows)]
    batch = merged(singles)
    for cache in (batch, singles[0].cache):
        with pytest.raises(vq.QuantizerConfigError, match=rf"^{name}: `lengths` must have \d batch rows; got "):
            cache.prepare(lengths=[3, 4, 5], right_padding=[2, 1, 0])
    for keep in ([], [rows], [0, -rows - 1], mx.array([], mx.int32)):
        with pytest.raises(vq.QuantizerConfigError, match=f"^{name}: `keep` must name some of the {rows} batch rows"):
            batch.filter(keep)
    same_steps(batch, singles, 2)
