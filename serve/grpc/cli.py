"""The commands `pallasite serve` and `pallasite chat`: their options. What they need is imported when they run."""

import argparse
import os
import sys

from pallasite.serve.grpc.limits import DEFAULT_GRACE_SECONDS, DEFAULT_HOST, DEFAULT_PORT, join_address


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both. Their `run` takes the parsed arguments and returns the exit status; it raises ValueError or OSError,
    with a message for the user, for what is wrong with them or with the world."""
    _add_serve(subparsers)
    _add_chat(subparsers)


def _add_serve(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = subparsers.add_parser(
        "serve",
        help="serve a model by gRPC",
        description="Serve a model by gRPC (pallasite.v1, with health and reflection) until SIGTERM or Ctrl-C.",
        epilog="example: pallasite serve ./smollm2 --port 50051 --session-len 2048",
    )
    serve.set_defaults(run=run_serve)
    serve.add_argument("model", metavar="MODEL", help="a converted checkpoint, a Hugging Face folder, or a GGUF file")
    serve.add_argument("--host", default=DEFAULT_HOST, help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=DEFAULT_PORT, help="0: a free one (default: %(default)s)")
    serve.add_argument(
        "--insecure",
        action="store_true",
        help="allow a host that other machines reach, without encryption or passwords",
    )
    serve.add_argument("--model-name", help="name to serve it under (default: from the path)")
    serve.add_argument(
        "--grace",
        type=float,
        default=DEFAULT_GRACE_SECONDS,
        metavar="SECONDS",
        help="on SIGTERM, how long running requests may go on (default: %(default)g)",
    )
    engine = serve.add_argument_group("engine", "What they mean and their defaults: pallasite.EngineConfig.")
    engine.add_argument("--session-len", type=int, metavar="TOKENS", help="longest sequence, prompt and answer")
    engine.add_argument("--max-batch-size", type=int, metavar="N", help="sequences generated at once")
    engine.add_argument("--tp", type=int, metavar="N", help="devices that share the model")
    engine.add_argument("--dtype", choices=("auto", "float32", "bfloat16"))
    engine.add_argument("--device", choices=("auto", "cpu", "gpu"))
    engine.add_argument("--model-format", choices=("auto", "hf", "gguf", "pallasite"))
    engine.add_argument(
        "--cache-max-entry-count",
        type=_share_or_pages,
        metavar="SHARE|PAGES",
        help="KV pool: a share of free device memory (0.8), or a number of pages (1024)",
    )
    engine.add_argument("--cache-block-seq-len", type=int, metavar="TOKENS", help="size of a page")
    engine.add_argument(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        default=None,
        help="compute every prompt anew",
    )
    engine.add_argument("--max-prefill-token-num", type=int, metavar="TOKENS", help="prompt tokens of a step")
    engine.add_argument("--max-queue-size", type=int, metavar="N", help="requests that may wait for a place")


_ENGINE_OPTIONS = (
    "session_len",
    "max_batch_size",
    "tp",
    "dtype",
    "device",
    "model_format",
    "cache_max_entry_count",
    "cache_block_seq_len",
    "enable_prefix_caching",
    "max_prefill_token_num",
    "max_queue_size",
)


def _add_chat(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    chat = subparsers.add_parser(
        "chat",
        help="talk to a running server",
        description="Talk to a running `pallasite serve`: a conversation, or one question with --once.",
        epilog='example: pallasite chat --once "What is a pallasite?" --max-new-tokens 100',
    )
    chat.set_defaults(run=run_chat)
    chat.add_argument("--once", metavar="TEXT", help="ask this, print the answer as it comes, and leave")
    chat.add_argument("--host", default=DEFAULT_HOST, help="the server's (default: %(default)s)")
    chat.add_argument("--port", type=int, default=DEFAULT_PORT, help="the server's (default: %(default)s)")
    chat.add_argument("--address", metavar="HOST:PORT", help="instead of --host and --port")
    chat.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    chat.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer (default: the server's, 512)")
    chat.add_argument("--temperature", type=float, help="sample, at this temperature (default: the most likely tokens)")
    chat.add_argument("--seed", type=int, help="for sampling: the same seed gives the same answer")
    chat.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="wait so long for a server that is still starting"
    )


def _share_or_pages(text: str) -> int | float:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a share nor a number of pages") from None


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    if not arguments.grace >= 0:
        raise ValueError(f"grace is {arguments.grace:g}; it must be a number of seconds from 0")
    from pallasite.serve.config import EngineConfig

    given = {name: value for name in _ENGINE_OPTIONS if (value := getattr(arguments, name)) is not None}
    config = EngineConfig(**given)

    import asyncio

    from pallasite.serve.frontend import Frontend
    from pallasite.serve.grpc.server import LoadingInterrupted, serve

    def load() -> Frontend:
        from pallasite.serve.open import open_frontend

        return open_frontend(arguments.model, config, name=arguments.model_name)

    try:
        return asyncio.run(
            serve(load, arguments.host, arguments.port, grace=arguments.grace, insecure=arguments.insecure)
        )
    except LoadingInterrupted as interrupted:
        # The loading thread is somewhere inside XLA; an orderly exit would wait for it, or crash under it.
        print("pallasite: interrupted while loading", file=sys.stderr, flush=True)
        os._exit(128 + interrupted.args[0])


def run_chat(arguments: argparse.Namespace) -> int:
    """Ask once, or converse."""
    from pallasite.serve.grpc import chat
    from pallasite.serve.grpc.client import Client
    from pallasite.serve.proto import pallasite_pb2 as pb
    from pallasite.serve.types import GenerationConfig

    if arguments.once is not None and not arguments.once.strip():
        raise ValueError(f"--once is {arguments.once!r}; it must be a question")
    given = {
        "max_new_tokens": arguments.max_new_tokens,
        "random_seed": arguments.seed,
        "temperature": arguments.temperature,
        "do_sample": None if arguments.temperature is None else True,
    }
    given = {name: value for name, value in given.items() if value is not None}
    GenerationConfig(**given)  # says what is wrong with a value, where protobuf knows no field and no range
    config = pb.GenerationConfig(**given)
    with Client(arguments.address or join_address(arguments.host, arguments.port)) as client:
        if arguments.wait > 0:
            chat.wait(client, arguments.wait)
        if arguments.once is not None:
            chat.ask_once(client, arguments.once, arguments.system, config)
        else:
            chat.converse(client, arguments.system, config)
    return 0
