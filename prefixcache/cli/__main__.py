"""`python -m prefixcache.cli`, the same as the `prefixcache` script."""

from __future__ import annotations

from prefixcache.cli import main

main()
