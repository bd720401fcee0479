"""mlx_lm's HTTP server over loopback, with our caches in the place where it looks for them."""

import argparse
import contextlib
import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import server
from mlx_lm.models.cache import KVCache, LRUPromptCache
from models import ARCHITECTURES, CHUNK, TRANSFORMS, build, cache_list, feed, greedy, in_place, tokenizer, tokens

import vq_functional as vq
from vq_adapters import TransformKVCache, attention_hook, install_attention
from vq_functional.core.transform import Transform

ALL = {**TRANSFORMS, "rows": vq.rows()}
COUNT = 8  # tokens of an answer
FIRST, SECOND, THIRD = tokens(37, 1), tokens(5, 2), tokens(20, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk."""
    path = tmp_path_factory.mktemp("model")
    build("llama").save_weights(str(path / "model.safetensors"))
    config = {"model_type": "llama", **ARCHITECTURES["llama"]}
    (path / "config.json").write_text(json.dumps(config))
    tokenizer().save_pretrained(path)
    return path


def arguments(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(
        model=str(folder),
        adapter_path=None,
        allowed_origins=["*"],
        chat_template="",
        chat_template_args={},
        decode_concurrency=4,
        draft_model=None,
        kv_bits=None,
        kv_group_size=64,
        max_tokens=COUNT,
        min_p=0.0,
        num_draft_tokens=3,
        pipeline=False,
        prefill_step_size=CHUNK,
        prompt_cache_bytes=1 << 30,
        prompt_concurrency=2,
        quantized_kv_start=0,
        temp=0.0,
        top_k=0,
        top_p=1.0,
        trust_remote_code=False,
        use_default_chat_template=False,
    )


class Client:
    """Asks a running server."""

    def __init__(self, port: int, generator: server.ResponseGenerator) -> None:
        self.url, self.generator = f"http://127.0.0.1:{port}/v1/completions", generator

    def __call__(self, prompt: list[int], **more: Any) -> tuple[list[int], int]:
        """Tokens of the answer, and how many of the prompt were in the prompt cache."""
        body = {"prompt": as_text(prompt), "max_tokens": COUNT, **more}
        request = urllib.request.Request(
            self.url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            data = json.loads(answer.read())
        assert data["usage"]["prompt_tokens"] == len(prompt)
        assert data["choices"][0]["finish_reason"] == "length"
        return as_tokens(data["choices"][0]["text"]), data["usage"]["prompt_tokens_details"]["cached_tokens"]


def as_text(prompt: list[int]) -> str:
    return " ".join(f"t{token}" for token in prompt)


def as_tokens(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


@contextlib.contextmanager
def serving(
    folder: Path, transform: Transform, monkeypatch: pytest.MonkeyPatch, hooked: bool = False
) -> Iterator[Client]:
    """A server whose model makes our caches."""
    load = server.load

    def load_ours(*positional: Any, **named: Any) -> Any:
        model, *rest = load(*positional, **named)
        model.make_cache = lambda: in_place([KVCache() for _ in model.layers], transform, TransformKVCache)
        if hooked:
            install_attention(model)
        return model, *rest

    monkeypatch.setattr(server, "load", load_ours)
    generator = server.ResponseGenerator(server.ModelProvider(arguments(folder)), LRUPromptCache(10))
    httpd = ThreadingHTTPServer(
        ("127.0.0.1", 0),
        lambda *positional: server.APIHandler(generator, *positional, system_fingerprint="test"),
    )
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Client(httpd.server_port, generator)
        assert generator.is_healthy
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
        generator.stop_and_join()


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
    with serving(folder, transform, monkeypatch) as ask:
        assert ask(FIRST) == (answer, 0)
        assert ask.generator.model_provider.is_batchable
        assert ask(SECOND) == (one_by_one(transform, SECOND), 0)
        assert ask(FIRST) == (again, len(FIRST) - 1)
        assert ask([*FIRST, *again, *THIRD]) == (going_on, len(FIRST) + COUNT)
        assert ask.generator.prompt_cache.nbytes > 0


@pytest.mark.parametrize(("name", "hooked"), [*((name, False) for name in ALL), ("h2o", True), ("kivi", True)])
def test_three_at_once(name: str, hooked: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [FIRST, SECOND, THIRD]
    expected = [one_by_one(ALL[name], prompt, hooked) for prompt in prompts]
    with serving(folder, ALL[name], monkeypatch, hooked) as ask, ThreadPoolExecutor(3) as pool:
        assert [answer for answer, _ in pool.map(ask, prompts)] == expected


@pytest.mark.parametrize("name", ["h2o", "kivi"])
def test_requests_that_cannot_be_batched(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed makes the server answer alone; it may arrive between batched requests."""
    transform = ALL[name]
    expected = [one_by_one(transform, prompt) for prompt in (FIRST, SECOND, THIRD)]
    with serving(folder, transform, monkeypatch) as ask:
        assert ask(FIRST, seed=1)[0] == expected[0]
        assert ask(SECOND)[0] == expected[1]
        assert ask(THIRD, seed=2)[0] == expected[2]


def test_a_cache_that_forgets_changes_the_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ZeroCache(TransformKVCache):
        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            keys, values = super().update_and_fetch(keys, values)
            return mx.zeros_like(keys), mx.zeros_like(values)

    expected = one_by_one(vq.rows(), FIRST)
    with serving(folder, vq.rows(), monkeypatch) as ask:
        assert ask(FIRST)[0] == expected
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "TransformKVCache", ZeroCache)
        with serving(folder, vq.rows(), patch) as ask:
            assert ask(FIRST)[0] != expected
