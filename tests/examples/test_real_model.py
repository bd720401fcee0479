"""All seven methods on SmolLM2: close enough to the plain cache, small enough, and worse when they forget."""

import contextlib

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

import measuring
import quickstart
import vq_functional as vq
from prose import token_slice
from vq_adapters import TransformKVCache, attention_hook

pytestmark = pytest.mark.slow

PROMPT, STEPS = 256, 32

# Transform of a layer, most KL in nats, least top-1 agreement, most bytes over those of plain 16-bit rows.
METHODS = {
    "kivi 4 bits": (lambda layer: vq.kivi(bits=4, residual_length=32), 0.02, 0.85, 0.52),
    "kivi 2 bits": (lambda layer: vq.kivi(bits=2, residual_length=32), 0.4, 0.6, 0.41),
    "turboquant_mse": (lambda layer: vq.turboquant_mse(bits=4, seed=42 + layer), 0.1, 0.75, 0.45),
    "turboquant_rvq": (lambda layer: vq.turboquant_rvq(seed=42 + layer), 0.25, 0.6, 0.72),
    "qjl": (lambda layer: vq.qjl(jl_dim=512, seed=42 + layer), 1.2, 0.4, 0.59),
    "snapkv": (lambda layer: vq.snapkv(budget=64), 1.0, 0.4, 0.48),
    "h2o": (lambda layer: vq.h2o(budget=64), 1.1, 0.4, 0.25),
    "streaming_llm": (lambda layer: vq.streaming_llm(n_sink=4, window_size=60), 1.3, 0.4, 0.25),
}
FORGETFUL_KL = 3.0  # of a cache without any memory at least; twice the loosest bound above


class Forgetful(KVCache):
    """Every row comes back as zeros, so that attention is blind."""

    def update_and_fetch(self, keys, values):
        return tuple(mx.zeros_like(x) for x in super().update_and_fetch(keys, values))


@pytest.fixture(scope="module")
def smollm2():
    return measuring.load_model()


@pytest.fixture(scope="module")
def tokens(smollm2):
    return token_slice(smollm2[1], 1000, PROMPT + STEPS)


@pytest.fixture(scope="module")
def run(smollm2, tokens):
    """A function from the maker of a layer's cache to the run of the whole model."""
    model, _ = smollm2

    def run_of(cache, hook=False):
        caches = measuring.float16_rows(cache(layer) for layer in range(len(model.layers)))
        with attention_hook(model) if hook else contextlib.nullcontext():
            return measuring.teacher_forced(model, tokens, PROMPT, caches)[0]

    return run_of


@pytest.fixture(scope="module")
def plain(run):
    return run(lambda layer: KVCache())


def scores(plain, run):
    return (
        measuring.divergence(plain.log_probs, run.log_probs),
        measuring.agreement(plain.log_probs, run.log_probs),
        measuring.resident_bytes(run.caches) / measuring.plain_bytes(plain.caches),
    )


@pytest.mark.parametrize("hook", [False, True], ids=["as arrays", "hook"])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_close_and_small(run, plain, name, hook):
    transform, most, least, room = METHODS[name]
    far, same, held = scores(plain, run(lambda layer: TransformKVCache(transform(layer)), hook))
    assert far <= most, f"KL {far}"
    assert same >= least, f"top-1 {same}"
    assert held <= room, f"bytes {held}"


def test_real_queries_serve_h2o_better_than_keys(run, plain):
    by_keys, by_queries = (
        scores(plain, run(lambda layer: TransformKVCache(vq.h2o(budget=64)), hook))[0] for hook in (False, True)
    )
    assert by_queries < by_keys


def test_evicting_codes_costs_bytes_of_both(run, plain):
    def composed(layer):
        codes = vq.turboquant_mse_codec(bits=4, seed=42 + layer)
        return TransformKVCache(vq.chain(vq.h2o_policy(budget=128), vq.rows(key=codes, value=codes)))

    far, same, held = scores(plain, run(composed, hook=True))
    assert far <= 0.5 and same >= 0.6
    # A row has 4 bits a number and a norm twice, its position and its mass; one row is spare.
    head_row = 2 * (64 * 4 / 8 + 2) + 4 + 4
    assert held == pytest.approx(129 * head_row / ((PROMPT + STEPS) * 64 * 4), rel=0.01)


def test_a_budget_above_the_length_changes_nothing(run, plain):
    far, same, _ = scores(plain, run(lambda layer: TransformKVCache(vq.h2o(budget=PROMPT + STEPS)), hook=True))
    assert far < 1e-5 and same == 1.0


def test_a_cache_that_forgets_is_found_out(run, plain):
    far, same, _ = scores(plain, run(lambda layer: Forgetful()))
    assert far > FORGETFUL_KL
    assert same < 0.2
    assert all(far > 2 * most and same < least for _, most, least, _ in METHODS.values())


def test_the_model_writes_the_prose_better_than_chance(plain, tokens):
    """The loader puts every weight where it belongs: a wrong one leaves no language model."""
    targets = mx.array([*tokens[PROMPT + 1 :]])
    rows = plain.log_probs[: len(targets)]
    loss = -mx.take_along_axis(rows, targets[:, None], axis=1).mean().item()
    assert loss < 5.0  # a blind guess over the vocabulary has 10.8


def test_the_quickstart_prints_one_table(smollm2, monkeypatch, capsys):
    monkeypatch.setattr(quickstart, "load_model", lambda name: smollm2)
    quickstart.main(["--prompt", "48", "--generate", "3", "--steps", "2"])
    out = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    head, _, *body = lines
    assert head == list(quickstart.HEAD)
    assert [cells[0] for cells in body] == [quickstart.PLAIN, *quickstart.methods(32)]
    assert "left out" not in out
    plain, *others = body
    assert plain[4:7] == ["1.00", "0.0000", "1.00"]
    for cells in others:
        assert float(cells[2]) < float(plain[2])
        assert 0 <= float(cells[5]) < FORGETFUL_KL
        assert cells[7]
