"""A program that attaches to the daemon at argv[1], for argv[2] s, and never ends a write.

Of a sequence of 10 tokens it commits 5 and then writes to the blocks of the others again and again,
one number after another. Once it does, its block ids are a line of JSON on its standard output.
"""

from __future__ import annotations

import json
import sys
from itertools import count

from prefixcache import Client
from prefixcache.attached import attach
from tests.attached.served import NUM_LAYERS

client = Client(sys.argv[1], client_name="a stalled one", session_ttl_s=float(sys.argv[2]))
view = attach(client)
sequence = client.sequence(range(100, 110))
caches = [view.layer(layer) for layer in range(NUM_LAYERS)]
parts = [part for cache in caches for part in (cache.keys, cache.values)]
for part in parts:
    part[sequence.block_ids] = 0.5
sequence.commit(5)
for number in count(1):
    for part in parts:
        part[sequence.block_ids[1:]] = number % 1000
    if number == 1:
        print(json.dumps(sequence.block_ids.tolist()), flush=True)
