"""Methods that are added to the table, by the list in docs/new_method.md, are served like the documented ones."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

# What somebody writes who adds a policy and a codec: options, constructors, rows of the table.
ADDED = '''
import attrs
import mlx.core as mx
import vq_functional as vq
from vq_functional import methods
from vq_functional.core.policy import Policy, check_policy


@attrs.frozen(kw_only=True)
class VNormOptions:
    """Rows whose keys are small stay."""

    budget: int | float = 512
    n_sink: int = 4
    recent: int = 16

    def __attrs_post_init__(self):
        check_policy("vnorm", self.budget, self.n_sink, self.recent, ())


@attrs.frozen
class VNormPolicy(Policy):
    name = "vnorm"

    def score(self, memory, scene):
        return memory, -mx.linalg.norm(scene.keys().astype(mx.float32), axis=-1)


def vnorm(**options):
    """Rows whose keys are small stay."""
    o = VNormOptions(**options)
    return vq.chain(VNormPolicy(o.budget, o.n_sink, o.recent), vq.rows(), name="vnorm")


@attrs.frozen(kw_only=True)
class VCodeOptions:
    """`bits` a number of keys."""

    bits: int = 2


def vcode(**options):
    """Keys in codes."""
    key = vq.turboquant_mse_codec(bits=VCodeOptions(**options).bits)
    return vq.rows(key=key, value=vq.int8_codec(), name="vcode")


added = (
    methods._row("vnorm", VNormOptions, vnorm, "No paper", "evicts chunk_invariant new_rows_go"),
    methods._row("vcode", VCodeOptions, vcode, "No paper", "packs chunk_invariant attends_codes"),
)
methods.TABLE += added
methods.METHODS |= {method.name: method for method in added}

from vq_adapters import options
'''

SERVED = """
import copy, dataclasses, pickle
import pytest
from models import build, tokens
from vq_adapters import KVCacheBuilder, KVCacheConfig, KVCacheFactory, QuantizerConfigError
from vq_adapters.cli import main
from vq_adapters.cli.commands import _parser
from vq_adapters.cli.settings import configuration


model = build("llama")


def made(**fields):
    own = {f"vnorm_{name}": value for name, value in fields.items()}
    return KVCacheConfig(method="vnorm", options=options.VNormOptions(**own))


def budgets(config):
    caches = KVCacheBuilder.for_model(model, config)
    model(mx.array([tokens(40)]), cache=caches)
    return [cache.transform.policy.budget for cache in caches], sum(cache.nbytes for cache in caches)


# In a configuration, for one layer and for all
assert KVCacheConfig(method="vnorm").transform() == vnorm() and KVCacheConfig(method="vcode").transform() == vcode()
assert KVCacheFactory.create(made(budget=64)).transform == vnorm(budget=64)
assert budgets(made(budget=32, n_sink=1))[0] == [32, 32]
assert budgets(made(budget=[64, 48]))[0] == [64, 48]
assert budgets(made(budget=0.5))[0] == [0.5, 0.5]
(one, other), held = budgets(made(budget="60KB"))
row = 2 * 2 * 32 * 4 + 2 * 4
assert one == other > 21 and 60_000 - 2 * row < held <= 60_000
bits = KVCacheConfig(method="vcode", options=options.VCodeOptions(vcode_bits=[2, 4]))
assert [cache.transform.key.bits for cache in KVCacheBuilder.for_model(model, bits)] == [2, 4]

# What can't be is refused by name
for fields, rule in (
    ({"budget": 0}, "vnorm: `budget` must be"),
    ({"budget": "1k"}, "vnorm: `vnorm_budget` must be rows, a share of the prompt, or bytes"),
    ({"budget": 20}, "vnorm: `budget` must exceed the 20 rows"),
):
    with pytest.raises(QuantizerConfigError, match=f"^{rule}"):
        made(**fields)
for config in (made(budget=[64, 48]), made(budget="60KB")):
    with pytest.raises(QuantizerConfigError, match="^vnorm: `vnorm_budget` .*`for_model`"):
        config.transform()
with pytest.raises(QuantizerConfigError, match="`vnorm_budget` must have one entry for each of the 2 layers"):
    budgets(made(budget=[64, 48, 32]))
with pytest.raises(QuantizerConfigError, match=r"`vnorm_budget` .*write options=VNormOptions\\(vnorm_budget=...\\)"):
    KVCacheConfig(method="vnorm", vnorm_budget=64)
with pytest.raises(QuantizerConfigError, match="`options` must be VNormOptions"):
    KVCacheConfig(method="vnorm", options=options.H2OOptions())

# Copies
config = made(budget=[64, 48])
for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
    assert copied == config != made(budget=64) and budgets(copied)[0] == [64, 48]

# On the command line
def configured(*arguments):
    return configuration(_parser().parse_args(["report", "--model", "m", *arguments]))

assert configured("--method", "vnorm", "--budget", "64,48") == config
assert configured("--method", "vnorm", "--option", "budget=60KB", "--option", "n_sink=1").options.vnorm_n_sink == 1
assert configured("--method", "vcode", "--bits", "2,4") == bits
assert main(["methods"]) == main(["methods", "--method", "vnorm"]) == 0
"""


def test_added_methods_are_served_like_the_others() -> None:
    done = subprocess.run([sys.executable, "-c", ADDED + SERVED], cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "vnorm_budget" in done.stdout and "Rows whose keys are small stay." in done.stdout
