"""`accuracy_tables.py`: which export is compared with which, and how it is written."""

from __future__ import annotations

from accuracy_tables import TextKls, accuracy_rows, cost_rows, format_accuracy, format_costs
from measured_process import ProcessCost

KLS = {"peer": [[1.0, 3.0]], "rtn": [[2.0, 2.0]], "gptq": [[1.0, 1.0]], "bad": [[4.0, 4.0]]}


def cost(wall_s: float, peak_rss_mib: float) -> ProcessCost:
    return ProcessCost(wall_s=wall_s, cpu_s=wall_s, peak_rss_mib=peak_rss_mib, load_before=0.0)


def test_rows_are_compared_with_the_peer_and_with_rtn():
    peer, rtn, gptq, bad = accuracy_rows(TextKls(documents=[0, 1], kls=KLS))
    assert peer.to_peer is None
    assert rtn.to_rtn is None
    assert [row.to_peer.value for row in (rtn, gptq, bad)] == [1.0, 0.5, 2.0]
    assert [row.to_rtn.value for row in (peer, gptq, bad)] == [1.0, 0.5, 2.0]
    assert [row.verdict for row in (peer, rtn, gptq, bad)] == ["-", "-", "pass", "FAIL"]


def test_accuracy_without_peer_and_rtn_has_no_comparison():
    (row,) = accuracy_rows(TextKls(documents=[0, 1], kls={"gptq": [[1.0, 2.0]]}))
    table = format_accuracy([("m", "news", [row])], {"gptq": "gptq: `--x`"})
    assert table.splitlines()[1:] == [
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| m | news | gptq: `--x` | 1.50000 | - | - | - |",
    ]


def test_costs_are_compared_draw_by_draw():
    runs = {"peer": [cost(10.0, 100.0), cost(20.0, 100.0)], "rtn": [cost(5.0, 50.0), cost(5.0, 70.0)]}
    rows = cost_rows(runs, tuned_peer_s=100.0)
    table = format_costs([("m", rows)], {"peer": "Intel", "rtn": "ours"})
    assert table.splitlines()[2:] == [
        "| m | Intel | 15.0 s | - | 0.150 | 100 MiB | - |",
        "| m | ours | 5.0 s | 0.38 | 0.050 | 60 MiB | 0.60 |",
    ]


def test_costs_without_peer_have_no_ratio():
    (row,) = cost_rows({"rtn": [cost(5.0, 50.0)]}, tuned_peer_s=None)
    assert (row.wall_s, row.wall_to_peer, row.peak_to_peer, row.wall_to_tuned_peer) == (5.0, None, None, None)
