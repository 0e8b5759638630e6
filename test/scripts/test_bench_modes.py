"""A mode is worse than rounding to nearest only if documents agree that it is."""

from __future__ import annotations

import pytest
from bench_modes import BASE, verdicts


def test_a_mode_fails_by_two_paired_standard_errors() -> None:
    base = [0.01, 0.05, 0.02, 0.04]
    found = verdicts(
        {
            BASE: base,
            "better": [0.9 * kl for kl in base],
            "noisy": [kl + delta for kl, delta in zip(base, (0.01, -0.008, 0.009, -0.007), strict=True)],
            "worse": [kl + delta for kl, delta in zip(base, (0.0010, 0.0011, 0.0009, 0.0010), strict=True)],
        }
    )
    assert {mode: row["is_no_worse"] for mode, row in found.items()} == {
        BASE: True,
        "better": True,
        "noisy": True,
        "worse": False,
    }
    assert found[BASE]["difference"] == 0.0
    assert found["worse"]["difference"] == pytest.approx(0.001)
    assert found["better"]["kl"] == pytest.approx(0.9 * sum(base) / 4)
