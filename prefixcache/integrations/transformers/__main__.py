"""`python -m prefixcache.integrations.transformers FOLDER`: the flags of a daemon for a model."""

from __future__ import annotations

import argparse
import shlex

from transformers import AutoModelForCausalLM

from prefixcache.integrations.transformers.fit import serve_flags


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m prefixcache.integrations.transformers",
        description="Prints the flags of `prefixcache serve` for a model, but for the pool's size.",
    )
    parser.add_argument("model", help="folder, or name at the hub")
    parser.add_argument("--dtype", default="auto", help="as from_pretrained has it")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype)
    print(shlex.join(serve_flags(model)))


if __name__ == "__main__":
    main()
