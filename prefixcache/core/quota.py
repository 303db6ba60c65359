"""Whether an account may hold more blocks, and what it is told of the rest. Changes nothing.

The room for them is another matter, which `Pool.num_available` answers.
"""

from __future__ import annotations

from prefixcache.core.pool import Pool
from prefixcache.errors import NoRoomError, QuotaExceededError


def num_over_quota(pool: Pool, account: int, num_blocks: int, num_added: int) -> int:
    """Blocks by which a sequence of `num_blocks` is too much for an account.

    0 or below if it is not: how many blocks more the account may hold besides. num_added: blocks of
    the sequence that the account does not hold yet; without any it is never too much.
    """
    if not pool.keeps_accounts or not num_added:
        return -pool.num_blocks
    if num_blocks > pool.num_allowed(account):
        return num_blocks - pool.num_allowed(account)
    limit = pool.max_blocks(account)
    if limit is None:
        return -pool.num_blocks
    return pool.num_held(account) + num_added - limit


def check_quota(pool: Pool, account: int, num_blocks: int, num_added: int) -> None:
    """Raises QuotaExceededError if the sequence is too much."""
    if num_over_quota(pool, account, num_blocks, num_added) > 0:
        held, allowed = pool.num_held(account), pool.num_allowed(account)
        needed = num_blocks if num_blocks > allowed else num_added
        raise QuotaExceededError(needed, held, allowed)


def no_room(pool: Pool, account: int, num_needed: int, num_available: int) -> NoRoomError:
    """The refusal. With accounts it says what the account itself holds: the rest are others'."""
    if pool.keeps_accounts:
        return NoRoomError(num_needed, num_available, pool.num_held(account))
    return NoRoomError(
        num_needed, num_available, pool.num_referenced, quarantined=pool.num_quarantined
    )
