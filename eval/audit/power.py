"""What a chi-square test would have caught: from counts to the smallest visible bias.

Read next: `enumeration.py` and `rosenblatt.py`, the tests it qualifies.
"""

from __future__ import annotations

from scipy import optimize, stats

POWER = 0.99


def detectable_total_variation(cells: int, samples: int, level: float) -> float:
    """Smallest total variation that a chi-square test over `cells` catches with power 0.99.

    A deviation d from cell probabilities p has non-centrality n * sum(d^2 / p), and by
    Cauchy-Schwarz sum(d^2 / p) >= (sum |d|)^2 = 4 TV^2, whatever its shape. So any distribution further
    away than sqrt(lambda / 4n) is caught at least that often.
    """
    needed = noncentrality(cells - 1, level)
    return float((needed / (4 * samples)) ** 0.5)


def noncentrality(freedom: int, level: float) -> float:
    """What a chi-square test at `level` sees with power 0.99."""
    critical = stats.chi2.isf(level, freedom)

    def missing(noncentrality: float) -> float:
        return float(stats.ncx2.sf(critical, freedom, noncentrality)) - POWER

    return float(optimize.brentq(missing, 1e-6, 1e4))
