"""The notebook API, call by call: python examples/notebook_api.py MODEL

MODEL is a converted checkpoint, a Hugging Face folder or a GGUF file of a chat model.
"""

import asyncio
import sys

from pallasite import EngineConfig, GenerationConfig, Pipeline, pipeline


def main(model: str) -> None:
    """Open the model, ask it in every way, close it."""
    with pipeline(model, EngineConfig(max_batch_size=4)) as pipe:
        short = GenerationConfig(max_new_tokens=48)

        print("== one prompt")
        print(pipe("What is a pallasite?", short).text)

        print("== several at once, each with its own settings; the seed makes the second one repeatable")
        sampled = GenerationConfig(max_new_tokens=48, do_sample=True, temperature=0.9, random_seed=7)
        for answer in pipe(["Name a metal.", "Name a crystal."], [short, sampled]):
            print(answer)

        print("== pieces as they come, up to the first full stop")
        for piece in pipe.stream_infer("Where do meteorites come from?", GenerationConfig(stop_words=["."])):
            print(piece.text, end="", flush=True)
        print()

        print("== a conversation")
        session = pipe.chat("My name is Ada.", gen_config=short)
        session = pipe.chat("What is my name?", session, short)
        print(session.response)

        print("== token ids: in, out, and how likely they are")
        ids = pipe.generate([1, 2, 3], GenerationConfig(max_new_tokens=8, ignore_eos=True)).token_ids
        print(ids, pipe.get_logits([1, 2, 3]).shape, f"{pipe.get_ppl([1, 2, 3, *ids]):.2f} nats a token")

        print("== a wrong prompt among others")
        for answer in pipe(["Name a planet.", ""], short):
            print(answer)

        print("== in an event loop; in a notebook, `await` alone")
        asyncio.run(ask_together(pipe, short))


async def ask_together(pipe: Pipeline, config: GenerationConfig) -> None:
    """Two questions that don't wait for each other."""
    answers = await asyncio.gather(pipe.agenerate("Name a star.", config), pipe.agenerate("Name a moon.", config))
    for answer in answers:
        print(answer)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} MODEL")
    main(sys.argv[1])
