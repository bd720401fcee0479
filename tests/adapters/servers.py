"""mlx_lm's HTTP server over loopback, with our caches in the place where it looks for them."""

import argparse
import contextlib
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import server
from mlx_lm.models.cache import KVCache, LRUPromptCache
from models import ARCHITECTURES, CHUNK, build, in_place, tokenizer

from vq_adapters import TransformKVCache, install_attention
from vq_functional.core.transform import Transform

COUNT = 8  # tokens of an answer, where a request doesn't say
END = 1  # the token that ends a turn of a chat
CHAT = "{% for message in messages %}{{ message['content'] }} t1 {% endfor %}"

Maker = Callable[[Any], list[Any]]  # caches for a model


def write_model(path: Path, seed: int = 0) -> Path:
    """A folder with a small model and its tokenizer, whose chat template ends every message with one token."""
    path.mkdir(exist_ok=True)
    build("llama", seed=seed).save_weights(str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **ARCHITECTURES["llama"]}))
    words = tokenizer()
    words.chat_template = CHAT
    words.save_pretrained(path)
    return path


def arguments(folder: Path, **changed: Any) -> argparse.Namespace:
    """The server's command line."""
    values: dict[str, Any] = {
        "model": str(folder),
        "adapter_path": None,
        "allowed_origins": ["*"],
        "chat_template": "",
        "chat_template_args": {},
        "decode_concurrency": 4,
        "draft_model": None,
        "kv_bits": None,
        "kv_group_size": 64,
        "max_tokens": COUNT,
        "min_p": 0.0,
        "num_draft_tokens": 3,
        "pipeline": False,
        "prefill_step_size": CHUNK,
        "prompt_cache_bytes": 1 << 30,
        "prompt_concurrency": 2,
        "quantized_kv_start": 0,
        "temp": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "trust_remote_code": False,
        "use_default_chat_template": False,
    }
    return argparse.Namespace(**{**values, **changed})


class Client:
    """Asks a running server."""

    def __init__(self, port: int, generator: server.ResponseGenerator) -> None:
        self.url, self.generator = f"http://127.0.0.1:{port}/v1", generator

    def __call__(self, prompt: Sequence[int], **more: Any) -> tuple[list[int], int]:
        """Tokens of the answer, and how many of the prompt were in the prompt cache."""
        data = self.post("completions", prompt=as_text(prompt), **more)
        assert data["usage"]["prompt_tokens"] == len(prompt)
        return as_tokens(data["choices"][0]["text"]), data["usage"]["prompt_tokens_details"]["cached_tokens"]

    def chat(self, *turns: Sequence[int], **more: Any) -> tuple[list[int], int]:
        """The same for a system prompt, then questions and answers in turn."""
        roles = ["system", *("user", "assistant") * len(turns)]
        messages = [{"role": role, "content": as_text(turn)} for role, turn in zip(roles, turns)]
        data = self.post("chat/completions", messages=messages, **more)
        text = data["choices"][0]["message"]["content"]
        return as_tokens(text), data["usage"]["prompt_tokens_details"]["cached_tokens"]

    def post(self, path: str, **body: Any) -> Any:
        """The server's JSON; raises HTTPError where it refuses."""
        request = urllib.request.Request(
            f"{self.url}/{path}",
            json.dumps({"max_tokens": COUNT, **body}).encode(),
            {"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            data = json.loads(answer.read())
        assert data["choices"][0]["finish_reason"] == "length"
        return data


def as_text(prompt: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in prompt)


def as_tokens(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def made_of(transform: Transform, kind: type[TransformKVCache] = TransformKVCache) -> Maker:
    """Caches of a transform for every layer of a model."""
    return lambda model: in_place([KVCache() for _ in model.layers], transform, kind)


@contextlib.contextmanager
def serving(
    folder: Path,
    maker: Maker,
    monkeypatch: pytest.MonkeyPatch,
    *,
    hooked: bool = False,
    drafting: Maker | None = None,
    store: LRUPromptCache | None = None,
    healthy: bool = True,
    **changed: Any,
) -> Iterator[Client]:
    """A server whose model makes the caches of `maker`, and its draft model, if it has one, those of `drafting`.

    `healthy`: whether it must still be so in the end. `changed`: arguments of the command line.
    """
    load = server.load

    def load_ours(path: str, *positional: Any, **named: Any) -> Any:
        model, *rest = load(path, *positional, **named)
        make = maker if drafting is None or path == str(folder) else drafting
        model.make_cache = lambda: make(model)
        if hooked:
            install_attention(model)
        return model, *rest

    monkeypatch.setattr(server, "load", load_ours)
    provider = server.ModelProvider(arguments(folder, **changed))
    generator = server.ResponseGenerator(provider, LRUPromptCache(10) if store is None else store)
    httpd = ThreadingHTTPServer(
        ("127.0.0.1", 0),
        lambda *positional: server.APIHandler(generator, *positional, system_fingerprint="test"),
    )
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Client(httpd.server_port, generator)
        assert generator.is_healthy == healthy
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
        generator.stop_and_join()
        monkeypatch.setattr(server, "load", load)
