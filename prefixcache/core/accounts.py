"""Accounts of the pool: whose blocks are whose, what is guaranteed to each, and who loses first.

An account is a tenant's number in the pool, from 0 on; 0 is that of everything without a tenant.
Accounts whose tenants share a namespace are a *group*: they find each other's blocks, and nobody
else does. A pool keeps accounts from its first `set_account` on; before that there is one account
without any rules, which costs nothing. The rules:

**Charges.** A referenced block is charged to the account that has referenced it for the longest,
so a hit by another one moves no charge, and when the account it is charged to lets go, the next
one is charged. An evictable block stays charged to the last account that held it, until it is
evicted or referenced again. A blank block is charged to nobody. A quarantined block counts as
referenced by the account that it was charged to, until its quarantine ends.

    held(t)      blocks that t references, each once; those of others included
    private(t)   blocks that t alone references
    shared       blocks that two accounts or more reference
    used(g)      blocks charged to the accounts of group g, referenced and evictable

**Guarantees are firm.** `reserved = shared + sum over t of max(guaranteed(t), private(t))` never
goes above the number of blocks, so each account can always have what is left of its guarantee. An
account goes beyond it only with what nobody has reserved: `available(t)` is the number of blocks
that t can have now. Shared blocks belong to no guarantee, since one of their holders may let go at
any time and leave them to another: a hit that would make another's private block a shared one is
not taken if that cannot be reserved any more; the account then gets a block of its own, which
stands by. Evictable blocks are reserved by nobody, so caches fill the whole pool.

**Who loses first.** Blank blocks are taken first, by anyone. Then the least recently used evictable
block of all groups that use more than they are guaranteed (the sum over their accounts), the
taker's own included; if no such group has any, the taker's own group loses its least recently used
one. So a group within its guarantee loses cached blocks only to itself. Within a group the order
is that of a pool without accounts, hence the cache stays prefix-closed: a chain never leaves a
group, and is eaten from its end.

This always finds a block for an account that has any available. Suppose not: nothing is blank, and
evictable blocks are charged only to groups W without the taker t, each with used <= guaranteed.
Then for each of W the sum of max(guaranteed, private) is at least used, which counts its private,
evictable and charged shared blocks; and for every other account max(guaranteed, private) is at
least private. So reserved >= shared + all private + all evictable = the number of blocks. But t
either has private(t) < guaranteed(t), which adds one more, or taking adds one; reserved would be
above the number of blocks.

**Limits.** held(t) never goes above `max_blocks`, nor above what the guarantees of others leave.

**Changes at run time.** A raised guarantee may meet blocks that others have borrowed. They keep
them (nothing is taken from a sequence), reserved is then above the number of blocks, and until it
is not, nobody is given blocks beyond a guarantee, and within it what can be found by the order
above. A lowered limit takes nothing either. A removed tenant keeps its charges, with nothing
guaranteed.

Rejected: charging each holder of a shared block (two tenants without quotas could then not share
more than half of the pool); one order of eviction an account instead of a group (a parent charged
to one tenant could go before a child charged to another).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_ACCOUNTS = 1024
"""Accounts that a pool can have; taking a block looks at one number of each group at most."""


@dataclass(frozen=True, slots=True)
class AccountUse:
    """An account as it stands. held >= private, in blocks; evictions: of blocks charged to it."""

    group: int
    guaranteed: int
    max_blocks: int | None
    held: int
    private: int
    evictable: int
    evictions: int


class HitCounts(NamedTuple):
    """What an account would have to do to reference cached blocks, its hits.

    num_free: of them are free, and would be referenced by it alone. num_new: are not referenced by
    it yet, the free ones included. num_reserved: by how much blocks that it would come to share
    raise what is reserved. num_takeable: hits before the first one for which that is too much.
    """

    num_free: int
    num_new: int
    num_reserved: int
    num_takeable: int
