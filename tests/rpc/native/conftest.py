"""Tests of what only the compiled form has; all others run against whichever form is in use."""

from prefixcache.core.form import FORM

collect_ignore_glob = [] if FORM == "native" else ["test_*.py"]
