"""prefixcache: a gRPC daemon that shares the K/V blocks of common prompt prefixes."""

__version__ = "0.1.0"
