"""Reading and writing of plain messages in compiled code; `prefixcache.rpc.plain` is the caller."""
