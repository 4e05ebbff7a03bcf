"""`pallasite chat`: one question, or a conversation in the terminal."""

import sys
from collections.abc import Sequence

from pallasite.serve.grpc.client import CallFailed, Client, Stream, chat_request
from pallasite.serve.proto import pallasite_pb2 as pb

Turn = tuple[str, str]
"""Role and content."""

HELP = "Ctrl-C stops an answer, /clear starts a new conversation, Ctrl-D or /exit leaves."


def ask_once(client: Client, text: str, system: str | None, config: pb.GenerationConfig) -> None:
    """Print the answer to one question as it comes. Raises CallFailed."""
    stream = client.generate(chat_request([*_opening(system), ("user", text)], config))
    try:
        _print_answer(stream, [])
    except BaseException:
        stream.cancel()
        raise


def converse(client: Client, system: str | None, config: pb.GenerationConfig) -> None:
    """Questions from stdin, answers to stdout, until the input ends.

    A turn that failed is left out of the conversation; of an answer that was stopped, what was printed stays in it.
    Raises CallFailed where there is no server to begin with.
    """
    print(f"{client.model_info().name} at {client.address}. {HELP}")
    turns = _opening(system)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{HELP}")
            continue
        if text == "/exit":
            return
        if text == "/clear":
            turns = _opening(system)
        elif text:
            turns += _turn(client, turns, text, config)


def _turn(client: Client, turns: Sequence[Turn], text: str, config: pb.GenerationConfig) -> list[Turn]:
    """Ask and print; the turns to add to the conversation."""
    stream = client.generate(chat_request([*turns, ("user", text)], config))
    pieces: list[str] = []
    try:
        _print_answer(stream, pieces)
    except KeyboardInterrupt:
        stream.cancel()
        print(" [stopped]")
    except CallFailed as error:
        if pieces:
            print(flush=True)
        print(f"pallasite: error: {error}", file=sys.stderr)
        return []
    return [("user", text), ("assistant", "".join(pieces))] if pieces else []


def _print_answer(stream: Stream, pieces: list[str]) -> None:
    """Print the deltas as they come, and a newline; they are also added to `pieces`."""
    for response in stream:
        if response.text:
            pieces.append(response.text)
            print(response.text, end="", flush=True)
    print(flush=True)


def _opening(system: str | None) -> list[Turn]:
    return [("system", system)] if system else []


class WaitNotice:
    """Tells on stderr, once, that a server is being waited for: after 2 s, for until then it may just be slow."""

    def __init__(self, address: str):
        self._address, self._told = address, False

    def __call__(self, waited: float) -> None:
        if waited > 2 and not self._told:
            print(f"pallasite: waiting for the server at {self._address} ...", file=sys.stderr, flush=True)
            self._told = True


def wait(client: Client, seconds: float) -> None:
    """Until the server serves, at most `seconds`. Raises CallFailed."""
    client.wait_until_serving(seconds, WaitNotice(client.address))
