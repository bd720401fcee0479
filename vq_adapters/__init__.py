"""KV-cache compression for mlx_lm: drop-in caches over vq_functional."""

from vq_adapters.cache import TransformKVCache
from vq_adapters.hook import attention_hook, install_attention
from vq_functional.core.errors import QuantizerConfigError

__all__ = ["QuantizerConfigError", "TransformKVCache", "attention_hook", "install_attention"]
