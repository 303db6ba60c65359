"""Models of Hugging Face transformers on a daemon's blocks.

Needs `pip install 'prefixcache[transformers]'`.

from prefixcache import Client
from prefixcache.integrations.transformers import CachedModel, Row

with Client("unix:prefixcache.sock") as client, client.sequence(prompt) as sequence:
    model = CachedModel(AutoModelForCausalLM.from_pretrained(name), client)
    logits = model.forward([Row(sequence, prompt[sequence.num_cached_tokens :])])
"""

from prefixcache.integrations.transformers.cached_model import CachedModel, Row
from prefixcache.integrations.transformers.fit import kv_layout, serve_flags, weights_revision

__all__ = ["CachedModel", "Row", "kv_layout", "serve_flags", "weights_revision"]
