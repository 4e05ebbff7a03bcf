"""Engine speed: time to the first token, time for each further one, tokens a second.

Token ids go in, tokens are streamed out, EOS is ignored; at every moment `concurrency` requests are open, the next
one sent as one ends. Any model path, or a named shape with random weights:

    python benchmarks/engine.py smollm2 --concurrency 1 8 --input 64 --output 128
    python benchmarks/engine.py --shape internlm2.5-7b --quant none --concurrency 1 32 --json out.json
"""

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallasite
from pallasite.convert.load import decoder_facts
from pallasite.models.config import ModelConfig, RopeConfig
from pallasite.models.decoder import Decoder, PaddedSizes
from pallasite.models.layers import Int4Layout
from pallasite.models.model import Model, materialize
from pallasite.serve.config import EngineConfig
from pallasite.serve.engine import Engine
from pallasite.serve.open import enable_compilation_cache, open_frontend
from pallasite.serve.types import GenerationConfig, Request, StepOutput
from pallasite.sharding.mesh import make_mesh


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, **more: Any) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1e6),
        max_position_embeddings=32768,
        **({"tie_word_embeddings": False} | more),
    )


SHAPES = {
    "smollm2-135m": _shape(30, 576, 9, 3, 1536, 49152, tie_word_embeddings=True),
    "internlm2.5-7b": _shape(32, 4096, 32, 8, 14336, 92553),
    "qwen-14b": _shape(40, 5120, 40, 40, 13696, 152064, qkv_bias=True),
}


def random_model(config: ModelConfig, tp: int, dtype: str, quant: str, group_size: int) -> Model:
    """A model of this shape with random weights, made on the devices."""
    compute = jnp.dtype(dtype)
    int4 = tuple(
        {name: Int4Layout(group_size) for name in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down")}
        if quant == "int4"
        else {}
        for _ in range(config.num_layers)
    )
    sizes = PaddedSizes.of(config, tp, group_size if quant == "int4" else 1)

    def make(path: tuple, abstract: jax.ShapeDtypeStruct) -> jax.Array:
        key = jax.random.key(zlib.crc32(repr(path).encode()))
        if abstract.dtype == jnp.int32:
            return jax.random.randint(key, abstract.shape, -(2**31), 2**31 - 1, jnp.int32)
        if path[-1] in ("scale", "offset"):
            return jnp.full(abstract.shape, 0.004 if path[-1] == "scale" else -0.03, abstract.dtype)
        if "norm" in str(path[-2]):
            return jnp.ones(abstract.shape, abstract.dtype)
        return jax.random.normal(key, abstract.shape, abstract.dtype) * jnp.asarray(0.02, abstract.dtype)

    return materialize(
        lambda: Decoder(config, sizes, compute, int4), make_mesh(tp), make, **decoder_facts(config, sizes, compute)
    )


@dataclasses.dataclass
class _Timing:
    """Moments of one request, time.perf_counter()."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


def measure(engine: Engine, concurrency: int, inputs: int, outputs: int, requests: int) -> dict[str, Any]:
    """Run `requests` requests, `concurrency` at a time; medians in milliseconds."""
    rng = np.random.default_rng(0)
    timings: list[_Timing] = []
    lock, finished = threading.Lock(), threading.Event()
    config = GenerationConfig(max_new_tokens=outputs, ignore_eos=True)

    def send() -> None:
        with lock:
            number = len(timings)
            if number == requests:
                return
            timing = _Timing(time.perf_counter())
            timings.append(timing)
            prompt = rng.integers(0, engine.model.vocab_size, inputs).tolist()

        def emit(output: StepOutput) -> None:
            now = time.perf_counter()
            timing.first = timing.first or now
            timing.last = now
            timing.tokens += len(output.token_ids)
            if output.finish_reason:
                if output.error:
                    print(output.error, file=sys.stderr)
                send()
                if len(timings) == requests and all(t.tokens >= outputs for t in timings):
                    finished.set()

        engine.submit(Request(f"bench-{time.monotonic_ns()}-{number}", prompt, config, emit))

    start = time.perf_counter()
    for _ in range(min(concurrency, requests)):
        send()
    if not finished.wait(1800):
        raise TimeoutError(f"only {sum(t.tokens for t in timings)} tokens came")
    seconds = max(t.last for t in timings) - start
    tpot = [(t.last - t.first) / (t.tokens - 1) for t in timings if t.tokens > 1]
    return {
        "concurrency": concurrency,
        "input": inputs,
        "output": outputs,
        "requests": requests,
        "ttft_ms": round(1e3 * statistics.median(t.first - t.sent for t in timings), 2),
        "tpot_ms": round(1e3 * statistics.median(tpot), 3) if tpot else None,
        "request_ms": round(1e3 * statistics.median(t.last - t.sent for t in timings), 1),
        "decode_tokens_per_s": round(concurrency / statistics.median(tpot), 1) if tpot else None,
        "tokens_per_s": round(sum(t.tokens for t in timings) / seconds, 1),
    }


def _shown(words: list[str]) -> str:
    """The command line without folders: they are this machine's own."""
    return " ".join(Path(word).name if "/" in word else word for word in words)


def main() -> None:
    """Parse the command line, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="path of a model")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape instead of a model")
    parser.add_argument("--quant", choices=("none", "int4"), default="none", help="of a shape's random weights")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1])
    parser.add_argument("--input", type=int, default=128, help="prompt tokens")
    parser.add_argument("--output", type=int, default=128, help="generated tokens")
    parser.add_argument("--requests", type=int, help="for each concurrency (default: twice it, at least 4)")
    parser.add_argument("--repeat", type=int, default=1, help="measure everything so often")
    parser.add_argument("--max-prefill-token-num", type=int)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if (args.model is None) == (args.shape is None):
        parser.error("give a model's path or --shape, one of them")
    enable_compilation_cache()
    session = args.input + args.output
    engine_config = EngineConfig(
        session_len=-(-session // 64) * 64,
        max_batch_size=max(args.concurrency),
        tp=args.tp,
        dtype=args.dtype,
        enable_prefix_caching=False,
        max_prefill_token_num=args.max_prefill_token_num,
    )
    begin = time.perf_counter()
    if args.model:
        engine = open_frontend(args.model, engine_config).engine
    else:
        dtype = args.dtype if args.dtype != "auto" else ("float32" if jax.default_backend() == "cpu" else "bfloat16")
        engine = Engine(random_model(SHAPES[args.shape], args.tp, dtype, args.quant, args.group_size), engine_config)
    ready = time.perf_counter() - begin
    rows = []
    for concurrency in args.concurrency * args.repeat:
        measure(engine, concurrency, args.input, min(8, args.output), concurrency)  # first launches, not counted
        rows.append(measure(engine, concurrency, args.input, args.output, args.requests or max(4, 2 * concurrency)))
        print(rows[-1], flush=True)
    stats = engine.stats()
    engine.close()
    device = jax.devices()[0]
    report = {
        "what": (args.model and Path(args.model).name) or f"{args.shape}, random weights, {args.quant}",
        "dtype": str(engine.model.cache.dtype),
        "device": device.device_kind,
        "devices": args.tp,
        "versions": {"pallasite": pallasite.__version__, "jax": jax.__version__, "python": sys.version.split()[0]},
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/engine.py " + _shown(sys.argv[1:]),
        "start_seconds": round(ready, 1),
        "compilations_while_serving": stats.compilations,
        "figures": rows,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
