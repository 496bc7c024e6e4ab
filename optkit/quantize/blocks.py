"""The driver of the calibrated methods: one decoder block after the other, each seeing what the quantized blocks before it
produce.

For each block: run the calibration activations through it and collect ``H`` for every group of linears with one input; smooth
(awq.py), and prove that the block still computes what it did; choose codes and scales (gptq.py, rounding.py); compare every
layer with plain rounding on activations that were held out, and keep the better; then run the activations through the
quantized block, for the next one. With ``importance`` the tokens are weighted first (importance.py).

*Resume.* The result of a block goes to a work directory whose name is a digest of everything it depends on. A run that was
killed finds the finished blocks, runs the activations through them (as it would have) and goes on where it stopped: the result
is the same to the bit.

*Memory.* One block in float32, its statistics (``I²`` for each group) and the activations up to a budget, beyond which they
lie in files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import optkit
from optkit.checkpoint.affine import QuantizedWeight, dequantize
from optkit.checkpoint.model import Checkpoint
from optkit.quantize import linear_groups
from optkit.quantize.awq import ALPHAS, Smoothing, smooth_group
from optkit.quantize.calibration import Calibration, load_calibration
from optkit.quantize.capture import Activations, BlockModel, fast_matmul, precision, watching
from optkit.quantize.importance import Weights, token_weights
from optkit.quantize.linear_groups import Group, LinearProducer, apply, fold, linear_weight, stored_weight
from optkit.quantize.plan import Plan
from optkit.quantize.rounding import row_errors
from optkit.quantize.rtn import Rtn
from optkit.quantize.rtn import quantize_linear as round_to_nearest
from optkit.quantize.statistics import Statistics
from optkit.quantize.workspace import BlockResult, Workspace
from optkit.recipe import QuantizeRecipe
from optkit.scheme import QuantScheme

WORK_FORMAT = 1
PROBE_TOKENS = 16
HELD_OUT = 16  # one in so many calibration texts is held out for the comparison with plain rounding


@dataclass(frozen=True)
class Options:
    """How much is done.

    Attributes:
        smooth: exponents AWQ tries; empty for no smoothing.
        importance: share of the calibration texts that token weights are found on; 0 weights all tokens alike.
        damping: of ``H``, relative to the mean of its diagonal.
        refits: rounds of scale refit and code descent after GPTQ.
        steps: of learned rounding, for each block (learned.py).
    """

    smooth: tuple[float, ...] = ALPHAS
    importance: float = 0.0
    damping: float = 0.01
    refits: int = 0
    steps: int = 0


class Calibrated(Rtn):
    """What calibrated solvers are derived from: all blocks are done when it is made, and their results lie in the workspace."""

    def __init__(self, source: Checkpoint, plan: Plan, recipe: QuantizeRecipe, progress: Callable[..., Any]) -> None:
        super().__init__(source, plan, recipe, progress)
        self.options = self.choose(recipe)
        progress("reading calibration text")
        model = source.load() if recipe.calibration.source == "self" else None
        self.calibration: Calibration = load_calibration(recipe.calibration, source.directory, model)
        del model
        self.work = Workspace(self._key())
        linears = [name for name in plan.schemes if name not in (plan.embedding, plan.lm_head)]
        self._model = BlockModel(source, linears, self.calibration.tokens, self.work.directory)
        self._cached: tuple[int, BlockResult] | None = None
        self._places = {
            f"{block}.{name}": (index, name)
            for index, block in enumerate(self._model.names)
            for name in self._model.linears[index]
        }
        self._run()

    @classmethod
    def choose(cls, recipe: QuantizeRecipe) -> Options:
        """How much this method does at the recipe's effort."""
        raise NotImplementedError

    def _key(self) -> dict[str, Any]:
        return {
            "format": WORK_FORMAT,
            "optkit": optkit.__version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "bf16": fast_matmul(),
            "checkpoint": self.source.digest,
            "tokens": self.calibration.digest,
            "schemes": {name: scheme.to_dict() for name, scheme in self.plan.schemes.items()},
            "method": type(self).__name__,
            "options": dataclasses.asdict(self.options),
        }

    # ---- all blocks --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self) -> None:
        model = self._model
        self._groups: dict[Any, list[Group]] = {}
        model.load_outside()
        model.note_calls()
        model.note_probe(PROBE_TOKENS)
        self._weights = self._token_weights()
        model.free_outside()
        hidden = model.first_hidden
        self._exact = self._copied(hidden) if self.options.steps else None
        for index in range(len(model.names)):
            self.progress("calibrating", index, len(model.names))
            with model.loaded(index) as block:
                if self._exact is not None:
                    self._advance(index, block, self._exact)
                result = self.work.load_block(index)
                if result is None:
                    result = self._solve_block(index, block, hidden)
                    self.work.save_block(index, result)
                if index + 1 < len(model.names):
                    install(block, result)
                    self._advance(index, block, hidden)
        hidden.close()
        if self._exact is not None:
            self._exact.close()
        self.progress("calibrating", len(model.names), len(model.names))

    def _schemes(self, index: int) -> dict[str, QuantScheme]:
        block = self._model.names[index]
        return {name: self.plan.schemes[f"{block}.{name}"] for name in self._model.linears[index]}

    def _copied(self, hidden: Activations) -> Activations:
        copy = Activations(hidden.shape, self.work.directory / "exact.f32", self._model.budget)
        for rows in self._model.rows:
            copy.write(rows, hidden.read(rows))
        return copy

    def _advance(self, index: int, block: nn.Module, hidden: Activations) -> None:
        with precision():
            for batch, rows in enumerate(self._model.rows):
                hidden.write(rows, self._model.run(index, block, batch, hidden.read(rows)))

    def _token_weights(self) -> list[Weights]:
        """Token weights of the blocks that are not done yet."""
        count = len(self._model.names)
        batches = round(self.options.importance * len(self._model.rows))
        if batches < 1:
            return [{} for _ in range(count)]
        kept = self.work.load("importance")
        if kept is None:
            found = token_weights(
                self._model,
                lambda index, block: [group.linears for group in self.groups(index, block)],
                batches,
                self.work.directory,
                lambda done, total: self.progress("weighing tokens", done, total),
                self.calibration.seed,
            )
            self.work.save("importance", {f"{i}/{name}": w for i, part in enumerate(found) for name, w in part.items()}, {})
            kept = self.work.load("importance")
            assert kept is not None
        result: list[Weights] = [{} for _ in range(count)]
        for key, value in kept[0].items():
            index, _, name = key.partition("/")
            result[int(index)][name] = value
        return result

    # ---- one block ---------------------------------------------------------------------------------------------------------

    def groups(self, index: int, block: nn.Module) -> list[Group]:
        """Groups of block ``index`` (loaded); found once for blocks of one structure, and proven for each."""
        run = self._model.probe(index, block)
        key = (
            type(block),
            tuple((name, tuple(p.shape)) for name, p in block.named_parameters()),
            tuple(self._model.linears[index]),
        )
        if key not in self._groups:
            self._groups[key] = linear_groups.find_groups(block, self._model.linears[index], run)
        found = [Group(group.linears, group.producer if self.options.smooth else None) for group in self._groups[key]]
        linear_groups.proven(block, found, run)
        return found

    def _collect(
        self, index: int, block: nn.Module, groups: Sequence[Group], hidden: Activations
    ) -> tuple[dict[str, Statistics], ...]:
        """Statistics of each group (by its first linear): for fitting, and held out for comparing."""
        leaders = [group.linears[0] for group in groups]
        fit = {name: Statistics(linear_weight(block, name).shape[1]) for name in leaders}
        held = {name: Statistics(linear_weight(block, name).shape[1]) for name in leaders}
        weights = self._weights[index]
        known = next(iter(weights.values())).shape[0] if weights else 0
        for batch, rows in enumerate(self._model.rows):
            texts = torch.arange(rows.start, rows.stop)
            last = texts % HELD_OUT == HELD_OUT - 1

            def see(name: str, x: Tensor, texts: Tensor = texts, last: Tensor = last) -> None:
                per_text = len(x) // len(texts)
                if per_text * len(texts) != len(x) or per_text != hidden.shape[1]:  # routed: rows are not whole texts
                    fit[name].add(x)
                    held[name].add(x)
                    return
                x = x.view(len(texts), per_text, -1)
                w = weights.get(name)
                if w is not None and int(texts[-1]) < known:
                    w = w[texts]
                    fit[name].add(x[~last].flatten(0, 1), w[~last].flatten())
                    held[name].add(x[last].flatten(0, 1), w[last].flatten())
                else:
                    fit[name].add(x[~last].flatten(0, 1))
                    held[name].add(x[last].flatten(0, 1))

            with precision(), watching(block, leaders, see):
                self._model.run(index, block, batch, hidden.read(rows))
        if not any(stat.tokens for stat in held.values()):
            held = fit
        return fit, held

    def _solve_block(self, index: int, block: nn.Module, hidden: Activations) -> BlockResult:
        groups, schemes = self.groups(index, block), self._schemes(index)
        fit, held = self._collect(index, block, groups, hidden)
        result = BlockResult(facts={"groups": [], "layers": {}})
        if self.options.smooth:
            self._smooth(index, block, groups, fit, held, result)
        for group in groups:
            leader = group.linears[0]
            weights = {name: linear_weight(block, name).contiguous() for name in group.linears}
            solved = self.solve(weights, schemes, fit[leader])
            result.high |= self.solve_high(weights, schemes, fit[leader])
            for name, weight in weights.items():
                kept, fact = guarded(weight, solved[name], held[leader])
                result.weights[name] = kept
                result.facts["layers"][name] = {**fact, "tokens": fit[leader].tokens}
        if self.options.steps:
            self.refine(index, block, hidden, result)
        return result

    def refine(self, index: int, block: nn.Module, hidden: Activations, result: BlockResult) -> None:
        """Improves the weights of a block together; ``block`` has its smoothed, unquantized weights."""
        raise NotImplementedError

    def solve(
        self, weights: Mapping[str, Tensor], schemes: Mapping[str, QuantScheme], statistics: Statistics
    ) -> dict[str, QuantizedWeight]:
        """Codes and scales of linears with one input."""
        raise NotImplementedError

    def solve_high(
        self, weights: Mapping[str, Tensor], schemes: Mapping[str, QuantScheme], statistics: Statistics
    ) -> dict[str, QuantizedWeight]:
        """The same at more bits, for methods that choose later."""
        return {}

    def scale_for(self, group: Group, weights: Sequence[Tensor], statistics: Statistics, scheme: QuantScheme) -> Smoothing:
        """The smoothing scale of a group whose producer is known."""
        assert group.producer is not None
        return smooth_group(group.producer.reduce, weights, statistics, scheme, self.options.smooth)

    def _smooth(
        self,
        index: int,
        block: nn.Module,
        groups: Sequence[Group],
        fit: Mapping[str, Statistics],
        held: Mapping[str, Statistics],
        result: BlockResult,
    ) -> None:
        """Smooths the groups of a block, and proves that it computes what it did; else puts everything back."""
        run = self._model.probe(index, block)
        before = run()
        original = {name: parameter.data for name, parameter in block.named_parameters()}
        facts: list[dict[str, Any]] = []
        scales: list[tuple[str, Tensor]] = []
        for group in groups:
            leader = group.linears[0]
            scheme = self.plan.schemes[f"{self._model.names[index]}.{leader}"]
            if group.producer is None:
                facts.append({"linears": group.linears, "alpha": 0.0, "producer": None})
                continue
            weights = [linear_weight(block, name) for name in group.linears]
            found = self.scale_for(group, weights, fit[leader], scheme)
            facts.append({"linears": group.linears, "alpha": found.alpha, "gain": found.gain, "producer": group.producer.name})
            if found.alpha:
                apply(block, fold(block, group, found.scale))
                _note_scales(block, group, found.scale, result)
                scales.append((leader, found.scale))
        change = linear_groups.output_change(before, run())
        if not change <= linear_groups.TOLERANCE:
            apply(block, original)
            result.columns, result.rows, result.changed = {}, {}, {}
            result.facts["groups"] = [{"linears": group.linears, "alpha": 0.0, "undone": change} for group in groups]
            return
        result.facts |= {"groups": facts, "output_change": change}
        for leader, s in scales:
            fit[leader].divide(s)
            held[leader].divide(s)
        quantized = {f"{name}.weight" for group in groups for name in group.linears}
        for name, parameter in block.named_parameters():
            if parameter.data is not original[name] and name not in quantized:
                result.changed[name] = parameter.data.clone()

    # ---- what the writer asks ----------------------------------------------------------------------------------------------

    def result(self, index: int) -> BlockResult:
        """What block ``index`` became."""
        if self._cached is None or self._cached[0] != index:
            found = self.work.load_block(index)
            assert found is not None, f"block {index} is not in {self.work.directory}"
            self._cached = (index, found)
        return self._cached[1]

    def target(self, module: str) -> Tensor:
        weight = super().target(module)
        if module in self._places:
            index, name = self._places[module]
            result = self.result(index)
            if name in result.columns:
                weight = weight * result.columns[name]
            if name in result.rows:
                weight = weight * result.rows[name].unsqueeze(1)
        return weight

    def quantize(self, module: str) -> QuantizedWeight:
        if module not in self._places:
            return super().quantize(module)
        index, name = self._places[module]
        return self.result(index).weights[name]

    def changed(self, parameter: str) -> Tensor | None:
        for index, block in enumerate(self._model.names):
            if parameter.startswith(f"{block}."):
                return self.result(index).changed.get(parameter[len(block) + 1 :])
        return None

    def facts(self) -> dict[str, Any]:
        blocks = [self.result(index).facts for index in range(len(self._model.names))]
        layers = [fact for block in blocks for fact in block["layers"].values()]
        return {
            "calibration": self.calibration.facts(),
            "options": dataclasses.asdict(self.options),
            "forward": "bf16" if fast_matmul() else "fp32",
            "kept_rtn": sum(fact["kept"] == "rtn" for fact in layers),
            "unseen": sum(fact["tokens"] == 0 for fact in layers),
            "blocks": dict(zip(self._model.names, blocks, strict=True)),
        }

    def close(self) -> None:
        """Removes the work directory."""
        self.work.remove()


def guarded(weight: Tensor, solved: QuantizedWeight, held: Statistics) -> tuple[QuantizedWeight, dict[str, Any]]:
    """``solved``, or plain rounding where that has the smaller output error on held-out inputs."""
    plain = dataclasses.replace(round_to_nearest(weight, solved.scheme), input_scale=solved.input_scale)
    hessian = held.hessian
    signal = float(row_errors(weight, hessian).sum())
    errors = {
        name: float(row_errors(dequantize(quantized) - weight, hessian).sum()) / signal if signal > 0 else 0.0
        for name, quantized in (("solved", solved), ("rtn", plain))
    }
    kept = "solved" if held.tokens and errors["solved"] <= errors["rtn"] else "rtn"
    return (solved if kept == "solved" else plain), {"kept": kept, "error": errors["solved"], "rtn_error": errors["rtn"]}


def install(block: nn.Module, result: BlockResult) -> None:
    """Makes the block compute with its quantized weights."""
    apply(block, result.changed)
    for name, quantized in result.weights.items():
        apply(block, stored_weight(block, name, dequantize(quantized)))


def _note_scales(block: nn.Module, group: Group, s: Tensor, result: BlockResult) -> None:
    for name in group.linears:
        result.columns[name] = result.columns.get(name, torch.ones_like(s)) * s
    if isinstance(group.producer, LinearProducer):
        factor = torch.ones(group.producer.outputs)
        factor[group.producer.rows] = 1 / s
        name = group.producer.name
        result.rows[name] = result.rows.get(name, torch.ones_like(factor)) * factor
