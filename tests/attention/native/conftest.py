"""Tests of what only compiled attention has; all others run on every path that there is."""

from prefixcache.attention.device import native_forms

collect_ignore_glob = [] if native_forms() else ["test_*.py"]
