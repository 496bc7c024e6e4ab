"""One engine behind one protocol: a JSON line in, a JSON line out. Runs in the peer's own environment and imports no optkit
(except for optkit itself).

    python worker.py NAME MODEL THREADS            serves requests {"prompts": [[id, …], …], "new_tokens": n}
    python worker.py NAME MODEL THREADS --once     opens, makes one token from 64 ids, says so, makes 15 more, says its memory

Every engine generates greedily through the fastest interface its package offers to Python, does not stop at an end of sequence,
and keeps nothing between requests. Times are taken here, around the engine: ``ttft_ms`` from the request's arrival to the first
token, ``decode_tokens_per_second`` of the tokens after the first, all rows together.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Run = Callable[[Prompts, int], dict[str, Any]]

KEPT: list[Any] = []  # callbacks a C library holds on to


def timed(started: float, first: float, ended: float, rows: int, new_tokens: int, tokens: list[int]) -> dict[str, Any]:
    after = ended - first
    return {
        "ttft_ms": (first - started) * 1000,
        "decode_tokens_per_second": rows * (new_tokens - 1) / after if new_tokens > 1 else 0.0,
        "tokens": tokens,
    }


def optkit(path: str, threads: int) -> Run:
    from optkit.runtime.session import open_session

    session = open_session(path, threads=threads)

    def run(prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        result = session.generate(
            prompts, max_new_tokens=new_tokens, ignore_eos=True, do_sample=False, reuse_prefix=False, min_new_tokens=0
        )
        stats = result.stats
        return {
            "ttft_ms": stats.ttft_ms,
            "decode_tokens_per_second": stats.tokens_per_second,
            "tokens": result.tokens[0],
            "loop_share": stats.loop_fraction,
        }

    return run


def genai(path: str, threads: int) -> Run:  # the threads are in the model's genai_config.json
    import numpy as np
    import onnxruntime_genai as og

    model = og.Model(path)

    def run(prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        total = len(prompts[0]) + new_tokens
        started = time.perf_counter()
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=total, min_length=total, do_sample=False, batch_size=len(prompts))
        generator = og.Generator(model, params)
        generator.append_tokens(np.array(prompts, np.int32) if len(prompts) > 1 else prompts[0])
        generator.generate_next_token()
        first = time.perf_counter()
        made = 1
        while not generator.is_done() and made < new_tokens:
            generator.generate_next_token()
            made += 1
        ended = time.perf_counter()
        return timed(started, first, ended, len(prompts), made, [int(t) for t in generator.get_sequence(0)[-made:]])

    return run


def llama_cpp(path: str, threads: int) -> Run:
    """The library's own batch interface, which costs Python less than its ``Llama`` class does."""
    import ctypes

    import llama_cpp as lib
    import numpy as np

    KEPT.append(lib.llama_log_callback(lambda *_: None))
    lib.llama_log_set(KEPT[-1], ctypes.c_void_p(0))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    contexts: dict[tuple[int, int], Any] = {}

    def context(rows: int, tokens: int) -> Any:
        """A context sized to the request, as the other engines make theirs."""
        if (rows, tokens) not in contexts:
            for old in contexts.values():
                lib.llama_free(old)
            contexts.clear()
            wish = lib.llama_context_default_params()
            wish.n_ctx, wish.n_batch, wish.n_ubatch = rows * (-(-tokens // 256) * 256), 2048, 512
            wish.n_seq_max, wish.n_threads, wish.n_threads_batch, wish.no_perf = rows, threads, threads, True
            contexts[rows, tokens] = lib.llama_init_from_model(model, wish)
        return contexts[rows, tokens]

    def choose(ctx: Any, index: int) -> int:
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(ctx, index), shape=(vocab,)).argmax())

    def fill(batch: Any, items: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(items)
        for i, (token, position, row, wanted) in enumerate(items):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = row

    def run(prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        rows, length = len(prompts), len(prompts[0])
        ctx = context(rows, length + new_tokens)
        started = time.perf_counter()
        lib.llama_memory_clear(lib.llama_get_memory(ctx), False)
        batch = lib.llama_batch_init(max(rows * length, rows), 0, 1)
        fill(batch, [(t, p, r, p == length - 1) for r, row in enumerate(prompts) for p, t in enumerate(row)])
        if lib.llama_decode(ctx, batch):
            raise SystemExit("error: llama_decode refused the prompt")
        tokens = [choose(ctx, (r + 1) * length - 1) for r in range(rows)]
        first = time.perf_counter()
        made = [tokens[0]]
        for step in range(new_tokens - 1):
            fill(batch, [(t, length + step, r, True) for r, t in enumerate(tokens)])
            if lib.llama_decode(ctx, batch):
                raise SystemExit("error: llama_decode refused a step")
            tokens = [choose(ctx, r) for r in range(rows)]
            made.append(tokens[0])
        ended = time.perf_counter()
        lib.llama_batch_free(batch)
        return timed(started, first, ended, rows, new_tokens, made)

    return run


def openvino(path: str, threads: int) -> Run:
    import numpy as np
    import openvino as ov
    import openvino_genai as og

    pipe = og.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, PERFORMANCE_HINT="LATENCY")

    def run(prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        ids = np.array(prompts, np.int64)
        inputs = og.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        config = og.GenerationConfig(max_new_tokens=new_tokens, min_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        if len(prompts) > 1:  # no streamer for several rows: the pipeline's own clock
            result = pipe.generate(inputs, config)
            metrics = result.perf_metrics
            return {
                "ttft_ms": metrics.get_ttft().mean,
                "decode_tokens_per_second": len(prompts) * 1000.0 / metrics.get_tpot().mean,
                "tokens": [int(t) for t in result.tokens[0]],
            }
        times: list[float] = []

        class Clock(og.StreamerBase):
            def write(self, token: Any) -> Any:
                times.extend([time.perf_counter()] * (len(token) if isinstance(token, list) else 1))
                return og.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        started = time.perf_counter()
        result = pipe.generate(inputs, config, Clock())
        return timed(started, times[0], times[-1], 1, len(times), [int(t) for t in result.tokens[0]])

    return run


def transformers_ort(path: str, threads: int) -> Run:
    """transformers' exporter's graph, run by transformers' own generate."""
    import torch
    from transformers.exporters import AutoExportedModel

    torch.set_num_threads(threads)
    return _torch_run(AutoExportedModel.from_pretrained(path))


def transformers(path: str, threads: int) -> Run:
    """The checkpoint in torch, fp32, without any export."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    return _torch_run(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def _torch_run(model: Any) -> Run:
    import torch

    class Clock:
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run(prompts: Prompts, new_tokens: int) -> dict[str, Any]:
        ids = torch.tensor(prompts)
        clock = Clock()
        settings: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
        if len(prompts) == 1:
            settings["streamer"] = clock
        started = time.perf_counter()
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        ended = time.perf_counter()
        first = clock.times[1] if len(clock.times) > 1 else ended  # the first put is the prompt
        if len(prompts) > 1:  # no streamer for several rows: the time of one token alone is taken off
            one = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
            first = started + time.perf_counter() - one
        return timed(started, first, ended, len(prompts), new_tokens, found[0, len(prompts[0]) :].tolist())

    return run


ENGINES: dict[str, Callable[[str, int], Run]] = {
    "optkit": optkit,
    "genai": genai,
    "llama_cpp": llama_cpp,
    "openvino": openvino,
    "transformers_ort": transformers_ort,
    "transformers": transformers,
}


def memory() -> dict[str, int]:
    """Resident and peak resident bytes of this process; memory-mapped weights that were touched are in both."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS:", "VmHWM:"))}
    return {"rss_bytes": found["VmRSS"], "peak_rss_bytes": found["VmHWM"]}


def main() -> None:
    name, path, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    protocol, sys.stdout = sys.stdout, sys.stderr  # what a library prints must not get between the answers

    def say(answer: dict[str, Any]) -> None:
        protocol.write(json.dumps(answer) + "\n")
        protocol.flush()

    started = time.perf_counter()
    run = ENGINES[name](path, threads)
    load_ms = (time.perf_counter() - started) * 1000
    if "--once" in sys.argv:
        prompt = [3 + (37 * i) % 40_000 for i in range(64)]
        run([prompt], 1)
        say({"first": True, "load_ms": load_ms})
        run([prompt], 16)
        say(memory())
        return
    say({"ready": True, "load_ms": load_ms})
    for line in sys.stdin:
        request = json.loads(line)
        say(run(request["prompts"], request["new_tokens"]) | memory())


if __name__ == "__main__":
    main()
