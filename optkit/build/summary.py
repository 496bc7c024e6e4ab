"""The rows of the table at the end of a build."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optkit.build.result import BuildResult


def megabytes(count: float) -> str:
    """Bytes in decimal megabytes."""
    return f"{count / 1e6:.1f} MB"


def summary_rows(result: BuildResult) -> list[tuple[str, str, str]]:
    """``(measure, value, note)`` of everything that was measured."""
    export, validate, bench = (result.stages.get(name, {}) for name in ("export", "validate", "bench"))
    rows = [("model weights", megabytes(export["model_bytes"]), "as the checkpoint holds them (a GGUF file: in FP16)")]
    if "quantize" in result.stages:
        rows.append(
            ("quantized checkpoint", megabytes(result.stages["quantize"]["bytes"]), "compressed-tensors, everything included")
        )
    share = f"{100 * export['bytes'] / export['model_bytes']:.0f} % of the weights"
    rows.append(("artifact", megabytes(export["bytes"]), f"everything needed to run it; {share}"))
    rows += _accuracy(validate) + _speed(bench)
    return rows


def _accuracy(validate: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    metrics = validate.get("metrics")
    if not metrics:
        return []
    rows = [
        ("KL from the reference", f"{metrics['kl_mean']:.3g} nats", f"mean; largest {metrics['kl_max']:.3g}"),
        ("top-1 agreement", f"{100 * metrics['top1_agreement']:.1f} %", "near ties counted as same"),
    ]
    if "perplexity_delta" in metrics:
        note = f"{metrics['perplexity_reference']:.2f} → {metrics['perplexity_candidate']:.2f}"
        rows.append(("perplexity", f"{100 * metrics['perplexity_delta']:+.2f} %", note))
    if "greedy_match" in metrics:
        rows.append(("greedy tokens matched", f"{100 * metrics['greedy_match']:.0f} %", "before the first difference"))
    rows.append(
        (
            "logit error",
            f"{metrics['logit_error']:.2g} of range",
            f"noise of the reference itself {metrics['noise_floor']:.2g}" if "noise_floor" in metrics else "",
        )
    )
    if validate.get("export_step"):
        rows.append(
            (
                "KL of the export step",
                f"{validate['export_step']['kl_mean']:.3g} nats",
                "against the quantized checkpoint in torch",
            )
        )
    verdict = (
        f"{validate['checks']} passed"
        if not validate["failures"]
        else f"{len(validate['failures'])} of {validate['checks']} FAILED"
    )
    rows.append(("checks", verdict, "; ".join(validate["failures"])))
    return rows


def _speed(bench: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    if not bench:
        return []
    work = f"{bench['prompt_tokens']} + {bench['new_tokens']} tokens, {bench['threads'] or 'default'} threads"
    return [
        ("time to first token", f"{bench['ttft_warm_ms']:.0f} ms", f"warm; the first call {bench['ttft_cold_ms']:.0f} ms"),
        ("decode", f"{bench['decode_tokens_per_second']:.1f} tokens/s", work),
        ("peak memory", megabytes(bench["peak_rss_bytes"]), f"of which KV cache {megabytes(bench['kv_bytes'])}"),
    ]
