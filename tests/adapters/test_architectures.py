"""Every family of mlx_lm: our caches give its own caches' logits, or are refused when they are made."""

import ast
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from architectures import FAMILIES, METAL_ONLY, NOT_COVERED, RELEASE, build_family, installed
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache
from models import VOCABULARY, each, ours, tokens

import vq_functional as vq
from vq_adapters import (
    H2OOptions,
    KIVIOptions,
    KVCacheBuilder,
    KVCacheConfig,
    RocketKVOptions,
    StreamingLLMOptions,
    TransformKVCache,
    attention_hook,
    report,
)
from vq_adapters.entries import changed
from vq_functional.core.errors import QuantizerConfigError

# One method of each kind, with options under which nothing is given up or packed.
EXACT = {
    "h2o": KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget=512)),
    "streaming_llm": KVCacheConfig(method="streaming_llm", options=StreamingLLMOptions(stream_window_size=512)),
    "rocketkv": KVCacheConfig(method="rocketkv", options=RocketKVOptions(rocketkv_compression_ratio=1.001)),
    "kivi": KVCacheConfig(method="kivi", bit_width_inlier=4, options=KIVIOptions(residual_length=512)),
    "svdq": KVCacheConfig(method="svdq"),
    "xquant": KVCacheConfig(method="xquant"),
}
EVICTING = ("h2o", "streaming_llm", "rocketkv")
CODED = KVCacheConfig(method="turboquant_mse", bit_width_inlier=4)
SMALL = KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget=8, h2o_n_sink=1, h2o_grace=2))

PROMPT = tokens(24)
CALLS = [PROMPT[:12], PROMPT[12:21], *([token] for token in PROMPT[21:])]
PAIR = [[one, [VOCABULARY - 1 - token for token in one]] for one in CALLS]

COVERED = [family for family in FAMILIES if family not in NOT_COVERED and installed(family)]
PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def logits_of(model: nn.Module, caches: Sequence[Any], calls: Sequence[Any] = CALLS) -> mx.array:
    """Logits [B, all tokens, vocabulary] of the given calls."""
    rows = []
    for call in calls:
        ids = mx.array(call)
        rows.append(model(ids if ids.ndim == 2 else ids[None], cache=caches)[..., :VOCABULARY].astype(mx.float32))
        mx.eval(rows[-1], [cache.state for cache in ours(caches)])
    return mx.concatenate(rows, axis=1)


def distance(logits: mx.array, expected: mx.array) -> float:
    """The largest difference, in standard deviations of the logits; NaN where a logit is."""
    off: Any = mx.max(mx.abs(logits - expected)) / mx.std(expected)
    return off.item()


class Rounded(KVCache):
    """mlx_lm's cache over rows that went through a codec on their way in."""

    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        batch, heads, n, dim = keys.shape
        spec = vq.KVSpec(
            batch=batch, kv_heads=heads, key_dim=dim, value_dim=values.shape[3], dtype=keys.dtype, capacity=n
        )
        _, keys, values = self.transform.update(self.transform.init_state(spec), keys, values)
        return super().update_and_fetch(keys, values)


class Zeroed(KVCache):
    """A broken cache: its values are lost."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = super().update_and_fetch(keys, values)
        return keys, mx.zeros_like(values)


class Reordered(KVCache):
    """The rows held come in another order, and in a call of one token each of all rows comes twice.

    Attention without sinks is the same. A model that takes positions from rows
    notices, and so does one that looks at rows after the call.
    """

    looked_at = False
    twice = True

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        n, before = keys.shape[2], self.looked_at
        keys, values = super().update_and_fetch(keys, values)
        self.looked_at = before  # the base looks, too
        order = mx.concatenate([mx.arange(keys.shape[2] - n)[::-1], mx.arange(keys.shape[2] - n, keys.shape[2])])
        order = mx.concatenate([order, order]) if n == 1 and self.twice else order
        return keys[:, :, order], values[:, :, order]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        self.looked_at = True
        return super().keys_and_values()


def in_place_of(caches: Sequence[Any], kind: Any) -> list[Any]:
    """The model's own list with `kind` where `caches` has one of ours."""

    def other(cache: Any) -> Any:
        return kind(cache.transform) if isinstance(cache, TransformKVCache) else cache

    return [changed(entry, other) for entry in caches]


def fresh(model: nn.Module, kind: Any) -> list[Any]:
    return in_place_of(KVCacheBuilder.for_model(model, CODED), kind)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Calls whose attention a cache computed itself, by cache."""
    count: Counter[int] = Counter()
    attend = TransformKVCache.attend

    def counting(self: TransformKVCache, *arguments: Any, **more: Any) -> mx.array:
        count[id(self)] += 1
        return attend(self, *arguments, **more)

    monkeypatch.setattr(TransformKVCache, "attend", counting)
    return count


# What for_model does with a family


def refusal(model: nn.Module, config: KVCacheConfig) -> str:
    """Why for_model refuses; empty where it doesn't."""
    try:
        KVCacheBuilder.for_model(model, config)
    except QuantizerConfigError as error:
        return str(error)
    return ""


def left_alone(model: nn.Module) -> dict[str, str]:
    """Classes of the caches that stay the model's own, and why."""
    caches = make_prompt_cache(model) if refusal(model, CODED) else KVCacheBuilder.for_model(model, CODED)
    return {row.used: row.reason for row in report(caches) if row.reason}


def may_evict(model: nn.Module) -> bool:
    """Whether attention treats rows as a set, and nobody looks at them once a call has ended."""
    caches = fresh(model, lambda _: Reordered())
    replaced = [cache for cache in each(caches) if isinstance(cache, Reordered)]
    leaves: Any = tree_flatten(model.parameters())
    sinks = any(path.endswith("sinks") for path, _ in leaves)
    for cache in replaced:
        cache.twice = not sinks  # these have a share of their own, which is halved then
    off = distance(logits_of(model, caches), logits_of(model, make_prompt_cache(model)))
    return off < 1e-3 and not any(cache.looked_at for cache in replaced)


def hook_reaches(caches: Sequence[Any], attended: Counter[int]) -> str:
    """For how many of our caches the hook brings every call."""
    reached = [attended[id(cache)] >= len(CALLS) for cache in ours(caches)]
    return "yes" if all(reached) else "partly" if any(reached) else "fallback"


def row_of(family: str, model: nn.Module, hook: str) -> str:
    """The family's line in the page."""
    left = ", ".join(f"`{name}`" for name in sorted(left_alone(model))) or "none"
    if refusal(model, CODED):
        return f"| `{family}` | none | {left} | | | |"
    compressed = "all" if left == "none" else "the others"
    words = ["refused" if refusal(model, EXACT[name]) else "yes" for name in ("h2o", "xquant")]
    return f"| `{family}` | {compressed} | {left} | {hook} | {' | '.join(words)} |"


@pytest.mark.parametrize("family", COVERED)
def test_a_family(family: str, attended: Counter[int]) -> None:
    """All that is asked of one, on one model."""
    model, hook = build_family(family), ""
    if refusal(model, CODED):
        check_refused(model)
    else:
        check_refusals(model)
        own = logits_of(model, make_prompt_cache(model))
        check_logits(model, own)
        hook = check_codes(model, attended)
        check_pairs(model)
        check_loss_is_seen(model, own)
    assert row_of(family, model, hook) in PAGE.read_text().splitlines(), "docs/architectures.md is out of date"


def check_refused(model: nn.Module) -> None:
    """A family with nothing to replace is refused by every method, with the reason for each of its caches."""
    for config in (*EXACT.values(), CODED, SMALL):
        text = refusal(model, config)
        assert text.startswith("for_model: `model` must have a plain KVCache to replace")
        assert all(f"{name} ({reason})" in text for name, reason in left_alone(model).items())


def check_refusals(model: nn.Module) -> None:
    """Evicting is refused exactly where rows are no set, packing together where layers differ; nothing else is."""
    evicts = may_evict(model)
    heads = {rows.shape[1:2] + rows.shape[3:] for rows in first_rows(model)}
    for name, config in EXACT.items():
        text = refusal(model, config)
        if name in EVICTING and not evicts:
            assert "`model` must keep all rows" in text, name
        elif name == "xquant" and len(heads) > 1:
            assert "packed together" in text
        else:
            assert text == ""


def first_rows(model: nn.Module) -> list[mx.array]:
    """The keys that each replaced cache gets."""
    caches = fresh(model, lambda _: KVCache())
    logits_of(model, caches, CALLS[:1])
    marks = KVCacheBuilder.for_model(model, CODED)
    pairs = zip(each(caches), each(marks), strict=True)
    return [cache.state[0] for cache, mark in pairs if isinstance(mark, TransformKVCache)]


def check_logits(model: nn.Module, own: mx.array) -> None:
    """A method that gives nothing up gives the model's own logits, and two of them with the hook, too."""
    for name, config in EXACT.items():
        if refusal(model, config):
            continue
        assert distance(logits_of(model, KVCacheBuilder.for_model(model, config)), own) < 1e-3, name
        if name in ("h2o", "kivi"):
            with attention_hook(model):
                logits = logits_of(model, KVCacheBuilder.for_model(model, config))
            assert distance(logits, own) < 1e-3, f"{name} with the hook"


def check_codes(model: nn.Module, attended: Counter[int]) -> str:
    """Codes give the logits of mlx_lm's cache over rounded rows; returns how far the hook reaches.

    A number on the edge between two codes may take the other one.
    """
    expected = logits_of(model, fresh(model, Rounded))
    assert distance(logits_of(model, KVCacheBuilder.for_model(model, CODED)), expected) < 0.02
    attended.clear()
    caches = KVCacheBuilder.for_model(model, CODED)
    with attention_hook(model):
        assert distance(logits_of(model, caches), expected) < 0.02, "with the hook"
    return hook_reaches(caches, attended)


def check_pairs(model: nn.Module) -> None:
    """Two sequences in one call."""
    expected = logits_of(model, make_prompt_cache(model), PAIR)
    assert distance(logits_of(model, KVCacheBuilder.for_model(model, EXACT["kivi"]), PAIR), expected) < 1e-3
    if not refusal(model, EXACT["h2o"]):
        with attention_hook(model):
            logits = logits_of(model, KVCacheBuilder.for_model(model, EXACT["h2o"]), PAIR)
        assert distance(logits, expected) < 1e-3


def check_loss_is_seen(model: nn.Module, own: mx.array) -> None:
    """Lost values change the logits, and so do rows that are really evicted, without harm to the run."""
    assert distance(logits_of(model, fresh(model, lambda _: Zeroed())), own) > 0.05
    if refusal(model, SMALL):
        return
    caches = KVCacheBuilder.for_model(model, SMALL)
    with attention_hook(model):
        logits = logits_of(model, caches)
    assert distance(logits, own) > 0.02  # false for NaN
    assert {cache.size() for cache in ours(caches)} == {8}


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "gptj", "llama", "mimo_v2_flash", "talkie"])
def test_bytes_are_a_limit_however_a_family_tells_its_heads(family: str) -> None:
    model = build_family(family)
    config = KVCacheConfig(method="h2o", options=H2OOptions(h2o_budget="200KB"))
    caches = KVCacheBuilder.for_model(model, config)
    logits_of(model, caches, CALLS[:1])
    assert 100_000 < sum(cache.nbytes for cache in ours(caches)) <= 200_000


# Families that are not covered


@pytest.mark.skipif(mx.metal.is_available(), reason="the kernels are there")
@pytest.mark.parametrize("family", [name for name, why in NOT_COVERED.items() if why == METAL_ONLY and installed(name)])
def test_families_of_metal_kernels(family: str) -> None:
    """They don't run here; their caches are made all the same."""
    model = build_family(family)
    assert left_alone(model) == left_alone(build_family("muse_glimmer"))
    with pytest.raises(RuntimeError, match="No Metal"):
        logits_of(model, make_prompt_cache(model))


@pytest.mark.skipif(version("mlx_lm") != RELEASE, reason=f"a fault of mlx_lm {RELEASE}")
def test_olmo_fails_with_its_own_caches() -> None:
    model = build_family("olmo")
    with pytest.raises(ValueError, match="inplace addition"):
        logits_of(model, make_prompt_cache(model))


# The tables


def families() -> Iterator[str]:
    """Modules of mlx_lm that define, or take from another, `Model` and `ModelArgs`; none is imported."""
    for path in sorted(Path(mlx_lm.models.__path__[0]).glob("*.py")):
        body = ast.parse(path.read_text()).body
        imports = (node for node in body if isinstance(node, ast.ImportFrom))
        taken = {alias.asname or alias.name for node in imports for alias in node.names}
        if {"Model", "ModelArgs"} <= taken | {node.name for node in body if isinstance(node, ast.ClassDef)}:
            yield path.stem


def test_every_family_is_in_the_table() -> None:
    """Exactly, for the release that the table was made for.

    Another release may have other families, which is no fault of who installs
    it: then a warning names what has not been tried.
    """
    known, found = set(FAMILIES), set(families())
    if version("mlx_lm") == RELEASE:
        assert found == known, f"tests/adapters/architectures.py is for {RELEASE}; they differ in {found ^ known}"
    elif found - known:
        warnings.warn(f"not tried with our caches: {sorted(found - known)}", stacklevel=1)
    assert set(NOT_COVERED) <= known


def test_the_page_has_each_family_once_and_every_reason() -> None:
    lines = PAGE.read_text().splitlines()
    rows = [line.split("|")[1].strip(" `") for line in lines if line.startswith("| `") and line.count("|") == 7]
    assert rows == sorted(set(FAMILIES) - set(NOT_COVERED), key=str.lower)
    for family, reason in NOT_COVERED.items():
        assert f"| `{family}` | {reason} |" in lines


@pytest.mark.parametrize("family", ["deepseek_v41", "gear", "llama4", "falcon_h1", "longcat_flash", "deepseek_v3"])
def test_the_page_explains_every_class_that_is_left_alone(family: str) -> None:
    for name, reason in left_alone(build_family(family)).items():
        assert f"| `{name}` | {reason} |" in PAGE.read_text().splitlines()
