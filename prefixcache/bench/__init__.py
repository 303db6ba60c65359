"""Measurements of the daemon's own parts, beside floors and peers of the same run.

`measure` runs what is compared in interleaved rounds, `report` holds and prints the results,
`machine` says what they were measured on. The other modules each measure one thing. Nothing here
is imported by the daemon or a client; a result is never an error, however bad.
"""
