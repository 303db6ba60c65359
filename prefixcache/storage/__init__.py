"""K/V storage: shapes and bytes (`layout`, no torch), the allocation (`pool_memory`), its views."""
