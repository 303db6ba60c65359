"""A small inference engine on a prefixcache daemon; several of them share one.

It is the reference for who writes an engine: continuous batching with chunked prefill, admission
by free blocks, preemption and recomputation, and an HTTP endpoint in OpenAI's form.

    python -m examples.engine --model FOLDER --target unix:prefixcache.sock

To be read in this order: `request` (one answer), `scheduler` (what is computed next), `loop` (a
step), `text` (from tokens to text), `openai_form`, `answering` and `app` (HTTP), `runner` and
`__main__`.
`compare` measures four of them on one daemon against four with a daemon each.
"""
