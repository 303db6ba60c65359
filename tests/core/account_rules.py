"""The rule of the state machine that gives tenants their quotas, while the pool is in use.

Before the first one everything is of account 0. Accounts 1 and 2 share a namespace; 0 and 3 have
one each.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from prefixcache.core.sequences import Sequences
from tests.core.session_rules import OWNERS, SLOTS
from tests.support.model import Model

GROUPS = (0, 1, 1, 2)
ACCOUNTS = dict(zip((*OWNERS, *SLOTS, b"press"), (1, 2, 2, 1, 0, 3, 3), strict=True))
GUARANTEES = (0, 0, 1, 2, 4, 8)
LIMITS = (None, None, None, None, 3, 12)


class AccountRules:
    """Goes before a machine, whose `account_of` and `tokens_of` it replaces."""

    sequences: Sequences
    model: Model

    def account_of(self, slot: bytes) -> int:
        return ACCOUNTS[slot] if self.sequences.pool.keeps_accounts else 0

    def tokens_of(self, slot: bytes, tokens: list[int]) -> list[int]:
        return [token + 10 * GROUPS[self.account_of(slot)] for token in tokens]

    @rule(
        account=st.integers(0, 3),
        guaranteed=st.sampled_from(GUARANTEES),
        limit=st.sampled_from(LIMITS),
    )
    def set_quota(self, account: int, guaranteed: int, limit: int | None) -> None:
        """Guarantees are cut to what is not promised to others."""
        pool = self.sequences.pool
        if not pool.keeps_accounts:
            for number, group in enumerate(GROUPS):
                pool.set_account(number, group, 0, None)
                self.model.set_account(number, group, 0, None)
        others = sum(pool.account(other).guaranteed for other in range(4) if other != account)
        guaranteed = min(guaranteed, pool.num_blocks - others)
        limit = None if limit is None else max(limit, guaranteed)
        pool.set_account(account, GROUPS[account], guaranteed, limit)
        self.model.set_account(account, GROUPS[account], guaranteed, limit)
