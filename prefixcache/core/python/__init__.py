"""The core in Python and numpy: for installations without compiled code, and to compare with.

`prefixcache.core.form` imports from here or from `prefixcache.core.native`.
"""
