"""The core in compiled code, made by Cython when the package is installed.

Each module here does what the one of that name in `prefixcache.core.python` does, byte for byte.
`prefixcache.core.form` imports one or the other; nothing else imports from here. The modules are
absent where no C compiler was at hand.
"""
