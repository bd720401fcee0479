"""The one table of methods."""

from collections.abc import Callable

import attrs

from vq_functional.codebook.nsnquant import NSNQuantOptions, nsnquant
from vq_functional.codebook.polar import PolarOptions, polar
from vq_functional.codebook.qjl import QJLOptions, qjl
from vq_functional.codebook.spectral import SpectralOptions, spectral
from vq_functional.codebook.turboquant_mse import TurboQuantMSEOptions, turboquant_mse
from vq_functional.codebook.turboquant_prod import TurboQuantProdOptions, turboquant_prod
from vq_functional.codebook.turboquant_rvq import TurboQuantRVQOptions, turboquant_rvq
from vq_functional.codebook.vecinfer import VecInferOptions, vecinfer
from vq_functional.core.errors import check_choice, refusing
from vq_functional.core.transform import Transform
from vq_functional.crosslayer.minicache import MiniCacheOptions, minicache
from vq_functional.crosslayer.xkv import XKVOptions, xkv
from vq_functional.crosslayer.xquant import XQuantOptions, xquant
from vq_functional.evict.cam import CaMOptions, cam
from vq_functional.evict.chunkkv import ChunkKVOptions, chunkkv
from vq_functional.evict.curdkv import CurDKVOptions, curdkv
from vq_functional.evict.h2o import H2OOptions, h2o
from vq_functional.evict.keyformer import KeyformerOptions, keyformer
from vq_functional.evict.knorm import L2NormOptions, knorm
from vq_functional.evict.kvzip import KVzipOptions, kvzip
from vq_functional.evict.morphkv import MorphKVOptions, morphkv
from vq_functional.evict.nestedkv import NestedKVOptions, nestedkv
from vq_functional.evict.pyramidkv import PyramidKVOptions, pyramidkv
from vq_functional.evict.qfilters import QFiltersOptions, qfilters
from vq_functional.evict.snapkv import SnapKVOptions, snapkv
from vq_functional.evict.squeeze import SqueezeAttentionOptions, squeeze
from vq_functional.evict.streaming_llm import StreamingLLMOptions, streaming_llm
from vq_functional.evict.tova import TOVAOptions, tova
from vq_functional.hybrid.a2ats import A2ATSOptions, a2ats
from vq_functional.hybrid.amc import amc
from vq_functional.hybrid.amc_options import AMCOptions
from vq_functional.hybrid.anchor_options import AnchorKVOptions
from vq_functional.hybrid.anchorkv import anchorkv
from vq_functional.hybrid.rocketkv import RocketKVOptions, rocketkv
from vq_functional.lowrank.kvtc import KVTCOptions, kvtc
from vq_functional.lowrank.palu import PALUOptions, palu
from vq_functional.lowrank.svdq import SVDqOptions, svdq
from vq_functional.quantize.adakv import AdaKVOptions, adakv
from vq_functional.quantize.age_tiered import AgeTieredKVOptions, age_tiered
from vq_functional.quantize.cachegen import CacheGenOptions, cachegen
from vq_functional.quantize.gear import GEAROptions, gear
from vq_functional.quantize.kitty import KittyOptions, kitty
from vq_functional.quantize.kivi import KIVIOptions, kivi
from vq_functional.quantize.kivi_sink import KIVISinkOptions, kivi_sink
from vq_functional.quantize.kvquant import KVQuantOptions, kvquant
from vq_functional.quantize.skvq import SKVQOptions, skvq
from vq_functional.quantize.zipcache import ZipCacheOptions, zipcache


@attrs.frozen
class Method:
    """One row. Traits select the laws that a method must obey:

    evicts          gives up rows; the rest stays as it was first held, but for `folds`
    uses_queries    has a rule for real queries beside the one for keys alone
    packs           holds codes
    chunk_invariant one-shot prefill equals any chunking, bit for bit
    attends_codes   `attend` reads codes without rebuilding keys or values
    anchors         codes the prompt once, when it has ended
    stacks          packs the rows of several layers together
    vectors         also serves one head, vector by vector
    window          which rows stay follows from their positions alone
    new_rows_go     the newest row competes like any other
    one_choice      all heads of a layer keep the same rows
    sums_heads      adds up the scores of the query heads that share a KV head
    chunks          rows stay or go by chunks of neighbours
    share           keeps a share of the prompt
    pages           attends to some of the rows it holds
    noise           draws random numbers for each head
    norms           looks at norms beside attention
    folds           evicted rows go on in the values of others
    classes         how a row is held depends on how it compares with its neighbours
    chunk_means     rows are held beside the mean of their chunk; the newest chunk is exact while it is open
    sinks           some rows are exact, by how they compare with others
    """

    name: str
    options: type
    build: Callable[..., Transform]
    paper: str
    traits: frozenset[str]


def _row(name: str, options: type, build: Callable[..., Transform], paper: str, traits: str) -> Method:
    return Method(name, refusing(options, name), build, paper, frozenset(traits.split()))


_CODES = "packs chunk_invariant attends_codes"

TABLE = (
    _row("streaming_llm", StreamingLLMOptions, streaming_llm, "2309.17453", "evicts window chunk_invariant"),
    _row("h2o", H2OOptions, h2o, "2306.14048", "evicts uses_queries"),
    _row("snapkv", SnapKVOptions, snapkv, "2404.14469", "evicts uses_queries"),
    _row("tova", TOVAOptions, tova, "2401.06104", "evicts uses_queries new_rows_go one_choice"),
    _row("pyramidkv", PyramidKVOptions, pyramidkv, "2406.02069", "evicts uses_queries"),
    _row("squeeze", SqueezeAttentionOptions, squeeze, "2404.04793", "evicts uses_queries"),
    _row("chunkkv", ChunkKVOptions, chunkkv, "2502.00299", "evicts uses_queries chunks"),
    _row("cam", CaMOptions, cam, "PMLR 235:58840", "evicts uses_queries folds noise"),
    _row("knorm", L2NormOptions, knorm, "2406.11430", "evicts chunk_invariant new_rows_go"),
    _row("keyformer", KeyformerOptions, keyformer, "2403.09054", "evicts uses_queries new_rows_go noise"),
    _row("morphkv", MorphKVOptions, morphkv, "2503.00979", "evicts uses_queries sums_heads"),
    _row("kvzip", KVzipOptions, kvzip, "2505.23416", "evicts uses_queries new_rows_go"),
    _row("nestedkv", NestedKVOptions, nestedkv, "2605.26678", "evicts new_rows_go"),
    _row("rocketkv", RocketKVOptions, rocketkv, "2502.14051", "evicts uses_queries share pages new_rows_go"),
    _row("qfilters", QFiltersOptions, qfilters, "2503.02812", "evicts uses_queries new_rows_go"),
    _row("curdkv", CurDKVOptions, curdkv, "2509.15038", "evicts uses_queries new_rows_go norms"),
    _row("kivi", KIVIOptions, kivi, "2402.02750", _CODES),
    _row("turboquant_mse", TurboQuantMSEOptions, turboquant_mse, "2504.19874", f"{_CODES} vectors"),
    _row("turboquant_rvq", TurboQuantRVQOptions, turboquant_rvq, "2504.19874", _CODES),
    _row("qjl", QJLOptions, qjl, "2406.03482", f"{_CODES} vectors"),
    _row("turboquant_prod", TurboQuantProdOptions, turboquant_prod, "2504.19874", f"{_CODES} vectors"),
    _row("polar", PolarOptions, polar, "2502.02617", f"{_CODES} vectors"),
    _row("spectral", SpectralOptions, spectral, "SpectralQuant", f"{_CODES} vectors"),
    _row("kivi_sink", KIVISinkOptions, kivi_sink, "2508.04257", f"{_CODES} sinks"),
    _row("age_tiered", AgeTieredKVOptions, age_tiered, "No paper", _CODES),
    _row("kitty", KittyOptions, kitty, "2511.18643", _CODES),
    _row("adakv", AdaKVOptions, adakv, "2407.11550", _CODES),
    _row("skvq", SKVQOptions, skvq, "2405.06219", _CODES),
    _row("kvquant", KVQuantOptions, kvquant, "2401.18079", _CODES),
    _row("vecinfer", VecInferOptions, vecinfer, "2510.06175", _CODES),
    _row("a2ats", A2ATSOptions, a2ats, "2502.12665", f"{_CODES} pages"),
    _row("zipcache", ZipCacheOptions, zipcache, "2405.14256", f"{_CODES} uses_queries classes"),
    _row("nsnquant", NSNQuantOptions, nsnquant, "2505.18231", f"{_CODES} chunk_means"),
    _row("cachegen", CacheGenOptions, cachegen, "2310.07240", _CODES),
    _row("gear", GEAROptions, gear, "2403.05527", _CODES),
    _row("amc", AMCOptions, amc, "2607.10109", f"{_CODES} uses_queries classes"),
    _row("svdq", SVDqOptions, svdq, "2502.15304", _CODES),
    _row("xquant", XQuantOptions, xquant, "2510.11236", f"{_CODES} stacks"),
    _row("palu", PALUOptions, palu, "2407.21118", _CODES),
    _row("kvtc", KVTCOptions, kvtc, "2511.01815", _CODES),
    _row("minicache", MiniCacheOptions, minicache, "2405.14366", f"{_CODES} stacks classes"),
    _row("xkv", XKVOptions, xkv, "2503.18893", f"{_CODES} stacks"),
    _row("anchorkv", AnchorKVOptions, anchorkv, "2608.02901", "packs attends_codes uses_queries anchors"),
)

METHODS = {method.name: method for method in TABLE}


def find(name: str) -> Method:
    """The row of a method; raises QuantizerConfigError for a name that isn't in the table."""
    check_choice("methods", "method", name, tuple(METHODS))
    return METHODS[name]
