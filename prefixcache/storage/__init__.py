"""K/V storage: shapes and bytes (`layout`, no torch) and the one allocation (`pool_memory`)."""
