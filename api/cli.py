"""The `pallasite` command: convert, inspect, serve, chat."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import pallasite
from pallasite.convert.cli import add_commands as add_convert_commands
from pallasite.serve.grpc.cli import add_commands as add_serve_commands


class Parser(argparse.ArgumentParser):
    """Wrong usage is one line, as all bad input is. The commands' parsers are of this class too."""

    def error(self, message: str) -> NoReturn:
        """Print it and exit with 2."""
        self.exit(2, f"pallasite: error: {message} ({self.prog} --help tells more)\n")


def parser() -> argparse.ArgumentParser:
    """The command line, with every command's own help."""
    top: argparse.ArgumentParser = Parser(
        prog="pallasite",
        description="Serve large language models from JAX.",
        epilog="example: pallasite convert SmolLM2.gguf smollm2 && pallasite serve smollm2",
    )
    top.add_argument("--version", action="version", version=f"pallasite {pallasite.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_convert_commands(commands)
    add_serve_commands(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Bad input is one line on stderr and exit code 2; Ctrl-C is 130, a reader of stdout that left
    (`pallasite inspect m | head`) 141."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed goes there
        return 141
    except (ValueError, OSError) as error:
        print(f"pallasite: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pallasite: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
