"""mlx_lm's HTTP server over loopback, with our caches in the place where it looks for them."""

import contextlib
import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from http.client import RemoteDisconnected
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import LRUPromptCache
from models import CHUNK, COMPOSED, TRANSFORMS, WINDOWED, build, cache_list, feed, greedy, read, tokens
from servers import COUNT, END, made_of, serving, write_model

import vq_functional as vq
from vq_adapters import KVCacheBuilder, KVCacheConfig, PyramidKVOptions, TransformKVCache, attention_hook
from vq_functional.core.transform import Transform

ALL = {**TRANSFORMS, "rows": vq.rows()}
# One of each way to hold rows, where a test starts a server for a question that no method answers by itself.
SOME = ["rows", "turboquant_mse", "kivi", "kvtc", "xquant", "anchorkv", "h2o", "squeeze", COMPOSED, WINDOWED]
FIRST, SECOND, THIRD = tokens(37, 1), tokens(5, 2), tokens(20, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk."""
    return write_model(tmp_path_factory.mktemp("model"))


def one_by_one(transform: Transform, prompt: list[int], hooked: bool = False) -> list[int]:
    model = build("llama")
    with attention_hook(model) if hooked else contextlib.nullcontext():
        return greedy(model, cache_list(model, transform), prompt, COUNT)[0]


@pytest.mark.parametrize("name", ALL)
def test_one_after_the_other_with_hits_in_the_prompt_cache(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question asked again, and one that goes on from an answer.

    Where rows can be taken back, the store serves a question from its own
    longer history; elsewhere from the prefix that was put aside for it.
    """
    model, transform = build("llama"), ALL[name]
    caches = cache_list(model, transform)
    answer, _ = greedy(model, caches, FIRST, COUNT)
    feed(model, caches, answer[-1:])
    again = answer
    if transform.trimmable:
        assert [cache.trim(COUNT + 1) for cache in caches] == [COUNT + 1] * 2
        again, _ = greedy(model, caches, FIRST[-1:], COUNT)
        feed(model, caches, again[-1:])
    going_on, _ = greedy(model, caches, THIRD, COUNT)
    with serving(folder, made_of(transform), monkeypatch) as ask:
        assert ask(FIRST) == (answer, 0)
        assert ask.generator.model_provider.is_batchable
        assert ask(SECOND) == (one_by_one(transform, SECOND), 0)
        assert ask(FIRST) == (again, len(FIRST) - 1)
        assert ask([*FIRST, *again, *THIRD]) == (going_on, len(FIRST) + COUNT)
        assert ask.generator.prompt_cache.nbytes > 0


@pytest.mark.parametrize(("name", "hooked"), [*((name, False) for name in SOME), ("h2o", True), ("kivi", True)])
def test_three_at_once(name: str, hooked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [FIRST, SECOND, THIRD]
    expected = [one_by_one(ALL[name], prompt, hooked) for prompt in prompts]
    with serving(folder, made_of(ALL[name]), monkeypatch, hooked=hooked) as ask, ThreadPoolExecutor(3) as pool:
        assert [answer for answer, _ in pool.map(ask, prompts)] == expected


@pytest.mark.parametrize("name", SOME)
def test_chats_share_their_system_prompt(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stops where it ends and puts its caches aside; they serve the next chat of a method that evicts.

    Where rows can be taken back, the longer first chat does that.
    """
    model, transform, system = build("llama"), ALL[name], [*FIRST, END]
    caches = cache_list(model, transform)
    read(model, caches, [*system, END])
    first, second = copy.deepcopy(caches), caches
    answer, _ = greedy(model, first, [*SECOND, END], COUNT)
    if transform.trimmable:
        feed(model, first, answer[-1:])
        assert [cache.trim(len(SECOND) + 1 + COUNT) for cache in first] == [len(SECOND) + 1 + COUNT] * 2
        second = first
    expected, _ = greedy(model, second, [*THIRD, END], COUNT)
    assert END not in (SECOND[0], THIRD[0]), "which would count as the system prompt's"
    with serving(folder, made_of(transform), monkeypatch) as ask:
        assert ask.chat(FIRST, SECOND) == (answer, 0)
        assert ask.chat(FIRST, THIRD) == (expected, len(system))


@pytest.mark.parametrize("name", ["h2o", "kivi"])
def test_requests_that_cannot_be_batched(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed makes the server answer alone; it may arrive between batched requests."""
    transform = ALL[name]
    expected = [one_by_one(transform, prompt) for prompt in (FIRST, SECOND, THIRD)]
    with serving(folder, made_of(transform), monkeypatch) as ask:
        assert ask(FIRST, seed=1)[0] == expected[0]
        assert ask(SECOND)[0] == expected[1]
        assert ask(THIRD, seed=2)[0] == expected[2]


def test_layers_of_unequal_budgets_with_the_hook(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    config = KVCacheConfig(method="pyramidkv", options=PyramidKVOptions(pyramid_budget=16, pyramid_beta=1.5))
    prompts = [FIRST, SECOND, THIRD]
    with attention_hook(model):
        expected = [greedy(model, KVCacheBuilder.for_model(model, config), prompt, COUNT)[0] for prompt in prompts]
    make = functools.partial(KVCacheBuilder.for_model, config=config)
    with serving(folder, make, monkeypatch, hooked=True) as ask, ThreadPoolExecutor(3) as pool:
        assert [answer for answer, _ in pool.map(ask, prompts)] == expected


# With a draft model: one request at a time


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model on disk, nearly all of whose guesses are refused."""
    return write_model(tmp_path_factory.mktemp("draft"), seed=1)


def drafted(target: Transform, drafting: Transform, draft: int, prompt: list[int]) -> list[int]:
    """Tokens of speculative decoding without a server."""
    model, guesser = build("llama"), build("llama", seed=draft)
    caches = cache_list(model, target) + cache_list(guesser, drafting)
    steps = speculative_generate_step(
        mx.array(prompt),
        model,
        guesser,
        num_draft_tokens=3,
        max_tokens=COUNT,
        prompt_cache=caches,
        prefill_step_size=CHUNK,
    )
    return [token for token, _, _ in steps]


@pytest.mark.parametrize("name", [name for name in SOME if ALL[name].trimmable])
def test_drafts(name: str, folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed target and draft; requests that come at once wait for each other."""
    prompts, maker = [FIRST, SECOND, THIRD], made_of(ALL[name])
    expected = [drafted(ALL[name], ALL[name], 1, prompt) for prompt in prompts]
    more = {"drafting": maker, "draft_model": str(draft)}
    with serving(folder, maker, monkeypatch, **more) as ask, ThreadPoolExecutor(3) as pool:
        assert [answer for answer, _ in pool.map(ask, prompts)] == expected
        assert not ask.generator.model_provider.is_batchable


@pytest.mark.parametrize("name", [name for name in SOME if not ALL[name].trimmable])
def test_drafts_of_evicting_targets_are_refused(
    name: str, folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first token, and the server goes on; as drafts they only cost guesses."""
    rows = made_of(vq.rows())
    more = {"drafting": rows, "draft_model": str(draft)}
    with serving(folder, made_of(ALL[name]), monkeypatch, **more) as ask:
        for _ in range(2):
            with pytest.raises(RemoteDisconnected):
                ask(SECOND)
        assert "trimmable" in capsys.readouterr().err
    more["drafting"] = made_of(ALL[name])
    with serving(folder, rows, monkeypatch, **more) as ask:
        assert ask(FIRST)[0] == one_by_one(vq.rows(), FIRST)


def test_turns_with_drafts_need_an_empty_store(folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx_lm keeps such caches under the name of one token more than they hold, plain ones too."""
    maker, store = made_of(ALL["kivi"]), LRUPromptCache(0)
    more = {"drafting": maker, "draft_model": str(draft)}
    with serving(folder, maker, monkeypatch, store=store, **more) as ask:
        answer, _ = ask(FIRST)
        turn = [*FIRST, *answer, *THIRD]
        assert ask(turn) == (drafted(ALL["kivi"], ALL["kivi"], 1, turn), 0)


def test_a_cache_that_forgets_changes_the_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ZeroCache(TransformKVCache):
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            keys, values = super().update_and_fetch(keys, values)
            return mx.zeros_like(keys), mx.zeros_like(values)

    expected = one_by_one(vq.rows(), FIRST)
    for kind, same in ((TransformKVCache, True), (ZeroCache, False)):
        with serving(folder, made_of(vq.rows(), kind), monkeypatch) as ask:
            assert (ask(FIRST)[0] == expected) == same
