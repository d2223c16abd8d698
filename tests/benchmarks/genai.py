"""Decoding one token at a time in int4, beside openvino-genai: same weights, same bits.

Both take one checkpoint of random weights, quantize linear layers to 4 bits in groups of 32 and the
embedding to 8 bits a row, and generate the same number of tokens in turns, each in a process of its
own. openvino-genai needs another release of transformers than this package, so it runs in an
environment of its own::

    python -m venv peer && peer/bin/pip install "optimum-intel[openvino]" openvino-genai
    python -m tests.benchmarks.genai peer/bin/python

The bandwidth is that of reading 256 MB with the same threads, and the bytes of a token are those of
the weights that it multiplies by.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

# Of the model; the same as in ``benchmarks.llm``.
_DIM, _LAYERS, _HEADS, _KV_HEADS, _HIDDEN, _VOCABULARY = 768, 12, 12, 4, 2048, 16384
_GROUP = 32
_PROMPT, _TOKENS, _CONTEXT = 128, 64, 256
_MODES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "openvino-genai": {},
        "openvino-genai, fp32 activations": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0},
    }
)
_OUR_MODES: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {
        "ours, openvino": {},
        "ours, openvino, dynamic quantization": {"dynamic_quantization": True},
    }
)
_READ_BYTES = 1 << 28


def bytes_per_token() -> int:
    """Return the bytes of the weights that a token multiplies by, scales in fp16 included."""
    width = _DIM // _HEADS
    attention = _DIM * (2 * _DIM + 2 * _KV_HEADS * width)
    linear = _LAYERS * (attention + 3 * _DIM * _HIDDEN)
    return linear // 2 + linear // _GROUP * 2 + _VOCABULARY * (_DIM + 2)


def _write_checkpoint(folder: str) -> None:
    """Write a checkpoint of random weights, and a tokenizer; runs in the peer's environment."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=_DIM,
        intermediate_size=_HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        vocab_size=_VOCABULARY,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_VOCABULARY - 1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(_VOCABULARY)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, unk_token="<0>").save_pretrained(folder)


def _convert(checkpoint: str, folder: str) -> None:
    """Write the checkpoint and the peer's model; runs in its environment."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    _write_checkpoint(checkpoint)
    four_bits = OVWeightQuantizationConfig(bits=4, sym=True, group_size=_GROUP, ratio=1.0)
    model = OVModelForCausalLM.from_pretrained(
        checkpoint, export=True, quantization_config=four_bits
    )
    model.save_pretrained(folder)
    command = [Path(sys.executable).with_name("convert_tokenizer"), checkpoint, "-o", folder]
    subprocess.run(command, check=True)


def _peer(folder: str, threads: int, mode: str) -> Callable[[], float]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    config = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", **_MODES[mode]}
    pipeline = genai.LLMPipeline(folder, "CPU", ATTENTION_BACKEND="SDPA", **config)
    prompt = ov.Tensor(np.arange(_PROMPT, dtype=np.int64)[None])
    greedy = genai.GenerationConfig(max_new_tokens=_TOKENS, ignore_eos=True, do_sample=False)
    return lambda: pipeline.generate(prompt, greedy).perf_metrics.get_tpot().mean


def _ours(file: str, threads: int, mode: str) -> Callable[[], float]:
    from coreml_delegate import runtime
    from coreml_delegate.llm import Generator, Sampler, Sampling

    options = runtime.EngineOptions(threads=threads, cache=None, **_OUR_MODES[mode])
    generator = Generator.load(file, engine="openvino", options=options)

    def generate() -> float:
        generator.reset()
        tokens = generator.generate(list(range(_PROMPT)), Sampler(Sampling()), limit=_TOKENS)
        times = [time.perf_counter() for _ in tokens]
        return 1e3 * (times[-1] - times[0]) / (len(times) - 1)

    return generate


def _serve(generate: Callable[[], float]) -> None:
    """Generate at each line of stdin, and print the milliseconds of a token."""
    generate()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(generate(), flush=True)


def _bandwidth(threads: int) -> float:
    """Bytes a second of reading memory."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(_READ_BYTES // 4)
    times: list[float] = []
    for _ in range(20):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return _READ_BYTES / statistics.median(times)


def _race(commands: Mapping[str, Sequence[str]], rounds: int) -> Iterator[tuple[str, float]]:
    """Median milliseconds of a token by name; the processes take turns."""
    servers = {
        name: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    try:
        taken: dict[str, list[float]] = {name: [] for name in servers}
        for number in range(rounds + 1):
            for name, server in servers.items():
                if number:
                    print("go", file=server.stdin, flush=True)
                answer = _answer(name, server)
                if number:
                    taken[name].append(float(answer))
        yield from ((name, statistics.median(times)) for name, times in taken.items())
    finally:
        for server in servers.values():
            server.kill()


def _answer(name: str, server: subprocess.Popen[str]) -> str:
    """The next line that is ``ready`` or a number; libraries print others."""
    for line in server.stdout or ():
        if line.strip() == "ready" or line.strip().replace(".", "", 1).isdigit():
            return line.strip()
    raise SystemExit(f"{name} ended: {server.wait()}")


def _run_side(threads: int, task: str, *rest: str) -> None:
    if task == "convert":
        _convert(*rest)
    elif task == "peer":
        folder, mode = rest
        _serve(_peer(folder, threads, mode))
    else:
        file, mode = rest
        _serve(_ours(file, threads, mode))


def main() -> None:
    """Measure and print, or run one side."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.genai")
    parser.add_argument("peer", help="Python of the environment with openvino-genai")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        _run_side(options.threads, *options.side)
        return
    with tempfile.TemporaryDirectory(prefix="coreml-delegate-genai-") as name:
        checkpoint, folder, file = (Path(name, part) for part in ("checkpoint", "peer", "ours.pte"))
        peer = (options.peer, "-W", "ignore", __file__, options.peer)
        subprocess.run([*peer, "--side", "convert", str(checkpoint), str(folder)], check=True)
        four_bits = ("--quantize", "int4", "--group-size", str(_GROUP))
        sampled = ("--sample-in-model", "argmax")
        export = ("export-llm", str(checkpoint), "-o", str(file), "--context", str(_CONTEXT))
        ours = (str(Path(sys.executable).with_name("coreml-delegate")),)
        subprocess.run(
            [*ours, *export, *four_bits, *sampled, "--embedding-quantize", "int8"], check=True
        )
        threads = ("--threads", str(options.threads), "--side")
        here = (sys.executable, "-W", "ignore", "-m", "tests.benchmarks.genai", options.peer)
        commands = {mode: [*here, *threads, "ours", str(file), mode] for mode in _OUR_MODES}
        commands |= {mode: [*peer, *threads, "peer", str(folder), mode] for mode in _MODES}
        results = dict(_race(commands, options.rounds))
    bandwidth = _bandwidth(options.threads)
    least = 1e3 * bytes_per_token() / bandwidth
    print(f"{bytes_per_token() / 1e6:.1f} MB a token, {bandwidth / 1e9:.1f} GB/s: {least:.2f} ms")
    print("| | ms a token | of what the bandwidth allows |\n| --- | ---: | ---: |")
    for name, milliseconds in results.items():
        print(f"| {name} | {milliseconds:.2f} | {least / milliseconds:.2f} |")


if __name__ == "__main__":
    main()
