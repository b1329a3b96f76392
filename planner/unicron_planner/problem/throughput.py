"""T(t,x), the total FLOP/s that a job achieves on x nodes: measured where the job has run, modelled elsewhere.

A model fills in the other sizes. Its few scale factors are fitted to the measured sizes by least squares around a
prior, which also gives an uncertainty. More nodes can always be left idle, so a throughput that falls with size is
noise. Isotonic regression (pool adjacent violators), weighted by certainty, removes it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from unicron_planner.problem import megatron_costs
from unicron_planner.problem.megatron_costs import Gpt, Hardware, Parallel
from unicron_planner.problem.objective import PlanError, number, whole

MODEL_ERROR = 0.10  # expected relative error of the model at sizes without a measurement [our choice]
MOST_SAMPLES = 64  # newest samples kept per size
NOISE = 0.02  # lower bound on the relative error of a measured iteration time [our choice]
# Factors of the cost model's compute, tensor-parallel traffic, network traffic and a constant, seconds [our choice]
PRIOR, SPREAD = np.array([1.0, 1.0, 1.0, 0.0]), np.array([0.3, 0.5, 0.5, 0.05])


@dataclass(frozen=True)
class Estimate:
    """The throughput expected at one size."""

    flops: float
    """T in FLOP/s"""
    sigma: float
    """Its standard error, FLOP/s"""
    measured: bool
    """Whether the job has run at this size"""


def isotonic(values: Iterable[float], weights: Iterable[float]) -> list[float]:
    """The non-decreasing sequence closest to `values` in weighted least squares (pool adjacent violators)."""
    blocks: list[list[float]] = []  # mean, weight, count
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            later, before = blocks.pop(), blocks.pop()
            total = before[1] + later[1]
            mean = (before[0] * before[1] + later[0] * later[1]) / total
            blocks.append([mean, total, before[2] + later[2]])
    return [mean for mean, _, count in blocks for _ in range(int(count))]


def ridge(
    features: np.ndarray, seconds: np.ndarray, prior: np.ndarray, spread: np.ndarray, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fits seconds ~ features @ factors by least squares, relative to `noise`, around prior +- spread; factors >= 0.

    Returns (factors, covariance). features: (samples, k); seconds, noise: (samples,); prior, spread: (k,)."""
    free = np.ones(len(prior), dtype=bool)
    factors, covariance = prior.copy(), np.diag(spread**2)
    for _ in range(len(prior)):
        rows = features[:, free] / noise[:, None]
        precision = rows.T @ rows + np.diag(spread[free] ** -2.0)
        right = rows.T @ (seconds / noise) + prior[free] / spread[free] ** 2
        covariance = np.zeros((len(prior), len(prior)))
        covariance[np.ix_(free, free)] = np.linalg.inv(precision)
        factors = np.zeros(len(prior))
        factors[free] = np.linalg.solve(precision, right)
        if np.all(factors >= 0):
            break
        free &= factors > 0
    return np.maximum(factors, 0.0), covariance


@dataclass
class Throughput:
    """The throughput of one job.

    Without `model`, sizes at which the job has not run follow t(x) = a + b / x.
    """

    flops_per_iteration: float = 0.0
    """Work of one optimizer step; `model` overrides it"""
    model: Gpt | None = None
    """The model, if Megatron's cost model covers the job"""
    hardware: Hardware = field(default_factory=Hardware)
    samples: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model is not None:
            self.flops_per_iteration = self.model.flops_per_iteration
        number(self.flops_per_iteration, "flops_per_iteration", positive=True)

    def add(self, nodes: int, seconds: float) -> None:
        """Records that a healthy iteration took `seconds` on `nodes` nodes. Raises PlanError for impossible values."""
        whole(nodes, "nodes", least=1)
        number(seconds, "seconds", positive=True)
        kept = self.samples.setdefault(nodes, [])
        kept.append(float(seconds))
        del kept[:-MOST_SAMPLES]

    def medians(self) -> dict[int, tuple[float, float]]:
        """(median seconds, standard error) by size. The error is at least 1 % of the median."""
        out = {}
        for nodes, seconds in self.samples.items():
            middle = statistics.median(seconds)
            spread = 1.4826 * statistics.median(abs(value - middle) for value in seconds)
            out[nodes] = (middle, max(1.2533 * spread / math.sqrt(len(seconds)), 0.01 * middle))
        return out

    def table(self, sizes: Iterable[int]) -> dict[int, Estimate]:
        """An Estimate for each size at which the job can run. The throughput never falls with size."""
        sizes = sorted(set(sizes))
        seen = self.medians()
        factors, covariance = self._fit(seen)
        raw: dict[int, Estimate] = {}
        for nodes in sizes:
            if nodes in seen:
                seconds, error = seen[nodes]
            elif (best := self._best(nodes, factors)) is not None:
                seconds = float(best @ factors)
                error = math.sqrt(float(best @ covariance @ best) + (MODEL_ERROR * seconds / 2) ** 2)
            else:
                continue
            rate = self.flops_per_iteration / seconds
            raw[nodes] = Estimate(rate, rate * error / seconds, nodes in seen)
        return _make_monotone(raw)

    def flops(self, sizes: Iterable[int]) -> dict[int, float]:
        """The FLOP/s by size, in the form of `Job.flops`."""
        return {nodes: estimate.flops for nodes, estimate in self.table(sizes).items()}

    def _features(self, nodes: int, split: Parallel | None) -> np.ndarray:
        if self.model is None or split is None:
            return np.array([1.0, 1.0 / nodes])
        return np.array([*megatron_costs.parts(self.model, self.hardware, split), 1.0])

    def _best(self, nodes: int, factors: np.ndarray) -> np.ndarray | None:
        """The features of the fastest split; None if no split fits into memory."""
        if self.model is None:
            return self._features(nodes, None)
        splits = megatron_costs.ways(self.model, self.hardware, nodes)
        return min(
            (self._features(nodes, split) for split in splits), key=lambda row: float(row @ factors), default=None
        )

    def _fit(self, seen: Mapping[int, tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
        """The fitted factors and their covariance."""
        if self.model is None:
            return self._fit_scaling(seen)
        factors, covariance = PRIOR, np.diag(SPREAD**2)
        for _ in range(3):  # the best split depends on the factors, and the factors on the splits
            fitting = ((self._best(nodes, factors), value) for nodes, value in sorted(seen.items()))
            pairs = [(best, value) for best, value in fitting if best is not None]
            if not pairs:
                break
            features = np.array([best for best, _ in pairs])
            seconds = np.array([value[0] for _, value in pairs])
            noise = np.hypot([value[1] for _, value in pairs], NOISE * seconds)
            factors, covariance = ridge(features, seconds, PRIOR, SPREAD, noise)
        return factors, covariance

    def _fit_scaling(self, seen: Mapping[int, tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
        """Fits t(x) = a + b / x. The prior is that 5 % of one node's time does not scale [our choice]."""
        if not seen:
            raise PlanError("nothing has been measured and the model is unknown: no throughput can be given")
        work = statistics.median(seconds * nodes for nodes, (seconds, _) in seen.items())
        prior, spread = np.array([0.05 * work, 0.95 * work]), np.array([0.1 * work, 0.5 * work])
        features = np.array([[1.0, 1.0 / nodes] for nodes in sorted(seen)])
        seconds = np.array([seen[nodes][0] for nodes in sorted(seen)])
        noise = np.hypot([seen[nodes][1] for nodes in sorted(seen)], NOISE * seconds)
        return ridge(features, seconds, prior, spread, noise)


def _make_monotone(raw: dict[int, Estimate]) -> dict[int, Estimate]:
    """The estimates, corrected so that the throughput never falls with size."""
    weights = [1.0 / max(estimate.sigma, 1e-9 * estimate.flops, 1e-300) ** 2 for estimate in raw.values()]
    largest = max(weights, default=1.0)
    rates = isotonic([estimate.flops for estimate in raw.values()], [weight / largest for weight in weights])
    return {
        nodes: Estimate(rate, estimate.sigma, estimate.measured)
        for (nodes, estimate), rate in zip(raw.items(), rates, strict=True)
    }
