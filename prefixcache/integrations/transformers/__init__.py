"""Models of Hugging Face transformers on a daemon's blocks.

Needs `pip install 'prefixcache[transformers]'`, and a daemon for the model:

    prefixcache serve $(python -m prefixcache.integrations.transformers FOLDER) --memory 4GiB

    from prefixcache import Client
    from prefixcache.integrations.transformers import CachedModel

    with Client("unix:prefixcache.sock") as client:
        model = CachedModel(AutoModelForCausalLM.from_pretrained(name), client)
        (answer,) = model.generate([tokenizer.encode(text)], max_new_tokens=64)

`generate` and `stream` take many prompts and choose greedily or by `Sampling`. `forward` is one
pass, for engines that have a scheduler of their own.
"""

from prefixcache.integrations.transformers.cached_model import CachedModel, Completion
from prefixcache.integrations.transformers.fit import kv_layout, serve_flags
from prefixcache.integrations.transformers.identity import weights_revision
from prefixcache.integrations.transformers.rows import Row
from prefixcache.integrations.transformers.sampling import GREEDY, Sampling, own_stop_token_ids

__all__ = [
    "GREEDY",
    "CachedModel",
    "Completion",
    "Row",
    "Sampling",
    "kv_layout",
    "own_stop_token_ids",
    "serve_flags",
    "weights_revision",
]
