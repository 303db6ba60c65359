"""The daemon's pool in an engine's own process: mapped, written to and attended over in place.

`attach` is the way in. Importing this package imports no torch; `attach` does.
"""

from prefixcache.attached.attaching import attach, attach_async

__all__ = ["attach", "attach_async"]
