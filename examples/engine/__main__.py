"""Serves a model: python -m examples.engine --model FOLDER --target unix:prefixcache.sock"""

from __future__ import annotations

import argparse
import logging
import os
import socket
from contextlib import closing
from pathlib import Path

import torch
import uvicorn

from examples.engine.app import DEFAULT_TIMEOUT_S, make_app
from examples.engine.loop import Engine
from examples.engine.openai_form import ServedModel
from examples.engine.runner import TransformersRunner, TransformersTokenizer, load
from examples.engine.scheduler import Limits, Scheduler
from prefixcache import Client
from prefixcache.integrations.transformers import own_stop_token_ids


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load(arguments.model)
    with (
        Client(arguments.target, client_name=f"engine {os.getpid()}") as client,
        closing(
            TransformersRunner(
                model, client, attached=not arguments.rpc, revision=arguments.model_revision
            )
        ) as runner,
    ):
        info = client.server_info()
        text = TransformersTokenizer(tokenizer)
        limits = Limits(
            arguments.step_tokens,
            arguments.max_running,
            arguments.wait_pending,
            arguments.max_waiting,
        )
        engine = Engine(
            Scheduler(client, limits),
            runner,
            text.decode,
            own_stop_token_ids(model),
        )
        served = ServedModel(
            name=arguments.model_name or Path(arguments.model).name,
            tokenizer=text,
            max_tokens=min(model.config.max_position_embeddings, info.num_blocks * info.block_size),
            vocabulary=model.config.vocab_size,
            max_choices=min(limits.max_running, info.max_fork_children + 1),
            max_prompts=limits.max_waiting,
        )
        app = make_app(engine, served, arguments.timeout)
        config = uvicorn.Config(app, log_level="warning")
        listening = listen(arguments.host, arguments.port)
        url = f"http://{arguments.host}:{listening.getsockname()[1]}/v1"
        print(f"serving {served.name} at {url}", flush=True)
        try:
            uvicorn.Server(config).run([listening])
        finally:
            engine.close()


def listen(host: str, port: int) -> socket.socket:
    """The socket is there before anything is said, so who reads the line may connect."""
    return socket.create_server((host, port), reuse_port=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder, or name at the hub")
    parser.add_argument("--model-name", help="how callers name it; the folder's name if left out")
    parser.add_argument(
        "--model-revision",
        help="the daemon's, if its operator has chosen one; else it must name the model's weights, "
        "as the flags of `python -m prefixcache.integrations.transformers MODEL` do",
    )
    parser.add_argument("--target", required=True, help="the daemon: unix:PATH or HOST:PORT")
    parser.add_argument(
        "--rpc",
        action="store_true",
        help="let the daemon attend, for one that is not on a Unix socket of this host",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--threads", type=int, default=1, help="of the model")
    defaults = Limits()
    parser.add_argument("--step-tokens", type=int, default=defaults.max_tokens_per_step)
    parser.add_argument("--max-running", type=int, default=defaults.max_running)
    parser.add_argument(
        "--wait-pending",
        type=float,
        default=defaults.max_wait_pending_s,
        help="longest wait, in seconds, for others that compute a prompt's prefix; 0 for none",
    )
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=defaults.max_waiting,
        help="requests that wait for room at most; more are answered with 429",
    )
    parser.add_argument(
        "--timeout", type=float, default=DEFAULT_TIMEOUT_S, help="seconds for a whole answer"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
