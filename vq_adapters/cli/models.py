"""Models of mlx_lm that make compressed caches, inside the commands of mlx_lm as they are."""

import argparse
import contextlib
import copy
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import mlx.nn as nn

from vq_adapters.builder import KVCacheBuilder
from vq_adapters.cli.parsing import Parser, UsageError, say
from vq_adapters.config import KVCacheConfig, Layer
from vq_adapters.group import unlike
from vq_adapters.hook import can_hook, install_attention
from vq_functional.core.transform import Transform
from vq_functional.methods import Method, find


def compress(model: nn.Module, config: KVCacheConfig | None, hook: bool = True) -> None:
    """Let the model make the configured caches, a fresh list each time, and attend over them."""
    if config is None:
        return
    caches = KVCacheBuilder.for_model(model, config)
    model.make_cache = lambda: copy.deepcopy(caches)
    if hook and not can_hook(model):
        say("warning: the attention of this model can't be reached: keys stand in for queries, codes are decoded")
    if hook:
        install_attention(model)


def compressing(
    load: Callable[..., Any], config: KVCacheConfig | None, hook: bool, draft: str | None
) -> Callable[..., Any]:
    """mlx_lm's `load` for models that make compressed caches; calibrations of the model don't serve its draft.

    A draft is what mlx_lm loads by its name alone.
    """
    bare: Any = copy.copy(config)
    if bare is not None:
        bare.store = None

    def load_compressed(path: str, *args: Any, **options: Any) -> Any:
        loaded = load(path, *args, **options)
        compress(loaded[0], bare if path == draft and not options else config, hook)
        return loaded

    return load_compressed


def check_mlx_lm(args: argparse.Namespace, config: KVCacheConfig | None) -> None:
    """Refuse options of mlx_lm that don't go with compressed caches."""
    if config is None:
        return
    for name in ("kv_bits", "max_kv_size", "prompt_cache_file"):
        if getattr(args, name, None) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for --method plain: {config.method} makes its own caches")
    if args.draft_model is not None:
        check_draft(config)


def check_draft(config: KVCacheConfig | None) -> None:
    """Refuse a draft model where the newest tokens can't be taken back."""
    if config is not None and not takes_back(config):
        raise UsageError(f"a draft model needs caches that take tokens back, which those of {config.method} can't")


def takes_back(config: KVCacheConfig) -> bool:
    """Whether the newest tokens can be dropped from the configured caches."""
    return config.sliding_window is None and sample(find(config.method)).trimmable


def uneven(config: KVCacheConfig) -> bool:
    """Whether layers may hold different numbers of rows, told by those that lists name, or by two.

    A default budget stands for one in bytes, which is the same number of rows where layers are alike.
    """
    config = config._checkable()
    count = max((len(entries) for entries in config._lists().values()), default=2)
    return unlike(config.for_layer(Layer(index, count, index)).transform() for index in range(count))


def sample(row: Method) -> Transform:
    """The method with its default options, to ask what it can do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return row.build()


@contextlib.contextmanager
def patched(module: Any, **names: Any) -> Iterator[None]:
    """Other values for names of a module, for the length of a block."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def reports_in_one_line(module: Any) -> contextlib.AbstractContextManager[None]:
    """Let the parsers that a module makes raise UsageError."""
    return patched(module, argparse=types.SimpleNamespace(**{**vars(argparse), "ArgumentParser": Parser}))
