"""Numbers from samples: nearest-rank percentiles, and a bootstrap interval for a difference of medians."""
import random
import statistics


def percentile(samples, p):
    """Nearest rank: always a value that was measured."""
    ordered = sorted(samples)
    rank = max(1, -(-len(ordered) * p // 100))
    return ordered[int(rank) - 1]


def summary(samples):
    return {"n": len(samples), "p50": round(statistics.median(samples), 4),
            "p90": round(percentile(samples, 90), 4), "p99": round(percentile(samples, 99), 4)}


def difference(a, b, rounds=400):
    """Median of a minus median of b, with the 95 % interval of a bootstrap (fixed seed)."""
    source = random.Random(1)
    found = sorted(
        statistics.median(source.choices(a, k=len(a))) - statistics.median(source.choices(b, k=len(b)))
        for _ in range(rounds))
    return {"value": round(statistics.median(a) - statistics.median(b), 4),
            "low": round(found[int(0.025 * rounds)], 4), "high": round(found[int(0.975 * rounds) - 1], 4)}
