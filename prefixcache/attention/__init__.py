"""Attention over K/V that lie in the blocks of a pool.

One module per operation (`write_kv`, `prefill`, `decode`), each the launcher that checks its
input and picks the path; `reference/` holds a slow float64 twin of each for the tests.

Letters of all shapes here: S sequences, T new tokens of all of them together, Hq query heads, Hkv
KV heads, G = Hq / Hkv query heads that share a KV head, D head dim, Dv that of V (D but for latent
K/V), N blocks of the pool, B tokens of a block.
"""
