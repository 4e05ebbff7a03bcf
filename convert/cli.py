"""`pallasite convert` and `pallasite inspect`: arguments, and what is printed. Errors are the caller's to print."""

import argparse
from typing import Any

CONVERT_EXAMPLE = """\
examples:
  pallasite convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2
  pallasite convert ./Llama-3.1-8B-Instruct llama-int4 --quantize int4 --group-size 128
  pallasite convert ./Llama-3.1-8B-Instruct llama-int4 --quantize int4 --group-size 128 --resume

SRC is a Hugging Face folder (config.json and safetensors), a GGUF file, or a checkpoint of ours.
INT4 tensors of the source (GGUF's Q4_0 and Q4_1) stay INT4, exactly, unless --dequantize or --quantize is given.
"""
INSPECT_EXAMPLE = """\
example:
  pallasite inspect smollm2
"""


def add_commands(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `convert` and `inspect`. Each parser's `run` takes the parsed arguments and returns the exit code.

    `run` raises ValueError for bad input and OSError for files; the caller prints one line and exits with 2.
    """
    style = argparse.RawDescriptionHelpFormatter
    p = subparsers.add_parser(
        "convert", help="convert a checkpoint into ours", epilog=CONVERT_EXAMPLE, formatter_class=style
    )
    p.add_argument("src", metavar="SRC", help="Hugging Face folder, GGUF file, or checkpoint of ours")
    p.add_argument("dst", metavar="DST", help="folder of the new checkpoint; it appears when it is whole")
    p.add_argument("--quantize", metavar="METHOD", help="quantize linear layers: int4 (round to nearest)")
    p.add_argument("--group-size", type=int, metavar="N", help="rows that share a scale: 128 (default), 64 or 32")
    p.add_argument("--calibration", metavar="TEXT", help="for methods that need it: file or folder of text, or builtin")
    p.add_argument("--samples", type=int, metavar="N", help="calibration samples: 128 (default)")
    p.add_argument("--length", type=int, metavar="N", help="tokens of a calibration sample: 512 (default)")
    p.add_argument(
        "--dtype",
        default="auto",
        help="of floating-point tensors: auto (as stored; the default), float32, bfloat16 or float16",
    )
    p.add_argument("--dequantize", action="store_true", help="expand the source's INT4 tensors to --dtype")
    p.add_argument("--force", action="store_true", help="replace a checkpoint at DST, when the new one is whole")
    p.add_argument("--resume", action="store_true", help="go on with an interrupted conversion, given the same options")
    p.add_argument("--quiet", action="store_true", help="no progress bar, and nothing printed")
    p.set_defaults(run=run_convert)
    p = subparsers.add_parser(
        "inspect", help="print what is in a checkpoint", epilog=INSPECT_EXAMPLE, formatter_class=style
    )
    p.add_argument("path", metavar="PATH", help="checkpoint of ours, Hugging Face folder or GGUF file")
    p.set_defaults(run=run_inspect)


def run_convert(args: argparse.Namespace) -> int:
    """`pallasite convert`."""
    _keep_off_devices()
    from pallasite.convert.convert import Speed, convert
    from pallasite.convert.inspect import human

    speed = Speed()
    manifest: dict[str, Any] = convert(
        args.src,
        args.dst,
        quantize=args.quantize,
        group_size=args.group_size,
        dtype=args.dtype,
        dequantize=args.dequantize,
        calibration=args.calibration,
        samples=args.samples,
        length=args.length,
        force=args.force,
        resume=args.resume,
        progress=not args.quiet,
        speed=speed,
    )
    if not args.quiet:
        for note in (manifest["quantization"] or {}).get("notes", []):
            print(f"note: {note}")
        tensors, nbytes = len(manifest["tensors"]), manifest["bytes"]
        print(f"wrote {args.dst}: {manifest['architecture']}, {tensors} tensors, {nbytes / 1e6:.1f} MB")
        rate = human(round(speed.nbytes / speed.seconds))
        print(f"read {human(speed.nbytes)} in {speed.seconds:.1f} s: {rate}/s")
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    """`pallasite inspect`."""
    _keep_off_devices()
    from pallasite.convert.inspect import describe

    print(describe(args.path))
    return 0


def _keep_off_devices() -> None:
    """A conversion computes nothing on a device: a GPU's memory stays with whoever uses it."""
    import jax

    jax.config.update("jax_platforms", "cpu")
