"""Which form of the core runs, compiled or Python. The one place that chooses.

Both forms do the same, byte for byte. PREFIXCACHE_CORE forces one: `python` or `native`; without
it the compiled one runs if it was built. The choice is made once, at import.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

from prefixcache.errors import InvalidArgumentError

FORM_ENV = "PREFIXCACHE_CORE"
FORMS = ("native", "python")


def choose(wanted: str, *, is_built: Callable[[], bool]) -> str:
    """The form to run. wanted: one of `FORMS`, or empty for the best that there is.

    Raises InvalidArgumentError for any other, and for one that was not built.
    """
    if wanted not in ("", *FORMS):
        raise InvalidArgumentError(FORM_ENV, f"is {wanted!r}, must be one of {', '.join(FORMS)}")
    if wanted == "python":
        return wanted
    if is_built():
        return "native"
    if wanted == "native":
        raise InvalidArgumentError(
            FORM_ENV,
            "is 'native', and this installation has no compiled core: "
            "install the package again where a C compiler is",
        )
    return "python"


def _is_built() -> bool:
    """True if all compiled modules are there; each of them is built or not by itself."""
    names = (
        *("admission", "append", "commit", "free_queue", "hash_chain", "pool", "sequence_record"),
        "slots",
    )
    found = (importlib.util.find_spec(f"prefixcache.core.native.{name}") for name in names)
    return None not in found


FORM = choose(os.environ.get(FORM_ENV, ""), is_built=_is_built)


def is_compiled(module: str) -> bool:
    """Whether the native form runs, and a compiled module that is not of the core was built.

    module: its whole name. Those who import it have another form to fall back on.
    """
    return FORM == "native" and importlib.util.find_spec(module) is not None
