"""The class of each method; the others are served by TransformKVCache itself."""

from vq_adapters.anchor_classes import AnchorKVKVCache
from vq_adapters.block_classes import AdaKVCache, AgeTieredKVCache, KittyKVCache, SinkProtectedKVCache
from vq_adapters.coded_classes import KIVIKVCache, TurboQuantRVQKVCache
from vq_adapters.crosslayer_classes import MiniCacheKVCache, XKVKVCache, XQuantKVCache
from vq_adapters.evicting_classes import (
    CurDKVCache,
    H2OKVCache,
    KeyformerKVCache,
    KNormKVCache,
    KVzipCache,
    MorphKVCache,
    NestedKVCache,
    QFiltersKVCache,
    StreamingLLMKVCache,
    TOVAKVCache,
)
from vq_adapters.layered_classes import (
    CaMKVCache,
    ChunkKVCache,
    PyramidKVCache,
    SqueezeAttentionCache,
)
from vq_adapters.lowrank_classes import KVTCKVCache, PALUKVCache, SVDqKVCache
from vq_adapters.method_cache import MethodKVCache
from vq_adapters.prompt_classes import (
    RocketKVKVCache,
    SnapKVKVCache,
)
from vq_adapters.routed_classes import AMCKVCache, CacheGenKVCache, GEARKVCache, ZipCacheKVCache
from vq_adapters.table_classes import A2ATSKVCache, KVQuantKVCache, NSNQuantKVCache, SKVQKVCache, VecInferKVCache

_KINDS: tuple[type[MethodKVCache], ...] = (
    StreamingLLMKVCache,
    H2OKVCache,
    SnapKVKVCache,
    TOVAKVCache,
    PyramidKVCache,
    SqueezeAttentionCache,
    ChunkKVCache,
    CaMKVCache,
    KNormKVCache,
    QFiltersKVCache,
    RocketKVKVCache,
    KeyformerKVCache,
    MorphKVCache,
    KVzipCache,
    CurDKVCache,
    NestedKVCache,
    KIVIKVCache,
    SinkProtectedKVCache,
    KittyKVCache,
    AdaKVCache,
    AgeTieredKVCache,
    ZipCacheKVCache,
    GEARKVCache,
    CacheGenKVCache,
    AMCKVCache,
    SVDqKVCache,
    PALUKVCache,
    KVTCKVCache,
    XQuantKVCache,
    MiniCacheKVCache,
    XKVKVCache,
    AnchorKVKVCache,
    TurboQuantRVQKVCache,
    SKVQKVCache,
    KVQuantKVCache,
    NSNQuantKVCache,
    VecInferKVCache,
    A2ATSKVCache,
)

CLASSES: dict[str, type[MethodKVCache]] = {kind.method: kind for kind in _KINDS}
