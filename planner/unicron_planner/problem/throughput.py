"""T(t,x), the total FLOP/s that a job achieves on x nodes: measured if the job has run there, else modelled.

The factors of the model are fitted to the measured sizes by least squares around a prior, which also gives an
uncertainty. More nodes can always be left idle, so a throughput that falls with size is noise. Isotonic regression
(pool adjacent violators), weighted by certainty, removes it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

import numpy as np

from unicron_planner.problem import megatron_costs
from unicron_planner.problem.megatron_costs import Gpt, Hardware
from unicron_planner.problem.objective import number

MODEL_ERROR = 0.10  # expected relative error of the model at sizes without a measurement [our choice]
MEASURED_ERROR = 0.01  # relative standard error of a measured throughput [our choice]
NOISE = 0.02  # lower bound on the relative error of a measured iteration time [our choice]
# Factors of the cost model's compute, tensor-parallel traffic, network traffic and a constant, seconds [our choice]
PRIOR, SPREAD = np.array([1.0, 1.0, 1.0, 0.0]), np.array([0.3, 0.5, 0.5, 0.05])


Estimate = tuple[float, float]  # FLOP/s, and their standard error


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


def fit_flops(measured: Mapping[int, float], sizes: Iterable[int]) -> dict[int, float]:
    """FLOP/s by number of nodes: as measured, and t(x) = a + b / x elsewhere. measured: not empty, FLOP/s above 0."""
    seconds = {nodes: number(1.0 / rate, "seconds", positive=True) for nodes, rate in sorted(measured.items())}
    factors, covariance = _fit_scaling(seconds)
    estimates = {}
    for nodes in sizes:
        if nodes in seconds:
            estimates[nodes] = 1.0 / seconds[nodes], MEASURED_ERROR / seconds[nodes]
        else:
            estimates[nodes] = _estimate(np.array([1.0, 1.0 / nodes]), factors, covariance, 1.0)
    return _make_monotone(estimates)


def model_flops(model: Gpt, hardware: Hardware, sizes: Iterable[int]) -> dict[int, float]:
    """FLOP/s by number of nodes, by Megatron's cost model with the fastest split.

    Sizes at which no split fits into memory are left out.
    """
    estimates = {}
    for nodes in sizes:
        splits = megatron_costs.ways(model, hardware, nodes)
        features = [np.array([*megatron_costs.parts(model, hardware, split), 1.0]) for split in splits]
        if features:
            best = min(features, key=lambda row: float(row @ PRIOR))
            estimates[nodes] = _estimate(best, PRIOR, np.diag(SPREAD**2), model.flops_per_iteration)
    return _make_monotone(estimates)


def _estimate(features: np.ndarray, factors: np.ndarray, covariance: np.ndarray, work: float) -> Estimate:
    """The estimate at a size without a measurement. work: FLOP of an iteration."""
    seconds = float(features @ factors)
    error = math.sqrt(float(features @ covariance @ features) + (MODEL_ERROR * seconds / 2) ** 2)
    return work / seconds, work / seconds * error / seconds


def _fit_scaling(measured: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Fits t(x) = a + b / x to seconds by number of nodes. The prior is that 5 % of one node's time does not scale [our
    choice]."""
    work = statistics.median(seconds * nodes for nodes, seconds in measured.items())
    prior, spread = np.array([0.05 * work, 0.95 * work]), np.array([0.1 * work, 0.5 * work])
    features = np.array([[1.0, 1.0 / nodes] for nodes in measured])
    seconds = np.array(list(measured.values()))
    return ridge(features, seconds, prior, spread, math.hypot(MEASURED_ERROR, NOISE) * seconds)


def _make_monotone(estimates: dict[int, Estimate]) -> dict[int, float]:
    """The FLOP/s, corrected so that they never fall with size."""
    weights = [1.0 / max(sigma, 1e-9 * rate, 1e-300) ** 2 for rate, sigma in estimates.values()]
    largest = max(weights, default=1.0)
    rates = isotonic([rate for rate, _ in estimates.values()], [weight / largest for weight in weights])
    return dict(zip(estimates, rates, strict=True))
