"""Least squares with few terms, none of them negative. The error of a fit is part of its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from baton.core.errors import InvalidRequest
from sim.scale.costs import Residual
from sim.stats import percentile


def fit(terms: Mapping[str, Sequence[float]], values: Sequence[float]) -> tuple[dict[str, float], Residual]:
    """Returns a coefficient from 0 on for each term, so that the sums come close to `values`, and how close. `terms`
    has one number per value. Relative errors count, so short and long steps count alike; a term that would be negative
    is left out, the most negative one first.

    Raises:
        InvalidRequest: there are fewer values than terms, or a value is not above 0.
    """
    names = list(terms)
    if len(values) < len(names) or min(values, default=0.0) <= 0.0:
        raise InvalidRequest(f"{len(values)} measurements, each above 0, are too few for {', '.join(names)}")
    y = np.asarray(values, dtype=float)
    chosen = [name for name in names if any(terms[name])]
    coefficients: dict[str, float] = {}
    while chosen:
        a = np.stack([np.asarray(terms[name], dtype=float) for name in chosen], axis=1) / y[:, None]
        scale = np.abs(a).max(axis=0)
        solution = np.linalg.lstsq(a / scale, np.ones_like(y), rcond=None)[0] / scale
        coefficients = {name: float(value) for name, value in zip(chosen, solution, strict=True)}
        worst = min(chosen, key=lambda name: coefficients[name] * np.abs(terms[name]).max())
        if coefficients[worst] >= 0.0:
            break
        chosen.remove(worst)
        coefficients = {}
    fitted = sum((coefficients[name] * np.asarray(terms[name], dtype=float) for name in coefficients), np.zeros_like(y))
    errors = sorted(float(e) for e in np.abs(fitted - y) / y)
    return {name: coefficients.get(name, 0.0) for name in names}, Residual(
        percentile(errors, 50), errors[-1], len(errors)
    )
